"""What the methods accept on a trained model: rates, accepted lengths, and what their texts are worth to the target.

Run at 5a85132.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import Goal, Table
from megatron_mtp.drafting import generate, method
from megatron_mtp.drafting.kv_cache import FORBIDDEN, KVCache, Rows, chain_rows
from megatron_mtp.drafting.proposers import PROPOSERS
from megatron_mtp.drafting.proposers.mtp import Vanilla
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling
from megatron_mtp.drafting.types import AcceptanceStats, Draft, Round, Verdict, merged
from megatron_mtp.drafting.verifiers import VERIFIERS
from megatron_mtp.drafting.verifiers.base import Rule
from megatron_mtp.drafting.verifiers.block import block
from megatron_mtp.drafting.verifiers.rejection import rejection

Config = dict[str, Any]

CHAINS: dict[str, Config] = {
    f"mtp_eagle K={k}": {"method": "mtp_eagle", "num_speculative_tokens": k} for k in (2, 3, 4, 6, 8, 11, 14)
}
TREES: dict[str, Config] = {
    "tree [4, 2]": {"method": "mtp_tree", "tree": [4, 2]},
    "dynamic 14 of depth 4": {
        "method": "mtp_tree",
        "tree_nodes": 14,
        "num_speculative_tokens": 4,
        "beam_width": 4,
    },
    "dynamic 14 of depth 5": {
        "method": "mtp_tree",
        "tree_nodes": 14,
        "num_speculative_tokens": 5,
        "beam_width": 4,
    },
    "dynamic 14 of depth 6": {
        "method": "mtp_tree",
        "tree_nodes": 14,
        "num_speculative_tokens": 6,
        "beam_width": 3,
    },
    "dynamic 14 of depth 8": {
        "method": "mtp_tree",
        "tree_nodes": 14,
        "num_speculative_tokens": 8,
        "beam_width": 3,
    },
}
VANILLA: Config = {"method": "mtp", "num_speculative_tokens": 2}
GREEDY: dict[str, Config] = {
    "mtp": VANILLA,
    "mtp_trunk_states": {**VANILLA, "method": "mtp_trunk_states"},
    "lookahead": {"method": "lookahead"},
    "ngram K=4": {"method": "ngram", "num_speculative_tokens": 4},
    **CHAINS,
    **TREES,
}

BATCH = 8
"""Prompts that run together."""

OTHER_BATCHES = (1, 4, 16)
"""In which tokens are compared as well, of 16 prompts and at most 40 tokens each."""


@dataclass(frozen=True)
class Trained:
    """A trained model with prompts for it, each continued by `new_tokens`."""

    runner: Runner
    prompts: list[list[int]]
    new_tokens: int


def acceptance(model: Trained) -> tuple[dict[str, Any], list[Goal]]:
    """Accepted lengths of the methods on a trained model; greedy ones must emit what plain decoding does."""
    stats = identical(model, BATCH)
    results: dict[str, Any] = {name: figures(one) for name, one in stats.items()}
    short = replace(model, prompts=model.prompts[:16], new_tokens=min(model.new_tokens, 40))
    checked = {BATCH: stats} | {batch: identical(short, batch) for batch in OTHER_BATCHES}
    results["identical_tokens"] = {
        batch: sum(one.emitted for one in by_method.values()) for batch, by_method in checked.items()
    }
    results["single position"] = figures(_single(model))
    results |= _sampled(model)
    return results, _acceptance_goals(results)


def identical(model: Trained, batch: int, methods: dict[str, Config] = GREEDY) -> dict[str, AcceptanceStats]:
    """What every greedy method costs on the prompts, so many at once; ends the run where one emits other tokens."""
    plain = _texts(model, None, batch=batch)[0]
    stats: dict[str, AcceptanceStats] = {}
    for name, config in methods.items():
        print(f"accepted: {name}, batch {batch}", file=sys.stderr, flush=True)
        texts, stats[name] = _texts(model, config, batch=batch)
        if texts != plain:
            raise SystemExit(f"{name} emits other tokens than plain decoding, {batch} texts at once")
    return stats


def _single(model: Trained) -> AcceptanceStats:
    with mock.patch.object(method, "PROPOSERS", {**PROPOSERS, "mtp": SinglePosition}):
        return _texts(model, VANILLA)[1]


class SameDrafts:
    """Several rules judge the same drafts, each many times over; the texts go on as `rejection` says.

    Texts that differ are as different in what can be accepted, which would hide what the rules differ in.
    """

    DRAWS = 16

    def __init__(self) -> None:
        self.accepted = dict.fromkeys(("rejection", "block", "without q"), 0)

    def __call__(self, logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
        rules: dict[str, tuple[Rule, Draft]] = {
            "rejection": (rejection, draft),
            "block": (block, draft),
            "without q": (rejection, replace(draft, probs_BNV=None)),
        }
        for draw in range(self.DRAWS):
            noise = replace(round.noise, seed_B=round.noise.seed_B + 1_000_003 * (draw + 1))
            for name, (rule, offered) in rules.items():
                self.accepted[name] += int(rule(logits_BRV, offered, replace(round, noise=noise)).accepted_B.sum())
        return rejection(logits_BRV, draft, round)


def _sampled(model: Trained) -> dict[str, Any]:
    """At temperature 1: how much is accepted, and for `joint` how likely the texts are under the target."""
    results: dict[str, Any] = {}
    same = SameDrafts()
    with mock.patch.object(method, "VERIFIERS", {**VERIFIERS, "rejection": replace(rejection, rule=same)}):
        _texts(model, VANILLA, Sampling(1.0))
    results["same_drafts"] = same.accepted
    rules: dict[str, Config] = {
        "sampled rejection": VANILLA,
        "sampled eagle K=4": {"method": "mtp_eagle", "num_speculative_tokens": 4},
    }
    for tau in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9):
        beam = {"method": "mtp_beam", "num_speculative_tokens": 4, "beam_width": 4}
        rules[f"joint tau={tau}"] = {**beam, "verifier": "joint", "threshold": tau}
    for name, config in rules.items():
        texts, stats = _texts(model, config, Sampling(1.0))
        results[name] = {**figures(stats), "perplexity": _perplexity(model, texts)}
    return results


@torch.inference_mode()
def _perplexity(model: Trained, texts: list[list[int]]) -> float:
    """Of the emitted tokens under the target at temperature 1."""
    total, count = 0.0, 0
    for prompt, text in zip(model.prompts, texts, strict=True):
        log_probs = trunk_logits(model.runner, prompt + text).log_softmax(-1)
        target = torch.tensor(text, device=model.runner.device)
        total -= log_probs[len(prompt) - 1 : -1].gather(1, target.unsqueeze(1)).sum().item()
        count += len(text)
    return float(torch.tensor(total / count).exp())


def trunk_logits(runner: Runner, text: list[int]) -> Tensor:
    """[S, V] of all positions."""
    whole = torch.tensor([text], device=runner.device)
    length = whole.size(1)
    rows = chain_rows(torch.zeros_like(whole[:, 0]), length, length, length)
    return runner.logits(runner.trunk(whole, rows, KVCache(runner.trunk_layers, 1, length)))[0]


def _texts(
    model: Trained, config: Config | None, sampling: Sampling | None = None, batch: int = BATCH
) -> tuple[list[list[int]], AcceptanceStats]:
    """All prompts continued, and what that took."""
    parts = []
    for first in range(0, len(model.prompts), batch):
        some = model.prompts[first : first + batch]
        seeds = list(range(first, first + len(some)))
        parts.append(generate(model.runner, some, model.new_tokens, sampling, config, seeds))
    return [text for part in parts for text in part.token_ids], merged([part.stats for part in parts])


def figures(stats: AcceptanceStats) -> dict[str, Any]:
    """Accepted lengths, and how often a position was accepted given that the ones before were."""
    hits, offers = stats.accepted_at, stats.offered_at
    given = [hit / max(before, 1) for hit, before in zip(hits, [offers[0] if offers else 1, *hits], strict=False)]
    return {
        "accepted_length": round(stats.accepted_length, 4),
        "accepted_per_forward": round(stats.accepted / stats.target_forwards, 4),
        "accepted_given_the_earlier": [round(rate, 4) for rate in given],
    }


def _acceptance_goals(results: dict[str, Any]) -> list[Goal]:
    def rate(name: str, position: int) -> float:
        return results[name]["accepted_given_the_earlier"][position]

    chain = max(results[name]["accepted_length"] for name in ("mtp", *CHAINS))
    tree = max(results[name]["accepted_length"] for name in TREES)
    base = results["sampled eagle K=4"]  # the drafter and K of the beams
    likely = max(
        (
            (one["accepted_length"] / base["accepted_length"], one["perplexity"] / base["perplexity"])
            for name, one in results.items()
            if name.startswith("joint")
        ),
        key=lambda pair: (pair[1] <= 0.79, pair[0]),
    )
    same = results["same_drafts"]
    beyond_trunk, beyond_single = (
        rate("mtp", 1) - rate("mtp_trunk_states", 1),
        rate("mtp", 0) - rate("single position", 0),
    )
    return [
        Goal("tokens identical to plain decoding", sum(results["identical_tokens"].values()), 20_000, ">="),
        Goal("second draft: mtp less the trunk's states, points", 100 * beyond_trunk, 8, ">="),
        Goal("first draft: mtp less a single position, points", 100 * beyond_single, 4, ">="),
        Goal("rejection: accepted with q over without", same["rejection"] / max(same["without q"], 1), 1.3, ">="),
        Goal("block over rejection: accepted", same["block"] / max(same["rejection"], 1), 1.0, ">="),
        Goal("tree of 15 rows over the best chain: accepted length", tree / chain, 1.1, ">="),
        Goal("joint: perplexity over speculative sampling's", likely[1], 0.79, "<="),
        Goal("joint: tokens per forward over speculative sampling's", likely[0], 1.42, ">="),
    ]


def accepted_table(results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            one["accepted_length"],
            one.get("perplexity"),
            " ".join(f"{r:.3f}" for r in one["accepted_given_the_earlier"]),
        ]
        for name, one in results.items()
        if isinstance(one, dict) and "accepted_length" in one
    ]
    return Table(["method", "accepted length", "perplexity", "conditional acceptance"], rows)


class SinglePosition(Vanilla):
    """Planted: every draft from row m - 1 alone, as without an MTP cache."""

    def start(self, sequences: Any) -> None:
        super().start(sequences)
        chain = sequences.chain

        def alone(first_B: Tensor, rows: int, beyond: int) -> Rows:
            made = chain(first_B, rows, beyond)
            slot_W = torch.arange(made.window, device=first_B.device)
            own_BRW = slot_W == made.positions_BR.unsqueeze(2)
            mask_B1RW = torch.zeros_like(made.mask_B1RW).masked_fill_(~own_BRW.unsqueeze(1), FORBIDDEN)
            return Rows(made.positions_BR, made.slots_BR, mask_B1RW) if self._drafting else made

        sequences.chain = alone
        self._drafting = False

    def propose(self, *arguments: Any) -> Any:
        self._drafting = True
        try:
            return super().propose(*arguments)
        finally:
            self._drafting = False
