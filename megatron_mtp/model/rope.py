"""Rotary positions: Megatron's rotary modules at positions that are not 0, 1, 2, ..."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch


def place(module: torch.nn.Module, positions: Sequence[int]) -> None:
    """Let the rows of every forward of `module` stand at these positions, where its parts make their own angles."""
    for rotary in _rotary_modules(module):
        rotary.forward = partial(_angles, rotary, positions)


@contextmanager
def placed(module: torch.nn.Module, positions: Sequence[int]) -> Iterator[None]:
    """The same while this lasts."""
    place(module, positions)
    try:
        yield
    finally:
        for rotary in _rotary_modules(module):
            del rotary.forward


def _rotary_modules(module: torch.nn.Module) -> Iterator[Any]:
    """Only rotary modules have `get_emb`, with and without YaRN."""
    return (one for one in module.modules() if hasattr(one, "get_emb"))


def _angles(rotary: Any, positions: Sequence[int], length: int, *_: object, **__: object) -> Any:
    """In the place of `forward(length, ...)`: angles [length, 1, 1, C], with YaRN's factor if the module has one.

    The angles of positions 0 1 2 9 are made in two parts, of the 3 from 0 on and of the 1 from 9 on.
    """
    parts = []
    for _, run in groupby(enumerate(positions), lambda pair: pair[1] - pair[0]):
        together = [position for _, position in run]
        parts.append(rotary.get_emb(len(together), together[0]))
    if isinstance(parts[0], tuple):
        return torch.cat([angles for angles, _ in parts])[:length], parts[0][1]
    return torch.cat(parts)[:length]
