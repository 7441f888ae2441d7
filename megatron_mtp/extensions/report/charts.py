"""Charts of a page: which ones, and how they are drawn.

With one run, the MTP layers share a chart, each with its own color. With several, every metric has its own chart, and
each run its own color. All charts have the same steps, and charts of one kind the same range of values.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go

from megatron_mtp.extensions.report.runs import RunFolder, figures

Ends = tuple[float, float] | None
"""First and last value of an axis; plotly chooses an end that is None."""
MEMORY = "peak memory bytes"
GIB = 2**30
COLORS = ("#3b7ddd", "#c8611d", "#1f8f68", "#a94f95", "#8a7a1c", "#cf4651", "#6f6bd0", "#5d7f90")
"""Colors that are readable on light and dark backgrounds; the page's script sets the color of text."""
LONGEST_NAME = 28
"""Most characters of a legend entry; a longer name shows only its end."""


@dataclass(frozen=True)
class Kind:
    """A kind of chart.

    Attributes:
        pattern: of the names of its figures.
        title: above the chart.
        unit: title of the vertical axis.
        divisor: of its values.
        whole: ends of the vertical axis; the least and largest value if left out.
        logarithmic: whether the page's switch makes the vertical axis logarithmic.
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
    Kind(r"^mtp_\d+ acceptance$", "Acceptance", "part of drafts 1 .. d", whole=RATE),
    Kind("conditional acceptance$", "Conditional acceptance", "part, given the earlier drafts", whole=RATE),
    Kind("overlap$", "Overlap", "sum of min(p, q)", whole=RATE),
    Kind("^expected accepted length$", "Expected accepted length", "tokens per forward pass of the trunk"),
    Kind("^learning rate$", "Learning rate", "rate", logarithmic=True),
    Kind("^grad norm$", "Grad norm", "norm before clipping", logarithmic=True),
    Kind("^step seconds$", "Step seconds", "seconds, median", logarithmic=True),
    Kind(f"^{MEMORY}$", "Peak memory", "GiB", divisor=GIB),
)


def charts(runs: list[RunFolder]) -> list[tuple[Kind, str, go.Figure]]:
    """Return every chart that the runs have metrics for: its kind, title and drawing."""
    drawn = []
    steps = _ends(row["iteration"] for run in runs for row in run.rows)
    for kind in KINDS:
        keys = [key for key in figures(runs) if re.search(kind.pattern, key)]
        groups = [keys] if len(runs) == 1 else [[key] for key in keys]
        lines = [[line for key in group for line in _lines(runs, key, kind.divisor)] for group in groups]
        ends = kind.whole or _ends(value for of_group in lines for line in of_group for value in line.y)
        for group, of_group in zip(groups, lines, strict=True):
            if of_group:
                title = kind.title if len(groups) == 1 else f"{kind.title}: {label(group[0])}"
                drawn.append((kind, title, go.Figure(of_group, _layout(kind, steps, ends, alone=len(of_group) == 1))))
    return drawn


def _ends(values: Iterable[float]) -> Ends:
    """Return the least and the largest finite value with a margin, above zero if they are.

    None without such a range.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or math.isinf(margin := (max(finite) - min(finite)) / 20) or not margin:
        return None
    low = min(finite)
    return low - margin if low <= 0 or low > margin else low, max(finite) + margin


def _lines(runs: list[RunFolder], key: str, divisor: float) -> list[go.Scatter]:
    """Return lines of training, and lines with markers of validation; test data is only in the table."""
    made = []
    for number, run in enumerate(runs):
        name, place = (label(key), _depth(key)) if len(runs) == 1 else (run.name[-LONGEST_NAME:], number)
        splits = ["training", *(one for one in run.evaluations() if not one.startswith("test"))]
        lines = {split: points for split in splits if (points := run.points(split, key))}
        for split, points in lines.items():
            is_training, of_set = split == "training", split.partition("-")[2]
            hint = " (training)" if is_training and len(lines) > 1 else f", {of_set}" if of_set else ""
            made.append(
                go.Scatter(
                    x=list(points),
                    y=[value / divisor for value in points.values()],
                    name=escape(name + hint),
                    legendgroup=escape(name),
                    showlegend=not (is_training and len(lines) > 1),
                    mode="lines" if is_training else "lines+markers",
                    opacity=0.75 if is_training else 1.0,
                    line={
                        "color": COLORS[place % len(COLORS)],
                        "width": 1.25 if is_training else 2,
                        "dash": "dash" if place >= len(COLORS) else "solid",
                    },
                )
            )
    return made


def _layout(kind: Kind, steps: Ends, values: Ends, alone: bool) -> go.Layout:
    grid = {"gridcolor": "rgba(128,128,128,0.3)", "zeroline": False, "automargin": True, "exponentformat": "power"}
    return go.Layout(
        template={},
        height=320,
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=not alone,
        legend={"orientation": "h", "y": -0.25},
        hovermode="x unified",
        xaxis={**grid, "title": "training step", "range": steps},
        yaxis={**grid, "title": kind.unit, "range": values},
    )


def label(key: str) -> str:
    """Return 'depth 2' for 'mtp_2 loss' and 'trunk' for 'lm loss'; other metrics keep their names."""
    return f"depth {_depth(key)}" if _depth(key) else "trunk" if key == "lm loss" else key


def _depth(key: str) -> int:
    """Return the number of the depth; 0 if the metric has none."""
    named = re.match(r"mtp_(\d+) ", key)
    return int(named[1]) if named else 0
