"""File of finished samples, in order of completion: a line of settings, then one line per sample.

    {"settings": {"load": 3735928559, "seed": 1234, "temperature": 0.7, ...}}
    {"number": 4, "prompt": [5, 12], "tokens": [7, 9, 0], "finish": "stop", "logprobs": [-0.2, -1.5, -0.7]}

The file is only ever appended to. A kill truncates at most its last line, which is removed and generated again.
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
    """A finished sample.

    Attributes:
        number: its index among all samples.
        tokens: tokens that the model generated.
        finish: why it ended, as in `Finish` of decoding/requests.py.
        logprobs: log-probabilities of these tokens, before temperature and truncation; None if not requested or not
            given.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    finish: str
    logprobs: list[float] | None = None


def seed_of(seed: int, number: int) -> int:
    """Return the seed of a sample, unique among all samples of all seeds."""
    return (seed << 32) + number


def read_samples(file: Path, settings: dict[str, Any]) -> dict[int, Sample]:
    """Read the samples of a file by number; empty if there is no file yet.

    Raises:
        ValueError: they were generated with other settings, or a line is damaged.
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
    """Return a function that appends a sample: when it returns, the sample is on disk."""
    with open(file, "ab") as stream:

        def append(line: dict[str, Any]) -> None:
            stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            synced(stream)

        has_samples = bool(read_samples(file, settings))
        stream.truncate(file.read_bytes().rfind(b"\n") + 1 if has_samples else 0)
        if not has_samples:
            append({"settings": settings})
        yield lambda sample: append({name: value for name, value in asdict(sample).items() if value is not None})
