"""The parts of gpu_check.py: each takes a `Setting` and returns what it `Found`, or raises `NotRunError`.

    drafting     plain decoding against K = 1..4 drafts, each with and without CUDA graphs; energy of a token
    losses       memory and time of the chunked losses against a head with all its logits
    parity       bfloat16 training on this device against the CPU, from the same weights; with TE too where it is there
    train_step   benchmarks/train_step.py, against Megatron's own MTP
    mtp_memory   benchmarks/mtp_memory.py, what a depth costs where the vocabulary is large
    unit_tests   tests/unit on this device

Importing it prepares the platform for Megatron.
"""

import contextlib
import gc
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import torch

from benchmarks.agreeing import agreeing_model
from benchmarks.harness import Goal, allocated_peak, interleave
from megatron_mtp.config import MTPConfig
from megatron_mtp.drafting import generate, loop
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.energy import Meter
from megatron_mtp.drafting.graphs import can_record
from megatron_mtp.drafting.proposers.base import Proposer
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.losses import depth_loss
from megatron_mtp.losses.linear_cross_entropy import Targets, linear_loss
from megatron_mtp.losses.vocabulary import Vocabulary
from megatron_mtp.model.arguments import TE, flags_without
from megatron_mtp.model.build import join_world
from megatron_mtp.platform import prepare
from megatron_mtp.platform.kernels import why_not

ON_CPU = prepare()

ROOT = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cpu" if ON_CPU else "cuda")


class NotRunError(Exception):
    """Why a part did not run."""


@dataclass(frozen=True)
class Setting:
    """How much is run, where files go, and until when (`time.monotonic`)."""

    quick: bool
    folder: Path
    deadline: float

    @property
    def left(self) -> float:
        return max(self.deadline - time.monotonic(), 1.0)


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Found:
    """What a part found; `not_run` names pieces of it that did not run, and why."""

    results: dict[str, Any]
    goals: list[Goal] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


def forget() -> None:
    """Give the device's memory back, which other processes of this check need."""
    gc.collect()
    torch.cuda.empty_cache()


# Drafting


@dataclass(frozen=True)
class Model:
    """Random weights whose depths agree with the trunk as often as trained ones do (agreeing.py)."""

    layers: int
    hidden: int
    vocabulary: int
    new_tokens: int
    rounds: int


MODEL, QUICK_MODEL = Model(16, 2048, 32768, 448, 3), Model(1, 64, 256, 12, 1)
DEPTHS, NOISE = 4, 0.5
PROMPT = list(range(5, 37))


def drafting(setting: Setting) -> Found:
    """One text, bfloat16, medians over rounds in which all sides take turns; the prompt's time is left out."""
    join_world()
    size = QUICK_MODEL if setting.quick else MODEL
    runner = Runner(agreeing_model(size.layers, size.hidden, size.vocabulary, DEPTHS, NOISE).to(torch.bfloat16))
    graphs = can_record(runner, Proposer(runner, SpeculativeConfig("mtp")), 0, "greedy")
    sides = [(count, graphed) for count in range(DEPTHS + 1) for graphed in (False, True)]
    runs: dict[tuple[int, bool], list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(size.rounds + 1):
        for side in sides:
            one = decoded(runner, size.new_tokens, *side)
            if number:  # the first round warms up
                runs[side].append(one)
    found = [summary(count, graphed and graphs, runs[count, graphed]) for count, graphed in sides]
    plain = {each["graphs"]: each for each in found if each["K"] == 0}
    for each in found:
        each["speed_up"] = round(each["tokens_per_second"] / plain[each["graphs"]]["tokens_per_second"], 3)
        each["as plain"] = each.pop("tokens") == runs[0, False][0]["tokens"]
    bound = bytes_read(runner) / copy_bandwidth(2**20 if setting.quick else 2**30)
    results = {
        "sizes": vars(size),
        "graphs": graphs,
        "energy": Meter().why or "measured",
        "sides": found,
        "plain_forward_against_bandwidth": round(bound * plain[graphs]["tokens_per_second"], 3),
    }
    return Found(results, drafting_goals(found, graphs), [drafting_table(found)], without_graphs(graphs))


def decoded(runner: Runner, new_tokens: int, count: int, graphed: bool) -> dict[str, Any]:
    """A text with K = `count`; with graphs where they can be."""
    config = {"method": "mtp", "num_speculative_tokens": count} if count else None
    meter = Meter()
    with contextlib.nullcontext() if graphed else mock.patch.object(loop, "can_record", return_value=False):
        made = generate(runner, [PROMPT], new_tokens, None, config)
    stats = made.stats
    return {
        "seconds": stats.target_seconds + stats.drafter_seconds,
        "tokens": made.token_ids[0],
        "accepted_length": stats.accepted_length,
        "joules": meter.joules(),
    }


def summary(count: int, graphed: bool, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = len(rounds[0]["tokens"]) - 1  # the first is the prompt's
    joules = [one["joules"] for one in rounds]
    return {
        "K": count,
        "graphs": graphed,
        "tokens_per_second": round(tokens / statistics.median(one["seconds"] for one in rounds), 2),
        "accepted_length": round(rounds[0]["accepted_length"], 3),
        "joules_per_token": None if None in joules else round(statistics.median(joules) / (tokens + 1), 4),
        "tokens": rounds[0]["tokens"],
    }


def drafting_goals(found: list[dict[str, Any]], graphs: bool) -> list[Goal]:
    """All sides emit the same text; where there are graphs, they are worth it, and drafting is beside them."""
    goals = [
        Goal("drafting: sides that emit other tokens than plain decoding", sum(not e["as plain"] for e in found), 0)
    ]
    if graphs:
        best = {kind: max(e["tokens_per_second"] for e in found if e["graphs"] == kind) for kind in (True, False)}
        fastest = max(e["speed_up"] for e in found if e["graphs"])
        goals.append(Goal("drafting: the fastest K over plain decoding, both with CUDA graphs", fastest, 1.0, ">="))
        goals.append(Goal("drafting: with CUDA graphs over without", best[True] / best[False], 1.0, ">="))
    return goals


def without_graphs(graphs: bool) -> dict[str, str]:
    return {} if graphs else {"CUDA graphs": "there are none on this device; their sides ran as the others"}


def drafting_table(found: list[dict[str, Any]]) -> Table:
    columns = ("K", "graphs", "tokens_per_second", "accepted_length", "speed_up", "joules_per_token", "as plain")
    header = ("K", "graphs", "tokens/s", "tokens a forward", "over plain likewise", "J/token", "same tokens")
    return Table("Drafting", header, [tuple(each[column] for column in columns) for each in found])


def bytes_read(runner: Runner) -> int:
    """Weights that a forward of the trunk reads: its layers and the head; of the embedding one row."""
    model: Any = runner.model
    weights = [*model.decoder.parameters(), model.output_layer.weight]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def copy_bandwidth(size: int) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    spent = interleave({"copy": lambda: target.copy_(source)}, 5, 2, torch.cuda.synchronize)
    return 2 * size / min(one.wall for one in spent["copy"])


# Losses


def losses(setting: Setting) -> Found:
    """One depth's loss and its gradients, bfloat16 states and head; 'all logits' is torch's cross-entropy of them."""
    tokens, hidden, entries = (64, 32, 512) if setting.quick else (16384, 2048, 131072)
    generator = torch.Generator().manual_seed(1)
    states_NH = torch.randn(tokens, hidden, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
    weight_VH = (torch.randn(entries, hidden, generator=generator) / hidden**0.5).to(DEVICE, torch.bfloat16)
    weight_VH.requires_grad_()
    labels_N = torch.randint(entries, (tokens,), generator=generator).to(DEVICE)

    def chunked(name: str) -> None:
        token_loss = depth_loss(MTPConfig(mtp_loss=name))
        teacher_NH = states_NH.detach() if token_loss.needs_teacher else None
        ones = torch.ones(tokens, device=DEVICE)
        targets = Targets(labels_N, ones, torch.tensor(1.0 / tokens, device=DEVICE), teacher_NH)
        linear_loss(token_loss, [states_NH], [targets], weight_VH, Vocabulary(entries))[0].backward()
        states_NH.grad = weight_VH.grad = None

    def whole() -> None:
        torch.nn.functional.cross_entropy((states_NH @ weight_VH.t()).float(), labels_N).backward()
        states_NH.grad = weight_VH.grad = None

    sides: dict[str, Callable[[], None]] = {name: (lambda name=name: chunked(name)) for name in ("ce", "kd", "tv")}  # type: ignore[misc]
    sides["ce, all logits"] = whole
    spent = interleave(sides, 1 if setting.quick else 3, 1, torch.cuda.synchronize)
    seconds = {name: round(statistics.median(one.wall for one in spent[name]), 5) for name in sides}
    mib = {name: allocated_peak(step, ON_CPU).mib for name, step in sides.items()}
    ratio = (mib["ce"] or 0.0) / (mib["ce, all logits"] or 1.0)
    rows = [(name, mib[name], 1000 * seconds[name]) for name in sides]
    return Found(
        {"tokens": tokens, "hidden": hidden, "entries": entries, "MiB": mib, "seconds": seconds},
        [] if setting.quick else [Goal("losses: memory of ce in chunks over that of all logits", ratio, 0.25)],
        [Table(f"Memory of a loss, {tokens} tokens x {entries} entries", ("loss", "MiB", "ms"), rows)],
    )


# Whole commands


def start(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    with open(log, "wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], log: Path, seconds: float, well: Sequence[int] = (0,)) -> str:
    """What it printed; RuntimeError where it did not end well, or in time."""
    try:
        status: int | str = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = f"killed after {seconds:.0f} s"
    printed = log.read_text(errors="replace")
    if status not in well:
        print(printed[-4000:], file=sys.stderr)
        raise RuntimeError(f"status {status}: {' '.join(printed.split())[-300:]}")
    return printed


TRAINED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --lr 5e-3 --mtp-num-layers 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0"
).split()
WITH_TE = "device, with TE"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
APART = 4e-2
"""Nats between two trainings in bfloat16; each stays within half of it of the one in float32 (test_precision.py)."""


def parity(setting: Setting) -> Found:
    """The same steps in bfloat16 from weights that the CPU drew: losses of trunk and depths, step by step."""
    steps, start_from = 2 if setting.quick else 50, setting.folder / "start"
    drawn = pretrain("--train-iters", "1", "--save-interval", "1", "--save", str(start_from))
    log = setting.folder / "start.log"
    finish(start(drawn, log, **NO_GPU), log, setting.left)
    flags = ["--train-iters", str(steps), "--load", str(start_from), "--finetune", "--bf16"]
    no_te = "it needs a CUDA device" if ON_CPU else why_not("transformer_engine.pytorch")
    sides: dict[str, tuple[list[str], dict[str, str]]] = {"CPU": ([], NO_GPU), "device": ([], {})}
    if no_te is None:
        sides["device"] = (flags_without(TE), {})
        sides[WITH_TE] = (["--dist-ckpt-strictness", "log_all"], {})  # the CPU has saved no state of TE's modules
    started = {}
    for name, (own, environment) in sides.items():
        folder = setting.folder / name
        command = pretrain(*flags, *own, "--mtp-metrics-dir", str(folder))
        started[name] = start(command, setting.folder / f"{name}.log", **environment)
    learned, failed = {}, {}
    for name, process in started.items():  # all come to their end, since what runs on would disturb the next part
        try:
            finish(process, setting.folder / f"{name}.log", setting.left)
            learned[name] = losses_of(setting.folder / name)
        except RuntimeError as error:
            failed[name] = str(error)
    if failed.keys() - {WITH_TE}:
        raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    not_run = failed if no_te is None else {"Transformer Engine": no_te}
    apart = {name: distance(learned[name], learned["CPU"]) for name in learned if name != "CPU"}
    last = [(name, *(learned[name][steps][key] for key in LOGGED), apart.get(name)) for name in learned]
    no_apex = why_not("amp_C")
    if no_apex is not None:
        not_run["Apex"] = no_apex
    return Found(
        {"steps": steps, "largest distance from the CPU": apart},
        [
            Goal(f"parity: nats between CPU and {name}, {steps} steps of bfloat16", far, APART)
            for name, far in apart.items()
        ],
        [Table(f"bfloat16 training, step {steps}", ("side", *LOGGED, "largest distance from the CPU"), last)],
        not_run,
    )


LOGGED = ("lm loss", "mtp_1 loss", "mtp_2 loss")


def pretrain(*flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "pretrain_gpt.py"), *TRAINED, *flags]


def losses_of(folder: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: {name: row[name] for name in LOGGED} for row in rows if row["split"] == "training"}


def distance(ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]]) -> float:
    """The largest difference of any loss at any step; NaN where one is, which meets no goal."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"steps {sorted(ours)} against {sorted(theirs)}")
    differences = [abs(ours[step][name] - theirs[step][name]) for step in theirs for name in LOGGED]
    return next((each for each in differences if each != each), max(differences))


def benchmark(script: str, *flags: str) -> Callable[[Setting], Found]:
    """A part that is a benchmark of its own."""

    def part(setting: Setting) -> Found:
        if setting.quick:
            raise NotRunError(f"benchmarks/{script} has its own --quick")
        log = setting.folder / f"{script}.log"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *flags]
        summary = json.loads(finish(start(command, log), log, setting.left).splitlines()[-1])
        goals = [Goal(f"{script}: {g['what']}", g["value"], g["goal"], g["op"]) for g in summary["goals"]]
        rows = [(goal.what, goal.value, f"{goal.op} {goal.goal}") for goal in goals]
        return Found(summary["results"], goals, [Table(script, ("figure", "measured", "wanted"), rows)])

    return part


# Unit tests


def unit_tests(setting: Setting) -> Found:
    """What pytest counts; tests of whole commands are left out, which train on the CPU or are parts of this check."""
    file, log = setting.folder / "tests.xml", setting.folder / "tests.log"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={file}"]
    if setting.quick:
        command.append("tests/unit/test_shift.py")
    else:
        command += ["tests/unit", "--ignore-glob=*/test_killed_*", "--ignore-glob=*/test_benchmarks.py"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", "8", "--dist", "loadfile"]
    finish(start(command, log, OMP_NUM_THREADS="1"), log, setting.left, well=(0, 1))
    counted = counts(file)
    rows = [tuple(counted[name] for name in ("tests", "skipped", "failed"))]
    return Found(
        counted,
        [Goal("unit tests that fail on this device", counted["failed"], 0)],
        [Table("Unit tests", ("tests", "skipped", "failed"), rows)],
    )


def counts(file: Path) -> dict[str, Any]:
    """Of a JUnit file: tests, skipped, failed, and the names of the first twenty that failed."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": len(failed),
        "names": [f"{case.get('classname')}::{case.get('name')}" for case in failed[:20]],
    }


PARTS: dict[str, Callable[[Setting], Found]] = {
    "drafting": drafting,
    "losses": losses,
    "parity": parity,
    "train_step": benchmark("train_step.py", "--depths", "1", "2", "--repeats", "15"),
    "mtp_memory": benchmark("mtp_memory.py", "--vocab-sizes", "131072", "--tokens", "1024", "8192", "--repeats", "3"),
    "unit_tests": unit_tests,
}
