"""An MTP layer: from the hidden state of the depth before to its own (DeepSeek-V3, arXiv:2412.19437, eq. 21-23).

Depth d = 1 .. D at position i, h_0 the trunk's hidden state after its final norm:

    x   = eh_proj([enorm(embedding(t_{i+d})); hnorm(h_{d-1})])     embedding half first
    h_d = final_layernorm(tf_layer(x))                             what depth d+1 and the output head receive

The parallel architecture (Gloeckle et al., arXiv:2404.19737) has h_d = final_layernorm(tf_layer_d(h_0)) instead.

The modules come from a spec, so that the same classes hold TE modules on a GPU and portable ones elsewhere. Letters in
names: S sequence, B batch, H hidden.
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
"""The name of `tf_layer` in checkpoints, which Megatron's own MTP uses too."""


@dataclass(frozen=True)
class MultiTokenPredictionLayerSubmodules:
    """Modules of a depth; the embedding-side modules are None for a parallel head.

    `tf_layer` is one transformer layer, or a stack of layers with the interface of one; `sharded_name` is its name in
    checkpoints, which are those of Megatron's own MTP. With `shares_kv` later passes of a repeated layer attend to pass
    1's keys and values, and if `has_chain` to those of their own chain (shared_keys.py).
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
    """The spec of one depth around an inner layer or stack of layers, for TE or for portable modules."""
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
    """States [S, B, H] of a column-parallel projection's output [S, B, H / ranks]; this rank's positions under SP."""
    whole_SBH = tensor_parallel.gather_from_tensor_model_parallel_region(part, group=group)
    if config.sequence_parallel:
        return tensor_parallel.scatter_to_sequence_parallel_region(whole_SBH, group=group)
    return whole_SBH


class MultiTokenPredictionLayer(MegatronModule):
    """One depth: from the hidden state of the depth before (and the embedding of the token it adds) to its own."""

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
        """`tf_layer`, by the name under which Megatron looks for layers to record as Transformer Engine's CUDA graphs.

        With experts it is this module, which is not recorded: graphs would drop the padding mask of the router.
        """
        return self if any(isinstance(module, MoELayer) for module in self.tf_layer.modules()) else self.tf_layer

    def forward(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor | None,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """The hidden state of this depth.

        Args:
            hidden_SBH: of the depth before, after its final norm; sequence-parallel slices where that is on.
            embedded_SBH: embedding of the token d positions later; None for a parallel head.
            padding_mask_BS: True where the position was shifted in from outside; MoE routers leave it out.
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
        """A draft of every request, as Megatron's `DynamicInferenceEngine` calls for it: without earlier positions.

        That engine keeps no keys and values of the MTP layers. A request attends to itself alone: in Megatron's own
        layer the requests of a step attend to one another.

        Args:
            hidden_states: [N, B, H], the state of each request that its draft continues from.
            next_token_ids: [B, N], the newest token of each.
            position_ids: [B, N], of these tokens.
            embedding: the shared embedding.

        Returns:
            The depth's states [N, B, H], after its final norm.

        Raises:
            ValueError: the depth is a parallel head or has layers with a state, or sequence parallelism cuts requests.
        """
        self._check_single_position()
        embedded_NBH = embedding(input_ids=next_token_ids, position_ids=position_ids)
        rows = 1, -1, hidden_states.size(-1)  # every request is a text of one position
        made = self(hidden_states.reshape(rows), embedded_NBH.reshape(rows), AttentionInputs())
        return made.view_as(hidden_states)

    def _check_single_position(self) -> None:
        if not hasattr(self, "eh_proj"):
            raise ValueError(
                "Megatron's inference engine drafts with sequential MTP layers, and these are parallel heads; use "
                "megatron-mtp generate."
            )
        from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols  # not there before 0.18

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
        """Entries under the keys that Megatron's own MTP writes, so that checkpoints pass in both directions."""
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
        # Each sequence-parallel rank has other positions, and needs other random numbers for dropout.
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
        # The pipeline schedule frees the output after sending it, which a view would not allow.
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
