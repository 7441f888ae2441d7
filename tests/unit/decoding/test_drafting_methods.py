"""Properties of every method: KV (caches after any accept pattern), INV (neighbors do not matter), EDGE (ends)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from drafting_single import Driven, first_rows, model_of, prompts_of, run, run_every_step_in_python, runner_of
from tiers import tiered
from torch import Tensor

from megatron_mtp.decoding import engine
from megatron_mtp.decoding.block_tables import BlockTables
from megatron_mtp.decoding.config import PROPOSERS
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.proposers import mtp
from megatron_mtp.decoding.proposers.mtp import Vanilla
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.requests import Update
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sequences import Sequences

pytestmark = pytest.mark.usefixtures("megatron")


@dataclass(frozen=True)
class Case:
    """A method's settings, and the kind of model that it drafts with."""

    settings: dict[str, Any]
    kind: str = "gqa"

    def target(self, dtype: torch.dtype = torch.float64) -> Runner:
        return runner_of(self.kind, dtype=dtype)

    def run(self, target: Runner, prompts: list[list[int]], new: int, **more: Any) -> tuple[Sequences, Driven]:
        needs_model = "model" in self.settings
        drafter = Runner(model_of("mha-tied-layernorm", dtype=target.dtype)) if needs_model else None
        return run(target, prompts, new, self.settings, drafter=drafter, **more)


CASES: dict[str, Case] = {
    "mtp": Case({"method": "mtp", "num_speculative_tokens": 3}),
    "mtp-latent": Case({"method": "mtp", "num_speculative_tokens": 3}, "mla"),
    "mtp_eagle": Case({"method": "mtp_eagle", "num_speculative_tokens": 5}),
    "mtp_eagle-latent": Case({"method": "mtp_eagle", "num_speculative_tokens": 5}, "mla"),
    "mtp_tree": Case({"method": "mtp_tree", "tree": [3, 2, 1]}),
    "mtp_tree-dynamic": Case({"method": "mtp_tree", "tree_nodes": 12, "num_speculative_tokens": 4}),
    "mtp_beam": Case({"method": "mtp_beam", "num_speculative_tokens": 3}),
    "eagle3": Case({"method": "eagle3", "num_speculative_tokens": 5}, "eagle3-own-head"),
    "eagle3_tree": Case({"method": "eagle3_tree", "tree_nodes": 12, "num_speculative_tokens": 4}, "eagle3"),
    "eagle": Case({"method": "eagle", "num_speculative_tokens": 5}, "eagle"),
    "eagle_tree": Case({"method": "eagle_tree", "tree_nodes": 12, "num_speculative_tokens": 4}, "eagle"),
    "dflash": Case({"method": "dflash"}, "dflash"),
    "dspark": Case({"method": "dspark"}, "dspark-own-head"),
    "dflash2": Case({"method": "dflash2"}, "dflash2"),
    "domino": Case({"method": "domino"}, "domino"),
    "peagle": Case({"method": "peagle", "num_speculative_tokens": 4}, "peagle"),
    "parallel_heads": Case({"method": "parallel_heads"}, "parallel"),
    "draft_model": Case({"method": "draft_model", "model": "-", "num_speculative_tokens": 3}),
    "draft_model-beam": Case({"method": "draft_model", "model": "-", "num_speculative_tokens": 3, "beam_width": 3}),
    "draft_model_tree": Case({"method": "draft_model_tree", "model": "-", "tree": [3, 2, 1]}),
    "draft_model_tree-dynamic": Case(
        {"method": "draft_model_tree", "model": "-", "tree_nodes": 12, "num_speculative_tokens": 4}
    ),
    "exhaustive": Case({"method": "exhaustive", "num_speculative_tokens": 1}),
    "ngram": Case({"method": "ngram", "num_speculative_tokens": 4}),
    "lookahead": Case({"method": "lookahead"}),
}
FIRST = "mtp mtp_eagle-latent mtp_tree-dynamic eagle3 eagle_tree dspark parallel_heads draft_model-beam ngram".split()
"""Methods of the first tier: every kind of drafter, chains and trees."""
every_method = pytest.mark.parametrize("name", tiered(CASES, FIRST))


def plain(target: Runner, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    return run(target, prompts, new_tokens, None)[0].token_ids


def test_no_method_is_left_out() -> None:
    assert {case.settings["method"] for case in CASES.values()} == set(PROPOSERS) - {"plain"}


@pytest.mark.parametrize("name", CASES)
def test_a_method_drafts_chains_or_trees_as_it_says(name: str) -> None:
    case, seen = CASES[name], list[Update]()
    drafter = Runner(model_of("mha-tied-layernorm"))
    generate(case.target(), prompts_of(2), 6, speculative=case.settings, drafter=drafter, emit=seen.append)
    drafts = [update.draft for update in seen if update.draft is not None]
    assert drafts
    assert {draft.is_chain for draft in drafts} == {not PROPOSERS[case.settings["method"]].drafts_trees}


Placed = tuple[KVCache, BlockTables]
"""A cache, and where sequences have their rows in it."""


def caches_of(proposer: Proposer, sequences: Sequences) -> list[KVCache]:
    """Return the drafter's caches, one per depth if there are several."""
    if proposer.drafter is not None:
        assert sequences.memory.drafter is not None
        return [sequences.memory.drafter]
    return sequences.memory.depths[: None if isinstance(proposer, Vanilla) else 1]


@every_method
def test_caches_are_those_of_a_fresh_prefill(name: str) -> None:
    """KV: after randomly accepted and rejected drafts, the trunk's rows and the drafter's final ones."""
    case = CASES[name]
    target, prompts = case.target(), prompts_of(4)
    used, driven = case.run(target, prompts, 40, answers=plain(target, prompts, 60))
    assert driven.stats.accepted > (0 if name == "lookahead" else 20)
    fresh, redone = case.run(target, [text[:-1] for text in used.token_ids], 12)
    assert_same_rows(
        (used.memory.cache, used.tables), (fresh.memory.cache, fresh.tables), [len(text) - 1 for text in used.token_ids]
    )
    inner: Any = driven.proposer.inner  # type: ignore[attr-defined]
    if case.settings["method"] in ("ngram", "lookahead"):
        assert not any(one.seen for one in used.progress)
        return
    pairs = zip(caches_of(inner, used), caches_of(redone.proposer, fresh), strict=True)
    for depth, (ours, theirs) in enumerate(pairs, start=1):
        # The drafter has not run the last step's tokens, and depth d lags by d - 1 rows.
        counts = [len(text) - 7 - depth for text in used.token_ids]
        assert_same_rows((ours, used.tables), (theirs, fresh.tables), counts)


def assert_same_rows(ours: Placed, theirs: Placed, counts: list[int]) -> None:
    for row, count in enumerate(counts):
        mine, right = first_rows(*ours, row, count), first_rows(*theirs, row, count)
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


class Overheard:
    """Record every draft of a seed's sequence, and the logits it was made from, by sequence length."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seed, self.patch = seed, monkeypatch
        self.logits: dict[tuple[int, int], list[Tensor]] = {}
        self.drafts: dict[tuple[int, int], list[list[int]]] = {}

    def listen(self, proposer: type) -> None:
        run_every_step_in_python(self.patch)
        propose = proposer.propose  # type: ignore[attr-defined]
        heads = {name: getattr(Runner, name) for name in ("logits", "draft_logits")}

        def overheard(made_by: Any, sequences: Sequences, round: Round, count: int) -> Draft:
            seeds = sequences.seed_B.tolist()
            if self.seed not in seeds:
                return propose(made_by, sequences, round, count)
            row = seeds.index(self.seed)
            key, heard = (len(sequences.token_ids[row]), count), []

            def noting_after(head: Callable[[Runner, Tensor], Tensor]) -> Callable[[Runner, Tensor], Tensor]:
                def noting(runner: Runner, hidden_SBH: Tensor) -> Tensor:
                    heard.append(head(runner, hidden_SBH))
                    return heard[-1]

                return noting

            with self.patch.context() as patch:
                for name, head in heads.items():
                    patch.setattr(Runner, name, noting_after(head))
                draft = propose(made_by, sequences, round, count)
            self.logits[key] = [one_BRV[row] for one_BRV in heard]
            own = (draft.tokens_BN, draft.parents(), draft.valid())
            self.drafts[key] = [one_BN[row].tolist() for one_BN in own]
            return draft

        self.patch.setattr(proposer, "propose", overheard)


@every_method
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-4, marks=pytest.mark.matrix)]
)
def test_other_sequences_of_a_batch_do_not_change_the_result(
    name: str, dtype: torch.dtype, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV: drafts and logits of a sequence alone and in a batch whose other drafts are accepted differently.

    They only differ by rounding, since products have different numbers of rows: `allowed` is relative to the largest
    logit. An EAGLE layer has no norms that keep it small.
    """
    case, prompts = CASES[name], prompts_of(4)
    heard = []
    for batch, seed in ((prompts, 2), (prompts[2:3], 0)):
        target = case.target(dtype)
        _, method = case.run(target, batch, 1)
        with monkeypatch.context() as patch:
            ears = Overheard(seed, patch)
            ears.listen(type(method.proposer))
            case.run(target, batch, 20)
        heard.append(ears)
    among, alone = heard
    shared = among.drafts.keys() & alone.drafts.keys()
    assert len(shared) >= 6
    for key in shared:
        assert among.drafts[key] == alone.drafts[key]
        assert bool(alone.logits[key]) == (case.settings["method"] not in ("ngram", "lookahead", "exhaustive"))
        for one_RV, other_RV in zip(among.logits[key], alone.logits[key], strict=True):
            torch.testing.assert_close(one_RV, other_RV, rtol=0, atol=allowed * other_RV.abs().max().item())


@every_method
def test_a_stop_token_inside_a_draft_ends_the_text_there(name: str) -> None:
    case, prompts = CASES[name], prompts_of(3)
    target = case.target()
    answers = plain(target, prompts, 30)
    news = [answer[len(prompt) :] for answer, prompt in zip(answers, prompts, strict=True)]
    stop = news[0][10]
    wanted = [new[: new.index(stop) + 1] if stop in new else new for new in news]
    sequences, driven = case.run(target, prompts, 30, answers=answers, stop_ids=frozenset([stop]))
    assert [text[len(prompt) :] for text, prompt in zip(sequences.token_ids, prompts, strict=True)] == wanted
    assert driven.stats.emitted == sum(map(len, wanted))


@every_method
@pytest.mark.parametrize("budget", tiered([1, 2, 3], (2,)))
def test_the_bonus_token_counts_against_the_budget(name: str, budget: int) -> None:
    """K is larger than what remains, and a prompt has one token."""
    case, prompts = CASES[name], [[3], [5, 6, 7]]
    target = case.target()
    sequences, driven = case.run(target, prompts, budget, answers=plain(target, prompts, 8))
    assert sequences.token_ids == plain(target, prompts, budget)
    assert driven.stats.emitted == 2 * budget
    assert driven.stats.drafted <= 2 * max(budget - 1, 0) * budget


@every_method
def test_prompts_longer_than_a_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, prompts = CASES[name], prompts_of(3, longest=40)
    target = case.target()
    whole = case.run(target, prompts, 16)[0].token_ids
    monkeypatch.setattr(engine, "CHUNK", 8)
    monkeypatch.setattr(mtp, "CHUNK", 8)
    assert case.run(target, prompts, 16)[0].token_ids == whole == plain(target, prompts, 16)


@pytest.mark.parametrize("name", ["ngram", "lookahead"])
def test_without_a_match_nothing_is_drafted(name: str) -> None:
    """A sequence of distinct tokens, and a pool that is still empty."""
    case = CASES[name]
    target = case.target()
    sequences, driven = case.run(target, [[1, 2, 3, 4, 5]], 2)
    assert len(set(sequences.token_ids[0])) == 7
    assert driven.stats.drafted == driven.stats.accepted == 0
    assert sequences.token_ids == plain(target, [[1, 2, 3, 4, 5]], 2)
