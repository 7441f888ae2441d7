"""Number of threads for compiled code: all of them, or fewer while other processes use the cores.

The threads of a step meet at barriers some hundred times per millisecond. A thread that has lost its core to another
process delays all others for a time slice of the scheduler. Then more threads are slower than one.

The compiled code counts how long its threads wait for a late one. If that is a large part of a window of calls, half as
many threads run from then on. More are tried again after a pause, which doubles each time they are held up again.
Torch's own operations wait in the same way, for prompts for instance, so they get the same number of threads.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

WINDOW = 0.02
"""Seconds of calls that are judged together: several time slices of the kernel."""

HELD_UP = 0.3
"""Share of a window in which threads may be held up. On a quiet machine it is below 0.05."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0
"""Seconds until more threads are tried again."""


@dataclass
class Team:
    """The threads of one compiled library.

    Attributes:
        stalled: the library's counter of nanoseconds spent waiting for late threads.
    """

    stalled: ctypes.c_int64
    _most: int = 0
    _fewer: int = 0
    _pause: float = FIRST_PAUSE
    _until: float = 0.0
    _seconds: float = 0.0
    _held_up: float = 0.0

    @property
    def size(self) -> int:
        """Number of threads of the next call."""
        return max(self._most >> self._fewer, 1) if self._fewer else torch.get_num_threads()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function of the library, whose last argument is the number of threads."""
        size = self.size
        if size == 1 and not self._fewer:
            function(*arguments, size)
            return
        before, began = self.stalled.value, time.perf_counter()
        function(*arguments, size)
        ended = time.perf_counter()
        self.learn(ended, ended - began, (self.stalled.value - before) / 1e9)

    def learn(self, now: float, seconds: float, held_up: float) -> None:
        """Record the time of a call and of waiting in it, and choose the number of threads of the next ones."""
        self._seconds += seconds
        self._held_up += held_up
        if self._seconds < WINDOW:
            return
        if self.size > 1 and self._held_up > HELD_UP * self._seconds:
            self._change(self._fewer + 1)
            self._until = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._fewer and now >= self._until:
            self._change(self._fewer - 1)
        elif not self._fewer:
            self._pause = FIRST_PAUSE
        self._seconds = self._held_up = 0.0

    def _change(self, fewer: int) -> None:
        """Halve the threads this many times."""
        if not self._fewer:
            self._most = torch.get_num_threads()
        self._fewer = fewer
        torch.set_num_threads(max(self._most >> fewer, 1))


@cache
def team_of(compiled: ctypes.CDLL) -> Team:
    """Return the threads of a library, shared by all of its functions."""
    return Team(ctypes.c_int64.in_dll(compiled, "stalled_nanoseconds"))
