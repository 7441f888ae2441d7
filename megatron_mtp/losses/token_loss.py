"""Interface of the depths' losses: a class that says what it needs, and computes a chunk's losses with their gradients.

Letters in names: N positions, V this rank's slice of the vocabulary, D depths.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from megatron_mtp.config import MTPConfig
from megatron_mtp.losses.vocabulary import Vocabulary


@dataclass(frozen=True)
class Chunk:
    """Inputs of a loss: some positions at once.

    Attributes:
        logits_NV: the depth's, this rank's slice, in float32 at least.
        labels_N: tokens; of a draft vocabulary their numbers in it, or -1 outside of it.
        teacher_NV: the trunk's logits of the same tokens, if `needs_teacher`; of all tokens, if `needs_whole_teacher`.
        vocabulary: what the columns are, and how they are reduced over ranks.
        overlap_N: where a loss that knows it writes the rate at which sampled drafts are accepted; None for nowhere.
    """

    logits_NV: Tensor
    labels_N: Tensor
    teacher_NV: Tensor | None
    vocabulary: Vocabulary
    overlap_N: Tensor | None = None


@dataclass(frozen=True)
class Joined:
    """The losses of the depths at a position made one.

    Attributes:
        value_N: what is trained on.
        slopes_ND: its derivatives by the depths' losses.
        shown_ND: the depths' numbers for the logs.
    """

    value_N: Tensor
    slopes_ND: Tensor
    shown_ND: Tensor


class TokenLoss(ABC):
    """A loss of single tokens, with its gradient by the logits; masks, weights and sums are made elsewhere.

    Attributes:
        line: what the depths learn, for --list-losses and docs/attaching.md.
        needs_teacher: it compares with the trunk's own distribution of the token.
        needs_whole_teacher: it does so over all tokens, also where the depths draft from some of them.
        couples_depths: a depth's gradient depends on the losses of the others at the same position, which counts where
            all depths do.
        knows_overlap: it computes the rate at which sampled drafts are accepted.
    """

    line: ClassVar[str]
    couples_depths: ClassVar[bool] = False

    @property
    def needs_teacher(self) -> bool:
        """Return whether it compares with the trunk's own distribution of the token."""
        return False

    @property
    def needs_whole_teacher(self) -> bool:
        """Return whether it does so over all tokens, also where the depths draft from some of them."""
        return False

    @property
    def knows_overlap(self) -> bool:
        """Return whether it computes the rate at which sampled drafts are accepted."""
        return False

    @classmethod
    @abstractmethod
    def of(cls, settings: MTPConfig) -> Self:
        """The loss with the settings that it reads.

        Raises:
            ValueError: one of them has a value that is not allowed.
        """

    @abstractmethod
    def __call__(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Losses in nats, loss_N, the same on every rank, and this rank's gradient_NV by the logits.

        It may overwrite both logits; the gradient may be made in the memory of the depth's.
        """

    def joined(self, losses_ND: Tensor, weights_ND: Tensor) -> Joined:
        """One loss of the depths' losses at every position: their weighted sum, where the loss does not couple them.

        Args:
            losses_ND: what the call returned.
            weights_ND: of their terms; 0 where a position does not count.
        """
        return Joined((losses_ND * weights_ND).sum(1), weights_ND, losses_ND)
