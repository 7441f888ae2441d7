"""Outputs of the trunk's forward pass that draft heads read. Letters in names: S sequence, B batch, H hidden."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

Turns = Tensor | tuple[Tensor, Tensor]
"""Megatron's rotary angles of all positions, or a pair for queries and for keys."""

Angles = Callable[[int], Turns]
"""Function from a number of positions to the angles of a pass whose queries are that many positions later."""


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of a transformer layer other than its hidden state: the same for every depth of a microbatch."""

    attention_mask: Tensor | None = None
    rotary_pos_emb: Turns | None = None
    rotary_pos_cos: Tensor | None = None
    rotary_pos_sin: Tensor | None = None
    packed_seq_params: PackedSeqParams | None = None

    def at_pass(self, index: int, angles: Angles | None) -> "AttentionInputs":
        """Return the inputs of pass `index`, from 0, shifted by as many positions if there are `angles`."""
        return self if angles is None or not index else replace(self, rotary_pos_emb=angles(index))


@dataclass(frozen=True)
class TrunkOutput:
    """Outputs of the trunk's forward pass that a draft head reads.

    Attributes:
        hidden_SBH: hidden states after the trunk's final norm.
        position_ids_BS: position ids of the trunk's tokens.
        embedding: the trunk's embedding, called with `input_ids` and `position_ids`.
        attention: attention inputs of the trunk's layers.
        angles: Megatron's rotary angles, as a function of a number of positions and further arguments.
        read: states [S, B, H] after the layers that drafters read, by layer number.
        is_apart: whether no head may train the trunk and its embedding.
    """

    hidden_SBH: Tensor
    position_ids_BS: Tensor
    embedding: Callable[..., Tensor]
    attention: AttentionInputs
    angles: Callable[..., Tensor]
    read: Mapping[int, Tensor] = field(default_factory=dict)
    is_apart: bool = False

    def frozen_embedding(self, **given: Any) -> Tensor:
        """The embedding without gradients."""
        return self.embedding(**given).detach()


def is_detached(config: TransformerConfig) -> bool:
    """Whether `--mtp-detach-heads` is on; Megatron-Core before 0.19 does not have it."""
    return bool(getattr(config, "mtp_detach_heads", False))
