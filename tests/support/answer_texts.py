"""Documents in which only the responses count, written as a corpus and read as rows."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from megatron_mtp.data.corpus import write_sequences

EOD = 0


def config(length: int, **changes: Any) -> GPTDatasetConfig:
    tokenizer: Any = Namespace(eod=EOD, pad=998, vocab_size=999, unique_identifiers={})
    settings = {"random_seed": 1, "sequence_length": length, "tokenizer": tokenizer, "split": "1"}
    switches = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    return GPTDatasetConfig(**{**settings, **switches, "create_attention_mask": False, **changes})


def written(place: Path, documents: list[list[int]], answers: list[tuple[int, int]]) -> str:
    encoder: Any = Namespace(vocab_size=999, eod_id=EOD, eod_token="<eod>", folder=str(place))
    write_sequences(documents, answers, ["own"] * len(documents), encoder, str(place / "own"), {})
    return str(place / "own")


def rows(kind: type[GPTDataset], prefix: str, settings: GPTDatasetConfig, count: int | None = None) -> GPTDataset:
    low: Any = kind.build_low_level_dataset(prefix, settings)
    return kind(low, prefix, np.arange(len(low)), count, Split.train, settings)
