"""Interface of a loss: the class declares what it needs and computes losses and gradients of a chunk.

Cross-entropy, the simplest loss, is below.

Letters in names: N positions, V this rank's slice of the vocabulary, D depths.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, override

import torch
from torch import Tensor

from megatron_mtp.model.draft_vocabulary import NOT_DRAFTED
from megatron_mtp.model.vocabulary import Vocabulary

if TYPE_CHECKING:
    from megatron_mtp.spec.config import MTPConfig


@dataclass(frozen=True)
class Chunk:
    """Inputs of a loss for a chunk of positions.

    Attributes:
        logits_NV: logits of the MTP layer, this rank's slice, in float32 or better.
        labels_N: tokens; with a draft vocabulary, their indices in it, or -1 if they are not in it.
        teacher_NV: the trunk's logits of the same tokens, if `needs_teacher`; of all tokens, if `needs_whole_teacher`.
        vocabulary: meaning of the columns, and how to reduce over ranks.
        overlap_N: output buffer for the acceptance rate of sampled drafts, if the loss computes it; None if not needed.
    """

    logits_NV: Tensor
    labels_N: Tensor
    teacher_NV: Tensor | None
    vocabulary: Vocabulary
    overlap_N: Tensor | None = None


@dataclass(frozen=True)
class Joined:
    """The losses of all depths at a position, combined to one.

    Attributes:
        value_N: the loss to train on.
        slopes_ND: its derivatives by the losses of the depths.
        shown_ND: value of each depth for the logs.
    """

    value_N: Tensor
    slopes_ND: Tensor
    shown_ND: Tensor


class TokenLoss(ABC):
    """Loss of single tokens, with its gradient by the logits. Masks, weights and sums are applied elsewhere.

    Attributes:
        line: what MTP layers learn, for --list-losses and docs/reference/losses.md.
        needs_teacher: it compares with the trunk's own distribution of the token.
        needs_whole_teacher: it does so over all tokens, also where the depths draft from some of them.
        couples_depths: a depth's gradient depends on the losses of the others at the same position, which counts where
            all depths do.
        weighs_depths: it weighs the depths of a position itself; drafters then have no other weights by default.
        knows_overlap: it computes the rate at which sampled drafts are accepted.
    """

    line: ClassVar[str]
    couples_depths: ClassVar[bool] = False
    weighs_depths: ClassVar[bool] = False

    @property
    def needs_teacher(self) -> bool:
        """Return whether the loss compares with the trunk's distribution of the token."""
        return False

    @property
    def needs_whole_teacher(self) -> bool:
        """Return whether it does so over all tokens, even with a draft vocabulary."""
        return False

    @property
    def knows_overlap(self) -> bool:
        """Return whether the loss computes the acceptance rate of sampled drafts."""
        return False

    @classmethod
    @abstractmethod
    def of(cls, settings: "MTPConfig") -> Self:
        """Create the loss from the settings that it reads.

        Raises:
            ValueError: a setting has a value that is not allowed.
        """

    @abstractmethod
    def __call__(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Compute losses in nats, loss_N, the same on every rank, and gradient_NV with respect to this rank's logits.

        May overwrite both logits; the gradient may reuse the memory of `logits_NV`.
        """

    def joined(self, losses_ND: Tensor, weights_ND: Tensor) -> Joined:
        """Combine the losses of all depths at each position: their weighted sum, unless the loss couples depths.

        Args:
            losses_ND: return values of `__call__`.
            weights_ND: weights of the terms; 0 where a position does not count.
        """
        return Joined((losses_ND * weights_ND).sum(1), weights_ND, losses_ND)


# --- ce: cross-entropy with label smoothing and z-loss, float32, vocabulary-parallel ---------------------------------
#
# With s the smoothing, z the z-loss weight (PaLM, arXiv:2204.02311, section 5), l the logits, and L = logsumexp l:
#
#     loss     = L - (1 - s) l_y - s mean_v l_v + z L^2
#     gradient = (1 + 2 z L) softmax(l) - (1 - s) [v = y] - s / V
#
# With a draft vocabulary, labels are indices into it, V is its size, and a label outside of it (-1) has loss 0 and
# gradient 0.


@dataclass(frozen=True)
class CrossEntropy(TokenLoss):
    """Cross-entropy of the labels. The gradient overwrites the logits."""

    line = "cross-entropy on the labels"
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @classmethod
    @override
    def of(cls, settings: "MTPConfig") -> Self:
        return cls(settings.mtp_label_smoothing, settings.mtp_z_loss)

    @override
    def __call__(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        logits_NV, labels_N, vocabulary = chunk.logits_NV, chunk.labels_N, chunk.vocabulary
        local_N1, is_own_N1 = vocabulary.own(labels_N)
        label_N1 = logits_NV.gather(1, local_N1).masked_fill_(~is_own_N1, 0)
        rows_N2 = [label_N1]
        if self.label_smoothing:
            rows_N2.append(vocabulary.tokens_of(logits_NV).sum(1, keepdim=True))
        (softmax_NV,), normalizer_N1, linear_N2 = vocabulary.softmaxes_([logits_NV], torch.cat(rows_N2, dim=1))
        loss_N = self.of_logits(normalizer_N1[:, 0], linear_N2, vocabulary.size)
        if self.z_loss:
            softmax_NV *= 1 + 2 * self.z_loss * normalizer_N1
        if self.label_smoothing:
            vocabulary.tokens_of(softmax_NV).sub_(self.label_smoothing / vocabulary.size)
        hit_N1 = (1 - self.label_smoothing) * is_own_N1.to(softmax_NV.dtype)
        gradient_NV = softmax_NV.scatter_add_(1, local_N1, -hit_N1)
        if vocabulary.draft_vocabulary is None:
            return loss_N, gradient_NV
        is_drafted_N = labels_N != NOT_DRAFTED
        return loss_N * is_drafted_N, gradient_NV.mul_(is_drafted_N.unsqueeze(1))

    def of_logits(self, normalizer_N: Tensor, linear_N2: Tensor, size: int) -> Tensor:
        """Compute the loss from L and, side by side, the label's logit and, for smoothing, the sum of all logits."""
        loss_N = normalizer_N - (1 - self.label_smoothing) * linear_N2[:, 0]
        if self.label_smoothing:
            loss_N -= self.label_smoothing / size * linear_N2[:, 1]
        return loss_N.add_(normalizer_N.square(), alpha=self.z_loss) if self.z_loss else loss_N
