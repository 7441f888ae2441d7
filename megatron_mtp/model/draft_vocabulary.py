"""Draft vocabulary: the N tokens that MTP layers may draft. A draft costs only these rows of the output layer.

Each tensor-parallel rank uses the rows of its own slice of the output layer; ranks may have different numbers of them.
Draft indices follow ascending tokens, so those of a rank's slice are consecutive, starting at `first`.

    vocabulary 0 .. 7 over two ranks, draft tokens 1 2 6      rank 0: rows 1 2, first 0      rank 1: row 2, first 2

Letters in names: N draft vocabulary, K its part in this rank's slice, V the whole vocabulary, W this rank's slice of
it.
"""

from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

NOT_DRAFTED = -1
"""Index of a token outside the draft vocabulary."""


class DraftVocabulary(nn.Module):
    """This rank's part of the draft vocabulary. Its tensors move with the model and are not saved in checkpoints.

    Attributes:
        rows_K: row indices within this rank's slice of the output layer.
        drafted_W: whether each token of the slice is in the draft vocabulary.
        index_V: index of every token in the draft vocabulary; `NOT_DRAFTED` for tokens outside it.
        first: index of the first of `rows_K`.
        size: N.

    Raises:
        ValueError: the tokens are not ascending.
    """

    rows_K: Tensor
    drafted_W: Tensor
    index_V: Tensor

    def __init__(self, tokens_N: Tensor, slice_size: int, ranks: int = 1, rank: int = 0) -> None:
        super().__init__()
        if (tokens_N.diff() <= 0).any():
            raise ValueError("the ids of the draft vocabulary do not ascend; sort them, each once.")
        start = rank * slice_size
        index_V = torch.full((slice_size * ranks,), NOT_DRAFTED, device=tokens_N.device)
        index_V[tokens_N] = torch.arange(tokens_N.numel(), device=tokens_N.device)
        drafted_W = index_V[start : start + slice_size] != NOT_DRAFTED
        self.register_buffer("rows_K", drafted_W.nonzero()[:, 0], persistent=False)
        self.register_buffer("drafted_W", drafted_W, persistent=False)
        self.register_buffer("index_V", index_V, persistent=False)
        self.first = int((tokens_N < start).sum())
        self.size = tokens_N.numel()


def tokens_of_file(path: Path, vocab_size: int, what: str = "--mtp-draft-vocab-file") -> list[int]:
    """Read and sort token ids from a text file with one id per line, or from a token map of FR-Spec and SGLang (.pt).

    Args:
        path: the file; its ids may have any order, such as the most frequent first.
        vocab_size: number of the tokenizer's ids.
        what: how messages call the file.

    Raises:
        ValueError: the file cannot be read or is empty, or a line is not an id, repeats one or exceeds the vocabulary.
    """
    try:
        ids = _ids_in(path)
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{what} is {path}, which is not a list of token ids, in text or of torch: {reason}."
        ) from None
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
