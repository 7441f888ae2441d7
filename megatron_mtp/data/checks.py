"""Checks of `--data-path` before training. Every error is one sentence with the flag, the value and how to fix it.

In:  the prefixes of Megatron indexed datasets (PREFIX.bin, PREFIX.idx) and the tokenizer's vocabulary size.
Out: nothing, or a ValueError.

The index is read with numpy, without Megatron. Its layout is Megatron's: 9 magic bytes, version (8 bytes), dtype code
(1), number of sequences S (8), number of document bounds D (8), then S int32 lengths in tokens, S int64 byte offsets, D
int64 bounds, and in multimodal data S int8 modes.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Megatron's dtype codes that can hold a token id.
TOKEN_DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
SCAN_TOKENS = 64 * 1024 * 1024
SLICES = 64
SIZE, FILE = "--mtp-draft-vocab-size", "--mtp-draft-vocab-file"
"""The flags that choose a draft vocabulary."""

REBUILD = "build it again with megatron-mtp preprocess --overwrite"
PARTS = ("training", "validation", "testing")


class Index(NamedTuple):
    """Contents of an index: type and number of tokens, numbers of documents and sequences (usually equal).

    `has_modes` is set if sequences have modes, as those of chats do (`data/chat_files.py`).
    """

    dtype: type[np.integer]
    documents: int
    tokens: int
    sequences: int
    has_modes: bool = False


def check_weights(data_path: Sequence[str]) -> None:
    """Check that the weights of a blend are above 0. As in Megatron, an odd number of entries has no weights.

    Args:
        data_path: values of `--data-path`.

    Raises:
        ValueError: a weight is not above 0; Megatron would use other proportions.
    """
    weights = data_path[::2]
    if len(data_path) % 2 or not all(map(_is_number, weights)):
        return
    for value in weights:
        if not 0 < float(value) < math.inf:
            raise ValueError(f"--data-path: {value} is not a weight of a dataset; give a number above 0.")


def check_data_prefixes(prefixes: Sequence[str], vocab_size: int) -> None:
    """Check that every dataset exists, is complete and not empty, and has token ids below `vocab_size`.

    The highest id comes from the sidecar PREFIX.json if that belongs to the `.bin` (same number of tokens). Otherwise
    the `.bin` is scanned: all of it up to 64Mi tokens, beyond that 64 evenly spaced slices of 1Mi tokens, which may
    miss a rare id. Object storage (`s3://`, `msc://`) is not checked.

    Args:
        prefixes: paths of the datasets without `.bin` and `.idx`.
        vocab_size: number of the tokenizer's ids.

    Raises:
        ValueError: the first dataset that fails.
    """
    for prefix in prefixes:
        if "://" not in prefix:
            index = _check_files(prefix)
            _check_ids(prefix, index, vocab_size)


def split_weights(split: str) -> list[float]:
    """Parse the weights of `--split`, such as 90,10,0. Megatron accepts any text and uses the numbers in it.

    Raises:
        ValueError: it is not a list of up to three weights, one of them above 0.
    """
    entries = split.split(",")
    weights = [float(entry) for entry in entries if _is_number(entry)]
    whole = len(weights) == len(entries) <= len(PARTS) and all(0 <= weight < math.inf for weight in weights)
    if not whole or not any(weights):
        raise ValueError(
            f"--split is '{split}'; give the weights of training, validation and test data, such as 90,10,0."
        )
    return weights


def part_of(count: int, split: str, part: str, of: str = "") -> range:
    """Return the documents of a part of `--split`, as Megatron splits them, out of this many (of the dataset `of`).

    Raises:
        ValueError: the part is empty.
    """
    weights = np.array(split_weights(split))
    ends = [0, *(round(end * count) for end in weights.cumsum() / weights.sum())]
    place = PARTS.index(part)
    if found := range(*ends[place : place + 2]) if place + 1 < len(ends) else range(0):
        return found
    raise ValueError(
        f"--split is {split}, which of the {count} documents{of} leaves none for {part}; give more documents, or "
        f"another --split (of 0 for {part}, it is left out)."
    )


def check_split(prefixes: Sequence[str], split: str) -> None:
    """Check that no part of `--split` is empty; Megatron would hang.

    Args:
        prefixes: paths of the datasets without `.bin` and `.idx`.
        split: value of `--split`.

    Raises:
        ValueError: the first dataset with too few sequences, or chats, for a part.
    """
    wanted = [part for part, weight in zip(PARTS, split_weights(split), strict=False) if weight]
    for prefix in prefixes:
        for part in wanted if "://" not in prefix else ():
            index = read_index(prefix)
            part_of(index.documents if index.has_modes else index.sequences, split, part, f" of '{prefix}'")


def read_sidecar(prefix: str) -> dict[str, Any]:
    """Read PREFIX.json, which data/corpus.py writes with a dataset; empty if it is missing or damaged."""
    try:
        sidecar = json.loads(Path(f"{prefix}.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return sidecar if isinstance(sidecar, dict) else {}


def check_tokenizer(prefixes: Sequence[str], folder: str) -> None:
    """Check that every dataset was made with the vocabulary of the tokenizer in `folder`.

    Datasets without a sidecar, and tokenizers without a tokenizer.json, cannot be compared and pass.

    Args:
        prefixes: paths of the datasets without `.bin` and `.idx`.
        folder: folder of the tokenizer.

    Raises:
        ValueError: the first dataset with another vocabulary.
    """
    own = vocabulary_digest(folder)
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        made_with = sidecar.get("vocabulary_sha256")
        if own and made_with and own != made_with:
            raise ValueError(
                f"--data-path: the dataset '{prefix}' was made with the tokenizer {sidecar.get('tokenizer')}, "
                f"whose vocabulary is not that of --tokenizer-model {folder}; {REBUILD} --tokenizer {folder}."
            )


def vocabulary_digest(folder: str) -> str | None:
    """Return the SHA-256 of the tokens and ids in FOLDER/tokenizer.json; None if there is no such file."""
    try:
        tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
        added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        vocabulary = [tokenizer["model"]["vocab"], added]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()


def token_slices(prefix: str, index: Index) -> list[np.ndarray]:
    """Return the tokens of a `.bin`, memory-mapped: all up to 64Mi, beyond that 64 evenly spaced slices of 1Mi."""
    tokens = np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r")
    length = SCAN_TOKENS // SLICES
    if len(tokens) <= SCAN_TOKENS:
        starts = np.arange(0, len(tokens), length)
    else:
        starts = np.linspace(0, len(tokens) - length, SLICES, dtype=np.int64)
    return [tokens[start : start + length] for start in starts]


def most_frequent(
    prefixes: Sequence[str], weights: Sequence[float] | None, count: int, vocab_size: int
) -> tuple[list[int], float]:
    """Return the `count` most frequent tokens below `vocab_size`, and their share of the data.

    For a dataset above 64Mi tokens, 64 evenly spaced slices of 1Mi tokens are counted; every rank counts for itself.
    Ties go to the lower ids.

    Args:
        prefixes: paths of the datasets without `.bin` and `.idx`.
        weights: weight of each dataset in the blend; None for its number of tokens.
        count: number of tokens to choose.
        vocab_size: number of the tokenizer's ids.

    Returns:
        The ids in ascending order, and their share of all tokens.

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


def _check_files(prefix: str) -> Index:
    absent = [f"{prefix}.{kind}" for kind in ("bin", "idx") if not os.path.isfile(f"{prefix}.{kind}")]
    if absent:
        raise ValueError(
            f"--data-path: there is no dataset '{prefix}' ({' and '.join(absent)} missing); make it with megatron-mtp "
            f"preprocess --input TEXT --output-prefix {prefix} --overwrite, or correct the path."
        )
    index = read_index(prefix)
    if index.documents == 0 or index.tokens == 0:
        raise ValueError(
            f"--data-path: the dataset '{prefix}' is empty ({index.documents} documents, {index.tokens} tokens); "
            "run megatron-mtp preprocess --overwrite on an --input that has text."
        )
    expected = index.tokens * np.dtype(index.dtype).itemsize
    size = os.path.getsize(f"{prefix}.bin")
    if size != expected:
        raise ValueError(
            f"--data-path: '{prefix}.bin' has {size} bytes where its index lists {expected}, so that the two do not "
            f"belong together or one was cut off; copy both again, or {REBUILD}."
        )
    return index


def read_index(prefix: str) -> Index:
    """Read PREFIX.idx. Raise ValueError if it is not an index, or is incomplete."""
    path = f"{prefix}.idx"
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    magic, version, code, sequences, bounds = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    if size < HEADER.size or magic != MAGIC or version != 1 or code not in TOKEN_DTYPES:
        raise ValueError(
            f"--data-path: '{path}' is not an index that Megatron wrote, or was cut off at its start; {REBUILD}."
        )
    expected = HEADER.size + sequences * (4 + 8) + bounds * 8
    if size not in (expected, expected + sequences):
        raise ValueError(f"--data-path: '{path}' has {size} bytes where {expected} belong: it was cut off; {REBUILD}.")
    lengths = np.fromfile(path, dtype=np.int32, count=sequences, offset=HEADER.size)
    starts = np.fromfile(path, dtype=np.int64, count=sequences, offset=HEADER.size + sequences * 4)
    ends = lengths.cumsum(dtype=np.int64) * np.dtype(TOKEN_DTYPES[code]).itemsize
    documents = np.fromfile(path, dtype=np.int64, count=bounds, offset=HEADER.size + sequences * (4 + 8))
    are_in_order = (lengths >= 0).all() and (documents[:-1] <= documents[1:]).all()
    if (
        not are_in_order
        or not (starts[1:] == ends[:-1]).all()
        or not ((documents >= 0) & (documents <= sequences)).all()
    ):
        raise ValueError(f"--data-path: '{path}' is damaged: its sequences do not follow each other; {REBUILD}.")
    return Index(TOKEN_DTYPES[code], max(bounds - 1, 0), int(lengths.sum(dtype=np.int64)), sequences, size > expected)


def _check_ids(prefix: str, index: Index, vocab_size: int) -> None:
    sidecar, lowest = read_sidecar(prefix), 0
    highest = sidecar.get("max_token_id") if sidecar.get("tokens") == index.tokens else None
    if type(highest) is not int:
        slices = token_slices(prefix, index)
        lowest, highest = min(int(part.min()) for part in slices), max(int(part.max()) for part in slices)
    if lowest < 0:
        raise ValueError(f"--data-path: '{prefix}.bin' holds the token id {lowest}, which no tokenizer has; {REBUILD}.")
    if highest >= vocab_size:
        raise ValueError(
            f"--data-path: '{prefix}' holds the token id {highest}, but the tokenizer has ids up to {vocab_size - 1} "
            f"(vocabulary of {vocab_size}); give the --tokenizer-model (or --vocab-size) that the data was made with, "
            "or preprocess the text again with this one."
        )


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
