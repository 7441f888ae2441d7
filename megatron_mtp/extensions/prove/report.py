"""Formats the verdicts as text, JSON and a static HTML page."""

import json
import re
from collections.abc import Iterable, Iterator
from html import escape
from textwrap import wrap
from typing import Any

from megatron_mtp.extensions.prove.cases import MICROBATCHES, Case
from megatron_mtp.extensions.prove.proving import (
    BASE,
    GRADIENT_IN_BF16,
    LOSS_IN_BF16,
    NOT_RUN,
    RIGHT,
    WRONG,
    Proof,
    Verdict,
    place,
)
from megatron_mtp.extensions.prove.shrink import HIDDEN, LAYERS, POSITIONS

WIDTH = 120
MEANS = (
    "Judged by eq. 21-25 of arXiv:2412.19437 in float64, by documents: a depth's loss is the mean over its targets in "
    "a microbatch, those of all context-parallel ranks; "
)
CONVENTION = (
    f"{MEANS}microbatches weigh the same or, with --calculate-per-token-loss, as much as the targets of their main "
    "loss."
)
OF_ATTACHED = (
    f"{MEANS}microbatches weigh the same. With --calculate-per-token-loss it is the sum over its targets, divided by "
    "those of the main loss in the global batch."
)
IN_BF16 = (
    f"In BF16 within {GRADIENT_IN_BF16:.0%} of the norm of a gradient and {LOSS_IN_BF16:.1%} of a loss, which are "
    "measured."
)
BY_ONE = (
    "Judged by one process, not by equations, which do not describe this model: a layout is right where logged losses "
    "and all gradients are those of one process with the same microbatches. What one process does wrong is not seen."
)


def as_text(proof: Proof) -> str:
    """Return a line for each verdict, with the right ones grouped."""
    lines = [*_head(proof), ""]
    if base := [verdict.case for verdict in proof.verdicts if verdict.status == BASE]:
        lines += _hanging(BASE, titles(base))
    if right := [verdict.case for verdict in proof.verdicts if verdict.status == RIGHT]:
        lines += _hanging("right", titles(right))
    for cases, verdict in _wrong(proof):
        lines += _hanging(WRONG, titles(cases))
        lines += _hanging("", explained(verdict, proof))
    for words, what in not_run(proof).items():
        lines += _hanging(NOT_RUN, f"{what}: {words}")
    return "\n".join(lines)


def titles(cases: Iterable[Case]) -> str:
    """Format cases by layout: "TP 2 (rows, packed documents); PP 2 (rows)"."""
    by_layout: dict[str, list[str]] = {}
    for case in cases:
        by_layout.setdefault(case.layout.name, []).append(case.kind)
    return "; ".join(f"{layout} ({', '.join(kinds)})" for layout, kinds in by_layout.items())


def _head(proof: Proof) -> list[str]:
    tiny = proof.tiny
    if proof.source is None:
        return wrap(_convention(proof), WIDTH)
    lines = wrap(
        f"{'MTP layers of megatron_mtp.attach on ' if tiny.attached else ''}"
        f"Megatron-Core {proof.version} of {proof.source.parents[3]}, shrunk to {LAYERS} layers of {HIDDEN}, "
        f"{POSITIONS} tokens, {MICROBATCHES} microbatches; on the CPU over gloo.",
        WIDTH,
    )
    lines += wrap(BY_ONE if _by_one(proof) else _convention(proof), WIDTH)
    left = [*tiny.changed, *(f"no {flag} ({why})" for flag, why in tiny.left_out.items())]
    if left:
        lines += wrap(f"Changed: {', '.join(left)}.", WIDTH)
    if tiny.unread:
        lines += wrap(f"No effect on the loss: {' '.join(tiny.unread)}.", WIDTH)
    return lines + wrap(f"Not Megatron's own here: {'; '.join(proof.stand_ins)}.", WIDTH)


def _by_one(proof: Proof) -> bool:
    return any(verdict.convention == "1 process" for verdict in proof.verdicts)


def _convention(proof: Proof) -> str:
    by_equations = OF_ATTACHED if proof.tiny.attached else CONVENTION
    return f"{by_equations} {IN_BF16}" if any(verdict.case.in_bf16 for verdict in proof.verdicts) else by_equations


def _wrong(proof: Proof) -> Iterator[tuple[list[Case], Verdict]]:
    """Yield wrong cases grouped by cause, with a verdict that has numbers; cases without a cause are single groups."""
    groups: dict[Any, list[Verdict]] = {}
    for verdict in proof.verdicts:
        if verdict.status == WRONG:
            words = re.sub(r"^rank \d+: ", "", verdict.words)
            by_one = verdict.convention if verdict.convention == "1 process" else ""
            groups.setdefault(verdict.cause or words or by_one or id(verdict), []).append(verdict)
    for verdicts in groups.values():
        shown = next((one for one in verdicts if one.logged), verdicts[0])
        yield [verdict.case for verdict in verdicts], shown


def not_run(proof: Proof) -> dict[str, str]:
    """Return the cases and layouts that were not tested, by reason."""
    found: dict[str, list[Case]] = {}
    for verdict in proof.verdicts:
        if verdict.status == NOT_RUN:
            found.setdefault(re.sub(r"rank \d+: ", "", verdict.words), []).append(verdict.case)
    layouts: dict[str, list[str]] = {}
    for layout, words in proof.skipped.items():
        layouts.setdefault(words, []).append(layout)
    return {words: titles(cases) for words, cases in found.items()} | {
        words: "; ".join(names) for words, names in layouts.items()
    }


def explained(verdict: Verdict, proof: Proof) -> str:
    """Describe what is wrong in a case, and why."""
    parts = [numbers(verdict)]
    cause = verdict.cause
    if cause is not None:
        whose = "The attached layers'" if proof.tiny.attached else "Megatron's"
        where = place(verdict, proof)
        parts.append(f"{whose} numbers are those of {cause.words}{f' ({where})' if where else ''}.")
        if cause.rule.divisor == "ranks" and not verdict.case.per_token:
            parts.append("Megatron's main loss does the same without --calculate-per-token-loss.")
        if cause.known and not proof.tiny.attached:
            parts.append(f"Known: {', '.join(f'NVIDIA/Megatron-LM#{number}' for number in cause.known)}.")
    elif verdict.convention == "1 process":
        parts.append("No cause is searched for, which would need the equations.")
    elif verdict.case.in_bf16:
        parts.append("A cause is looked for in float32 alone.")
    elif not verdict.words:
        parts.append("No known cause gives these numbers.")
    return " ".join(parts)


def numbers(verdict: Verdict) -> str:
    """Describe losses and gradients of a wrong case, or what happened instead."""
    if verdict.words:
        return f"{verdict.words}."
    pairs = enumerate(zip(verdict.logged, verdict.right, strict=False), 1)
    off = [] if verdict.logged else ["no MTP loss is logged"]
    off += [
        f"depth {depth}: {found:.5f}, right {right:.5f}"
        for depth, (found, right) in pairs
        if f"{found:.5f}" != f"{right:.5f}"
    ]
    name, far = verdict.worst
    wrong, every = verdict.wrong
    of_gradients = f"{wrong} of {every} gradients are off, {name} by {far:.1%}" if wrong else "all gradients are right"
    return f"{verdict.case.title}: {'; '.join(off) or 'the log is right'}; {of_gradients}."


def _hanging(first: str, text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=f"{first:8}", subsequent_indent=" " * 8, break_on_hyphens=False)


def as_json(proof: Proof) -> dict[str, Any]:
    """Return all results as plain values."""
    tiny = proof.tiny
    return {
        "megatron": proof.source and {"version": proof.version, "file": str(proof.source)},
        "right": proof.is_right,
        "attached": proof.tiny.attached,
        "convention": BY_ONE if _by_one(proof) else _convention(proof),
        "shrunk": {"changed": tiny.changed, "left_out": tiny.left_out, "unread": tiny.unread, "config": tiny.config},
        "stand_ins": proof.stand_ins,
        "cases": [
            {
                "case": verdict.case.title,
                "status": verdict.status,
                "compared_with": verdict.convention,
                "losses": verdict.logged,
                "right_losses": verdict.right,
                "wrong_gradients": verdict.wrong[0],
                "gradients": verdict.wrong[1],
                "worst_gradient": verdict.worst[0] or None,
                "worst_by": verdict.worst[1],
                "cause": verdict.cause and verdict.cause.words,
                "place": place(verdict, proof) or None,
                "known": [f"NVIDIA/Megatron-LM#{number}" for number in verdict.cause.known] if verdict.cause else [],
                "words": verdict.words or None,
            }
            for verdict in proof.verdicts
        ],
        "not_tried": proof.skipped,
    }


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Is this Megatron's MTP right?</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
td, th {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #ddd }}
.right {{ color: #176f2c }} .base {{ color: #666 }} .WRONG {{ color: #b00020; font-weight: 600 }} .not {{ color: #666 }}
</style></head><body><h1>Is this Megatron's MTP right?</h1>{head}
<table><tr><th>Case</th><th>Verdict</th><th>Losses</th><th>Right losses</th><th>Explanation</th></tr>
{rows}</table><details><summary>As JSON</summary><pre>{json}</pre></details></body></html>
"""


def as_page(proof: Proof) -> str:
    """Render one static HTML page."""

    def row(verdict: Verdict) -> str:
        losses = (" ".join(f"{one:.5f}" for one in of) for of in (verdict.logged, verdict.right))
        why = explained(verdict, proof) if verdict.status == WRONG else verdict.words
        cells = (verdict.case.title, verdict.status, *losses, why)
        style = verdict.status.split()[0]
        return f'<tr class="{style}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"

    head = "".join(f"<p>{escape(line)}</p>" for line in [" ".join(_head(proof))])
    rows = "\n".join(row(verdict) for verdict in proof.verdicts)
    return PAGE.format(head=head, rows=rows, json=escape(json.dumps(as_json(proof), indent=1)))
