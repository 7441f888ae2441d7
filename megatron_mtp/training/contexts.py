"""Counts of acceptance by the length of the context (--mtp-context-lengths)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MOST_CONTEXTS = 64
"""Multiplier that maps a group's number to the numbers of its contexts."""


def numbers_of_contexts(document_BS: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return group and context of each position instead of documents: the group is the row's first document.

    A position is in context 0 if its document has at most `lengths[0]` tokens up to and including it, and so on; the
    last context has no upper bound.
    """
    tokens_S = torch.arange(1, document_BS.size(1) + 1, device=document_BS.device)
    context_S = torch.bucketize(tokens_S, torch.tensor(lengths, device=document_BS.device))
    return document_BS[:, :1] % (1 << 56) * MOST_CONTEXTS + context_S


def by_context(groups: Mapping[int, Any], lengths: Sequence[int]) -> dict[str, dict[int, Any]]:
    """Group values by context, labelled by context length."""
    bounds = list(map(str, lengths))
    names = [f"to {bounds[0]}", *(f"{low} to {high}" for low, high in pairwise(bounds)), f"above {bounds[-1]}"]
    found: dict[str, dict[int, Any]] = {name: {} for name in names}
    for number, each in groups.items():
        found[names[number % MOST_CONTEXTS]][number] = each
    return {name: of for name, of in found.items() if of}
