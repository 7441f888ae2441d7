"""The file of finished continuations, in the order in which they end: one line each, after a line of their settings.

    {"settings": {"load": 3735928559, "seed": 1234, "temperature": 0.7, ...}}
    {"number": 4, "prompt": [5, 12], "tokens": [7, 9, 0], "finish": "stop", "logprobs": [-0.2, -1.5, -0.7]}

The file is only ever appended to. A kill cuts its last line at most; that line is removed, and its sample made again.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_mtp.common.files import synced


@dataclass(frozen=True)
class Sample:
    """A finished continuation.

    Attributes:
        number: its place among all.
        tokens: that the model added.
        finish: why it ended, as `Finish` of decoding/requests.py.
        logprobs: of these tokens, before temperature and truncation; None if they were not asked for, or not given.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    finish: str
    logprobs: list[float] | None = None


def seed_of(seed: int, number: int) -> int:
    """The seed of a text, which no other text of any seed has."""
    return (seed << 32) + number


def read_samples(file: Path, settings: dict[str, Any]) -> dict[int, Sample]:
    """The samples in a file by number; none where the file is not there yet.

    Raises:
        ValueError: they were made with other settings, or a line is damaged.
    """
    samples: dict[int, Sample] = {}
    kept: dict[str, Any] = {}
    whole_lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    for place, line in enumerate(whole_lines, start=1):
        try:
            if place == 1:
                kept = dict(json.loads(line)["settings"])
            else:
                sample = Sample(**json.loads(line))
                samples[sample.number] = sample
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{file} is damaged in line {place}; remove the line, or make it anew with --overwrite."
            ) from None
    others = sorted(name for name in {*kept, *settings} if kept.get(name) != settings.get(name))
    if samples and others:
        raise ValueError(
            f"{file} holds samples made with another {', '.join(f'--{name}' for name in others)}; add --overwrite to "
            "make them anew, or name another --output-prefix."
        )
    return samples


@contextmanager
def appended(file: Path, settings: dict[str, Any]) -> Iterator[Callable[[Sample], None]]:
    """A function that appends a sample: when it returns, the sample is on the disk."""
    with open(file, "ab") as stream:

        def append(line: dict[str, Any]) -> None:
            stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            synced(stream)

        has_samples = bool(read_samples(file, settings))
        stream.truncate(file.read_bytes().rfind(b"\n") + 1 if has_samples else 0)
        if not has_samples:
            append({"settings": settings})
        yield lambda sample: append({name: value for name, value in asdict(sample).items() if value is not None})
