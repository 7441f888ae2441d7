"""`megatron-mtp doctor --distributed`: whether the ranks of a job are alike, reach each other, and compute as one does.

Every rank runs this. Rank 0 prints one table, and all end with one exit status: 0 if these ranks can train together.
"""

import importlib.metadata
import json
import logging
import math
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from hashlib import blake2b
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from megatron_mtp.command.links import bandwidths, clock_offset
from megatron_mtp.command.ranks import Place, Ranks, join_group, place_of
from megatron_mtp.errors import sentences
from megatron_mtp.platform import prepare
from megatron_mtp.training.machine import BLACKWELL, CONNECTIONS, check_device

TOLERANCE = 1e-5
"""How far a layout's loss and gradient norm may lie from one process's, relative to them."""

SKEW = 1.0
"""Seconds between clocks from which logs of several nodes mislead."""

ALIKE = (*"Python torch CUDA NCCL megatron-core transformer-engine megatron-mtp device".split(), CONNECTIONS)
"""Facts that all ranks must share."""


@dataclass(frozen=True)
class Finding:
    """A row: whether it is well, whether training needs it, and what was found."""

    name: str
    ok: bool
    found: str
    needed: bool = True


def main(program: str, as_json: bool, seconds: float) -> int:
    """Exit status 0 if these ranks can train together, 1 if not, 2 where no launcher has started this process."""
    with sentences(program):
        place = place_of(os.environ)
    with _without_listings():
        on_cpu = prepare()
        try:
            ranks = Ranks(place, seconds, program)
        except ConnectionError as error:
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
            return 1
        facts, findings = examine(ranks, on_cpu)
        verdict = ranks.agree("verdict", all(each.ok for each in findings if each.needed))
    if place.rank == 0:
        print(json_of(facts, findings, verdict) if as_json else text_of(findings, verdict), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0 if verdict else 1


@contextmanager
def _without_listings() -> Iterator[None]:
    """Megatron prints, warns of and logs what it builds."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def examine(ranks: Ranks, on_cpu: bool) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Facts of all ranks and findings, both on rank 0 alone."""
    with ranks.within("versions"):
        facts = ranks.exchange("facts", facts_of(ranks.place, on_cpu))
        findings = [found_ranks(facts), *compared(facts), *of_environment(facts)]
        alike = ranks.agree("alike", all(each.ok for each in findings if each.needed))
    if not alike:
        return facts, [*findings, Finding("links and training", False, "not tried, since the ranks are not alike")]
    with ranks.within("meeting in a process group"):
        join_group(ranks, on_cpu)
    if ranks.place.ranks > 1:
        with ranks.within("clocks"):
            group = None if on_cpu else torch.distributed.new_group(backend="gloo")
            findings.append(of_clocks(ranks.exchange("clocks", clock_offset(group))))
        with ranks.within("bandwidth"):
            findings += of_bandwidth(bandwidths(on_cpu), "gloo" if on_cpu else "NCCL")
    return facts, findings + of_training(ranks)


def facts_of(place: Place, on_cpu: bool) -> dict[str, Any]:
    """What this rank is."""
    return {
        "rank": place.rank,
        "node": platform.node(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": None if on_cpu else ".".join(map(str, torch.cuda.nccl.version())),
        **{name: _version(name) for name in ("megatron-core", "transformer-engine")},
        "megatron-mtp": f"{_version('megatron-mtp')} ({source_hash()})",
        "device": "CPU" if on_cpu else torch.cuda.get_device_name(place.device),
        CONNECTIONS: os.environ.get(CONNECTIONS),
        "refusal": refusal(on_cpu),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_hash() -> str:
    """Of this package's files: two checkouts of one version may differ."""
    folder = Path(__file__).parents[1]
    digest = blake2b(digest_size=4)
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def refusal(on_cpu: bool) -> str | None:
    """Why training refuses this rank's device or environment; None if it does not."""
    try:
        check_device(on_cpu)
    except ValueError as error:
        return str(error)
    given = os.environ.get(CONNECTIONS)
    if not on_cpu and given not in (None, "1") and torch.cuda.get_device_capability()[0] < BLACKWELL:
        return f"{CONNECTIONS} is {given}; tensor and context parallelism need 1 before Blackwell: unset it."
    return None


def found_ranks(facts: list[dict[str, Any]]) -> Finding:
    """How many, and on which nodes."""
    nodes = Counter(each["node"] for each in facts)
    return Finding("ranks", True, f"{len(facts)}, on " + ", ".join(f"{node} ({n})" for node, n in nodes.items()))


def compared(facts: list[dict[str, Any]]) -> list[Finding]:
    """Each fact on all ranks; those that differ from most are named."""
    findings = []
    for name in ALIKE:
        (most, _), *_ = Counter(each[name] for each in facts).most_common(1)
        others = [f"rank {each['rank']} on {each['node']} has {each[name]}" for each in facts if each[name] != most]
        findings.append(Finding(name, not others, "; ".join(["none" if most is None else str(most), *others])))
    return findings


def of_environment(facts: list[dict[str, Any]]) -> list[Finding]:
    """What training refuses on a rank."""
    refused = [f"rank {each['rank']}: {each['refusal']}" for each in facts if each["refusal"] is not None]
    return [Finding("environment", not refused, " ".join(refused) or "training takes it on all ranks")]


def of_clocks(offsets: list[float]) -> Finding:
    """Of every rank, relative to rank 0."""
    rank = max(range(len(offsets)), key=lambda each: abs(offsets[each]))
    apart = max(offsets) - min(offsets)
    found = f"apart at most {1000 * apart:.3f} ms; rank {rank} is {1000 * offsets[rank]:+.3f} ms from rank 0"
    return Finding("clocks", apart < SKEW, found, needed=False)


def of_bandwidth(found: dict[str, float], backend: str) -> list[Finding]:
    """Of every collective."""
    return [Finding(name, True, f"{bytes_ / 1e9:.2f} GB/s over {backend}") for name, bytes_ in found.items()]


def of_training(ranks: Ranks) -> list[Finding]:
    """A step of a tiny model in every layout that so many ranks can have."""
    from megatron_mtp.training import trial_step

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    findings = []
    for layout in trial_step.layouts_of(ranks.place.ranks):
        with ranks.within(f"training in {layout.name}"):
            alone = trial_step.reference(layout, ranks.place.ranks)
            together = trial_step.distributed(layout, ranks.place.ranks)
            apart = ranks.exchange(f"apart/{layout.name}", distance(alone, together))
        rank = max(range(len(apart)), key=apart.__getitem__)
        found = f"loss {alone.loss:.5f}, gradient norm {alone.grad_norm:.5f}; apart from one process {apart[rank]:.1e}"
        ok = apart[rank] <= TOLERANCE
        findings.append(Finding(f"training, {layout.name}", ok, found if ok else f"{found}, on rank {rank}"))
    return findings


def distance(alone: Any, together: Any) -> float:
    """The larger relative difference of loss and gradient norm; infinite where one is no number."""
    pairs = zip(asdict(alone).values(), asdict(together).values(), strict=True)
    apart = [abs(one - other) / abs(one) for one, other in pairs]
    return math.inf if any(map(math.isnan, apart)) else max(apart)


def text_of(findings: list[Finding], can_train: bool) -> str:
    """A line for every finding, and whether these ranks can train."""
    width = max(len(each.name) for each in findings)
    signs = ["ok  " if each.ok else "FAIL" if each.needed else "-   " for each in findings]
    lines = [f"{sign} {each.name:<{width}}  {each.found}" for sign, each in zip(signs, findings, strict=True)]
    failed = ", ".join(each.name for each in findings if each.needed and not each.ok)
    verdict = "these ranks can train together" if can_train else f"these ranks cannot train together: {failed}"
    return "\n".join([*lines, "", verdict])


def json_of(facts: list[dict[str, Any]], findings: list[Finding], can_train: bool) -> str:
    """The same as one object, with the facts of every rank."""
    return json.dumps({"can_train": can_train, "ranks": facts, "checks": [asdict(each) for each in findings]})
