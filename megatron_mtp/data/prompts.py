"""Prompts drawn from a corpus by seed. Prompt i is the same however many are drawn.

In:  the .bin and .idx of `megatron-mtp preprocess`, or JSON lines of conversations.
Out: the token ids of prompt i.

Prompt i is from document i of a shuffled order; after all documents, another order begins.
"""

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_mtp.data.chat import place_of, read_chat
from megatron_mtp.data.chat_template import check_template
from megatron_mtp.data.checks import part_of, read_index
from megatron_mtp.data.corpus import Document, find_files, list_documents
from megatron_mtp.data.named_sources import sources_of_files
from megatron_mtp.data.sources import read_sources
from megatron_mtp.data.tokenizer import apply_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompts(Protocol):
    """Prompts by number.

    Attributes:
        documents: number of different documents.
    """

    documents: int

    def source(self, number: int) -> str:
        """Return the source of a prompt's document (data/sources.py)."""

    def prompt(self, number: int) -> list[int]:
        """Return the token ids of a prompt."""


class Beginnings:
    """The first tokens of documents, or the same number from anywhere in them.

    Args:
        prefix: prefix of the .bin and .idx.
        length: tokens of a prompt.
        seed: seed of the draws.
        split, part: which documents, as in `part_of`.
        anywhere: whether a prompt may begin anywhere in its document.

    Raises:
        ValueError: there is no such corpus, or no document of the part is longer than a prompt.
    """

    def __init__(self, prefix: str, length: int, seed: int, split: str, part: str, anywhere: bool = False) -> None:
        _check_corpus(prefix)
        self._data, (self._names, self._sources) = IndexedDataset(prefix), read_sources(prefix)
        self._length, self._seed, self._anywhere = length, seed, anywhere
        every = part_of(len(self._data), split, part)
        self._long = [number for number in every if self._data.sequence_lengths[number] > length]
        self.documents = len(self._long)
        if not self.documents:
            raise ValueError(
                f"--prompt-tokens is {length}, and none of the {len(every)} documents of '{prefix}' for {part} is "
                "longer; give fewer."
            )

    def source(self, number: int) -> str:
        """The source of a prompt's document."""
        return self._names[self._sources[self._document(number)]]

    def prompt(self, number: int) -> list[int]:
        """Return the token ids of a prompt."""
        document = self._document(number)
        start = 0
        if self._anywhere:
            last = int(self._data.sequence_lengths[document]) - self._length
            start = int(np.random.default_rng([self._seed, number]).integers(0, last))
        found: list[int] = self._data.get(document, offset=start, length=self._length).tolist()
        return found

    def _document(self, number: int) -> int:
        return self._long[drawn(self._seed, self.documents, number)]


class UserTurns:
    """Conversations up to a user turn, rendered with the tokenizer's chat template.

    Of consecutive user turns, only the first is used; the others refer to its response.

    Args:
        files: JSON lines, as in `read_chat`.
        tokenizer: tokenizer of the model.
        seed: seed of the draws.
        split, part: which conversations, as in `part_of`.

    Raises:
        ValueError: there is no such file, or the tokenizer has no chat template.
    """

    def __init__(
        self, files: list[str], tokenizer: "PreTrainedTokenizerBase", seed: int, split: str, part: str
    ) -> None:
        check_template(tokenizer)
        every = list_documents(find_files(files, ["*.jsonl"], "--chat"))
        self._lines = [every[number] for number in part_of(len(every), split, part)]
        self._source_of = sources_of_files({line.path for line in every})
        self._tokenizer, self._seed, self.documents = tokenizer, seed, len(self._lines)

    def source(self, number: int) -> str:
        """The source of a prompt's conversation."""
        line = self._line(number)
        return read_chat(line).source or self._source_of[line.path]

    def prompt(self, number: int) -> list[int]:
        """Return the token ids of a prompt. Raise ValueError for a line that is not a conversation."""
        line = self._line(number)
        chat = read_chat(line)
        roles = [None, *(message["role"] for message in chat.messages)]
        turns = [place for place, pair in enumerate(pairwise(roles)) if pair[1] == "user" != pair[0]]
        if not turns:
            raise ValueError(f"--chat: {place_of(line)} has no turn of the user; remove it.")
        asked, prompted = chat.messages[: turns[number // self.documents % len(turns)] + 1], chat.variables
        try:
            text = apply_template(self._tokenizer, asked, tools=chat.tools, add_generation_prompt=True, **prompted)
        except Exception as error:  # chat templates reject roles and their order with various Jinja exceptions
            raise ValueError(f"--chat: the chat template refuses {place_of(line)} ({error}); correct it.") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _line(self, number: int) -> Document:
        return self._lines[drawn(self._seed, self.documents, number)]


def drawn(seed: int, documents: int, number: int) -> int:
    """Return the document of a prompt."""
    return int(_order(seed, documents, number // documents)[number % documents])


@lru_cache(maxsize=2)
def _order(seed: int, documents: int, turn: int) -> np.ndarray:
    return np.random.default_rng([seed, turn]).permutation(documents)


def _check_corpus(prefix: str) -> None:
    try:
        read_index(prefix)
    except FileNotFoundError:
        raise ValueError(
            f"--data-path: there is no dataset '{prefix}' ({prefix}.idx); make one with megatron-mtp preprocess."
        ) from None
