"""Drafting on hybrid trunks: states stored, rolled back and prefilled in parts, against the training forward pass."""

from itertools import cycle, product
from typing import Any

import pytest
import torch
from drafting_single import (
    Agreeing,
    first_rows,
    model_of,
    p_value_of,
    prefilled,
    prompts_of,
    read_back,
    run,
    run_every_step_in_python,
    trained_forward,
)
from hybrid_single import drafting_hybrid
from megatron_single import VOCABULARY
from tiers import tiered
from torch import Tensor

from megatron_mtp.decoding import engine, recurrent_layers
from megatron_mtp.decoding.auto_count import AutoK
from megatron_mtp.decoding.batch import step
from megatron_mtp.decoding.block_tables import BlockTables
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.proposers import mtp
from megatron_mtp.decoding.proposers.plain import Plain
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.sequences import Sequences

pytestmark = pytest.mark.usefixtures("megatron")

PATTERNS = ("M-M-/M-/M-", "G-G-/G-/G-", "M*EG/GM*/GM*", "M+-/+-", "*-*-/*-/*-")
every_pattern = pytest.mark.parametrize("pattern", tiered(PATTERNS, PATTERNS[2:3]))
all_kinds = pytest.mark.parametrize("pattern", tiered(PATTERNS[:3], PATTERNS[2:3]))

FLOAT32_GATE = 1e-6
"""Megatron's Gated DeltaNet computes its output gate in float32, even if everything else is float64."""

MTP = {"method": "mtp"}
EAGLE = {"method": "mtp_eagle", "num_speculative_tokens": 5}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def runner_of(pattern: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Runner:
    return Runner(drafting_hybrid(pattern, dtype, **changes))


def plain(target: Runner, prompts: list[list[int]], new: int) -> list[list[int]]:
    return run(target, prompts, new, None)[0].token_ids


def random_text(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- against the training forward pass --------------------------------------------------------------------------------


@every_pattern
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_plain_decoding_is_the_training_forward(pattern: str, dtype: torch.dtype, allowed: float) -> None:
    """Logits of all rows, including prompts in several parts; relative to the largest logit."""
    twin, target = drafting_hybrid(pattern, dtype), runner_of(pattern, dtype)
    prompts = [random_text(length, length) for length in (1, 3, 90, 170)]
    sequences, _ = run(target, prompts, 60, None)
    for row, text in enumerate(sequences.token_ids):
        trained_SV = trained_forward(twin, text[:-1])[0]
        first_B = torch.zeros_like(sequences.length_B)
        drafted_SV = target.logits(sequences.states_at(first_B, len(text) - 1))[row]
        allowed = max(allowed, FLOAT32_GATE) if "G" in pattern else allowed
        assert (drafted_SV - trained_SV).abs().max() <= allowed * trained_SV.abs().max()
        if dtype == torch.float64:
            assert text[1:][len(prompts[row]) - 1 :] == trained_SV.argmax(-1)[len(prompts[row]) - 1 :].tolist()


@all_kinds
@pytest.mark.parametrize("architecture", tiered(["sequential", "parallel"], ("sequential",)))
def test_drafts_are_the_training_forwards(pattern: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONF: after accepted and rejected drafts, in a batch of sequences with different acceptance."""
    twin = drafting_hybrid(pattern, architecture=architecture)
    target, prompts = runner_of(pattern, architecture=architecture), prompts_of(3)
    answers, drafted = plain(target, prompts, 80), list[tuple[list[int], list[int], int, Tensor]]()
    run_every_step_in_python(monkeypatch)
    real = mtp.pick

    def pick(logits_BV: Tensor, round: Round, position: int) -> tuple[Tensor, Tensor | None]:
        noise = round.noise
        drafted.append((noise.seed_B.tolist(), noise.position_B.tolist(), position, logits_BV.clone()))
        return real(logits_BV, round, position)

    monkeypatch.setattr(mtp, "pick", pick)
    run(target, prompts, 60, MTP if architecture == "sequential" else {"method": "parallel_heads"}, answers)
    for (seeds, lengths, _, first_BV), (_, _, position, second_BV) in zip(drafted[::2], drafted[1::2], strict=True):
        assert position == 1
        for row, (seed, length) in enumerate(zip(seeds, lengths, strict=True)):
            known = [*answers[seed][:length], int(first_BV[row].argmax())]
            if length < len(prompts[seed]) + 60:
                for logits_BV, of_depth_SV in zip((first_BV, second_BV), trained_forward(twin, known)[1], strict=True):
                    torch.testing.assert_close(
                        logits_BV[row], of_depth_SV[length - 2], rtol=FLOAT32_GATE, atol=FLOAT32_GATE
                    )


# --- tokens ----------------------------------------------------------------------------------------------------------


@every_pattern
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.matrix), 4])
def test_drafting_never_changes_the_tokens(pattern: str, batch: int) -> None:
    """ID: drafts do not change the tokens, accepted or not."""
    target, prompts = runner_of(pattern), prompts_of(batch)
    answers = plain(target, prompts, 40)
    automatic = {**MTP, "num_speculative_tokens": "auto"}
    assert run(target, prompts, 40, MTP)[0].token_ids == answers
    for settings in (MTP, {**MTP, "num_speculative_tokens": 1}, automatic, EAGLE, NGRAM):
        texts, driven = run(target, prompts, 40, settings, answers)
        assert texts.token_ids == answers
        assert settings is automatic or driven.stats.accepted_length > 1.2


@pytest.mark.matrix
@pytest.mark.parametrize("pattern", ["M-M-/M-/M-", "G-G-/G-/G-", "M*E-/M*/M*", "*-*-/*-/*-"])
def test_drafting_never_changes_the_tokens_over_2000_tokens(pattern: str) -> None:
    """Eight sequences of 250 tokens, during which states roll back and absorb rows many times."""
    target, prompts = runner_of(pattern), prompts_of(8)
    answers = plain(target, prompts, 250)
    for settings in (MTP, EAGLE):
        texts, driven = run(target, prompts, 250, settings, answers)
        assert texts.token_ids == answers
        assert driven.stats.accepted_length > 1.4


@pytest.mark.parametrize("pattern", tiered(["M-M-", "M*EG"], ("M-M-",)))
def test_a_hybrid_drafts_for_another_model(pattern: str) -> None:
    """`draft_model`: its states are rolled back too, in a batch; a twin is always right."""
    target, prompts = Runner(model_of("gqa")), prompts_of(4)
    settings = {"method": "draft_model", "num_speculative_tokens": 4, "model": "-"}
    answers = plain(target, prompts, 60)
    assert run(target, prompts, 60, settings, answers, drafter=runner_of(pattern))[0].token_ids == answers
    twins = runner_of(pattern), runner_of(pattern)
    drawn = generate(twins[0], prompts, 60, speculative=settings, drafter=twins[1])
    assert drawn.token_ids == generate(twins[0], prompts, 60).token_ids
    assert drawn.stats.accepted_per_position == [1.0] * 4


def test_lookahead_and_trees_work_without_recurrent_layers() -> None:
    target, prompts = runner_of("*-*-/*-"), prompts_of(4)
    answers = plain(target, prompts, 40)
    for settings in ({"method": "lookahead"}, {"method": "mtp_tree", "tree": [3, 2]}):
        assert run(target, prompts, 40, settings, answers)[0].token_ids == answers


@pytest.mark.matrix
@pytest.mark.parametrize("pattern", tiered(["M-*-/M-/M-", "G-/*G/*G"], ("M-*-/M-/M-",)))
@pytest.mark.parametrize(
    "settings",
    [pytest.param(MTP, marks=pytest.mark.matrix), EAGLE | {"num_speculative_tokens": 2}],
    ids=["mtp", "mtp_eagle"],
)
def test_sampled_texts_have_the_targets_distribution(pattern: str, settings: dict[str, Any]) -> None:
    """CHI, with rejection sampling."""
    assert p_value_of(settings, pair=(drafting_hybrid(pattern, torch.float32), drafting_hybrid(pattern))) > 0.001


# --- caches and states -----------------------------------------------------------------------------------------------


Placed = tuple[KVCache, BlockTables]
"""A cache, and where sequences have their rows in it."""


def assert_same_memory(ours: Placed, theirs: Placed, counts: list[int]) -> None:
    """Compare keys, values, states and convolution inputs of the first `counts` rows of every sequence."""
    for row, count in enumerate(counts):
        mine, right = first_rows(*ours, row, count), first_rows(*theirs, row, count)
        torch.testing.assert_close(mine, right, rtol=FLOAT32_GATE, atol=FLOAT32_GATE)
    mine, right = ours[0].recurrence, theirs[0].recurrence
    assert (mine is None) == (right is None)
    if mine is not None and right is not None:
        assert mine.layers.keys() == right.layers.keys()
        for layer in mine.layers:
            for one, other in zip(*(states_at(*each, layer, counts) for each in (ours, theirs)), strict=True):
                torch.testing.assert_close(one, other, rtol=FLOAT32_GATE, atol=FLOAT32_GATE)


def states_at(cache: KVCache, tables: BlockTables, layer: int, counts: list[int]) -> list[Tensor]:
    """Return S after so many rows, and the earlier rows that the next row's convolution reads."""
    assert cache.recurrence is not None
    memory, entries = cache.recurrence.layers[layer], tables.entry_B
    slot_B = torch.tensor(counts).cuda() - cache.recurrence.start_E[entries]
    assert (slot_B >= 0).all()
    before = range(memory.sizes.width - 1)
    return [memory.state_after(slot_B, tables), *(memory.mixed_E1TC[entries, 0, slot_B + at] for at in before)]


class Given(Plain):
    """Draft the given tokens."""

    def __init__(self, runner: Runner, tokens_BN: Tensor) -> None:
        super().__init__(runner, config_from({"method": "plain"}))
        self.tokens_BN = tokens_BN

    def propose(self, sequences: Sequences, round: Round, count: int) -> Draft:
        return Draft(self.tokens_BN)


DRAFTED = 4


@pytest.mark.parametrize(
    "prompt", [pytest.param((5, 9), marks=pytest.mark.matrix), (120, 61)], ids=["few rows", "states take in rows"]
)
@all_kinds
@torch.inference_mode()
def test_states_after_every_accepted_prefix_are_those_of_a_fresh_prefill(pattern: str, prompt: tuple[int, int]) -> None:
    """KV: 0 to 4 of four drafts are right, in each of two sequences; then one more in the next step."""
    target = runner_of(pattern)
    prompts = [random_text(length, 3 + row) for row, length in enumerate(prompt)]
    answers = plain(target, prompts, 3 + 2 * DRAFTED)
    for accepted in product(range(DRAFTED + 1), repeat=2):
        batch = prefilled(target, prompts)
        sequences, method = batch.sequences, batch.method
        for right in (accepted, (1, 3)):
            for row, gained in enumerate(read_back(sequences)):
                sequences.settle(row, gained, ended=False)
            drafts = []
            for text, answer, count in zip(sequences.token_ids, answers, right, strict=True):
                said = answer[len(text) : len(text) + DRAFTED]
                drafts.append([*said[:count], *((one + 1) % VOCABULARY for one in said[count:])])
            method.proposer = Given(target, torch.tensor(drafts).cuda())
            step(sequences, method, DRAFTED)
            assert (
                sequences.length_B - torch.tensor([len(text) for text in sequences.token_ids]).cuda() - 1
            ).tolist() == [*right]
            made = [sequences.tokens_BT[row, :length].tolist() for row, length in enumerate(sequences.length_B)]
            fresh = prefilled(target, [text[:-1] for text in made]).sequences
            assert_same_memory(
                (sequences.memory.cache, sequences.tables),
                (fresh.memory.cache, fresh.tables),
                [len(text) - 1 for text in made],
            )
            assert made == [answer[: len(text)] for answer, text in zip(answers, made, strict=True)]


@every_pattern
@pytest.mark.parametrize("settings", tiered([MTP, EAGLE, NGRAM], [EAGLE]), ids=["mtp", "mtp_eagle", "ngram"])
def test_caches_along_a_text_are_those_of_a_fresh_prefill(pattern: str, settings: dict[str, Any]) -> None:
    """KV: of trunk and MTP layers, after hundreds of randomly accepted and rejected rows."""
    target, prompts = runner_of(pattern), prompts_of(3)
    used, driven = run(target, prompts, 150, settings, plain(target, prompts, 170))
    assert driven.stats.accepted > 100
    fresh, _ = run(target, [text[:-1] for text in used.token_ids], 8, settings)
    lengths = [len(text) for text in used.token_ids]
    assert_same_memory(
        (used.memory.cache, used.tables), (fresh.memory.cache, fresh.tables), [length - 1 for length in lengths]
    )
    if settings is not NGRAM:
        depths = 1 if settings is EAGLE else target.depths
        ours, theirs = (one.memory.depths[:depths] for one in (used, fresh))
        for depth, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
            # the drafter has not run the last step's tokens, and depth d lags by d - 1 rows
            assert_same_memory((one, used.tables), (other, fresh.tables), [length - 7 - depth for length in lengths])


@pytest.mark.matrix
@all_kinds
@pytest.mark.parametrize("method", tiered(["mtp", "parallel_heads"], ("mtp",)))
def test_the_number_of_depths_may_change_between_steps(
    pattern: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with automatic K: only depth 1 for longer than states can roll back, then both, and none for as long."""
    target = runner_of(pattern, architecture="parallel" if method == "parallel_heads" else "sequential")
    prompts, asked = prompts_of(3), [*[1] * 70, 2, 2, *[0] * 70, 2, 1, 2, 2]
    answers, drafted = plain(target, prompts, 150), cycle(asked)
    monkeypatch.setattr(AutoK, "choose", lambda *_: next(drafted))
    monkeypatch.setattr(recurrent_layers, "PIECE", 16)
    monkeypatch.setattr(recurrent_layers, "KEPT", 72)
    sequences, _ = run(target, prompts, 150, {"method": method, "num_speculative_tokens": "auto"})
    assert sequences.token_ids == answers


@all_kinds
@pytest.mark.parametrize("method", tiered(["mtp_eagle", "draft_model", "ngram"], ("ngram",)))
def test_sequences_of_a_batch_may_accept_16_tokens_and_1(
    pattern: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest possible rollback, at any slot: after 15 drafts that ran one by one."""
    target, drafter, prompts = runner_of(pattern), runner_of(pattern), prompts_of(2)
    answers = plain(target, prompts, 120)
    never = [(token + 1) % VOCABULARY for token in answers[1]]
    monkeypatch.setattr(Agreeing.__init__, "__defaults__", (1.0,))
    monkeypatch.setattr(recurrent_layers, "KEPT", 67)
    monkeypatch.setattr(recurrent_layers, "PIECE", 17)
    settings = {"method": method, "num_speculative_tokens": 15} | ({"model": "-"} if method == "draft_model" else {})
    used, driven = run(target, prompts, 90, settings, [answers[0], never], drafter=drafter)
    assert used.token_ids == [answer[: len(text)] for answer, text in zip(answers, used.token_ids, strict=True)]
    assert driven.stats.accepted_at[14] >= 1
    fresh, _ = run(target, [text[:-1] for text in used.token_ids], 2, settings, drafter=drafter)
    counts = [len(text) - 18 for text in used.token_ids]
    assert_same_memory((used.memory.cache, used.tables), (fresh.memory.cache, fresh.tables), counts)
    if method != "ngram":
        ours, theirs = (
            one.memory.drafter if method == "draft_model" else one.memory.depths[0] for one in (used, fresh)
        )
        assert_same_memory((ours, used.tables), (theirs, fresh.tables), counts)


@all_kinds
@pytest.mark.parametrize("settings", tiered([None, MTP, EAGLE], [MTP]), ids=["plain", "mtp", "mtp_eagle"])
def test_neighbors_and_padding_change_nothing(pattern: str, settings: dict[str, Any] | None) -> None:
    """INV: prompts of 1, 70 and 200 tokens in a batch and alone; the trunk's states of all rows."""
    target = runner_of(pattern)
    prompts = [random_text(length, length) for length in (1, 70, 200)]
    answers = plain(target, prompts, 40)
    together, _ = run(target, prompts, 30, settings, settings and answers)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        alone, _ = run(target, [prompt], 30, settings, settings and [answer])
        assert alone.token_ids == [answer[: len(prompt) + 30]] == [together.token_ids[row]]
        of_one, of_all = (each.states_at(0 * each.length_B, len(prompt) + 29) for each in (alone, together))
        torch.testing.assert_close(of_one[:, 0], of_all[:, row], rtol=FLOAT32_GATE, atol=FLOAT32_GATE)


@pytest.mark.matrix
@all_kinds
def test_the_size_of_chunks_and_pieces_changes_nothing(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = runner_of(pattern)
    prompts = [random_text(length, length) for length in (150, 2, 31)]
    wanted = plain(target, prompts, 60)
    for chunk, piece, kept in ((8, 64, 128), (512, 5, 40), (64, 40, 72)):
        monkeypatch.setattr(engine, "CHUNK", chunk)
        monkeypatch.setattr(mtp, "CHUNK", chunk)
        monkeypatch.setattr(recurrent_layers, "PIECE", piece)
        monkeypatch.setattr(recurrent_layers, "KEPT", kept)
        for settings in (None, MTP, EAGLE):
            assert run(target, prompts, 60, settings, settings and wanted)[0].token_ids == wanted


def test_recurrent_state_does_not_grow_with_the_sequence() -> None:
    target, sizes = runner_of("M-G-"), []
    for new in (10, 300):
        recurrence = run(target, [[1, 2, 3]], new, None)[0].memory.cache.recurrence
        assert recurrence is not None
        memories = recurrence.layers.values()
        sizes.append(sum(one.numel() for each in memories for one in vars(each).values() if isinstance(one, Tensor)))
    assert sizes[0] == sizes[1]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "method", "part"),
    [
        ("M-*-/*-", "mtp_tree", "trunk"),
        ("M-*-/*-", "lookahead", "trunk"),
        ("*-*-/G-", "mtp_tree", "MTP layers"),
        ("*-*-/G-", "mtp_beam", "MTP layers"),
    ],
)
def test_methods_with_branches_are_rejected_for_recurrent_models(pattern: str, method: str, part: str) -> None:
    said = f"'{method}' runs rows that branch off, .* this model's {part} do not allow; choose mtp"
    with pytest.raises(ValueError, match=said):
        make_method(runner_of(pattern), config_from({"method": method}), Sampling())


def test_branches_of_an_external_proposer_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An external proposer that does not declare what it drafts."""
    target = runner_of("M-")
    parents_BN = torch.zeros(1, 2, dtype=torch.long).cuda()

    def propose(self: Plain, sequences: Sequences, round: Round, count: int) -> Draft:
        return Draft(torch.zeros_like(parents_BN), None, parents_BN)

    monkeypatch.setattr(Plain, "propose", propose)
    monkeypatch.setattr(Plain, "most", 1)
    with pytest.raises(ValueError, match="a state has no branches; draft chains"):
        run(target, [[1]], 4, {"method": "plain", "num_speculative_tokens": 1})


def test_attention_mtp_layers_may_branch_behind_a_recurrent_trunk() -> None:
    target, prompts = runner_of("M-G-/*-/*-"), prompts_of(3)
    answers = plain(target, prompts, 40)
    settings = {"method": "mtp_beam", "num_speculative_tokens": 2}
    assert run(target, prompts, 40, settings, answers)[0].token_ids == answers
