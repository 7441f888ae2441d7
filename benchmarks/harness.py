"""Shared by all benchmarks: command line, interleaved timing, memory peaks, goals, and the report.

A benchmark is a function from its flags to what it `Found`; `main` runs it. Its sides are functions that do one step
each, and take turns. The last line of a report is one JSON object:

    {"benchmark": ..., "command": ..., "hardware": ..., "versions": ..., "results": ..., "goals": [...],
     "tables": [{"title": ..., "header": [...], "rows": [...]}]}

Benchmarks without a device do not need torch, so it is imported where it is used; Megatron is never imported.
"""

import gc
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

MIB = 2**20
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine")
OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b}


@dataclass(frozen=True)
class Goal:
    """A goal: the measured value against its limit; `value` is None if it was not measured."""

    what: str
    value: float | None
    goal: float
    op: str = "<="

    def __post_init__(self) -> None:
        if self.op not in OPERATORS:
            raise ValueError(
                f"the operator of goal '{self.what}' is '{self.op}'; choose one of {', '.join(OPERATORS)}."
            )

    @property
    def met(self) -> bool:
        return self.value is not None and OPERATORS[self.op](self.value, self.goal)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        return f"{'' if self.met else 'UNMET '}{self.what}: {_written(self.value)} {self.op} {self.goal}"


@dataclass(frozen=True)
class Spent:
    """Cost of one step: wall-clock seconds, and CPU seconds of all threads of this process (less noisy under load)."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Comparison:
    """One side's seconds relative to another's, from rounds in which both ran.

    Attributes:
        ratio: ratio of the two medians.
        paired_ratio: median of the ratios within each round, which is less sensitive to varying load.
        paired_quartiles: 25 % and 75 % quantiles of those ratios.
    """

    ratio: float
    paired_ratio: float
    paired_quartiles: tuple[float, float]


class Table(NamedTuple):
    """Results with a title and a header; `str` is for a terminal, `markdown` for a page."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        """Format with right-aligned columns."""
        cells = [list(self.header), *([_written(value) for value in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([self.title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])

    def markdown(self) -> list[str]:
        """Return lines of Markdown without the title."""
        cells = [[_written(value) for value in row] for row in self.rows]
        return ["| " + " | ".join(row) + " |" for row in (list(self.header), ["---"] * len(self.header), *cells)]


def _written(value: Any) -> str:
    """Format floats with four significant digits."""
    if isinstance(value, float):
        return f"{value:,.4g}"
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)


@dataclass(frozen=True)
class Found:
    """Result of a benchmark, or of part of one; `not_run` names pieces that did not run, with the reasons."""

    results: dict[str, Any]
    goals: Sequence[Goal] = ()
    tables: Sequence[Table] = ()
    not_run: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Found":
        """Create it from a report or a record."""
        goals = [Goal(one["what"], one["value"], one["goal"], one["op"]) for one in record["goals"]]
        tables = [Table(**table) for table in record["tables"]]
        return cls(record["results"], goals, tables, record.get("not run", {}))

    def as_dict(self) -> dict[str, Any]:
        """Return it in the form of reports and records."""
        return {
            "results": self.results,
            "goals": [goal.as_dict() for goal in self.goals],
            "tables": [table._asdict() for table in self.tables],
        }


def main(
    measure: Callable[[Namespace], Found],
    doc: str | None,
    on_cpu: bool = True,
    repeats: Mapping[str, int] | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Run a benchmark's command: parse the flags, measure, and report under the name of the script.

    Args:
        measure: called with the flags, plus `place` ("quick", "cpu" or "cuda"), a `folder` for files and, if
            `repeats` has the place, `repeats`.
        doc: the text of --help.
        repeats: default rounds by place, or by a benchmark's own keys.
        flags: the benchmark's own flags, with arguments of `add_argument`.
    """
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name, given in (flags or {}).items():
        parser.add_argument(name, **given)
    if repeats:
        values = ", ".join(f"{number} ({place})" for place, number in repeats.items())
        parser.add_argument("--repeats", type=count, metavar="N", help=f"timed rounds of every side; default: {values}")
    kept = "takes what is written; default: a temporary folder, removed at the end"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=kept)
    parser.add_argument("--threads", type=count, metavar="N", help="of the CPU; default: all cores (with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    wanted, command = parser.parse_args(), sys.argv
    wanted.place = "quick" if wanted.quick else "cpu" if on_cpu else "cuda"
    if repeats and wanted.repeats is None:
        wanted.repeats = repeats.get(wanted.place)
    import torch

    if wanted.threads or wanted.quick:  # threads that wait for each other starve on a busy machine
        torch.set_num_threads(wanted.threads or 1)
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        wanted.folder = Path(wanted.folder or temporary).absolute()
        wanted.folder.mkdir(parents=True, exist_ok=True)
        found = measure(wanted)
    sys.argv = command
    report(Path(command[0]).stem, hardware(on_cpu), found)


def count(text: str) -> int:
    """Parse a positive integer flag.

    Raises:
        ArgumentTypeError: it is not an integer of at least 1.
    """
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text} was given; give 1 or more.")
    return int(text)


def hardware(on_cpu: bool) -> dict[str, Any]:
    """Return a description of the machine and its load."""
    import torch

    card = {} if on_cpu else {"driver": driver_version(), "CUDA": torch.version.cuda}
    return {
        "device": cpu_name() if on_cpu else torch.cuda.get_device_name(),
        **card,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def driver_version(about: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module; None if it is unknown."""
    found = re.search(r"Kernel Module.*?  (\d[\d.]+)  ", about.read_text()) if about.exists() else None
    return found and found[1]


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name from the kernel, or the architecture if it has none."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Return versions of Python and of the measured packages as imported; None for a package that is not installed."""
    from megatron_mtp import __version__
    from megatron_mtp.megatron.patches.patch import installed

    found = {name: None if (of := installed(name)) == "0" else of for name in PACKAGES}
    return {"python": platform.python_version(), **found, "megatron-mtp": __version__}


class Timed(dict[str, list[Spent]]):
    """Times of every round, by side."""

    def medians(self, clock: str = "wall") -> dict[str, float]:
        """Return the median seconds of a step by side; `clock` is "wall" or "cpu"."""
        return {name: statistics.median(self._of(name, clock)) for name in self}

    def compare(self, side: str, base: str, clock: str = "wall") -> Comparison:
        """Return how much longer the steps of one side take than those of another."""
        return compare(self._of(side, clock), self._of(base, clock))

    def _of(self, side: str, clock: str) -> list[float]:
        return [getattr(one, clock) for one in self[side]]


def interleave(
    sides: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: int = 2,
    synchronize: Callable[[], None] = lambda: None,
) -> Timed:
    """Time every step, with the sides taking turns within each round: A B, B A, A B, ...

    Args:
        sides: functions that do one step, by name.
        repeats: timed rounds, each with one step of every side.
        warm_up: rounds before them.
        synchronize: waits until the device is done (`torch.cuda.synchronize`).
    """
    spent = Timed({name: [] for name in sides})
    with _garbage_kept():
        for number, order in enumerate(rounds(list(sides), warm_up + repeats)):
            gc.collect()
            for name in order:
                one = _spent(sides[name], synchronize)
                if number >= warm_up:
                    spent[name].append(one)
    return spent


def rounds(names: Sequence[str], count: int) -> Iterator[list[str]]:
    """Yield the order of every round, each rotated by one: for [a, b, c] that is abc, bca, cab, abc, ..."""
    for number in range(count):
        start = number % len(names)
        yield [*names[start:], *names[:start]]


def _spent(step: Callable[[], object], synchronize: Callable[[], None]) -> Spent:
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    synchronize()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Disable garbage collection during steps, and exclude existing objects."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def compare(seconds: Sequence[float], base: Sequence[float]) -> Comparison:
    """Return how much longer `seconds` are than `base`, whose entries are from the same rounds."""
    ratios = [one / other for one, other in zip(seconds, base, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return Comparison(
        ratio=statistics.median(seconds) / statistics.median(base),
        paired_ratio=statistics.median(ratios),
        paired_quartiles=(low, high),
    )


def allocated_peak(step: Callable[[], object], on_cpu: bool) -> float:
    """Return torch's peak allocation in MiB above the current amount; equal from step to step."""
    gc.collect()
    return round((_profiled_peak if on_cpu else _cuda_peak)(step) / MIB, 1)


def _cuda_peak(step: Callable[[], object]) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _profiled_peak(step: Callable[[], object]) -> int:
    """Return the peak on a CPU, whose allocator does not record it, from the profiler's allocations and releases."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))


def in_own_process(work: Callable[..., Any], *given: object) -> Any:
    """Run a function in a new process, which has its own peak of resident memory, and return its result."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work, *given).result()


def resident(field: str) -> int:
    """Return this process's resident bytes, current (VmRSS) or peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def report(benchmark: str, machine: dict[str, Any], found: Found, *more: str) -> None:
    """Print the tables, the goals in words, `more`, and as the last line everything as one JSON object."""
    sys.stderr.flush()
    command = shlex.join(["python", *sys.argv])
    for text in (f"{benchmark} on {machine['device']}: {command}", *found.tables):
        print(f"\n{text}")
    print()
    for piece, why in found.not_run.items():
        print(f"not run: {piece}: {why}")
    print("\n".join(map(str, [*found.goals, *more])))
    summary = {
        "benchmark": benchmark,
        "command": command,
        "hardware": machine,
        "versions": versions(),
        **found.as_dict(),
    }
    print(json.dumps(summary), flush=True)
