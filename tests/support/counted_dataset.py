"""A dataset that counts its tokens."""

from pathlib import Path

import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def dataset(prefix: Path, tokens: list[int]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(100))
    builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
