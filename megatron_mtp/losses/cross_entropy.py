"""Cross-entropy of a chunk of logits with its gradient: label smoothing, z-loss, float32, vocabulary-parallel.

With s the smoothing and z the weight of the z-loss (PaLM, arXiv:2204.02311, section 5), l the logits, L = logsumexp l:

    loss     = L - (1 - s) l_y - s mean_v l_v + z L^2
    gradient = (1 + 2 z L) softmax(l) - (1 - s) [v = y] - s / V

With a draft vocabulary labels are numbers of its tokens, V is its size, and a label outside of it (-1) has loss 0 and
gradient 0. Letters in names: N positions, V this rank's slice of the vocabulary.
"""

from dataclasses import dataclass
from typing import Self, override

import torch
from torch import Tensor

from megatron_mtp.config import MTPConfig
from megatron_mtp.losses.token_loss import Chunk, TokenLoss
from megatron_mtp.model.head import NOT_DRAFTED


@dataclass(frozen=True)
class CrossEntropy(TokenLoss):
    """Cross-entropy of the labels; the gradient is made in the logits' memory."""

    line = "the labels, by cross-entropy"
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @classmethod
    @override
    def of(cls, settings: MTPConfig) -> Self:
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
        """The loss, given L and, side by side, the label's logit and, for smoothing, the sum of all."""
        loss_N = normalizer_N - (1 - self.label_smoothing) * linear_N2[:, 0]
        if self.label_smoothing:
            loss_N -= self.label_smoothing / size * linear_N2[:, 1]
        return loss_N.add_(normalizer_N.square(), alpha=self.z_loss) if self.z_loss else loss_N
