"""Counts of acceptance by the length of the context (--mtp-context-lengths)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MOST_CONTEXTS = 64
"""Numbers of a group's contexts are those of the group times this, and more."""


def numbers_of_contexts(document_BS: Tensor, lengths: Sequence[int]) -> Tensor:
    """In the place of documents: the group of a row by the document that it begins with, and the context of a position.

    Context 0 has at most the first of `lengths` tokens, the position's own among them, and the last one has more than
    all of them.
    """
    tokens_S = torch.arange(1, document_BS.size(1) + 1, device=document_BS.device)
    context_S = torch.bucketize(tokens_S, torch.tensor(lengths, device=document_BS.device))
    return document_BS[:, :1] % (1 << 56) * MOST_CONTEXTS + context_S


def by_context(groups: Mapping[int, Any], lengths: Sequence[int]) -> dict[str, dict[int, Any]]:
    """Something of every group and context, by the lengths that the context is of."""
    bounds = list(map(str, lengths))
    names = [f"to {bounds[0]}", *(f"{low} to {high}" for low, high in pairwise(bounds)), f"above {bounds[-1]}"]
    found: dict[str, dict[int, Any]] = {name: {} for name in names}
    for number, each in groups.items():
        found[names[number % MOST_CONTEXTS]][number] = each
    return {name: of for name, of in found.items() if of}
