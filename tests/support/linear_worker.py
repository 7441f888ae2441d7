"""Compute the chunked losses over the ranks of this job, and compare with their definitions; print the worst
difference.

    torchrun --nproc-per-node 2 linear_worker.py CASES
"""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from linear_cases import SETTINGS, Case, worst
from torch import Tensor

from megatron_mtp.losses.table import depth_loss
from megatron_mtp.losses.token_loss import Chunk
from megatron_mtp.model.vocabulary import Vocabulary
from megatron_mtp.spec.config import MTPConfig

CASES = [Case.drawn(seed) for seed in range(int(sys.argv[1]))]


def main() -> None:
    """Print one line per loss on the first rank."""
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    assert group is not None
    for name, given in SETTINGS.items():
        settings, found = MTPConfig(**given), torch.zeros(())
        if group.rank() == 0:
            print(f"exchanges of {name}: {exchanges(settings)}", flush=True)
        for case, drafted_K in cases(group.size()):
            plain = case.plain(settings, drafted_K)
            plain[-1] = plain[-1].chunk(group.size())[group.rank()]
            found = torch.maximum(found, torch.tensor(worst(case.chunked(settings, group, drafted_K), plain)))
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        if group.rank() == 0:
            print(f"worst of {name}: {found.item():.3e}", flush=True)
    torch.distributed.destroy_process_group()


def exchanges(settings: MTPConfig) -> int:
    """Return how often ranks communicate in one chunk."""
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    vocabulary = Vocabulary(8, group)
    with (
        mock.patch("torch.distributed.all_gather_into_tensor") as gather,
        mock.patch("torch.distributed.all_reduce") as add,
    ):
        chunk = Chunk(torch.randn(3, 8), torch.tensor([1, 9, 4]), torch.randn(3, 8), vocabulary)
        depth_loss(settings)(chunk)
    return gather.call_count + add.call_count


def cases(ranks: int) -> Iterator[tuple[Case, Tensor | None]]:
    """Yield cases with the whole vocabulary and, unless the last rank only has padding, with a draft vocabulary."""
    for case in CASES:
        yield case, None
        if case.vocabulary > case.rows - case.rows // ranks:
            yield case, case.drafted()


if __name__ == "__main__":
    main()
