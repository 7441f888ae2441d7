"""Which charts a page has, and the table of final figures: from the rows of one run or several.

With one run, the depths share a chart and have a colour each. With several, every figure has a chart of its own, where
the runs have a colour each.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from megatron_mtp.report.charts import Chart, Points, Series
from megatron_mtp.report.runs import Run

MEMORY = "peak memory bytes"
GIB = 2**30


@dataclass(frozen=True)
class Kind:
    """A kind of chart.

    Attributes:
        pattern: of the names of the figures that it shows.
        divisor: what values are divided by to be in the unit.
        whole: ends of the vertical axis; None to follow the values.
    """

    pattern: str
    title: str
    unit: str
    divisor: float = 1.0
    whole: tuple[float, float] | None = None
    logarithmic: bool = False


RATE = (0.0, 1.0)
KINDS = (
    Kind("loss$", "Loss", "nats per token", logarithmic=True),
    Kind(r"^mtp_\d+ acceptance$", "Acceptance", "from the start", whole=RATE),
    Kind("conditional acceptance$", "Conditional acceptance", "given the earlier drafts", whole=RATE),
    Kind("overlap$", "Overlap", "sum of min(p, q)", whole=RATE),
    Kind("^expected accepted length$", "Expected accepted length", "tokens per forward of the trunk"),
    Kind("^learning rate$", "Learning rate", "", logarithmic=True),
    Kind("^grad norm$", "Grad norm", "before clipping", logarithmic=True),
    Kind("^step seconds$", "Step seconds", "median", logarithmic=True),
    Kind(f"^{MEMORY}$", "Peak memory", "GiB", divisor=GIB),
)


def charts(runs: list[Run]) -> list[Chart]:
    """Every chart that the runs have figures for."""
    drawn = []
    for kind in KINDS:
        keys = [key for key in _keys(runs) if re.search(kind.pattern, key)]
        for group in [keys] if len(runs) == 1 else [[key] for key in keys]:
            series = [one for key in group for one in _series(runs, key, kind.divisor) if one.points]
            if series:
                title = kind.title if len(runs) == 1 or len(keys) == 1 else f"{kind.title}: {label(group[0])}"
                drawn.append(Chart(title, kind.unit, series, whole=kind.whole, logarithmic=kind.logarithmic))
    return drawn


def _series(runs: list[Run], key: str, divisor: float) -> list[Series]:
    """The lines of training and of the validations of every run.

    Test data, on which a run is evaluated once at its end, is only in the table.
    """
    made = []
    for number, run in enumerate(runs):
        name, colour = (label(key), _depth(key)) if len(runs) == 1 else (run.name, number)
        splits = [split for split in run.evaluations() if not split.startswith("test")]
        parts = {split: _divided(run.points(split, key), divisor) for split in splits}
        made.append(Series(name, colour, _divided(run.points("training", key), divisor), training=True))
        made += [Series(_of_set(name, split), colour, points) for split, points in parts.items()]
    return made


def _of_set(name: str, split: str) -> str:
    """The name of a line, with the name of its data set if there is one."""
    _, dash, of_set = split.partition("-")
    return f"{name}, {of_set}" if dash else name


def _divided(points: Points, divisor: float) -> Points:
    return [(step, value / divisor) for step, value in points]


def label(key: str) -> str:
    """'mtp_2 loss' becomes 'depth 2' and 'lm loss' 'trunk'; other figures keep their names."""
    return f"depth {_depth(key)}" if _depth(key) else "trunk" if key == "lm loss" else key


def _depth(key: str) -> int:
    """The number of the depth; 0 if the figure has none."""
    named = re.match(r"mtp_(\d+) ", key)
    return int(named[1]) if named else 0


def _keys(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.figures()))


def table(runs: list[Run]) -> str:
    """The newest value of every figure, a column a run."""
    heads = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    rows = [_table_row("last step", [str(max(row["iteration"] for row in run.rows)) for run in runs])]
    for split in [*dict.fromkeys(split for run in runs for split in run.evaluations()), "training"]:
        for key in _keys(runs):
            values = [run.last(split, key) for run in runs]
            if any(value is not None for value in values):
                write = WRITERS.get(key, _plain)
                rows.append(_table_row(f"{key} ({split})", ["" if v is None else write(v) for v in values]))
    caption = "The newest value of every figure"
    body = f'<caption>{caption}</caption><tr><th scope="col">figure</th>{heads}</tr>{"".join(rows)}'
    return scrolled("final figures", f"<table>{body}</table>")


def scrolled(name: str, table: str) -> str:
    """A table that may be wider than the page, in a region that scrolls, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{table}</div>'


def _table_row(name: str, cells: list[str]) -> str:
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'


def _plain(value: float) -> str:
    """Four digits after the point, or a power of ten if these digits would not show the value."""
    return f"{value:.4f}" if value == 0 or 1e-2 <= abs(value) < 1e6 else f"{value:.4g}"


WRITERS: dict[str, Callable[[float], str]] = {MEMORY: lambda value: f"{value / GIB:.2f} GiB"}
"""Figures that are not written with four digits."""
