"""The source of every document of a corpus, to report acceptance by source: code, chat, another language.

PREFIX.sources.npy has a number for every document, int32: an index into `sources` in PREFIX.json.

Training numbers the documents of all its corpora: a corpus' first number depends only on its prefix, not on the others.
"""

import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron_mtp.data.checks import read_index, read_sidecar

SOURCES = "sources.npy"
"""Suffix of the file."""

MOST_DOCUMENTS = 2**31
"""Maximum number of documents of a corpus."""


def read_sources(prefix: str) -> tuple[list[str], np.ndarray]:
    """Read the source names of a corpus, and the index of every document's, [documents] or more.

    A corpus without sources is one source, named by its prefix.

    Raises:
        ValueError: the file of sources is damaged, or belongs to another corpus.
    """
    names = read_sidecar(prefix).get("sources")
    if names is None:
        return [Path(prefix).name], np.broadcast_to(np.int32(0), MOST_DOCUMENTS)
    file = Path(f"{prefix}.{SOURCES}")
    try:
        numbers: np.ndarray = np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError):
        numbers = np.empty(0)
    is_whole = numbers.shape == (read_index(prefix).documents,) and numbers.dtype == np.int32
    if not is_whole or numbers.min(initial=0) < 0 or numbers.max(initial=0) >= len(names):
        raise ValueError(f"'{file}' is damaged, or of another corpus than '{prefix}.idx'; make the corpus again.")
    return names, numbers


def first_number(prefix: str) -> int:
    """Return the number of a corpus' first document in training."""
    return zlib.crc32(prefix.encode()) * MOST_DOCUMENTS


def sources_of(numbers: Iterable[int], prefixes: Iterable[str]) -> list[str]:
    """Return the sources of documents by their numbers in training, given these corpora."""
    corpora = {first_number(prefix): read_sources(prefix) for prefix in set(prefixes)}
    found = []
    for number in numbers:
        names, places = corpora[number - number % MOST_DOCUMENTS]
        found.append(names[places[number % MOST_DOCUMENTS]])
    return found
