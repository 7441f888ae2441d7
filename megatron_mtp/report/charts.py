"""Line charts as HTML: lines in an inline SVG that stretches, labels as text that does not.

A chart fills the width of its place in the page, and its text keeps the page's size. Every chart is drawn with a linear
axis and, if `logarithmic`, with a logarithmic one; training lines are drawn unchanged and smoothed. The page's style
sheet shows what its switches select, without a script. The values follow as JSON for the script, which shows them at a
pointer, at a touch or by the arrow keys.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

Points = list[tuple[int, float]]
Scale = Callable[[float], float]

SIDE = 1000
"""Units of the SVG in both directions; the page stretches it."""
COLOURS = 8
"""Colours of the page's style sheet; a series beyond them takes the first again, dashed."""
MOST_POINTS = 400
"""Points of a line that are drawn; of a longer line every n-th point and the last."""
SMOOTHING = 0.9
"""Weight of the past in a smoothed line."""


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        training: a line of training, thin and without marks, which can be smoothed; others are of evaluations.
    """

    name: str
    colour: int
    points: Points
    training: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn.

    Attributes:
        unit: written next to the title.
        show: writes a value.
        whole: ends of the vertical axis; None to follow the values.
        logarithmic: whether the page's switch for logarithmic axes is for this chart, without values that are not
            positive.
    """

    title: str
    unit: str
    series: list[Series]
    show: Callable[[float], str] = field(default="{:.4g}".format)
    whole: tuple[float, float] | None = None
    logarithmic: bool = False


@dataclass(frozen=True)
class _Axis:
    """The vertical axis: its marks, and the place of a value, from 0 below to 1 above."""

    kind: str
    marks: list[float]
    place: Scale


def figure(chart: Chart) -> str:
    """The chart as a `<figure>` with its title, axes, lines, legend and values."""
    drawn = sorted(chart.series, key=lambda series: not series.training)  # evaluations over training
    steps = [step for series in drawn for step, _ in series.points]
    marks_x = ticks(min(steps), max(steps), whole=True)
    x = scale(min(marks_x[0], min(steps)), max(marks_x[-1], max(steps)))
    axes = _axes(chart, drawn)
    names = ", ".join(dict.fromkeys(series.name for series in chart.series))
    views = "".join(_view(axis, chart, drawn, x) for axis in axes)
    kind = "chart both" if len(axes) == 2 else "chart"
    return (
        f'<figure class="{kind}"><figcaption>{escape(chart.title)} <small>{escape(chart.unit)}</small></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(chart.title)} over training steps: {escape(names)}">'
        f"{views}{_columns(marks_x, x)}</div>{_legend(chart)}{_values(chart, x)}</figure>"
    )


def thinned(points: Points) -> Points:
    """At most about MOST_POINTS of them, the last among them."""
    kept = points[:: max(1, -(-len(points) // MOST_POINTS))]
    return kept if kept[-1:] == points[-1:] else [*kept, points[-1]]


def smoothed(points: Points) -> Points:
    """The moving average with weights 1, SMOOTHING, SMOOTHING ** 2, ... of a value and those before it."""
    made, total, weight = [], 0.0, 0.0
    for step, value in points:
        total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1
        made.append((step, total / weight))
    return made


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Four to eight round numbers from below `low` to above `high`: steps of 1, 2 or 5 times a power of ten.

    ticks(0.3, 2.1) is 0, 0.5, 1, 1.5, 2, 2.5; of `whole`, the steps are 1 or more.
    """
    span = high - low
    if span <= 1e-9 * max(abs(low), abs(high)):
        span = abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(times * power for times in (1, 2, 5, 10) if span / (times * power) <= 6)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Numbers 1, 2 and 5 times a power of ten from below `low` to above `high`; of a long range powers of ten alone.

    log_ticks(0.3, 2.1) is 0.2, 0.5, 1, 2, 5.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 3:
        every = -(-(last - first) // 6)
        return [10.0**power for power in range(first, last + every, every)]
    marks = [times * 10.0**power for power in range(first, last + 1) for times in (1, 2, 5)]
    below = max(mark for mark in marks if mark <= low * (1 + 1e-9))
    above = min((mark for mark in marks if mark >= high * (1 - 1e-9) and mark > below), default=10.0 ** (last + 1))
    return [mark for mark in marks if below <= mark < above] + [above]


def scale(low: float, high: float) -> Scale:
    """A straight line from values to 0 .. 1."""
    return lambda value: (value - low) / (high - low)


def _axes(chart: Chart, drawn: list[Series]) -> list[_Axis]:
    values = [value for series in drawn for _, value in series.points]
    marks = ticks(*(chart.whole or (min(values), max(values))))
    linear = _Axis("linear", marks, scale(marks[0], marks[-1]))
    positive = [value for value in values if value > 0]
    if not chart.logarithmic or not positive:
        return [linear]
    marks = log_ticks(min(positive), max(positive))
    along = scale(math.log10(marks[0]), math.log10(marks[-1]))
    return [linear, _Axis("log", marks, lambda value: along(math.log10(value)))]


def _view(axis: _Axis, chart: Chart, drawn: list[Series], x: Scale) -> str:
    """Labels, grid and lines on one kind of axis."""
    labels = "".join(
        f'<span style="top:{100 * (1 - axis.place(mark)):.2f}%">{escape(chart.show(mark))}</span>'
        for mark in axis.marks
    )
    grid = "".join(f'<path class="grid" d="M0 {_down(axis.place(mark))}H{SIDE}"/>' for mark in axis.marks)
    lines = "".join(_lines(series, axis, x) for series in drawn)
    return (
        f'<div class="view {axis.kind}"><div class="y">{labels}</div>'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">{grid}{lines}</svg></div>'
    )


def _columns(marks: list[float], x: Scale) -> str:
    """Steps below the chart, and the line that follows a pointer."""
    labels = "".join(f'<span style="left:{100 * x(mark):.2f}%">{compact(mark)}</span>' for mark in marks)
    return f'<div class="x">{labels}</div><div class="cursor" hidden></div>'


def compact(step: float) -> str:
    """A step in few letters: 1500 stays, 20000 is '20k', 1500000 is '1500k'."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= 10 * unit:
            return f"{step / unit:.4g}{letter}"
    return f"{step:.4g}"


def _lines(series: Series, axis: _Axis, x: Scale) -> str:
    """A line, for training also smoothed; every point of an evaluation has a mark."""
    points = [(step, value) for step, value in series.points if axis.kind == "linear" or value > 0]
    whole = _places(points, axis, x)
    path = f'<polyline points="{" ".join(f"{across},{down}" for across, down in whole)}"/>'
    if series.training:
        smooth = " ".join(f"{across},{down}" for across, down in _places(smoothed(points), axis, x))
        return f'<g class="training {_style(series)}">{path}<polyline class="smooth" points="{smooth}"/></g>'
    marks = "".join(f"M{across} {down}h0" for across, down in whole)
    return f'<g class="evaluation {_style(series)}">{path}<path class="marks" d="{marks}"/></g>'


def _places(points: Points, axis: _Axis, x: Scale) -> list[tuple[float, float]]:
    """Places of the drawn points, in units of the SVG from its upper left corner."""
    return [(round(SIDE * x(step), 1), _down(axis.place(value))) for step, value in thinned(points)]


def _down(place: float) -> float:
    return round(SIDE * (1 - place), 1)


def _legend(chart: Chart) -> str:
    """Names and colours of the lines; a single line needs no legend."""
    named = {series.name: series for series in chart.series}
    if len(named) == 1:
        return ""
    items = (f'<li><span class="swatch {_style(one)}"></span>{escape(name)}</li>' for name, one in named.items())
    return f'<ul class="legend">{"".join(items)}</ul>'


def _values(chart: Chart, x: Scale) -> str:
    """The data of the script: every line's name and style, and its steps with their places and values."""
    lines = [
        {
            "name": f"{one.name} (training)" if one.training and _has_twin(one, chart) else one.name,
            "style": _style(one),
            "points": [[step, round(x(step), 4), chart.show(value)] for step, value in thinned(one.points)],
        }
        for one in chart.series
    ]
    return f'<script type="application/json">{_in_html(json.dumps(lines))}</script>'


def _has_twin(training: Series, chart: Chart) -> bool:
    return any(one.name == training.name and not one.training for one in chart.series)


def _in_html(text: str) -> str:
    """JSON in which no text can end the script element."""
    return text.replace("<", "\\u003c")


def _style(series: Series) -> str:
    dashed = " dashed" if series.colour >= COLOURS else ""
    return f"s{series.colour % COLOURS}{dashed}"
