"""Indexed datasets, written to disk."""

from pathlib import Path

import numpy as np


def write_dataset(prefix: Path, documents: list[list[int]], dtype: type[np.integer] = np.uint16) -> str:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens in documents:
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_random_dataset(prefix: Path, vocabulary: int) -> str:
    """Write documents of 20 to 89 random tokens each, about 3,800 in total."""
    draw = np.random.default_rng(0)
    return write_dataset(prefix, [list(draw.integers(3, vocabulary, 20 + n % 100)) for n in range(70)])
