"""Plain decoding against drafting: CUDA graphs on and off, compiled or not, cuDNN attention, energy, a profile."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.agreeing import agreeing_model, bytes_of_a_step
from benchmarks.gpu.part import DEVICE, ON_CPU, NotRunError, Setting
from benchmarks.harness import Found, Goal, Table, interleave
from megatron_mtp.cli.cost import NO_METER, Cost, Workload, start_meter
from megatron_mtp.decoding import batch as steps
from megatron_mtp.decoding import cached_attention, dense_layer, generate
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.model.build import join_world


@dataclass(frozen=True)
class Model:
    """Random weights whose MTP layers agree with the trunk as often as trained ones (agreeing.py)."""

    layers: int
    hidden: int
    vocabulary: int
    new_tokens: int
    rounds: int


MODEL, QUICK_MODEL = Model(16, 2048, 32768, 448, 3), Model(1, 64, 256, 12, 1)
DEPTHS, NOISE = 4, 0.5
PROMPT = list(range(5, 37))


def graphs(setting: Setting) -> Found:
    """Measure K = 0..4, each with and without CUDA graphs."""
    return drafting(setting, range(DEPTHS + 1))


def cudnn(setting: Setting) -> Found:
    """Measure K = 0 and 3 with only cuDNN attention, which builds a plan for every length."""
    cudnn_first = sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True)
    with cudnn_first, mock.patch.object(cached_attention, "_own_kernels", contextlib.nullcontext):
        return drafting(setting, (0, 3), rounds=1)


def fused(setting: Setting) -> Found:
    """Compare K = 0 and 3 with CUDA graphs, with operations between products compiled or not."""
    size, work = workload(setting)
    counts, rows, speeds, texts = (0, 3), list[tuple[Any, ...]](), dict[tuple[str, int], float](), list[Any]()
    for name, way in (("one by one", lambda function, _: function), ("compiled", dense_layer.fused)):
        with mock.patch.object(dense_layer, "fused", way):
            work.runner.read_weights()
        for count in counts:
            began = time.perf_counter()
            text, _ = timed(work, count)
            first = time.perf_counter() - began
            cost = median([timed(work, count)[1] for _ in range(size.rounds)])
            speed = speeds[name, count] = cost.tokens_per_second
            rows.append((name, count, round(first, 2), speed, round(1e6 * cost.stats.accepted_length / speed, 1)))
            texts.append(text)
    ratios = {count: speeds["compiled", count] / speeds["one by one", count] for count in counts}
    other = sum(text != texts[0] for text in texts)
    goals = [Goal(f"fused: tokens/s over one by one, K = {count}", ratio, 1.0, ">=") for count, ratio in ratios.items()]
    header = ("between products", "K", "s of the first text", "tokens/s", "us a step")
    return Found(
        {"tokens/s over one by one": {str(count): ratio for count, ratio in ratios.items()}},
        [Goal("fused: sides that emit other tokens", other, 0), *goals],
        [Table("What stands between products", header, rows)],
    )


def drafting(setting: Setting, counts: Sequence[int], rounds: int | None = None) -> Found:
    """Measure one sequence in bfloat16; medians over rounds in which all sides take turns."""
    size, work = workload(setting)
    recorded = steps.can_record(work.runner, Proposer(work.runner, SpeculativeConfig("mtp")), 0)
    bound = bytes_of_a_step(work.runner.model) / copy_bandwidth(2**20 if setting.quick else 2**30)
    costs: dict[tuple[int, bool], list[Cost]] = {(count, graphed): [] for count in counts for graphed in (False, True)}
    texts, found = dict[tuple[int, bool], Any](), Found({})
    for number in range((rounds or size.rounds) + 1):
        for side, spent in costs.items():
            texts[side], cost = timed(work, *side)
            if number:  # the first round warms up
                spent.append(cost)
        if number:
            found = found_of(costs, texts, recorded, bound, size)
            setting.keep(found)
    return found


def workload(setting: Setting, zeros: bool = True) -> tuple[Model, Workload]:
    """Return a sequence of the model's size, timed as by `generate --compare`."""
    join_world()
    size = QUICK_MODEL if setting.quick else MODEL
    model = agreeing_model(size.layers, size.hidden, size.vocabulary, DEPTHS, NOISE, zeros=zeros)
    runner = Runner(model.to(torch.bfloat16))
    return size, Workload(runner, [PROMPT], size.new_tokens, Sampling(), frozenset(), None, None, 1, 0)


def timed(work: Workload, count: int, graphed: bool = True) -> tuple[list[list[int]], Cost]:
    """Return the output with K = `count` and its cost; with CUDA graphs where possible."""
    with contextlib.nullcontext() if graphed else mock.patch.object(steps, "can_record", return_value=False):
        return work.timed(config_of(count))


def config_of(count: int) -> SpeculativeConfig | None:
    return SpeculativeConfig("mtp", count) if count else None


def median(costs: list[Cost]) -> Cost:
    return sorted(costs, key=lambda cost: cost.seconds)[len(costs) // 2]


def found_of(
    costs: dict[tuple[int, bool], list[Cost]],
    texts: dict[tuple[int, bool], Any],
    recorded: bool,
    bound: float,
    size: Model,
) -> Found:
    """Return the result of the rounds so far; `bound` is the least seconds of a forward pass."""
    medians = {side: median(spent) for side, spent in costs.items()}
    plain = {graphed: medians[0, graphed].tokens_per_second for graphed in (False, True)}
    found: list[dict[str, Any]] = [
        {
            "K": count,
            "graphs": graphed and recorded,
            "tokens_per_second": round(cost.tokens_per_second, 2),
            "accepted_length": round(cost.stats.accepted_length, 3),
            "speed_up": round(cost.tokens_per_second / plain[graphed], 3),
            "joules_per_token": None if cost.joules is None else round(cost.joules / cost.stats.emitted, 4),
            "as plain": texts[count, graphed] == texts[0, False],
        }
        for (count, graphed), cost in medians.items()
    ]
    results = {
        "sizes": vars(size),
        "graphs": recorded,
        "energy": NO_METER if start_meter()() is None else "measured",
        "sides": found,
        "plain_forward_against_bandwidth": round(bound * plain[True], 3),
    }
    header = ("K", "graphs", "tokens/s", "tokens a forward", "over plain likewise", "J/token", "same tokens")
    table = Table("Drafting", header, [tuple(each.values()) for each in found])
    return Found(results, drafting_goals(found, recorded), [table], without_graphs(recorded))


def drafting_goals(found: list[dict[str, Any]], graphs: bool) -> list[Goal]:
    """Check that all sides output the same text, that graphs pay off, and that drafting pays off with them."""
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


def copy_bandwidth(size: int) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    spent = interleave({"copy": lambda: target.copy_(source)}, 5, 2, torch.cuda.synchronize)
    return 2 * size / min(one.wall for one in spent["copy"])


# Energy and a profile

STRETCH = 10.0
"""Seconds of work over which energy is measured."""


def energy(setting: Setting) -> Found:
    """Measure joules per token of plain decoding and of K = 3, repeated for a while, with CUDA graphs where possible.

    No weight is all zeros, since products with zeros draw less power.
    """
    if start_meter()() is None:
        raise NotRunError(NO_METER)
    _, work = workload(setting, zeros=False)
    spent = {count: joules_a_token(work, count, 0.1 if setting.quick else STRETCH) for count in (0, 3)}
    rows = [(count, *of_count) for count, of_count in spent.items()]
    ratio = spent[3][0] / spent[0][0]
    return Found(
        {"joules_per_token": {str(count): joules for count, (joules, *_) in spent.items()}, "ratio": ratio},
        [Goal("energy: joules a token of K = 3 over plain decoding", ratio, 0.6)],
        [Table("Energy (random weights)", ("K", "J/token", "W", "tokens a forward"), rows)],
    )


def joules_a_token(work: Workload, count: int, least: float) -> tuple[float, float, float]:
    """Return joules per token from the mean power in watts over at least this many seconds, and tokens per forward."""
    _, cost = timed(work, count)
    spent, begun, tokens = start_meter(), time.monotonic(), 0
    while time.monotonic() - begun < least:
        tokens += len(generate(work.runner, [PROMPT], work.new_tokens, None, config_of(count)).token_ids[0])
    joules = spent() or 0.0
    return joules / tokens, joules / (time.monotonic() - begun), round(cost.stats.accepted_length, 3)


def profiled(setting: Setting) -> Found:
    """Profile steps of K = 3 with CUDA graphs: kernels by their time, over the steps of a sequence."""
    size, work = workload(setting)
    new_tokens = min(size.new_tokens, 128)
    given = (work.runner, [PROMPT], new_tokens, None, config_of(3))
    generate(*given)
    activities = [ProfilerActivity.CPU] if ON_CPU else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        stats = generate(*given).stats
    steps = max(round(new_tokens / stats.accepted_length), 1)
    rows = kernels(profiler.key_averages(), steps)
    total = sum(microseconds for *_, microseconds in rows)
    found = {"steps": steps, "accepted_length": stats.accepted_length, "microseconds a step": total}
    return Found(found, [], [Table("A step of K = 3, by kernel", ("kernel", "calls a step", "us a step"), rows[:25])])


def kernels(averages: Any, steps: int) -> list[tuple[str, float, float]]:
    """Return name, calls per step and microseconds per step, longest first; on a CPU those of operators."""
    field = "self_cpu_time_total" if ON_CPU else "self_device_time_total"
    timed = [(each.key[:60], each.count / steps, getattr(each, field) / steps) for each in averages]
    rows = [row for row in timed if row[2] > 0]
    return sorted(rows, key=lambda row: -row[2])
