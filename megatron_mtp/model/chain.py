"""A chain of MTP layers: each continues from the hidden state of the previous one.

Letters in names: D depths, S sequence, B batch, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.model.mixing import Mixer
from megatron_mtp.model.trunk_output import Angles, AttentionInputs, is_detached

if TYPE_CHECKING:
    from megatron_mtp.model.head import Head

Layer = Callable[[Tensor, Tensor, AttentionInputs, Tensor | None], Tensor]
"""Function of a depth: takes its input state and embedding, both [S, B, H], attention, and mask [B, S]; see `mtp.py`.
"""


@dataclass(frozen=True)
class DepthInputs:
    """Inputs of the MTP layers for a microbatch, in addition to the trunk's hidden states.

    Attributes:
        tokens_DBS: token t_{i+d} at depth d and position i, 0 outside the document; None for parallel heads on a stage
            without tokens.
        positions: position ids of these tokens for the embedding, [B, S], at every depth.
        embedding: the shared embedding, called with `input_ids` and `position_ids`.
        attention: attention inputs of the trunk's layers.
        padding_mask_DBS: True where a position was shifted in from outside; this rank's positions.
        mixer: chooses the states that depths continue from; None for those of the previous depth.
        angles: rotary angles of later positions, for passes that share keys.
        is_apart: whether no gradient reaches the trunk's states and the embedding.
    """

    tokens_DBS: Tensor | None
    positions: Sequence[Tensor]
    embedding: Callable[..., Tensor]
    attention: AttentionInputs
    padding_mask_DBS: Tensor | None = None
    mixer: Mixer | None = None
    angles: Angles | None = None
    is_apart: bool = False

    def mask(self, depth: int) -> Tensor | None:
        """Return the padding mask of a depth, counted from 0, [B, S]; None if there is none."""
        return None if self.padding_mask_DBS is None else self.padding_mask_DBS[depth]

    def embedded(self, depth: int) -> Tensor:
        """Return the embeddings of a depth's tokens, counted from 0, [S, B, H]."""
        assert self.tokens_DBS is not None
        embedded_SBH = self.embedding(input_ids=self.tokens_DBS[depth], position_ids=self.positions[depth])
        return embedded_SBH.detach() if self.is_apart else embedded_SBH


class TrunksHead:
    """What all MTP layers have in common as a draft head (`DraftHead` in attachment.py): the trunk's output layer."""

    config: TransformerConfig

    @property
    def is_apart(self) -> bool:
        """Return whether the drafts train nothing of the trunk, including its embedding and output layer."""
        return is_detached(self.config)

    def head_of(self, head: "Head") -> "Head":
        """Return the output layer for drafts, given the trunk's: the same one."""
        return head

    def begin_head(self, head: "Head") -> None:
        """Initialize the head's own output rows from the trunk's. MTP layers have none."""


def chain(layers: Sequence[Layer], hidden_SBH: Tensor, inputs: DepthInputs) -> list[Tensor]:
    """Run layers one after another, cyclically, and return the hidden states of depths 1 .. D, each [S, B, H].

    Args:
        layers: layers of any class; a repeated layer is given once.
        hidden_SBH: the trunk's hidden states, after its final norm.
    """
    state_SBH, states = hidden_SBH.detach() if inputs.is_apart else hidden_SBH, list[Tensor]()
    for depth in range(len(inputs.positions)):
        embedded_SBH = inputs.embedded(depth)
        read_SBH = state_SBH if inputs.mixer is None else inputs.mixer.next_input(state_SBH)
        attention = inputs.attention.at_pass(depth, inputs.angles)
        state_SBH = layers[depth % len(layers)](read_SBH, embedded_SBH, attention, inputs.mask(depth))
        states.append(state_SBH)
    return states


def padding_mask(batch: DepthBatch, config: TransformerConfig, tp_group: ProcessGroup) -> Tensor | None:
    """Return where this rank's positions were shifted in from outside; None if no router uses it."""
    if config.num_moe_experts is None:
        return None
    shifted_in_DBS = ~batch.inside_DBS
    if config.sequence_parallel:
        return shifted_in_DBS.chunk(tp_group.size(), dim=2)[tp_group.rank()]
    return shifted_in_DBS
