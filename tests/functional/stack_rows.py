"""Texts and steps of fine-tuning that `megatron-mtp train` takes, and a framework beside it; and what then drafts.

In a text the next token is a function of the last: so many times it, plus so much.
"""

from pathlib import Path

LENGTH, ROWS, STEPS, RATE, SEED, SPLIT = 32, 4, 24, 3e-3, 1234, "90,10,0"
VOCABULARY = 95
"""Tokens of the texts; the models have one more."""

WEIGHT = 0.3
"""Of the layers' loss."""

Line = tuple[int, int]
PROMPTS, NEW = 8, 24


def rows_of(line: Line, count: int, length: int) -> list[list[int]]:
    factor, added = line
    rows = []
    for number in range(count):
        row = [number * 11 % VOCABULARY]
        for _ in range(length - 1):
            row.append((row[-1] * factor + added) % VOCABULARY)
        rows.append(row)
    return rows


def write_corpus(prefix: Path, line: Line) -> Path:
    """Enough texts for all steps."""
    import torch

    from megatron_mtp.runtime import prepare

    prepare()  # here, since a framework is imported before it
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCABULARY))
    for row in rows_of(line, 2 * STEPS * ROWS, LENGTH):
        builder.add_document(torch.tensor(row), [len(row)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def accepted(checkpoint: Path, line: Line) -> int:
    """First drafts of such texts that this package's engine accepts; texts do not change."""
    from megatron_mtp.decoding.engine import generate
    from megatron_mtp.decoding.load import load_runner

    runner, prompts = load_runner(checkpoint), rows_of(line, PROMPTS, 6)
    drafted = generate(runner, prompts, NEW, speculative={"method": "mtp", "num_speculative_tokens": 1})
    assert drafted.token_ids == generate(runner, prompts, NEW).token_ids
    return drafted.stats.accepted_at[0]
