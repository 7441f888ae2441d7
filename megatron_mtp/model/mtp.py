"""An MTP layer: from the hidden state of the previous depth to its own (DeepSeek-V3, arXiv:2412.19437, eq. 21-23).

Depth d = 1 .. D at position i, h_0 the trunk's hidden state after its final norm:

    x   = eh_proj([enorm(embedding(t_{i+d})); hnorm(h_{d-1})])     embedding half first
    h_d = final_layernorm(tf_layer(x))                             input of depth d+1 and of the output layer

The parallel architecture (Gloeckle et al., arXiv:2404.19737) has h_d = final_layernorm(tf_layer_d(h_0)) instead.

Modules come from a spec, so the same classes hold TE modules on a GPU and portable ones elsewhere. Letters in names: S
sequence, B batch, H hidden.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.model.around_layers import checkpointed
from megatron_mtp.model.shared_keys import FirstPassKeys
from megatron_mtp.model.trunk_output import AttentionInputs

SHARDED_TF_LAYER = "transformer_layer"
"""Name of `tf_layer` in checkpoints; Megatron's own MTP uses it too."""


@dataclass(frozen=True)
class MultiTokenPredictionLayerSubmodules:
    """Modules of an MTP layer; the embedding-side modules are None for a parallel head.

    `tf_layer` is a transformer layer, or a stack of layers with the same interface; `sharded_name` is its name in
    checkpoints, which match Megatron's own MTP. With `shares_kv`, later passes of a repeated layer attend to pass 1's
    keys and values, and with `has_chain` also to those of their own chain (shared_keys.py).
    """

    tf_layer: ModuleSpec
    final_layernorm: Callable[..., torch.nn.Module]
    enorm: Callable[..., torch.nn.Module] | None = None
    hnorm: Callable[..., torch.nn.Module] | None = None
    eh_proj: type | None = None
    sharded_name: str = SHARDED_TF_LAYER
    shares_kv: bool = False
    has_chain: bool = True


def mtp_layer_submodules(
    tf_layer: ModuleSpec, architecture: str, use_te: bool, sharded_name: str = SHARDED_TF_LAYER
) -> MultiTokenPredictionLayerSubmodules:
    """Return the spec of an MTP layer around an inner layer or stack of layers, with TE or portable modules."""
    backend: BackendSpecProvider = LocalSpecProvider()
    if use_te:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = TESpecProvider()
    norm = backend.layer_norm()
    made = MultiTokenPredictionLayerSubmodules(tf_layer, final_layernorm=norm, sharded_name=sharded_name)
    if architecture == "parallel":
        return made
    return replace(made, enorm=norm, hnorm=norm, eh_proj=backend.column_parallel_linear())


def whole_states(part: Tensor, config: TransformerConfig, group: ProcessGroup) -> Tensor:
    """Gather states [S, B, H] from a column-parallel output [S, B, H / ranks]; under SP, this rank's positions."""
    whole_SBH = tensor_parallel.gather_from_tensor_model_parallel_region(part, group=group)
    if config.sequence_parallel:
        return tensor_parallel.scatter_to_sequence_parallel_region(whole_SBH, group=group)
    return whole_SBH


class MultiTokenPredictionLayer(MegatronModule):
    """One MTP layer: computes its state from the previous depth's and the embedding of the next token."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.sharded_name = submodules.sharded_name
        norm: dict[str, Any] = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        if submodules.eh_proj is not None:
            assert submodules.enorm is not None
            assert submodules.hnorm is not None
            self.enorm = submodules.enorm(**norm)
            self.hnorm = submodules.hnorm(**norm)
            self.eh_proj = build_module(
                submodules.eh_proj,
                2 * config.hidden_size,
                config.hidden_size,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="mtp_eh_proj",
                tp_group=pg_collection.tp,
            )
        self.tf_layer = build_module(
            submodules.tf_layer,
            config=config,
            vp_stage=vp_stage,
            layer_number=layer_number,
            is_mtp_layer=True,
            pg_collection=pg_collection,
        )
        self.final_layernorm = submodules.final_layernorm(**norm)
        self.register_load_state_dict_pre_hook(_read_other_names)

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """`tf_layer`, under the name that Megatron uses to find layers for Transformer Engine's CUDA graphs.

        With experts, it is this module, which is not captured, because CUDA graphs would drop the router's padding
        mask.
        """
        return self if any(isinstance(module, MoELayer) for module in self.tf_layer.modules()) else self.tf_layer

    def forward(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor | None,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden state of this depth.

        Args:
            hidden_SBH: state of the previous depth, after its final norm; sequence-parallel slices if enabled.
            embedded_SBH: embedding of the token d positions later; None for a parallel head.
            padding_mask_BS: True where the position was shifted in from outside; MoE routers ignore these positions.
        """
        recomputes = self.training and self.config.recompute_granularity == "full"
        run = self._checkpointed if recomputes else self._run
        return run(hidden_SBH, embedded_SBH, attention, padding_mask_BS)

    def forward_single_position(
        self,
        hidden_states: Tensor,
        next_token_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
    ) -> Tensor:
        """Draft one token per request for Megatron's `DynamicInferenceEngine`, without earlier positions.

        That engine keeps no keys and values of the MTP layers, so a request attends only to itself. In Megatron's own
        layer, the requests of a step attend to each other.

        Args:
            hidden_states: [N, B, H], the state of each request that its draft continues from.
            next_token_ids: [B, N], the newest token of each request.
            position_ids: [B, N], positions of these tokens.
            embedding: the shared embedding.

        Returns:
            The states [N, B, H] of this depth, after its final norm.

        Raises:
            ValueError: the depth is a parallel head or has recurrent layers, or sequence parallelism splits the
                requests.
        """
        self._check_single_position()
        embedded_NBH = embedding(input_ids=next_token_ids, position_ids=position_ids)
        rows = 1, -1, hidden_states.size(-1)  # one sequence of one position per request
        made = self(hidden_states.reshape(rows), embedded_NBH.reshape(rows), AttentionInputs())
        return made.view_as(hidden_states)

    def _check_single_position(self) -> None:
        if not hasattr(self, "eh_proj"):
            raise ValueError(
                "Megatron's inference engine drafts with sequential MTP layers, and these are parallel heads; use "
                "megatron-mtp generate."
            )
        from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols  # missing before Megatron 0.18

        if {Symbols.MAMBA, Symbols.GDN} & set(getattr(self.tf_layer, "layer_type_list", ())):
            raise ValueError(
                "Megatron's inference engine keeps no states of the MTP layers, and these have Mamba or Gated DeltaNet "
                "layers; use megatron-mtp generate."
            )
        if self.config.sequence_parallel:
            raise ValueError(
                "sequence parallelism would cut the requests that Megatron's inference engine drafts for; load the "
                "model without --sequence-parallel."
            )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return entries under the keys of Megatron's own MTP, so checkpoints are compatible in both directions."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        apply_prefix_mapping(entries, {f"{prefix}tf_layer.": f"{prefix}{self.sharded_name}."})
        return entries

    def _checkpointed(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor | None,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None,
    ) -> Tensor:
        keeper: Any = getattr(self.tf_layer, "self_attention", None)
        passes = keeper.passes if isinstance(keeper, FirstPassKeys) else None
        inputs = self.config, self.tp_group, hidden_SBH, embedded_SBH, padding_mask_BS

        def run(hidden: Tensor, embedded: Tensor | None, mask: Tensor | None) -> Tensor:
            return self._run(hidden, embedded, attention, mask)

        if passes is None:
            return checkpointed(run, *inputs)
        number = len(passes) + 1

        def run_pass(hidden: Tensor, embedded: Tensor | None, mask: Tensor | None, *first: Tensor) -> Any:
            with keeper.at_pass(number, first) as kept:
                return run(hidden, embedded, mask), *kept[-1]

        state_SBH, *first = checkpointed(run_pass, *inputs, *(passes[0] if passes else ()))
        passes.append(tuple(first))
        return state_SBH

    def _run(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor | None,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None,
    ) -> Tensor:
        # Each sequence-parallel rank has different positions, so dropout needs different random numbers.
        with tensor_parallel.get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            if embedded_SBH is not None:
                with get_fp8_context(self.config):
                    hidden_SBH = self._merge(embedded_SBH, hidden_SBH)
            with get_fp8_context(self.config):
                hidden_SBH, _ = self.tf_layer(
                    hidden_states=hidden_SBH,
                    attention_mask=attention.attention_mask,
                    rotary_pos_emb=attention.rotary_pos_emb,
                    rotary_pos_cos=attention.rotary_pos_cos,
                    rotary_pos_sin=attention.rotary_pos_sin,
                    packed_seq_params=attention.packed_seq_params,
                    padding_mask=padding_mask_BS,
                )
        # The pipeline schedule frees the output after sending it, which fails for a view.
        return make_viewless_tensor(self.final_layernorm(hidden_SBH), requires_grad=True, keep_graph=True)

    def _merge(self, embedded_SBH: Tensor, hidden_SBH: Tensor) -> Tensor:
        both_SB2H = torch.cat((self.enorm(embedded_SBH), self.hnorm(hidden_SBH)), dim=-1)
        merged, _ = self.eh_proj(both_SB2H)
        return whole_states(merged, self.config, self.tp_group)


def _read_other_names(layer: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept the names of `tf_layer` in state dicts of Megatron's own MTP, which differ by release."""
    for name in list(state):
        for other in ("transformer_layer.", "mtp_model_layer."):
            if name.startswith(prefix + other):
                state[f"{prefix}tf_layer.{name.removeprefix(prefix + other)}"] = state.pop(name)
