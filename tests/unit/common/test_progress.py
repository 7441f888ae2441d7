"""progress.py: a bar in a terminal; in a log file, lines once work has taken a while."""

import io
import sys
from collections.abc import Iterator

import pytest

from megatron_mtp.common import progress


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def clock(seconds: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += seconds


@pytest.mark.parametrize(
    ("terminal", "step", "lines"), [(True, 0.3, range(5, 99)), (False, 0.3, range(1)), (False, 4.0, range(1, 9))]
)
def test_a_log_file_gets_an_occasional_progress_line(
    terminal: bool, step: float, lines: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, now = Stream(terminal), clock(step)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.progress_bar(total=10, desc="work") as bar:
        monkeypatch.setattr(bar, "_time", lambda: next(now))
        bar.start_t = bar.last_print_t = 0.0
        for _ in range(9):
            bar.update()
        said = stream.getvalue()
    assert said.count("work") in lines
