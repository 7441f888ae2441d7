"""Line charts as inline SVG: axes with round numbers, a line a series, a value under the pointer at every point."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

Points = list[tuple[int, float]]
Scale = Callable[[float], float]

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40
COLOURS = 8
"""Colours of the page's style sheet; a series beyond them takes the first again, dashed."""
MOST_POINTS = 400
"""Points of a line that are drawn; of more, every n-th, and the last."""


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        faint: a line of training beneath the marked points of its evaluations, without a legend of its own.
    """

    name: str
    colour: int
    points: Points
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn: `unit` stands at the vertical axis, `show` writes a value."""

    title: str
    unit: str
    series: list[Series]
    show: Callable[[float], str] = field(default="{:.4g}".format)
    whole: tuple[float, float] | None = None
    """Where the vertical axis begins and ends, if it is not to follow the values."""


def svg(chart: Chart, number: int) -> str:
    """The chart as an `<svg>` that screen readers call by its title; `number` makes its ids unique in the page."""
    drawn = [Series(s.name, s.colour, thinned(s.points), s.faint) for s in chart.series]
    values = [value for series in drawn for _, value in series.points]
    steps = [step for series in drawn for step, _ in series.points]
    marks_y = ticks(*(chart.whole or (min(values), max(values))))
    marks_x = ticks(min(steps), max(steps), whole=True)
    x = scale(min(marks_x[0], min(steps)), max(marks_x[-1], max(steps)), LEFT, WIDTH - RIGHT)
    y = scale(marks_y[0], marks_y[-1], HEIGHT - BOTTOM, TOP)
    parts = [_axes(chart, marks_x, marks_y, x, y), *(_line(series, chart.show, x, y) for series in drawn)]
    names = ", ".join(dict.fromkeys(series.name for series in drawn))
    told = f"Lines over training steps: {names}. The table of final figures has the last values."
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t{number} d{number}">'
        f'<title id="t{number}">{escape(chart.title)}</title><desc id="d{number}">{escape(told)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def legend(chart: Chart) -> str:
    """The names of the lines, each with its colour; one line needs none."""
    named = {series.name: series for series in chart.series}
    if len(named) == 1:
        return ""
    items = (f'<li><span class="swatch {_style(one)}"></span>{escape(name)}</li>' for name, one in named.items())
    return f'<ul class="legend">{"".join(items)}</ul>'


def thinned(points: Points) -> Points:
    """At most about MOST_POINTS of them, the last among them."""
    kept = points[:: -(-len(points) // MOST_POINTS)]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Four to eight round numbers from below `low` to above `high`: steps of 1, 2 or 5 times a power of ten.

    ticks(0.3, 2.1) is 0, 0.5, 1, 1.5, 2, 2.5; of `whole`, the steps are 1 or more.
    """
    span = (high - low) or abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(times * power for times in (1, 2, 5, 10) if span / (times * power) <= 6)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """A straight line from values to places."""
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def _axes(chart: Chart, marks_x: list[float], marks_y: list[float], x: Scale, y: Scale) -> str:
    rows = (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark)}" y2="{y(mark)}"/>'
        f'<text class="mark" x="{LEFT - 6}" y="{y(mark) + 4}" text-anchor="end">{escape(chart.show(mark))}</text>'
        for mark in marks_y
    )
    columns = (
        f'<text class="mark" x="{x(mark)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{mark:.4g}</text>'
        for mark in marks_x
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f"{''.join(rows)}{''.join(columns)}"
        f'<text class="unit" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">training step</text>'
        f'<text class="unit" transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.unit)}</text>"
    )


def _line(series: Series, show: Callable[[float], str], x: Scale, y: Scale) -> str:
    path = " ".join(f"{x(step)},{y(value)}" for step, value in series.points)
    points = (
        f'<circle cx="{x(step)}" cy="{y(value)}" r="{2 if series.faint else 3.5}">'
        f"<title>{escape(series.name)}{' (training)' if series.faint else ''}\nstep {step}: {escape(show(value))}"
        "</title></circle>"
        for step, value in series.points
    )
    return f'<g class="{_style(series)}"><polyline points="{path}"/>{"".join(points)}</g>'


def _style(series: Series) -> str:
    dashed = " dashed" if series.colour >= COLOURS else ""
    return f"s{series.colour % COLOURS}{dashed}{' faint' if series.faint else ''}"
