"""What the shifts of a packed batch cost for all depths, against Megatron's rolling.

    python benchmarks/shift.py               512 documents, D = 4
    python benchmarks/shift.py --quick       does it run? (the figures mean nothing)

Both sides shift the tokens, labels and loss mask of one packed row; ours also finds the document of every position, as
`data/batch.py` does for every batch. The results have to be equal, or the benchmark ends with an error.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from torch import Tensor

from benchmarks.harness import Goal, Table, compare, count, hardware, interleave, report
from megatron_mtp.data.batch import depth_batch, documents_from_offsets
from megatron_mtp.runtime import prepare

ON_CPU = prepare()

GOAL = 20.0
"""Megatron's rolling takes at least so many times as long."""

OURS, THEIRS = "megatron-mtp", "Megatron"
NAMES = ("tokens", "labels", "loss_mask")


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(
        description="Time of the depths' shifts of a packed batch, against Megatron's rolling.",
        epilog="example: python benchmarks/shift.py --documents 2048 --depths 2",
    )
    parser.add_argument("--documents", type=count, default=512, help="default: 512")
    parser.add_argument("--depths", type=count, default=4, help="default: 4")
    parser.add_argument("--repeats", type=count, default=15, help="timed rounds; default: 15")
    parser.add_argument("--quick", action="store_true", help="8 documents, 2 rounds: whether it runs, not how fast")
    wanted = parser.parse_args()
    documents, repeats = (8, 2) if wanted.quick else (wanted.documents, wanted.repeats)
    results = measure(documents, wanted.depths, repeats)
    row = (results["seconds"][OURS] * 1e3, results["seconds"][THEIRS] * 1e3, results["times_faster"])
    report(
        "shift",
        hardware(ON_CPU),
        {"documents": documents, "depths": wanted.depths, "repeats": repeats, **results},
        [Goal("times faster than Megatron's rolling", results["times_faster"], GOAL, ">=")],
        [Table(("ms ours", "ms Megatron", "times faster"), [row])],
    )


def measure(documents: int, depths: int, repeats: int) -> dict[str, Any]:
    """Seconds of both sides; raises ValueError where they disagree."""
    cu_seqlens, batch = packed_batch(documents)
    ours, theirs = our_shifts(batch, cu_seqlens, depths), megatron_shifts(batch, cu_seqlens, depths)
    if not all(torch.equal(ours[name], theirs[name]) for name in NAMES):
        raise ValueError("the two sides do not agree on the shifts: there is nothing to compare.")
    spent = interleave(
        {
            OURS: lambda: our_shifts(batch, cu_seqlens, depths),
            THEIRS: lambda: megatron_shifts(batch, cu_seqlens, depths),
        },
        repeats,
        synchronize=torch.cuda.synchronize,
    )
    wall = {name: [one.wall for one in steps] for name, steps in spent.items()}
    comparison = compare(wall[THEIRS], wall[OURS])
    return {
        "positions": batch["tokens"].size(1),
        "seconds": {name: statistics.median(steps) for name, steps in wall.items()},
        "times_faster": round(comparison.ratio, 2),
        "by_round": asdict(comparison),
    }


def packed_batch(documents: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Offsets [documents + 1] and one packed row of documents of 8 to 128 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 129, (documents,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)
    stream = torch.randint(1, 1000, (1, int(offsets[-1]) + 1), generator=generator)
    mask = (torch.rand(1, int(offsets[-1]), generator=generator) > 0.1).float()
    batch = {"tokens": stream[:, :-1].contiguous(), "labels": stream[:, 1:].contiguous(), "loss_mask": mask}
    return offsets.cuda(), {name: value.cuda() for name, value in batch.items()}


def our_shifts(batch: dict[str, Tensor], cu_seqlens: Tensor, depths: int) -> dict[str, Tensor]:
    """[D, 1, positions] each."""
    documents_BS = documents_from_offsets(cu_seqlens.unsqueeze(0), None, batch["tokens"].size(1))
    shifted = depth_batch(batch, depths, documents_BS)
    return {name: getattr(shifted, f"{name}_DBS") for name in NAMES}


def megatron_shifts(batch: dict[str, Tensor], cu_seqlens: Tensor, depths: int) -> dict[str, Tensor]:
    """[D, 1, positions] each, rolled depth after depth."""
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
    main()
