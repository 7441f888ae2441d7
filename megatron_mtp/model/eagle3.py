"""EAGLE-3 (Li et al., arXiv:2503.01840): a drafter of one layer that reads the trunk's states after three layers.

    f    = fc([state after layer a; after layer b; after layer c])       the feature of a position, [3 H -> H]
    x_1  = layer(embedding(t_{i+1}), f)                                   step 1 at position i
    x_k  = layer(embedding(t_{i+k}), x_{k-1})                             step k = 2 .. K
    the drafts' logits are head(norm(x_k))

The layer is Llama's, but makes queries, keys and values of [norm(embedding); norm(feature)], 2 H wide; its residual is
the feature itself. In training step k reads the layer's own output of step k - 1, as drafting does (the paper's
training-time test), and attends to what an engine's k-th draft attends to (shared_keys.py). The trunk is frozen.

The block has the interface of the MTP block, K passes of one layer, so that losses, metrics, layouts and drafting are
those of MTP. Letters in names: S sequence, B batch, H hidden, N drafted tokens, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, override

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import silu

from megatron_mtp.model.draft_vocabulary import DRAFTER
from megatron_mtp.model.mtp import (
    AttentionInputs,
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayerSubmodules,
    whole_states,
)
from megatron_mtp.model.portable import PortableAttention, PortableNorm, with_modules, with_portable_modules
from megatron_mtp.model.shared_keys import SharingAttention
from megatron_mtp.model.sharing import Head

FEATURES = 3
"""Layers of the trunk that the drafter reads."""


def default_layers(layers: int) -> tuple[int, ...]:
    """The layers that are read of a trunk of so many: the states after 2, after half and after all but three of them.

    A number counts the layers before the state, as the config key `eagle_aux_hidden_state_layer_ids` does.
    """
    return 2, layers // 2, layers - 3


def can_read(chosen: Sequence[int], layers: int) -> bool:
    """Return whether these are three layers in order of a trunk that has so many."""
    return len(chosen) == FEATURES and [*chosen] == sorted(set(chosen)) and chosen[0] >= 1 and chosen[-1] < layers


def check_layers(chosen: tuple[int, ...], layers: int) -> None:
    """Raises ValueError where `can_read` does not hold."""
    if not can_read(chosen, layers):
        raise ValueError(
            f"--drafter-layers is {' '.join(map(str, chosen))}, and the trunk has {layers} layers; give {FEATURES} "
            f"rising numbers from 1 to {layers - 1}, each the number of layers before the state that is read."
        )


def as_mtp_layers(steps: int) -> dict[str, Any]:
    """Megatron's arguments of a model with a drafter: an MTP layer in so many passes, on a frozen trunk."""
    return {
        "mtp_num_layers": 1,
        "mtp_use_repeated_layer": True,
        "mtp_unroll": steps,
        "mtp_repeated_layer_shares_kv": False,
        "mtp_architecture": "sequential",
        "mtp_init": None,
        "mtp_train_only": True,
        "mtp_loss_scaling_factor": 1.0,
    }


@dataclass(frozen=True)
class Drafter:
    """What a model with a drafter is built with: the layers that it reads, and its MLP's size (None: the trunk's)."""

    layers: tuple[int, ...]
    ffn_hidden_size: int | None = None


class InputNorms(torch.nn.Module):
    """Norms of the embedding and of the feature, in the place of a layer's input norm: feature [.., H] to [.., 2 H].

    Attributes:
        embedded_SBH: the embeddings of the layer's next call.
    """

    embedded_SBH: Tensor

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.enorm = PortableNorm(config, hidden_size, eps)
        self.hnorm = PortableNorm(config, hidden_size, eps)

    def forward(self, feature_SBH: Tensor) -> Tensor:
        """[norm(embedding); norm(feature)]."""
        return torch.cat((self.enorm(self.embedded_SBH), self.hnorm(feature_SBH)), dim=-1)


def _from_both(input_size: int, output_size: int, **others: Any) -> ColumnParallelLinear:
    """The projection to queries, keys and values, of inputs of twice the width."""
    return ColumnParallelLinear(2 * input_size, output_size, **others)


def layer_config(config: TransformerConfig, ffn_hidden_size: int | None = None) -> TransformerConfig:
    """The trunk's configuration, for one dense layer as in Llama.

    Args:
        ffn_hidden_size: of its MLP; None for the trunk's.
    """
    made = copy.copy(config)
    changes: dict[str, Any] = {
        "num_moe_experts": None,
        "ffn_hidden_size": ffn_hidden_size or config.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "gated_linear_unit": True,
        "activation_func": silu,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "qk_l2_norm": False,
        "attention_output_gate": False,
        "softmax_type": "vanilla",
        "window_size": None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "recompute_granularity": None,
        "fp8": None,
        "fp4": None,
        "mtp_use_repeated_layer": True,
        "mtp_detach_heads": False,
    }
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def drafter_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local modules with our norm and attention, whatever modules the trunk has."""
    plain = get_gpt_layer_local_submodules(normalization="RMSNorm")
    attention = plain.self_attention
    assert isinstance(attention, ModuleSpec)
    wide = replace(attention, submodules=replace(attention.submodules, linear_qkv=_from_both))
    changed = replace(plain, input_layernorm=InputNorms, self_attention=wide, sharded_state_dict_keys_map={})
    portable = with_portable_modules(changed, config)
    return ModuleSpec(TransformerLayer, submodules=with_modules(portable, {PortableAttention: SharingAttention}))


class Eagle3Layer(MegatronModule):
    """All weights of the drafter.

    Attributes:
        head: [N, H], the rows of the drafted tokens, whole on every tensor-parallel rank; None for the trunk's head.
    """

    head: Tensor | None
    final_layernorm = None  # the next step reads the state before the norm, which belongs to the head

    def __init__(
        self,
        config: TransformerConfig,
        drafted: int | None,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=config)
        hidden, self.tp_group = config.hidden_size, pg_collection.tp
        column: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        self.fc = ColumnParallelLinear(FEATURES * hidden, hidden, **column, tp_group=pg_collection.tp)
        self.tf_layer = build_module(
            submodules.tf_layer,
            config=config,
            vp_stage=vp_stage,
            layer_number=layer_number,
            is_mtp_layer=True,
            pg_collection=pg_collection,
        )
        self.norm = PortableNorm(config, hidden, config.layernorm_epsilon)
        rows_NH = None
        if drafted is not None:
            device = torch.cuda.current_device()
            rows_NH = torch.nn.Parameter(torch.zeros(drafted, hidden, dtype=config.params_dtype, device=device))
        self.register_parameter("head", rows_NH)

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """`tf_layer`, by the name under which Megatron's schedule looks for it."""
        return self.tf_layer

    def feature(self, states_SBX: Tensor) -> Tensor:
        """The features [S, B, H] of the trunk's states after the chosen layers, side by side [S, B, 3 H]."""
        part, _ = self.fc(states_SBX)
        return whole_states(part, self.config, self.tp_group)

    def merge(self, embedded_SBH: Tensor, given_SBH: Tensor) -> Tensor:
        """The input of `tf_layer`'s next call, whose input norms take the embeddings."""
        self.tf_layer.input_layernorm.embedded_SBH = embedded_SBH
        return given_SBH

    def forward(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """The state of a step, before the norm.

        Args:
            hidden_SBH: the feature, or the state of the step before.
            embedded_SBH: embedding of the next token.
            padding_mask_BS: not read; there are no experts.
        """
        made_SBH: Tensor = self.tf_layer(
            hidden_states=self.merge(embedded_SBH, hidden_SBH),
            attention_mask=attention.attention_mask,
            rotary_pos_emb=attention.rotary_pos_emb,
            packed_seq_params=attention.packed_seq_params,
        )[0]
        return made_SBH


class Eagle3Block(MultiTokenPredictionBlock):
    """K steps of the drafter; arguments as of the MTP block, whose `mtp_num_layers` is K here."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        draft_vocabulary: Tensor | None = None,
        ffn_hidden_size: int | None = None,
    ) -> None:
        self._drafted = None if draft_vocabulary is None else draft_vocabulary.numel()
        super().__init__(layer_config(config, ffn_hidden_size), submodules, pg_collection, vp_stage, draft_vocabulary)
        self.sequential = True

    @override
    def make_layer(self, *args: Any) -> Eagle3Layer:
        return Eagle3Layer(self.config, self._drafted, *args)

    @property
    def layer(self) -> Eagle3Layer:
        """The one that all steps run."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    @override
    def forward(self, hidden_SBH: Tensor, *args: Any, **others: Any) -> list[Tensor]:
        """What the head takes at step 1 .. K, each [S, B, H], from the trunk's states [S, B, 3 H]."""
        states = super().forward(self.layer.feature(hidden_SBH.detach()), *args, **others)
        return [self.layer.norm(state_SBH) for state_SBH in states]

    def begin_head(self, head: Head) -> None:
        """Copy the trunk's rows of the drafted tokens, each from the rank that has it."""
        if self.layer.head is None or head.draft_vocabulary is None:
            return
        drafted = head.draft_vocabulary
        with torch.no_grad():
            rows_NH = torch.zeros_like(self.layer.head)
            rows_NH[drafted.first : drafted.first + drafted.rows_K.numel()] = head.weight[drafted.rows_K].to(rows_NH)
            torch.distributed.all_reduce(rows_NH, group=self.tp_group)
            self.layer.head.copy_(rows_NH)

    @override
    def head_of(self, head: Head) -> Head:
        if self.layer.head is None or head.draft_vocabulary is None:
            return head
        first, count = head.draft_vocabulary.first, head.draft_vocabulary.rows_K.numel()
        rows_NH = copy_to_tensor_model_parallel_region(self.layer.head, group=self.tp_group)
        return replace(head, own_rows=rows_NH[first : first + count])

    @override
    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Entries under `drafter.`, beside the trunk's."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = f"{prefix.removesuffix('mtp.')}{DRAFTER}"
        apply_prefix_mapping(entries, {f"{prefix}layers.0.": own, prefix: own})
        return entries
