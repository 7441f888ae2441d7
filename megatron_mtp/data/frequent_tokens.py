"""The most frequent tokens of indexed datasets, or a list of tokens that a user has written: what depths may draft.

In:  prefixes of Megatron indexed datasets with their weights in the blend, or a text file.
Out: token ids in ascending order.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_mtp.data.checks import read_index, token_slices


def most_frequent(
    prefixes: Sequence[str], weights: Sequence[float] | None, count: int, vocab_size: int
) -> tuple[list[int], float]:
    """The `count` most frequent of the tokens below `vocab_size`, and their share of the data.

    Of a dataset above 64Mi tokens 64 evenly spread slices of 1Mi are counted, so that every rank can count by itself.
    Among tokens as frequent as each other the lower ids are taken.

    Args:
        prefixes: of `.bin/.idx` pairs.
        weights: of each in the blend; None where each weighs as its tokens.

    Raises:
        ValueError: a dataset cannot be read.
    """
    total = np.zeros(vocab_size)
    for number, prefix in enumerate(prefixes):
        counts, tokens = _counted(prefix, vocab_size)
        total += counts / counts.sum() * (tokens if weights is None else weights[number])
    chosen = np.argsort(-total, kind="stable")[:count]
    return sorted(chosen.tolist()), float(total[chosen].sum() / total.sum())


def tokens_of_file(path: Path, vocab_size: int, flag: str) -> list[int]:
    """The ids in a text file, one on every line.

    Raises:
        ValueError: the file cannot be read, is empty, or has a line that is no id, an id twice or one that the
            vocabulary does not have.
    """
    try:
        lines = path.read_text(encoding="utf-8").split()
        ids = [int(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} is {path}, which is no text file of token ids, one a line: {error}.") from None
    if not ids:
        raise ValueError(f"{flag} is {path}, which is empty; write a token id on every line.")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"{flag} is {path}, which has the id {outside}, and the tokenizer has 0 to {vocab_size - 1}; take it out."
        )
    ids.sort()
    twice = next((token for token, following in pairwise(ids) if token == following), None)
    if twice is not None:
        raise ValueError(f"{flag} is {path}, which has the id {twice} twice; give every token once.")
    return ids


def _counted(prefix: str, vocab_size: int) -> tuple[np.ndarray, int]:
    """How often each token stands in what is counted of a dataset, and the tokens of all of it."""
    try:
        index = read_index(prefix)
        counts = np.zeros(vocab_size, dtype=np.int64)
        for part in token_slices(prefix, index):
            counts += np.bincount(part, minlength=vocab_size)[:vocab_size]
    except OSError as error:
        raise ValueError(f"--data-path: the tokens of '{prefix}' cannot be counted: {error}.") from None
    return counts, index.tokens
