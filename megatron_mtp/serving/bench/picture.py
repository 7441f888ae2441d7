"""The figures drawn: how long requests wait, how long tokens take, what arrives over time, what drafts are accepted."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from megatron_mtp.files import written_beside
from megatron_mtp.serving.bench.client import Answer
from megatron_mtp.serving.bench.figures import TIMES, times

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BINS = 40


def draw(answers: list[Answer], found: dict[str, Any], target: Path) -> None:
    """Draw the answers into a file."""
    good = [answer for answer in answers if answer.error is None]
    acceptance = found["acceptance"]
    columns = 3 if acceptance is None else 4
    figure, axes = plt.subplots(1, columns, figsize=(4 * columns, 3.6), layout="constrained")
    try:
        measured = times(good)
        for part, key in zip(axes, ("time_to_first_token", "time_per_output_token"), strict=False):
            _shares(part, measured[key], TIMES[key])
        _over_time(axes[2], good)
        if acceptance is not None:
            _positions(axes[3], acceptance["accepted_per_position"])
        figure.suptitle(f"{found['model']}: {found['tokens_per_second']:.1f} tokens a second, {found['load']}")
        with written_beside(target) as beside:
            figure.savefig(beside, dpi=120, format=target.suffix.removeprefix("."))
    finally:
        plt.close(figure)


def _shares(axes: Any, seconds: list[float], title: str) -> None:
    """The share of requests that had at most so much."""
    axes.ecdf(np.array(seconds or [0.0]) * 1000)
    axes.set(title=title, xlabel="milliseconds", ylabel="share of requests", ylim=(0, 1))
    axes.grid(alpha=0.3)


def _over_time(axes: Any, good: list[Answer]) -> None:
    """Tokens that arrive, an event's share of its request's tokens each."""
    places = [place for answer in good for place in answer.arrivals]
    weights = [answer.tokens / len(answer.arrivals) for answer in good for _ in answer.arrivals]
    heights, edges = np.histogram(places, BINS, weights=weights)
    axes.stairs(heights / np.diff(edges), edges)
    axes.set(title="tokens over time", xlabel="seconds", ylabel="tokens a second", ylim=(0, None))
    axes.grid(alpha=0.3)


def _positions(axes: Any, shares: list[float]) -> None:
    places = range(1, len(shares) + 1)
    bars = axes.bar(places, shares)
    axes.set_xticks(places)
    axes.bar_label(bars, [f"{100 * share:.1f} %" for share in shares])
    axes.set(title="acceptance", xlabel="position in the draft", ylabel="share of drafts", ylim=(0, 1.08))
