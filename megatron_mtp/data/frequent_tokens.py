"""The most frequent tokens of Megatron's indexed datasets, which depths may draft."""

from collections.abc import Sequence

import numpy as np

from megatron_mtp.data.checks import read_index, token_slices

SIZE, FILE = "--mtp-draft-vocab-size", "--mtp-draft-vocab-file"
"""The flags that choose them."""


def most_frequent(
    prefixes: Sequence[str], weights: Sequence[float] | None, count: int, vocab_size: int
) -> tuple[list[int], float]:
    """The `count` most frequent tokens below `vocab_size`, and their share of the data.

    In a dataset above 64Mi tokens, 64 evenly spaced slices of 1Mi tokens are counted: every rank counts for itself. Of
    equally frequent tokens, the lower ids are taken.

    Args:
        prefixes: paths of the datasets without `.bin` and `.idx`.
        weights: weight of each dataset in the blend; None for its number of tokens.
        count: number of tokens to choose.
        vocab_size: number of the tokenizer's ids.

    Returns:
        The ids in ascending order, and their part of all tokens.

    Raises:
        ValueError: a dataset cannot be read.
    """
    total = np.zeros(vocab_size)
    for number, prefix in enumerate(prefixes):
        counts = np.zeros(vocab_size, dtype=np.int64)
        try:
            index = read_index(prefix)
            for part in token_slices(prefix, index):
                counts += np.bincount(part, minlength=vocab_size)[:vocab_size]
        except OSError as error:
            raise ValueError(f"--data-path: the tokens of '{prefix}' cannot be counted: {error}.") from None
        total += counts / counts.sum() * (index.tokens if weights is None else weights[number])
    chosen = np.argsort(-total, kind="stable")[:count]
    return sorted(chosen.tolist()), float(total[chosen].sum() / total.sum())
