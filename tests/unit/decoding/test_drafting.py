"""The engine on tiny models: every lossless method outputs the same as plain decoding, and drafts what training
computed.

ID: equal tokens. CONF: drafts equal to the training forward pass. KV, INV and EDGE are in test_drafting_methods.py.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting_single import (
    KINDS,
    Agreeing,
    Recorder,
    first_rows,
    kind_for,
    method_of,
    model_of,
    p_value_of,
    prefilled,
    prompts_of,
    read_back,
    run,
    runner_of,
    sequences_of,
    trained_forward,
)
from tiers import tiered
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding import backend
from megatron_mtp.decoding.batch import step
from megatron_mtp.decoding.config import PROPOSERS, VERIFIERS, SpeculativeConfig
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.engine import Engine, check_prompts, generate
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.proposers.ngram import continuation
from megatron_mtp.decoding.proposers.tree import Beam
from megatron_mtp.decoding.requests import Request
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.decoding.sequences import BatchShapes, Sequences

pytestmark = pytest.mark.usefixtures("megatron")

CHAINS: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp-1": {"method": "mtp", "num_speculative_tokens": 1},
    "mtp-auto": {"method": "mtp", "num_speculative_tokens": "auto"},
    "mtp_eagle": {"method": "mtp_eagle", "num_speculative_tokens": 5},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
}
TREES: dict[str, dict[str, Any]] = {
    "mtp_tree": {"method": "mtp_tree", "tree": [3, 2, 1]},
    "mtp_tree-dynamic": {"method": "mtp_tree", "tree_nodes": 12, "num_speculative_tokens": 4},
    "mtp_beam": {"method": "mtp_beam", "num_speculative_tokens": 3},
    "lookahead": {"method": "lookahead"},
}
METHODS = {**CHAINS, **TREES}
DRAFTERS = {kind: method_of(kind) for kind in KINDS if "drafter_layers" in KINDS[kind]}
WINDOWED = ("windows", "windows-sinks")
DRAFTING = [*DRAFTERS.items(), ("eagle3", "eagle3_tree")]
ARRIVING = [(*one, *sizes) for sizes in ((6, 16), (1, 16), (32, 84)) for one in DRAFTING]
"""A kind, a method, how many requests run at once, and how many arrive: 84 of them are 10,000 tokens."""


def plain(target: Runner, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    return run(target, prompts, new_tokens, None)[0].token_ids


@pytest.fixture(scope="module")
def answered() -> Callable[..., list[list[int]]]:
    """Return plain decoding's outputs for so many prompts."""
    return functools.cache(lambda batch, new_tokens: plain(runner_of(), prompts_of(batch), new_tokens))


def test_plain_decoding_is_the_argmax_of_the_training_forward() -> None:
    for kind in (*KINDS, "mla"):
        twin, prompts = model_of(kind), prompts_of(3)
        for text, prompt in zip(plain(runner_of(kind), prompts, 12), prompts, strict=True):
            best = trained_forward(twin, text)[0].argmax(-1)
            assert text[len(prompt) :] == best[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch", "new_tokens"), tiered([(1, 100), (4, 60), (16, 30)], ((4, 60),)))
def test_drafting_never_changes_the_tokens(
    method: str, batch: int, new_tokens: int, answered: Callable[..., list[list[int]]]
) -> None:
    """ID: neither correct nor wrong drafts change the tokens."""
    target, prompts = runner_of(), prompts_of(batch)
    answers = answered(batch, new_tokens)
    assert run(target, prompts, new_tokens, METHODS[method])[0].token_ids == answers
    if method in CHAINS:
        texts, driven = run(target, prompts, new_tokens, METHODS[method], answers)
        assert texts.token_ids == answers
        if method != "mtp-auto":
            assert driven.stats.accepted_length > 1.4


@pytest.mark.parametrize("kind", tiered([*KINDS, "mla"], ("gqa", "moe", "eagle3")))
def test_drafting_never_changes_the_tokens_of_any_kind_of_model(kind: str) -> None:
    target, prompts = runner_of(kind), prompts_of(4)
    answers = plain(target, prompts, 40)
    methods = ["parallel_heads"] if kind == "parallel" else ["mtp", "mtp_eagle", *(["mtp_tree"] if TREES else [])]
    if kind in DRAFTERS:
        methods = [DRAFTERS[kind], *(["eagle3_tree"] if target.kind == "eagle3" else [])]
    elif target.shares_kv:
        methods = methods[1:]
    for method in methods:
        settings = {"method": method, "num_speculative_tokens": 2 if "tree" in method else 3}
        assert run(target, prompts, 40, settings)[0].token_ids == answers
        if "tree" not in method:
            assert run(target, prompts, 40, settings, answers)[0].token_ids == answers


@pytest.mark.parametrize("method", tiered([*METHODS], ("mtp", "mtp_eagle", "mtp_tree", "ngram")))
def test_sampling_with_top_k_1_matches_greedy_decoding(method: str) -> None:
    """A wrong cache row changes a greedy choice, but only shifts the distribution of samples."""
    target, prompts = runner_of(), prompts_of(6)
    texts = generate(target, prompts, 40, Sampling(1.0, top_k=1), METHODS[method]).token_ids
    assert texts == generate(target, prompts, 40).token_ids


@pytest.mark.parametrize(("kind", "method", "running", "requests"), tiered(ARRIVING, ARRIVING[: len(DRAFTING) : 3]))
def test_drafters_change_no_token_of_requests_that_come_and_go(
    kind: str, method: str, running: int, requests: int
) -> None:
    """One arrives per step, each with its own budget; drafts are the drafter's, some replaced by correct ones."""
    target, prompts, least = runner_of(kind), prompts_of(requests), 10 if requests == 16 else 100
    budgets = [least + 3 * (number % 16) for number in range(requests)]
    answers = plain(target, prompts, max(budgets))
    engine = Engine(target, EngineSettings(running=running), config_from({"method": method}))
    (drafting,) = engine._methods.values()
    drafting.proposer = Agreeing(drafting.proposer, answers, 0.5)
    made: dict[int, list[int]] = {}
    waiting = [Request(*each, seed=seed) for seed, each in enumerate(zip(prompts, budgets, strict=True))]
    while waiting or engine.busy:
        if waiting:
            engine.add(waiting.pop(0))
        for update in engine.step():
            made.setdefault(update.request, []).extend(update.tokens)
    for number, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        assert prompt + made[number] == answers[number][: len(prompt) + budget]
    assert engine.stats.accepted_length > 1.3


def drafts_of(target: Runner, text: list[int], settings: dict[str, Any], recorder: Recorder) -> list[Tensor]:
    """Return logits [V] at every position of the first draft after `text`, whose last token is the newest."""
    recorder.drafts.clear()
    run(target, [text[:-1]], 20, settings)
    return [logits_BV[0] for *_, logits_BV in recorder.drafts[: int(settings["num_speculative_tokens"])]]


@pytest.mark.parametrize(
    "kind",
    [
        *("gqa", "mha-tied-layernorm", "moe", "repeated", "shared", "shared-moe", "first-pass", "mla-first-pass"),
        *("parallel", "mla", *WINDOWED, *DRAFTERS),
    ],
)
@pytest.mark.parametrize("length", tiered([1, 2, 9], (9,)))
def test_drafts_are_the_training_forwards(kind: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONF: the logits of depth d at slot m - 1 of the text followed by the drafts."""
    target, twin, recorder = runner_of(kind, dtype=torch.float32), model_of(kind, dtype=torch.float32), None
    recorder = Recorder(monkeypatch)
    method = method_of(kind)
    prompt = prompts_of(1, seed=length)[0][:1] + list(range(2, length + 1))
    text = plain(target, [prompt], 1)[0]
    drafted = drafts_of(target, text, {"method": method, "num_speculative_tokens": 3}, recorder)
    longer = [*text, *(int(logits_V.argmax()) for logits_V in drafted)]
    of_depths = trained_forward(twin, longer)[1]
    for depth in range(3):
        trained_V = of_depths[depth][len(text) - 2]
        largest = max(1.0, trained_V.abs().max().item())  # an EAGLE drafter has no norm, so its logits are large
        torch.testing.assert_close(drafted[depth], trained_V, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("kind", "method"),
    tiered(
        [
            *(("gqa", "mtp"), ("shared", "mtp_eagle"), ("first-pass", "mtp_eagle"), ("mla-first-pass", "mtp_eagle")),
            *(("windows-sinks", "mtp"), *DRAFTERS.items()),
        ],
        [
            *(("shared", "mtp_eagle"), ("mla-first-pass", "mtp_eagle"), ("windows-sinks", "mtp")),
            *(("eagle3", "eagle3"), ("dspark", "dspark")),
        ],
    ),
)
def test_drafts_after_accepted_and_rejected_ones_are_the_training_forwards(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONF along a whole sequence: a round leaves correct caches for the next."""
    target, twin = runner_of(kind), model_of(kind)
    prompt = prompts_of(1)[0]
    answer = plain(target, [prompt], 60)[0]
    recorder = Recorder(monkeypatch)
    run(target, [prompt], 40, {"method": method, "num_speculative_tokens": 3}, [answer])
    drafts = {(length, position): logits_BV[0] for (length,), position, logits_BV in recorder.drafts}
    steps = [length for length, position in drafts if position == 2]
    assert len(set(torch.tensor(steps).diff().tolist())) > 2
    for length in steps:
        drafted = [drafts[length, position] for position in range(3)]
        longer = [*answer[:length], *(int(logits_V.argmax()) for logits_V in drafted)]
        for depth, trained_SV in enumerate(trained_forward(twin, longer)[1]):
            torch.testing.assert_close(drafted[depth], trained_SV[length - 2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["mtp", "mtp_eagle", "mtp_tree"])
def test_sampled_texts_depend_on_their_seeds_alone(method: str) -> None:
    """Also near their ends, when a neighbor has more tokens left: at temperature 4 drafts are often accepted."""
    target, prompts = runner_of(), prompts_of(8)
    sampling = Sampling(4.0, top_k=20, top_p=0.95, min_p=0.02)

    def sampled(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        return generate(target, prompts, 12, sampling, METHODS[method], seeds).token_ids

    seeds = [7, 8, 9, 7, 10, 11, 12, 13]
    together = sampled(prompts, seeds)
    assert together == [sampled([prompt], [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == sampled(prompts, seeds)
    assert together != sampled(prompts, list(range(8)))


def test_drafts_beyond_the_budget_are_not_counted() -> None:
    """Three tokens after a prompt: its forward pass gives one, and one of the next step's three drafts can be used."""
    target, prompts = runner_of(), prompts_of(2)
    stats = run(target, prompts, 3, METHODS["mtp"], plain(target, prompts, 9))[1].stats
    assert all(offered <= 2 for offered in stats.offered_at[:1])
    assert sum(stats.offered_at[1:]) == 0
    assert stats.accepted <= stats.drafted == sum(stats.offered_at)


def test_each_sequence_ends_at_its_own_last_position() -> None:
    target = runner_of()
    target.positions = 20
    texts = generate(target, [[1] * 15, [2] * 4], 50, speculative=METHODS["mtp"]).token_ids
    assert [len(text) for text in texts] == [5, 16]


def continuation_of(text: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """Search size by size, and place by place."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + count]
    return []


def test_ngram_continues_the_longest_suffix_seen_before() -> None:
    assert continuation_of([1, 2, 3, 1, 2], 1, 3, 3) == [3, 1, 2]
    assert continuation_of([1, 2, 3, 1, 2], 3, 3, 3) == []
    assert continuation_of([7, 7], 1, 3, 3) == [7]
    assert continuation_of([7], 1, 3, 3) == []
    assert continuation_of([1, 2, 1, 2, 1, 2], 1, 4, 3) == [1, 2]
    generator, found = torch.Generator().manual_seed(1), 0
    for shortest, longest, count in ((1, 4, 3), (2, 3, 5), (1, 1, 1), (3, 9, 2)):
        tokens_BW = torch.randint(0, 3, (40, 12), generator=generator)
        length_B = torch.randint(1, 13, (40,), generator=generator)
        made = continuation(tokens_BW, length_B, shortest, longest, count)
        for tokens, valid, row, length in zip(*(part.tolist() for part in (*made, tokens_BW, length_B)), strict=True):
            wanted = continuation_of(row[:length], shortest, longest, count)
            assert [token for token, ok in zip(tokens, valid, strict=True) if ok] == wanted
            assert valid == sorted(valid, reverse=True)
            found += len(wanted)
    assert found > 50


@pytest.mark.parametrize("kind", tiered(KINDS, ("gqa", "moe", "eagle3")))
def test_short_layers_compute_what_the_modules_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, short = prompts_of(3), runner_of(kind)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "lean", lambda *_: None)
        modules = runner_of(kind)
    assert not any(any(stack.short) for stack in modules.backend.stacks)
    settings = {"method": method_of(kind), "num_speculative_tokens": 3}
    ours, theirs = (run(one, prompts, 20, settings)[0] for one in (short, modules))
    assert ours.token_ids == theirs.token_ids
    for row, text in enumerate(ours.token_ids):
        mine, right = (first_rows(one.memory.cache, one.tables, row, len(text) - 1) for one in (ours, theirs))
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


def test_a_standard_model_has_only_short_layers() -> None:
    assert runner_of("gqa").backend.all_short


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"method": "mtp", "num_speculative_tokens": 4},
            "at most 3 here, one with each of the checkpoint's MTP layers; give at most 3, or choose mtp_eagle",
        ),
        ({"method": "parallel_heads"}, "whose MTP layers are sequential; choose mtp"),
        ({"method": "eagle3"}, "whose MTP layers are sequential; choose mtp"),
        ({"method": "dspark"}, "whose MTP layers are sequential; choose mtp"),
        ({"method": "lookahead", "verifier": "spectr"}, "needs siblings that are samples of one q"),
        ({"method": "mtp_tree", "verifier": "block"}, "judges chains, and 'mtp_tree' drafts trees"),
        ({"method": "ngram"}, "has no number of tokens to draft"),
        ({"method": "mtp", "verifier": "relaxed", "think_start": 1, "think_end": 2}, "is for temperature 0"),
    ],
)
def test_settings_that_the_model_does_not_allow(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        generate(runner_of(), [[1]], 4, Sampling(1.0), settings)


def test_a_model_without_mtp_layers_is_rejected_with_alternatives() -> None:
    target = Runner(model_of("gqa", None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no MTP weights; train some"):
        make_method(target, SpeculativeConfig("mtp"), Sampling())
    with pytest.raises(ValueError, match=r"has none; .*--drafter eagle3, .*attach-drafter"):
        make_method(target, SpeculativeConfig("eagle3"), Sampling())
    with pytest.raises(ValueError, match="has an EAGLE-3 drafter; choose eagle3 or eagle3_tree"):
        make_method(runner_of("eagle3"), SpeculativeConfig("mtp_eagle"), Sampling())
    with pytest.raises(ValueError, match=r"a DFlash drafter, .* has none; .*--drafter dflash"):
        make_method(target, SpeculativeConfig("dflash"), Sampling())


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("dspark", {"method": "dflash"}, "'dflash' was asked of a checkpoint that has a DSpark drafter; choose dspark"),
        (
            "dflash",
            {"method": "dflash", "num_speculative_tokens": 4},
            "drafts at most 3 here, .* trained on; give at most 3, or train one with more --drafter-steps",
        ),
        ("dflash", {"method": "dflash", "min_confidence": 0.5}, "'min_confidence' is a key of the method 'dspark'"),
        ("dspark", {"method": "dspark", "min_confidence": 2}, "min_confidence is 2; give a number from 0 to 1"),
    ],
)
def test_settings_that_a_block_drafter_does_not_allow(kind: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        generate(runner_of(kind), [[1]], 4, Sampling(1.0), settings)


def test_a_draft_ends_before_the_first_token_without_confidence() -> None:
    """The higher the required confidence, the fewer drafts are offered, and none at 1; no token changes."""
    target, prompts, offered = runner_of("dspark"), prompts_of(4), []
    answers = plain(target, prompts, 30)
    for least in (0.0, 0.4, 0.5, 1.0):
        texts, driven = run(target, prompts, 30, {"method": "dspark", "min_confidence": least})
        assert texts.token_ids == answers
        offered.append(driven.stats.drafted / max(driven.stats.target_forwards, 1))
    assert offered[0] > offered[1] > offered[2] > offered[3] == 0


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "said"),
    [
        ([], 4, "there is no prompt"),
        ([[]], 4, "prompt 1 is empty"),
        ([[1], [1] * 160], 4, "prompt 2 has 160 tokens, and the model has 160 positions"),
        ([[96]], 4, "give 0 to 95"),
        ([[1]], 0, "--max-new-tokens is 0"),
    ],
)
def test_prompts_that_cannot_be_continued(prompts: list[list[int]], new_tokens: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_prompts(runner_of(), prompts, new_tokens)


def test_statistics_of_one_step_by_hand() -> None:
    """Three drafts each, of which 3, 1 and 0 are accepted; one of the last step's two tokens is cut off."""
    stats = AcceptanceStats()
    for offered, accepted, emitted in [(3, 3, 4), (3, 1, 2), (3, 0, 1), (3, 1, 1)]:
        stats.count(offered, accepted, emitted)
    assert stats.accepted_length == 2.0
    assert stats.accepted_per_forward == 1.25
    assert stats.accepted_per_position == [0.75, 0.25, 0.25]
    assert replace(stats).drafted == 12


RECORDED: list[tuple[str, str, float]] = [
    *((method, "greedy", 0.0) for method in ("mtp", "mtp_eagle", "mtp_tree", "mtp_beam", "draft_model", "ngram")),
    *((method, "rejection", 1.0) for method in ("mtp", "mtp_eagle", "mtp_tree", "mtp_beam", "draft_model", "ngram")),
    *(("mtp", "block", 1.0), ("mtp_tree", "specinfer", 1.0), ("mtp_tree", "spectr", 1.0)),
    *(("mtp_beam", "joint", 1.0), ("draft_model", "bild", 1.0), ("mtp", "relaxed", 0.0)),
    *(("draft_model_tree", "spectr", 1.0), ("exhaustive", "mtjd", 0.0)),
    *(("eagle3", "greedy", 0.0), ("eagle3", "rejection", 1.0), ("eagle3_tree", "specinfer", 1.0)),
    *(("eagle", "rejection", 1.0), ("eagle_tree", "specinfer", 1.0)),
    *(("dflash", "greedy", 0.0), ("dflash", "block", 1.0), ("dspark", "greedy", 0.0), ("dspark", "rejection", 1.0)),
    *(("dflash2", "greedy", 0.0), ("dflash2", "rejection", 1.0)),
    *(("domino", "greedy", 0.0), ("domino", "rejection", 1.0)),
    *(("peagle", "greedy", 0.0), ("peagle", "rejection", 1.0)),
]
"""Methods and verifiers whose steps can be CUDA graphs, and a temperature."""

RECORDED_FIRST = [
    *(("mtp", "block", 1.0), ("mtp_tree", "specinfer", 1.0), ("draft_model", "bild", 1.0)),
    *(("ngram", "greedy", 0.0), ("dspark", "rejection", 1.0)),
]


def test_every_step_that_may_be_recorded_is_checked() -> None:
    methods = {name for name, one in PROPOSERS.items() if one.recordable} - {"plain", "parallel_heads"}
    assert {method for method, _, _ in RECORDED} == methods
    assert {verifier for _, verifier, _ in RECORDED} == set(VERIFIERS)


@pytest.mark.parametrize(("method", "verifier", "temperature"), tiered(RECORDED, RECORDED_FIRST))
def test_a_step_reads_nothing_back_and_has_static_shapes(method: str, verifier: str, temperature: float) -> None:
    """Under FakeTensorMode, which rejects reads of data: drafting, verifying and storing, two steps in a row."""
    tree = {"tree": [3, 2, 1]}
    own = (tree if method.endswith("_tree") else {}) | ({"model": "-"} if method.startswith("draft_model") else {})
    thinking = {"think_start": 3, "think_end": 6} if verifier == "relaxed" else {}
    count = 1 if method == "exhaustive" else 3
    config = config_from({"method": method, "verifier": verifier, "num_speculative_tokens": count, **own, **thinking})
    kind = {"eagle3": "eagle3-own-head", "dspark": "dspark-own-head"}.get(method, kind_for(method))
    target, drafter, prompts = runner_of(kind), runner_of("mha-tied-layernorm"), prompts_of(3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        sequences = sequences_of(target, prompts, 60, drafter, BatchShapes(growth=4, fixed=True))
        chosen = make_method(target, config, Sampling(temperature), drafter)
        for _ in range(2):
            step(sequences, chosen, chosen.count)
            assert sequences.length_B.shape == (3,)
        with pytest.raises(DataDependentOutputException):  # planted
            int(sequences.length_B[0])


@pytest.mark.parametrize("method", ["mtp", "mtp_eagle", "mtp_tree", "mtp_beam"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_every_tensor_is_on_the_models_device(method: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model on the device "meta", which like CUDA rejects mixing with CPU tensors."""
    model = model_of("gqa").to("meta")
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq.to("meta")  # created on the device, but not a buffer
    target, sampling = Runner(model), Sampling(temperature, top_k=20, top_p=0.9, min_p=0.1)
    sequences = sequences_of(target, prompts_of(3), 60, shapes=BatchShapes(growth=3, fixed=True))
    chosen = make_method(target, config_from({"method": method, "num_speculative_tokens": 2}), sampling)
    step(sequences, chosen, chosen.count)
    monkeypatch.setattr(Sequences, "newest_B", torch.tensor([1, 2, 3]))  # planted
    with pytest.raises(RuntimeError, match="device"):
        step(sequences, chosen, chosen.count)


@pytest.mark.parametrize("method", ["mtp", "mtp_eagle"])
@torch.inference_mode()
def test_static_shapes_change_no_token(method: str) -> None:
    target, prompts = runner_of(), prompts_of(3)
    batch = prefilled(target, prompts, {"method": method, "num_speculative_tokens": 3})
    chosen, sequences = batch.method, batch.sequences.only([0, 1, 2], BatchShapes(growth=4, fixed=True))
    chosen.proposer = Agreeing(chosen.proposer, plain(target, prompts, 40))
    for _ in range(8):
        for row, gained in enumerate(read_back(sequences)):
            sequences.settle(row, gained, ended=False)
        step(sequences, chosen, chosen.count)
    assert min(len(text) - len(prompt) for text, prompt in zip(sequences.token_ids, prompts, strict=True)) > 10
    for text, answer in zip(sequences.token_ids, plain(target, prompts, 40), strict=True):
        assert text == answer[: len(text)]


SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "ngram-0": {"method": "ngram", "num_speculative_tokens": 0},
    "mtp-rejection": {"method": "mtp", "num_speculative_tokens": 2},
    "mtp-without-q": {"method": "mtp", "num_speculative_tokens": 2, "use_draft_probs": False},
    "mtp-block": {"method": "mtp", "num_speculative_tokens": 2, "verifier": "block"},
    "eagle-rejection": {"method": "mtp_eagle", "num_speculative_tokens": 2},
    "eagle3-rejection": {"method": "eagle3", "num_speculative_tokens": 2},
    "eagle3-specinfer": {"method": "eagle3_tree", "tree": [2, 2], "verifier": "specinfer"},
    "eagle-head-rejection": {"method": "eagle", "num_speculative_tokens": 2},
    "eagle-head-specinfer": {"method": "eagle_tree", "tree": [2, 2], "verifier": "specinfer"},
    "dflash-rejection": {"method": "dflash"},
    "dspark-rejection": {"method": "dspark"},
    "dspark-confident": {"method": "dspark", "min_confidence": 0.45},
    "dflash2-rejection": {"method": "dflash2"},
    "tree-specinfer": {"method": "mtp_tree", "tree": [2, 2], "verifier": "specinfer"},
    "tree-spectr": {"method": "mtp_tree", "tree": [2, 2], "verifier": "spectr"},
    "dynamic-tree": {"method": "mtp_tree", "tree_nodes": 5, "num_speculative_tokens": 2},
    "beam": {"method": "mtp_beam", "num_speculative_tokens": 2},
    "ngram": {"method": "ngram", "num_speculative_tokens": 2},
    "lookahead": {"method": "lookahead"},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 2, "model": "-"},
    "draft_model-beam": {"method": "draft_model", "num_speculative_tokens": 2, "model": "-", "beam_width": 2},
    "draft_model-specinfer": {"method": "draft_model_tree", "model": "-", "tree": [2, 2], "verifier": "specinfer"},
    "draft_model-spectr": {"method": "draft_model_tree", "model": "-", "tree": [2, 2], "verifier": "spectr"},
    "exhaustive": {"method": "exhaustive", "num_speculative_tokens": 2, "verifier": "specinfer"},
}


SAMPLED_FIRST = ("mtp-rejection", "tree-specinfer")


@pytest.mark.parametrize("name", tiered(SAMPLED, SAMPLED_FIRST))
def test_sampled_texts_have_the_targets_distribution(name: str) -> None:
    """CHI through the whole engine: four tokens of 4,000 seeds over a vocabulary of three, against the exact joint."""
    pair = None
    kind = kind_for(str(SAMPLED[name]["method"]))
    if kind in DRAFTERS:
        kind = f"{kind}-own-head" if f"{kind}-own-head" in KINDS else kind
        pair = model_of(kind, dtype=torch.float32), model_of(kind)
        if "drafter_markov_rank" in KINDS[kind].get("drafter", {}):
            pair[0].mtp.layer.markov_w2.data *= 8  # large enough that a q without the bias would be caught
    assert p_value_of(SAMPLED[name], pair=pair) > 0.001


@pytest.mark.matrix
@pytest.mark.parametrize("settings", [SAMPLED["eagle-rejection"], SAMPLED["tree-specinfer"]], ids=["chain", "tree"])
def test_texts_sampled_with_drafts_from_the_keys_of_pass_1_have_the_targets_distribution(
    settings: dict[str, Any],
) -> None:
    """CHI, as above."""
    assert p_value_of(settings, pair=(model_of("first-pass", dtype=torch.float32), model_of("first-pass"))) > 0.001


def test_the_distribution_test_detects_a_beam_used_as_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the best of several samples, with the q of one."""
    propose = Beam.propose

    def telling_q(self: Beam, sequences: Sequences, round: Round, count: int) -> Draft:
        return propose(self, sequences, replace(round, config=replace(round.config, verifier="joint")), count)

    monkeypatch.setattr(Beam, "propose", telling_q)
    assert p_value_of(SAMPLED["beam"]) < 0.001


@pytest.mark.parametrize("verifier", ["greedy", "bild"])
def test_a_draft_model_equal_to_the_target_is_always_accepted(verifier: str) -> None:
    target, drafter, prompts = runner_of(), runner_of(), prompts_of(4)
    settings = {"method": "draft_model", "num_speculative_tokens": 3, "model": "-", "verifier": verifier}
    if verifier == "bild":
        settings |= {"fallback": 0, "rollback": 99}
    drawn = generate(target, prompts, 25, speculative=settings, drafter=drafter)
    assert drawn.token_ids == generate(target, prompts, 25).token_ids
    assert drawn.stats.accepted_per_position == [1.0, 1.0, 1.0]


def test_a_draft_model_changes_no_token_and_bild_stops_if_unsure() -> None:
    target, drafter, prompts = runner_of(), Runner(model_of("mha-tied-layernorm")), prompts_of(4)
    settings = {"method": "draft_model", "num_speculative_tokens": 3, "model": "-"}
    assert (
        generate(target, prompts, 25, speculative=settings, drafter=drafter).token_ids
        == generate(target, prompts, 25).token_ids
    )
    unsure = {**settings, "verifier": "bild", "fallback": 1.0}
    assert generate(target, prompts, 25, speculative=unsure, drafter=drafter).stats.drafted == 0


def test_a_draft_model_with_another_vocabulary_or_fewer_positions_is_refused() -> None:
    drafter = runner_of()
    settings = {"method": "draft_model", "model": "-"}
    drafter.positions = 100
    with pytest.raises(ValueError, match="has 100 positions and the target 160"):
        generate(runner_of(), [[1]], 4, speculative=settings, drafter=drafter)
    drafter.vocab_size = 90
    with pytest.raises(ValueError, match="vocabulary of 90 tokens and the target one of 96"):
        generate(runner_of(), [[1]], 4, speculative=settings, drafter=drafter)


def test_a_draft_model_whose_ids_mean_other_tokens_is_refused() -> None:
    """Regression: with an equal vocabulary size, drafts were words of another language, accepted by chance."""
    settings = {"method": "draft_model", "model": "-", "num_speculative_tokens": 2}
    target, drafter = runner_of(), runner_of()
    target.tokens, drafter.tokens = {"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 1, "b": 2}
    with pytest.raises(ValueError, match=r"id 1 is 'c' in its own, and 'b' in .*; give a draft model"):
        generate(target, [[1]], 4, speculative=settings, drafter=drafter)
    drafter.tokens = {"a": 0, "b": 1}  # an id without a token cannot conflict
    assert generate(target, [[1]], 4, speculative=settings, drafter=drafter).token_ids


def test_joint_accepts_longer_drafts_with_a_lower_threshold() -> None:
    target, prompts = runner_of(), prompts_of(8)
    lengths = []
    for threshold in (1.0, 0.5, 0.0):
        settings = {"method": "mtp_beam", "num_speculative_tokens": 3, "verifier": "joint", "threshold": threshold}
        lengths.append(generate(target, prompts, 30, Sampling(1.0), settings).stats.accepted_length)
    assert lengths[0] == 1.0
    assert lengths[0] < lengths[1] < lengths[2]
    assert lengths[2] > 3
