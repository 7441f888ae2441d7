"""A chain of MTP layers: each depth continues from the hidden state of the depth before.

Letters in names: D depths, S sequence, B batch, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.model.mixing import Mixer
from megatron_mtp.model.trunk_output import Angles, AttentionInputs

Layer = Callable[[Tensor, Tensor, AttentionInputs, Tensor | None], Tensor]
"""A depth: the state and the embedding that it reads, both [S, B, H], attention, mask [B, S]; see `mtp.py`."""


@dataclass(frozen=True)
class DepthInputs:
    """What the depths of a microbatch read beside the trunk's hidden states.

    Attributes:
        tokens_DBS: at depth d and position i the token t_{i+d}, 0 where it lies outside the document; None for
            parallel heads on a stage without tokens.
        positions: ids of these tokens' positions for the embedding, [B, S], of every depth.
        embedding: the shared embedding, called with `input_ids` and `position_ids`.
        attention: the inputs of the trunk's layers.
        padding_mask_DBS: True where a position was shifted in from outside, at the positions that this rank has.
        mixer: which states the depths of a chain continue from; None for those of the depths before them.
        angles: the rotary angles of later positions, where passes that share keys stand.
        is_apart: whether the trunk's states and the embedding get no gradient.
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
        """The padding mask of a depth, from 0, [B, S]; None where there is none."""
        return None if self.padding_mask_DBS is None else self.padding_mask_DBS[depth]

    def embedded(self, depth: int) -> Tensor:
        """The embedding of a depth's tokens, from 0, [S, B, H]."""
        assert self.tokens_DBS is not None
        embedded_SBH = self.embedding(input_ids=self.tokens_DBS[depth], position_ids=self.positions[depth])
        return embedded_SBH.detach() if self.is_apart else embedded_SBH


def chain(layers: Sequence[Layer], hidden_SBH: Tensor, inputs: DepthInputs) -> list[Tensor]:
    """Hidden states of depth 1 .. D, each [S, B, H]: layers one after another, the first again after the last.

    Args:
        layers: of any class; a layer that serves all depths is given once.
        hidden_SBH: the trunk's, after its final norm.
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
    """Where positions were shifted in from outside, at those that this rank has; None where no router reads it."""
    if config.num_moe_experts is None:
        return None
    shifted_in_DBS = ~batch.inside_DBS
    if config.sequence_parallel:
        return shifted_in_DBS.chunk(tp_group.size(), dim=2)[tp_group.rank()]
    return shifted_in_DBS
