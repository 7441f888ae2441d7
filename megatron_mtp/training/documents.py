"""Acceptance counts by document: gathered over the ranks of an evaluation, grouped by source or context.

In an evaluation's samples, "documents" [S] has the document number of every position (data/sources.py).

Letters in names: N documents, D depths.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_mtp.data.sources import sources_of
from megatron_mtp.losses.head_objective import Documents


def named_prefixes(args: Namespace) -> list[str]:
    """Return the prefixes of all data sets named by flags."""
    blend, per_split = get_blend_and_blend_per_split(args)
    return [prefix for one in (blend, *(per_split or ())) if one is not None for prefix in one[0]]


def gathered(documents: Mapping[str, Sequence[Documents]]) -> dict[str, dict[int, Tensor]]:
    """Gather the counts [4, D] of every document, by document number, over all ranks of the evaluation.

    Only the first tensor-parallel rank knows the documents and broadcasts them. Documents without unmasked positions
    are left out.

    Args:
        documents: documents of every batch of this rank, by drafter name.
    """
    own = {name: [(numbers_N.cpu(), counts.cpu()) for numbers_N, counts in of] for name, of in documents.items()}
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    of_ranks: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(of_ranks, own, group=group)
    source, ranks = mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group()
    torch.distributed.broadcast_object_list(of_ranks, source, ranks)
    found: dict[str, dict[int, Tensor]] = {}
    for name, of in (pair for of_rank in of_ranks for pair in of_rank.items()):
        sums = found.setdefault(name, {})
        for numbers_N, counts_N4D in of:
            for number, counts_4D in zip(numbers_N.tolist(), counts_N4D, strict=True):
                sums[number] = sums[number] + counts_4D if number in sums else counts_4D
    return {
        name: {number: sums[number] for number in sorted(sums) if sums[number][0].any()} for name, sums in found.items()
    }


def grouped(documents: Mapping[int, Any], args: Namespace) -> dict[str, dict[int, Any]]:
    """Group values of documents by context length with --mtp-context-lengths, else by source in the data sets."""
    if args.mtp_context_lengths is not None:
        from megatron_mtp.training.contexts import by_context

        return by_context(documents, args.mtp_context_lengths)
    found: dict[str, dict[int, Any]] = {}
    for (number, each), source in zip(
        documents.items(), sources_of(list(documents), named_prefixes(args)), strict=True
    ):
        found.setdefault(source, {})[number] = each
    return dict(sorted(found.items()))
