"""Formats a plan as text for a terminal, and as JSON."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_mtp.extensions.plan.decoding import MOST, Accepted, DraftDecoder
from megatron_mtp.extensions.plan.hardware import GIB
from megatron_mtp.extensions.plan.memory import PARTS as HELD
from megatron_mtp.extensions.plan.memory import Held
from megatron_mtp.extensions.plan.planning import NAIVE, Option, Plan
from megatron_mtp.extensions.plan.step_time import OF_STEP, PARTS


@dataclass(frozen=True)
class Drafting:
    """Predicted drafting speed: decoder, acceptance, and the batch sizes to show."""

    decoder: DraftDecoder
    accepted: Accepted
    batches: tuple[int, ...]

    def table(self) -> dict[int, list[float]]:
        """Return the speed-ups for K = 1..7 by batch size."""
        counts = range(1, MOST + 1)
        return {
            batch: [self.decoder.speed_up(self.accepted, count, batch) for count in counts] for batch in self.batches
        }


def as_json(plan: Plan, drafting: Drafting | None) -> dict[str, Any]:
    """Return the plan's figures for --json, in bytes and seconds."""
    line = plan.model.line
    found: dict[str, Any] = {
        "gpu": plan.card.name,
        "gpus": plan.gpus,
        "parameters": plan.model.size,
        "parameters of a depth": plan.model.depth.size,
        "depths": plan.depths,
        "tokens of a step": line.microbatches(plan.gpus) * line.data_parallel(plan.gpus) * _sequence_tokens(plan),
        "options": [_option_json(plan, option) for option in plan.options],
        "recommended": _option_json(plan, plan.recommended),
        "seconds saved of the naive placement": plan.margin,
        "flags": plan.flags,
    }
    if drafting is not None:
        found["drafting"] = {
            "acceptance": drafting.accepted.at(MOST),
            "source": drafting.accepted.source,
            "speed-up by batch": {str(batch): speeds for batch, speeds in drafting.table().items()},
        }
    return found


def _sequence_tokens(plan: Plan) -> int:
    return plan.model.line.micro_batch_size * plan.model.line.whole("seq_length")


def _option_json(plan: Plan, option: Option) -> dict[str, Any]:
    return {
        "depths": option.depths,
        "placement": option.name,
        "stages": [str(chunk) for chunk in option.placement.chunks],
        "fits": option.fits,
        "seconds": option.time.seconds,
        "over no MTP layers": option.time.seconds / plan.of(0)[0].time.seconds - 1,
        "seconds by part": dict(option.time.parts),
        "bytes by stage": [dict(held.parts) for held in option.memory],
    }


def as_text(plan: Plan, drafting: Drafting | None) -> str:
    """Format the plan for a terminal."""
    line, best = plan.model.line, plan.recommended
    sizes = {
        "data": line.data_parallel(plan.gpus),
        "tensor": line.tensor_model_parallel_size,
        "pipeline": line.pipeline_model_parallel_size,
        "context": line.context_parallel_size,
        "expert": line.expert_model_parallel_size,
    }
    head = [
        f"{plan.model.size / 1e9:.2f} B parameters with {_depths(plan.depths)}; {plan.gpus} x {plan.card.name}: "
        + ", ".join(f"{name} {size}" for name, size in sizes.items()),
    ]
    parts = ["\n".join(head), _options(plan), _memory(best), _time(best), _recommended(plan)]
    if drafting is not None:
        parts.append(_drafting(drafting))
    return "\n\n".join(parts)


def _depths(count: int) -> str:
    return f"{count} depth" + ("s" if count != 1 else "")


def _options(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [
        ("D", "placement", "stages", "s a step", "over D = 0", "waits", "fullest stage, GiB", "fits")
    ]
    for count in sorted({option.depths for option in plan.options}):
        for option in plan.of(count):
            added = option.time.seconds / plan.of(0)[0].time.seconds - 1
            rows.append((
                str(option.depths), option.name, _stages(option), f"{option.time.seconds:.3f}", f"{100 * added:+.1f} %",
                f"{100 * option.time.bubbles:.1f} %", f"{option.fullest / GIB:.1f}", "yes" if option.fits else "NO",
            ))  # fmt: skip
    return _table(rows)


def _stages(option: Option) -> str:
    """Summarize the first, largest and last chunks, since layouts of many layers are long."""
    chunks = option.placement.chunks
    counts = [chunk.end - chunk.first for chunk in chunks]
    if len(chunks) == 1:
        return "one"
    tail = "".join(f" {str(chunk).replace('t', '')}+{chunk.end - chunk.first}" for chunk in chunks[-2:])
    return f"{len(chunks)} of {min(counts[:-1])}..{max(counts)} layers, last{tail}"


def _memory(option: Option) -> str:
    return f"memory of a rank, GiB ({option.name}, D = {option.depths})\n{memory_table(option.memory)}"


def memory_table(stages: Sequence[Held]) -> str:
    """Format the memory of a rank for every stage, in GiB."""
    rows: list[tuple[str, ...]] = [("stage", *HELD, "GiB")]
    for rank, held in enumerate(stages):
        cells = [f"{held.parts[part] / GIB:.2f}" for part in HELD]
        rows.append((str(rank), *cells, f"{held.total / GIB:.2f}"))
    return _table(rows)


def _time(option: Option) -> str:
    parts = [part for part in (*PARTS, *OF_STEP) if any(times[part] for times in option.time.ranks)]
    rows = [("stage", *parts)]
    for rank, times in enumerate(option.time.ranks):
        rows.append((str(rank), *(f"{times[part]:.3f}" for part in parts)))
    return f"seconds of a step, {option.time.seconds:.3f} in all\n{_table(rows)}"


def _recommended(plan: Plan) -> str:
    best, added = plan.recommended, plan.overhead(plan.depths)
    words = f"recommended: {best.name}, {100 * added:+.1f} % over no MTP layers"
    if best.name != NAIVE:
        words += f", {100 * plan.margin:.1f} % less time than the naive placement"
    if not best.fits:
        words += "; NO option fits the card's memory"
    return f"{words}\n{shlex.join(plan.flags)}"


def _drafting(drafting: Drafting) -> str:
    counts = range(1, MOST + 1)
    rows = [("batch", *(f"K = {count}" for count in counts))]
    rows.append(("length", *(f"{drafting.accepted.length(count):.2f}" for count in counts)))
    for batch, speeds in drafting.table().items():
        rows.append((str(batch), *(f"{speed:.2f}" for speed in speeds)))
    return f"speed-up of drafting over plain decoding (acceptance: {drafting.accepted.source})\n{_table(rows)}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
