"""Rows of one length: documents packed into them, and their order in an epoch."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack documents into rows, longest first, each into the row with the least remaining room that fits.

    Best-fit decreasing, as in arXiv:2404.10830. Documents of 5, 3, 3 and 2 positions in rows of 8: [5, 3] and [3, 2].

    Args:
        lengths: positions of each document, at most `capacity`.
        capacity: positions of a row.

    Returns:
        The document indices of every row.
    """
    rows: list[list[int]] = []
    sizes: list[int] = []  # free space of rows, sorted
    with_room = defaultdict[int, list[int]](list)
    for document in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(sizes, lengths[document])
        if place == len(sizes):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = sizes[place], with_room[sizes[place]].pop()
            if not with_room[left]:
                sizes.pop(place)
        rows[row].append(document)
        if left := left - int(lengths[document]):
            if not with_room[left]:
                insort(sizes, left)
            with_room[left].append(row)
    return rows


@lru_cache(maxsize=4)
def order_of_rows(seed: int, rows: int, epoch: int) -> list[int]:
    """Return the order of this many rows in an epoch."""
    found: list[int] = np.random.default_rng([seed, epoch]).permutation(rows).tolist()
    return found
