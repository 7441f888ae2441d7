"""Samples of a model: continuations of many prompts. A sample depends on its number and the settings alone.

In:  a runner, and prompts by number.
Out: finished samples, in the order in which they end; in a file, one line each after a line of what they depend on:

    {"settings": {"load": 3735928559, "seed": 1234, "temperature": 0.7, ...}}
    {"number": 4, "prompt": [5, 12], "tokens": [7, 9, 0], "finish": "stop", "logprobs": [-0.2, -1.5, -0.7]}

The file is only ever appended to. A kill cuts its last line at most; that line is removed, and its sample made again.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.config import DRAFTERS
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.engine import Engine, blocks_for
from megatron_mtp.decoding.requests import Finish, Request
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.files import synced

Numbered = tuple[int, list[int]]
"""A sample's number and its prompt."""


@dataclass(frozen=True)
class Sample:
    """A finished continuation.

    Attributes:
        number: its place among all.
        tokens: that the model added.
        finish: why it ended, as `requests.Finish`.
        logprobs: of these tokens, before temperature and truncation; None if they were not asked for.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    finish: str
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class SampleSettings:
    """How sequences are continued.

    Attributes:
        sampling: how a token is chosen.
        new_tokens: of each, at most.
        seed: of all.
        stop_ids: a sequence ends after any of these.
        speculative: how they are drafted; None for plain decoding.
        together: sequences that run at once.
        logprobs: whether samples have the log-probabilities of their tokens.
    """

    sampling: Sampling
    new_tokens: int
    seed: int
    stop_ids: frozenset[int]
    speculative: SpeculativeConfig | None
    together: int
    logprobs: bool = False

    def seed_of(self, number: int) -> int:
        """The seed of a sample, which no other sample of any seed has."""
        return (self.seed << 32) + number


def default_method(runner: Runner) -> SpeculativeConfig | None:
    """Drafts of the depths or of a drafter as they were trained, where there are any; None for plain decoding."""
    if runner.kind in DRAFTERS:
        return SpeculativeConfig(runner.kind)
    if not (runner.depths and runner.sequential):
        return None
    return SpeculativeConfig("mtp_eagle" if runner.shares_kv else "mtp")


def write_samples(
    runner: Runner, prompts: Iterable[Numbered], how: SampleSettings, keep: Callable[[Sample], object]
) -> AcceptanceStats:
    """Continue every prompt; returns what it cost.

    Args:
        prompts: taken as places become free.
        keep: called with every sample when it has ended.
    """
    settings = EngineSettings(how.together, 2 * how.together, blocks_for(how.together, runner))
    engine = Engine(runner, settings, how.speculative)
    live: dict[int, Sample] = {}
    left = iter(prompts)
    while True:
        while len(live) < 2 * how.together and (following := next(left, None)) is not None:
            number, prompt = following
            asked = Request(
                prompt, how.new_tokens, how.sampling, how.seed_of(number), stop_ids=how.stop_ids,
                logprobs=0 if how.logprobs else None,
            )  # fmt: skip
            live[engine.add(asked)] = Sample(number, prompt, [], "", [] if how.logprobs else None)
        if not live:
            return engine.load.stats
        for update in engine.step():
            sample = live[update.request]
            sample.tokens.extend(update.tokens)
            if sample.logprobs is not None:
                sample.logprobs.extend(one.logprob for one in update.logprobs)
            if update.finish is Finish.ERROR:
                raise RuntimeError(f"the continuation of prompt {sample.number} has failed; the log has the reason.")
            if update.finish is not None:
                del live[update.request]
                keep(replace(sample, finish=update.finish))


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
