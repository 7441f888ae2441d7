"""Conversations for `--sft` from files of JSON lines, if the package `datasets`, with which Megatron reads, is missing.

A line is an object whose "messages" are [{"role": "system", "content": ...}, {"role": "user", ...}, ...], one or more
conversations of which each begins with a system message. Rows are packed, and prompts masked, by Megatron's own class.
"""

import importlib.util
import json
from array import array
from typing import Any, override

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset


class ChatFile:
    """The messages of every line; only the offsets of lines are in memory."""

    def __init__(self, path: str) -> None:
        self.path, self._starts = path, array("q")
        with open(path, "rb") as file:
            place = 0
            for line in file:
                if line.strip():
                    self._starts.append(place)
                place += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        with open(self.path, "rb") as file:
            file.seek(self._starts[index])
            messages: list[dict[str, Any]] = json.loads(file.readline())["messages"]
        return messages


class ChatDataset(SFTDataset):
    """Megatron's, over a `ChatFile`."""

    @staticmethod
    @override
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> ChatFile:
        return ChatFile(dataset_path)


def sft_dataset() -> type[SFTDataset]:
    """Megatron's own class if it can read files, else ours."""
    return ChatDataset if importlib.util.find_spec("datasets") is None else SFTDataset
