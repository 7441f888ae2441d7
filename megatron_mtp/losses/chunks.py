"""Sizes of the chunks in which logits are made: so many positions that a chunk's logits fit a budget, or 256.

A chunk of float32 logits is as large on every rank, so that all ranks walk over the same chunks.
"""

from collections.abc import Iterator

CHUNK_BYTES = 64 * 2**20
"""Float32 logits of one chunk on a CPU; more gains nothing."""

CHUNK_BYTES_CUDA = 512 * 2**20
"""On a GPU a product has to be large enough to fill the card."""

LEAST_POSITIONS = 256
"""Positions of a chunk, whatever their logits need: with half as many, products are a tenth slower."""

BLOCK_BYTES = 2**20
"""The part of a chunk that a CPU hands to the loss at once: its passes over the logits then run in a core's own cache,
3 to 6 times as fast as over the whole chunk. Not where several ranks share the vocabulary: every block has
collectives."""


def chunks(positions: int, entries: int, is_cuda: bool, most: int | None = None, together: int = 1) -> Iterator[slice]:
    """Slices of all positions, each with at most a chunk of float32 logits, or `LEAST_POSITIONS`.

    Args:
        positions: all of them.
        entries: the logits of a position.
        is_cuda: whether they are on a GPU.
        most: positions of a slice, whatever their logits need.
        together: so many in a row are not cut apart.
    """
    at_once = max((CHUNK_BYTES_CUDA if is_cuda else CHUNK_BYTES) // (4 * entries), LEAST_POSITIONS)
    return _slices(positions, at_once if most is None else min(at_once, most), together)


def blocks(positions: int, entries: int, as_one: bool, together: int = 1) -> Iterator[slice]:
    """The positions of a chunk, cut into blocks; `as_one` leaves them whole."""
    return _slices(positions, positions if as_one else BLOCK_BYTES // (4 * entries), together)


def _slices(positions: int, at_once: int, together: int) -> Iterator[slice]:
    """At least one position each, or as many as belong together."""
    at_once = max(1, at_once // together) * together
    for start in range(0, positions, at_once):
        yield slice(start, min(start + at_once, positions))
