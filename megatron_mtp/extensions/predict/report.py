"""The result of `megatron-mtp predict` as text, as JSON with vLLM's synthetic acceptance, and as lines of a table.

vLLM's `--speculative-config` accepts `synthetic_acceptance_rates` with `rejection_sample_method` "synthetic": rate d is
the fraction of rounds that accept drafts 1 .. d. So a load test can run before the model is deployed.
"""

from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.extensions.predict.acceptance import Cause, Prediction
from megatron_mtp.extensions.predict.engines import DrafterRules, Engine
from megatron_mtp.spec.kinds import DRAFTERS

WIDTH = 100


@dataclass(frozen=True)
class Case:
    """One predicted case.

    Attributes:
        family: of the export.
        depths: its physical MTP layers; 0 with a drafter.
        drafter: the kind of the drafter; None where MTP layers draft.
        count: K, drafts a round.
        prompts, new: texts and the tokens that were counted in all of them.
        rules: the engine's class of the drafter; None where MTP layers draft.
    """

    engine: Engine
    family: str
    depths: int
    drafter: str | None
    count: int
    prompts: int
    new: int
    rules: DrafterRules | None = None

    @property
    def limit(self) -> int | None:
        """How many MTP layers the engine loads."""
        return None if self.drafter else self.engine.families[self.family].limit

    @property
    def evidence(self) -> str:
        """Whether the engine's counts were compared with what is predicted."""
        return self.engine.evidence_of(self.family) if self.rules is None else self.rules.evidence


def as_json(case: Case, predicted: Prediction) -> dict[str, Any]:
    """Return the values for --json; `speculative_config` is vLLM's."""
    rates = [round(rate, 4) for rate in predicted.engine.accepted_per_position]
    return {
        "speculative_config": {
            **((case.rules and case.rules.method) or {"method": case.drafter or "mtp"}),
            "num_speculative_tokens": case.count,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
        },
        "engine": case.engine.title,
        "evidence": case.evidence,
        "family": case.family,
        "depths": case.depths,
        "depths_limit": case.limit,
        "drafter": case.drafter,
        "accepts": case.engine.accepts,
        "prompts": case.prompts,
        "new_tokens": case.new,
        "rounds": predicted.engine.target_forwards,
        "acceptance": rates,
        "accepted_per_round": round(predicted.engine.accepted_per_forward, 4),
        "acceptance_as_trained": [round(rate, 4) for rate in predicted.trained.accepted_per_position],
        "accepted_per_round_as_trained": round(predicted.trained.accepted_per_forward, 4),
        "causes": [_cause_json(case, predicted, cause) for cause in predicted.causes],
    }


def _cause_json(case: Case, predicted: Prediction, cause: Cause) -> dict[str, Any]:
    return {
        "rule": cause.difference.rule,
        "engine": cause.difference.engine,
        "trained": cause.difference.trained,
        "source": _source(case, cause),
        "acceptance_if_undone": [round(rate, 4) for rate in cause.undone.accepted_per_position],
        "accepted_per_round_lost": round(cause.undone.accepted_per_forward - predicted.engine.accepted_per_forward, 4),
    }


def as_text(case: Case, predicted: Prediction) -> str:
    """Format the prediction for a terminal."""
    head = [f"{case.engine.title} ({case.evidence})"]
    heads = DRAFTERS[case.drafter].called if case.drafter else _number(case.depths, "depth")
    head.append(f"{case.family} with {heads}, {_number(case.count, 'draft')} a round")
    head.append(
        f"{case.prompts} prompts, {case.new} greedy tokens behind them, {predicted.engine.target_forwards} rounds"
    )
    parts = ["\n".join(head), _rates(case, predicted)]
    if case.limit is not None and case.depths > case.limit:
        parts.append(
            f"It loads {_number(case.limit, 'depth')} at most: export a copy with that many "
            f"(megatron-mtp convert drop-mtp CKPT DST --keep {case.limit})."
        )
    parts.append(_causes(case, predicted))
    return "\n\n".join(parts)


def as_table(rows: list[dict[str, Any]], failed: list[dict[str, Any]]) -> str:
    """Format one line per checkpoint and engine, from their JSON.

    A length is in tokens per forward pass of the trunk.
    """
    head = ["checkpoint", "engine", "family", "depths", "K", "as trained, %", "length", "predicted, %", "length"]
    table = [head]
    for row in rows:
        cells = [str(row[key]) for key in ("checkpoint", "engine", "family")]
        cells.append(row["drafter"] or str(row["depths"]))
        cells.append(str(row["speculative_config"]["num_speculative_tokens"]))
        for side in ("_as_trained", ""):
            cells.append(" ".join(f"{100 * rate:.1f}" for rate in row[f"acceptance{side}"]))
            cells.append(f"{1 + row[f'accepted_per_round{side}']:.3f}")
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([*lines, *(f"no line: {one['checkpoint']}, {one['engine']}: {one['reason']}" for one in failed)])


def _rates(case: Case, predicted: Prediction) -> str:
    """Return acceptance by position: the engine's, and training's."""
    titles = [f"draft {place}" for place in range(1, case.count + 1)] + ["drafts a round"]
    lines = [f"{'':<12}" + "".join(f"{title:>16}" for title in titles)]
    for name, found in (("as trained", predicted.trained), ("predicted", predicted.engine)):
        lines.append(f"{name:<12}" + "".join(f"{cell:>16}" for cell in _cells(found, case.count)))
    return "\n".join(lines)


def _cells(found: AcceptanceStats, count: int) -> list[str]:
    rates = [f"{100 * rate:.1f} %" for rate in found.accepted_per_position]
    return [*rates, *["-"] * (count - len(rates)), f"{found.accepted_per_forward:.3f}"]


def _causes(case: Case, predicted: Prediction) -> str:
    if case.rules is not None:
        return f"It feeds the drafter as training does ({case.engine.repository}: {case.rules.source})."
    if not predicted.causes:
        return "It feeds the MTP layers as training does."
    lines = ["What differs from training, and the drafts a round that are gained if that rule alone is undone:"]
    for cause in predicted.causes:
        gained = cause.undone.accepted_per_forward - predicted.engine.accepted_per_forward
        first, *more = wrap(f"{cause.difference.engine} (in training: {cause.difference.trained})", WIDTH)
        lines += [f"  {gained:+.3f}  {first}", *(f"          {line}" for line in more)]
        lines.append(f"          ({_source(case, cause)})")
    return "\n".join(lines)


def _source(case: Case, cause: Cause) -> str:
    return (
        "the checkpoint"
        if cause.difference.rule == "swapped"
        else case.engine.source_of(cause.difference.rule, case.family)
    )


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
