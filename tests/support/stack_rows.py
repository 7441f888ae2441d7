"""Documents and fine-tuning steps for `megatron-mtp train` and for a framework, and the number of accepted drafts.

In a document the next token is a linear function of the last: a factor times it, plus a constant.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

LENGTH, ROWS, STEPS, RATE, SEED, SPLIT = 32, 4, 24, 3e-3, 1234, "90,10,0"
VOCABULARY = 95
"""Tokens in the documents; the models have one more."""

WEIGHT = 0.3
"""Weight of the MTP loss."""

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
    """Write enough documents for all steps."""
    import torch

    from megatron_mtp.megatron.runtime import prepare

    prepare()  # here, because a framework is imported before it
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCABULARY))
    for row in rows_of(line, 2 * STEPS * ROWS, LENGTH):
        builder.add_document(torch.tensor(row), [len(row)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def accepted(checkpoint: Path, line: Line, method: str = "mtp") -> int:
    """Return how many first drafts of such documents this package's engine accepts, and check that outputs do not
    change.
    """
    from megatron_mtp.decoding.engine import generate
    from megatron_mtp.decoding.load import load_runner

    runner, prompts = load_runner(checkpoint), rows_of(line, PROMPTS, 6)
    drafted = generate(runner, prompts, NEW, speculative={"method": method, "num_speculative_tokens": 1})
    assert drafted.token_ids == generate(runner, prompts, NEW).token_ids
    return drafted.stats.accepted_at[0]


def accepted_by_transformers(folder: Path, line: Line) -> int:
    """Return how many drafts transformers accepts with the folder's MTP layer, and check that outputs do not change."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    layer = model.config.num_hidden_layers  # transformers looks up the layer by its number in published models
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*"]
    matches: list[int] = []

    class Counted(MTPCandidateGenerator):
        def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
            matches.append(int(num_matches))

    def generated(prompt: list[int], use_mtp: bool | None) -> list[int]:
        settings = {"do_sample": False, "max_new_tokens": NEW, "use_mtp": use_mtp, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        made_BS = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **settings)
        return list(made_BS[0].tolist())

    with patch("transformers.generation.utils.MTPCandidateGenerator", Counted):
        for prompt in rows_of(line, PROMPTS, 6):
            assert generated(prompt, True) == generated(prompt, None)
    return sum(matches)
