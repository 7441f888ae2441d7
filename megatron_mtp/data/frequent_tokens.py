"""The tokens that depths may draft: the most frequent tokens of indexed datasets, or a user's list.

In:  prefixes of Megatron indexed datasets with their weights in the blend, or a file of ids.
Out: token ids in ascending order.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch

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


def tokens_of_file(path: Path, vocab_size: int, what: str = FILE) -> list[int]:
    """The ids in a text file with one id per line, or in a token map of FR-Spec and SGLang (.pt), in ascending order.

    Args:
        path: the file; its ids may have any order, such as the most frequent first.
        vocab_size: number of the tokenizer's ids.
        what: how messages call the file.

    Raises:
        ValueError: the file cannot be read or is empty, or a line is no id, repeats one, or is outside the vocabulary.
    """
    try:
        ids = _ids_in(path)
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{what} is {path}, which is no list of token ids, in text or of torch: {reason}.") from None
    if not ids:
        raise ValueError(f"{what} is {path}, which is empty; write a token id on every line.")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"{what} is {path}, which has the id {outside}, and ids are 0 to {vocab_size - 1}; take it out."
        )
    ids.sort()
    twice = next((token for token, following in pairwise(ids) if token == following), None)
    if twice is not None:
        raise ValueError(f"{what} is {path}, which has the id {twice} twice; give every token once.")
    return ids


def _ids_in(path: Path) -> list[int]:
    if path.suffix != ".pt":
        return [int(word) for word in path.read_text(encoding="utf-8").split()]
    ids = torch.as_tensor(torch.load(path, map_location="cpu", weights_only=True))
    if ids.is_floating_point() or ids.dim() != 1:
        raise ValueError(f"it holds {ids.dtype} of shape {tuple(ids.shape)}")
    return [int(one) for one in ids]
