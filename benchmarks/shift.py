"""Time to shift a packed batch for all MTP layers, against Megatron's rolling.

    python benchmarks/shift.py               512 documents, D = 4
    python benchmarks/shift.py --quick       does it run? (the figures mean nothing)

Both sides shift the tokens, labels and loss mask of one packed row; ours also finds the document of every position, as
`data/batch.py` does for every batch. The results must be equal, or the benchmark fails.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from torch import Tensor

from benchmarks.harness import Found, Goal, Table, interleave, main
from megatron_mtp.data.batch import depth_batch, documents_from_offsets
from megatron_mtp.megatron.runtime import prepare

ON_CPU = prepare()

GOAL = 20.0
"""Megatron's rolling takes at least this many times as long."""

OURS, THEIRS = "megatron-mtp", "Megatron"
NAMES = ("tokens", "labels", "loss_mask")

DOCUMENTS, DEPTHS = 512, 4


def shift(wanted: Namespace) -> Found:
    """Time both sides. Raise ValueError if they disagree."""
    documents, depths = 8 if wanted.quick else DOCUMENTS, DEPTHS
    cu_seqlens, batch = packed_batch(documents)
    sides: dict[str, Callable[[], dict[str, Tensor]]] = {
        OURS: lambda: our_shifts(batch, cu_seqlens, depths),
        THEIRS: lambda: megatron_shifts(batch, cu_seqlens, depths),
    }
    ours, theirs = (side() for side in sides.values())
    if not all(torch.equal(ours[name], theirs[name]) for name in NAMES):
        raise ValueError("the two sides do not agree on the shifts: there is nothing to compare.")
    timed = interleave(sides, wanted.repeats, synchronize=torch.cuda.synchronize)
    times = timed.compare(THEIRS, OURS)
    header = ("ms ours", "ms Megatron", "times faster", "by round")
    row = (*(1e3 * median for median in timed.medians().values()), times.ratio, times.paired_ratio)
    return Found(
        {"documents": documents, "depths": depths, "positions": batch["tokens"].size(1)},
        [Goal("times faster than Megatron's rolling", times.ratio, GOAL, ">=")],
        [Table("Shifts of a packed batch", header, [row])],
    )


def packed_batch(documents: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return offsets [documents + 1] and one packed row of documents of 8 to 128 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 129, (documents,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)
    stream = torch.randint(1, 1000, (1, int(offsets[-1]) + 1), generator=generator)
    mask = (torch.rand(1, int(offsets[-1]), generator=generator) > 0.1).float()
    batch = {"tokens": stream[:, :-1].contiguous(), "labels": stream[:, 1:].contiguous(), "loss_mask": mask}
    return offsets.cuda(), {name: value.cuda() for name, value in batch.items()}


def our_shifts(batch: dict[str, Tensor], cu_seqlens: Tensor, depths: int) -> dict[str, Tensor]:
    """Return tensors of [D, 1, positions]."""
    documents_BS = documents_from_offsets(cu_seqlens.unsqueeze(0), None, batch["tokens"].size(1))
    shifted = depth_batch(batch, depths, documents_BS)
    return {name: getattr(shifted, f"{name}_DBS") for name in NAMES}


def megatron_shifts(batch: dict[str, Tensor], cu_seqlens: Tensor, depths: int) -> dict[str, Tensor]:
    """Return tensors of [D, 1, positions], rolled depth by depth."""
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    shifted: dict[str, Tensor] = {}
    for name in NAMES:
        value, values = batch[name], []
        for _ in range(depths):
            value, _ = roll_tensor(value, shifts=-1, dims=-1, packed_seq_params=packed)
            values.append(value)
        shifted[name] = torch.stack(values)
    return shifted


if __name__ == "__main__":
    main(shift, __doc__, ON_CPU, {"cpu": 15, "cuda": 15, "quick": 2})
