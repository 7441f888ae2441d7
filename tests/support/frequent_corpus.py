"""A small corpus in which few tokens are frequent."""

from pathlib import Path

import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

STEPS, HALF, DRAFTED = 4, 2, 40


def corpus(prefix: Path) -> Path:
    """Build a corpus in which tokens 0 to 19 and from 100 on, of 127, fill nine of ten positions."""
    generator = torch.Generator().manual_seed(1)
    frequent = torch.cat([torch.arange(1, 20), torch.arange(100, 121)])
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(127))
    for _ in range(40):
        rare = torch.randint(1, 121, (300,), generator=generator)
        often = frequent[torch.randint(DRAFTED, (300,), generator=generator)]
        document = torch.where(torch.rand(300, generator=generator) < 0.9, often, rare)
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix
