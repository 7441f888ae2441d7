"""Percentiles and rates of answers, as a dictionary for programs and as a table for people."""

from collections import Counter
from typing import Any

import numpy as np

from megatron_mtp.serving.bench.client import Answer

PERCENTILES = (50, 90, 95, 99)

TIMES = {
    "time_to_first_token": "time to first token",
    "time_per_output_token": "time per later token",
    "time_between_events": "time between events",
    "time_per_request": "time per request",
}
"""Key of a figure to its name in tables; all in seconds.

The first two are the usual ones: from the request to its first token, and from there to the end, by the later tokens.
Events are what arrives: with drafts, several tokens at once.
"""


def figures(answers: list[Answer]) -> dict[str, Any]:
    """All figures of answers.

    Raises:
        ValueError: no request was answered.
    """
    good = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    if not good:
        raise ValueError(f"no request was answered: {errors.most_common(1)[0][0]}")
    seconds = max(answer.arrivals[-1] for answer in good) - min(answer.asked for answer in answers)
    tokens = sum(answer.tokens for answer in good)
    return {
        "answered": len(good),
        "failed": dict(errors),
        "seconds": seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        **{name: _percentiles(values) for name, values in times(good).items()},
    }


def times(good: list[Answer]) -> dict[str, list[float]]:
    """What the percentiles are of, under the keys of `TIMES`."""
    later = [answer for answer in good if answer.tokens > 1]
    spans = [(answer.arrivals[-1] - answer.arrivals[0]) / (answer.tokens - 1) for answer in later]
    pairs = [pair for answer in good for pair in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
    return {
        "time_to_first_token": [answer.arrivals[0] - answer.asked for answer in good],
        "time_per_output_token": spans,
        "time_between_events": [after - before for before, after in pairs],
        "time_per_request": [answer.arrivals[-1] - answer.asked for answer in good],
    }


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}
    return {"mean": float(np.mean(values)), **found}


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    failed = sum(found["failed"].values())
    lines = [
        ("requests", f"{found['answered']} answered, {failed} failed, {found['requests_per_second']:.2f} a second"),
        ("tokens", f"{found['tokens']} in {found['seconds']:.2f} s, {found['tokens_per_second']:.1f} a second"),
        *((name, _row(found[key])) for key, name in TIMES.items()),
        *_drafts(found["acceptance"]),
        *((f"failed {count} times", message) for message, count in found["failed"].items()),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _row(percentiles: dict[str, float] | None) -> str:
    if percentiles is None:
        return "-"
    return "  ".join(f"{name} {1000 * value:9.1f} ms" for name, value in percentiles.items())


def _drafts(acceptance: dict[str, Any] | None) -> list[tuple[str, str]]:
    if acceptance is None:
        return []
    shares = enumerate(acceptance["accepted_per_position"], start=1)
    rows = [(f"acceptance at position {place}", f"{100 * share:.1f} %") for place, share in shares]
    return [*rows, ("drafts", f"{acceptance['accepted']} of {acceptance['drafted']} tokens accepted")]
