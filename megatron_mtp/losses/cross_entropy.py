"""Cross-entropy over the vocabulary, as Megatron computes it for the trunk (all logits of a depth at once)."""

from torch import Tensor

from megatron_mtp.model.sharing import Head


def cross_entropy(hidden_SBH: Tensor, labels_BS: Tensor, head: Head) -> Tensor:
    """-log p(label) in float32, [B, S]."""
    return head.cross_entropy(labels_BS, head.project(hidden_SBH))
