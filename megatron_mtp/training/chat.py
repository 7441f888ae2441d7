"""Conversations for `--sft` from files of JSON lines, if the package `datasets`, with which Megatron reads, is missing.

A line is an object whose "messages" are [{"role": "system", "content": ...}, {"role": "user", ...}, ...], one or more
conversations of which each begins with a system message. Rows are packed, and prompts masked, by Megatron's own class.
What is trained on depends on the format and on the tokenizer, and `trained_part` says it of a conversation.
"""

import importlib.util
import json
from array import array
from typing import Any, override

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset

from megatron_mtp.data.batch import IGNORED_LABEL


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
            line = file.readline()
        try:
            messages: list[dict[str, Any]] = json.loads(line)["messages"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"--data-path: '{self.path}' has a line without messages ({line[:40]!r}); with --sft every line is an "
                "object whose messages have a role and a content."
            ) from None
        return messages


class ChatDataset(SFTDataset):
    """Megatron's, over a `ChatFile`."""

    @staticmethod
    @override
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> ChatFile:
        return ChatFile(dataset_path)


def trained_part(tokenizer: Any, messages: list[dict[str, Any]], prompt_format: str) -> list[str]:
    """Lines that say which part of a conversation Megatron trains on.

    Args:
        tokenizer: Megatron's SFTTokenizer.
        messages: of a line.
        prompt_format: the value of `--sft-tokenizer-prompt-format`.
    """
    begins = [place for place, message in enumerate(messages) if message["role"] == "system" and place]
    first = messages[: begins[0]] if begins else messages
    tokens, targets = tokenizer.tokenize_conversation(first, return_target=True, add_generation_prompt=False)
    is_trained = (targets != IGNORED_LABEL) & (targets != tokenizer.pad)
    shown = tokenizer.detokenize(targets[is_trained].tolist())
    lines = [
        f"--sft by --sft-tokenizer-prompt-format {prompt_format}: of {len(tokens)} tokens of the first conversation "
        f"{int(is_trained.sum())} are trained on: {shown[:SHOWN]!r}{' ...' if len(shown) > SHOWN else ''}"
    ]
    if (targets != IGNORED_LABEL).all():
        lines.append("this format masks nothing: system and user messages are trained on like answers")
    if tokenizer.pad == tokenizer.eod:
        ends = tokenizer.detokenize([tokenizer.eod])
        lines.append(f"the tokenizer pads with {ends!r}, so that the end of an answer is never trained on")
    if messages[0]["role"] != "system":
        lines.append("lines without system messages are one document each, however many conversations they hold")
    return lines


SHOWN = 200
"""Characters of what is trained on."""


def sft_dataset() -> type[SFTDataset]:
    """Megatron's own class if it can read files, else ours."""
    return ChatDataset if importlib.util.find_spec("datasets") is None else SFTDataset
