"""Renders the plan as a self-contained HTML page: step time by placement, and bars of memory and time per stage."""

from collections.abc import Iterable
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_mtp.extensions.plan.decoding import MOST
from megatron_mtp.extensions.plan.hardware import GIB
from megatron_mtp.extensions.plan.memory import PARTS as HELD
from megatron_mtp.extensions.plan.planning import Option, Plan
from megatron_mtp.extensions.plan.report import Drafting
from megatron_mtp.extensions.plan.step_time import OF_STEP, PARTS

COLORS = (
    *("#3b7ddd", "#c8611d", "#1f8f68", "#a94f95", "#8a7a1c", "#cf4651", "#6f6bd0", "#5d7f90"),
    *("#b0a03c", "#9a9a9a"),
)


def page(plan: Plan, drafting: Drafting | None) -> str:
    """Render the whole document, including plotly's script, so that it needs no network."""
    figures = [_placements(plan), _bars(plan, "memory of a rank, GiB"), _bars(plan, "seconds of a step")]
    if drafting is not None:
        figures.append(_speed_up(drafting))
    drawn = [
        figure.to_html(full_html=False, include_plotlyjs=number == 0, config={"displayModeBar": False})
        for number, figure in enumerate(figures)
    ]
    best = plan.recommended
    title = f"{plan.gpus} x {plan.card.name}, D = {plan.depths}: {best.name}, {best.time.seconds:.3f} s a step"
    flags = escape(" ".join(plan.flags))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>body { font: 16px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 84rem; padding: 0 1rem } "
        f"pre {{ white-space: pre-wrap }}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f"{''.join(drawn)}<h2>Launch flags</h2><pre>{flags}</pre></main></body></html>\n"
    )


def _placements(plan: Plan) -> go.Figure:
    """Plot the seconds of a step over D, with a color per placement; placements that do not fit are pale."""
    names = dict.fromkeys(option.name for option in plan.options)
    bars = []
    for number, name in enumerate(names):
        options = [option for option in plan.options if option.name == name]
        opacity = [1.0 if option.fits else 0.35 for option in options]
        marker = {"color": COLORS[number], "opacity": opacity}
        x, y = [f"D = {option.depths}" for option in options], [option.time.seconds for option in options]
        bars.append(go.Bar(x=x, y=y, name=name, marker=marker))
    return go.Figure(bars, _layout("seconds of a step by placement (pale: does not fit)", "group"))


def _bars(plan: Plan, title: str) -> go.Figure:
    """Plot the stages of the best placement for every D, stacked by part."""
    counts = sorted({option.depths for option in plan.options})
    figure = make_subplots(1, len(counts), shared_yaxes=True, subplot_titles=[f"D = {count}" for count in counts])
    for column, count in enumerate(counts, start=1):
        for number, (part, values) in enumerate(_parts(plan.of(count)[0], title)):
            bar = go.Bar(
                x=[str(stage) for stage in range(len(values))],
                y=values,
                name=part,
                legendgroup=part,
                showlegend=column == 1,
                marker={"color": COLORS[number]},
            )
            figure.add_trace(bar, 1, column)
    figure.update_layout(_layout(title, "stack"))
    figure.update_xaxes(title_text="stage")
    return figure


def _parts(option: Option, title: str) -> Iterable[tuple[str, list[float]]]:
    if title.startswith("memory"):
        return [(part, [held.parts[part] / GIB for held in option.memory]) for part in HELD]
    return [(part, [times[part] for times in option.time.ranks]) for part in (*PARTS, *OF_STEP)]


def _speed_up(drafting: Drafting) -> go.Figure:
    """Plot the speed-up over K, with a line per batch size."""
    counts = list(range(1, MOST + 1))
    lines = [
        go.Scatter(x=counts, y=speeds, name=f"batch {batch}", line={"color": COLORS[number % len(COLORS)]})
        for number, (batch, speeds) in enumerate(drafting.table().items())
    ]
    return go.Figure(lines, _layout("speed-up of drafting over K", "group"))


def _layout(title: str, mode: str) -> go.Layout:
    return go.Layout(
        title=title, barmode=mode, template="plotly_white", height=420, legend={"orientation": "h", "y": -0.2}
    )
