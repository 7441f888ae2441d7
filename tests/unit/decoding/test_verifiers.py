"""Verifiers: lossless ones by chi-square over the joint of K + 1 tokens, and wrong rules that it must catch.

The first tier has the same distributions without statistics, in test_exact_step.py.
"""

from dataclasses import replace

import pytest
import torch
from tiers import tiered
from tiny_target import (
    DRAFTER,
    PLAIN,
    SAMPLES,
    TARGET,
    V,
    after,
    best_tree,
    emitted,
    fit,
    logits_of,
    p_value,
    processed,
    sampled_tree,
)
from torch import Tensor
from torch.nn.functional import one_hot

from megatron_mtp.decoding.config import VERIFIERS
from megatron_mtp.decoding.draft import Draft, Round, Verdict
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.sampling import RECOVER, VERIFY, Noise, Sampling, draw
from megatron_mtp.decoding.verifiers import (
    bild,
    block,
    chosen,
    greedy,
    joint,
    mtjd,
    rejection,
    relaxed,
    solve_rho,
    walk,
)

CHAIN, TREE = (1, 1), (3, 2)
LEVEL = 0.001


@pytest.mark.matrix
@pytest.mark.parametrize("verifier", ["rejection", "block", "spectr", "specinfer"])
@pytest.mark.parametrize("make", [sampled_tree, best_tree], ids=["q", "deterministic"])
def test_a_chain_keeps_the_joint_distribution(verifier: str, make: object) -> None:
    assert fit(VERIFIERS[verifier], make, CHAIN) > LEVEL  # type: ignore[arg-type]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("verifier", "make"),
    [
        pytest.param("specinfer", sampled_tree, id="specinfer"),
        pytest.param("spectr", sampled_tree, id="spectr"),
        pytest.param("rejection", best_tree, id="deterministic"),
    ],
)
def test_a_tree_keeps_the_joint_distribution(verifier: str, make: object) -> None:
    assert fit(VERIFIERS[verifier], make, TREE) > LEVEL  # type: ignore[arg-type]


@pytest.mark.parametrize("verifier", tiered(["rejection", "block", "spectr"], ("block",)))
def test_ragged_chains_keep_the_joint_distribution(verifier: str) -> None:
    draft = sampled_tree(CHAIN, SAMPLES)
    length_B = torch.arange(SAMPLES) % 3
    ragged = replace(draft, valid_BN=torch.arange(2) < length_B.unsqueeze(1))
    assert p_value(emitted(VERIFIERS[verifier], ragged)) > LEVEL


MIN_P = Sampling(temperature=1.0, min_p=0.25)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("verifier", "children"), [("rejection", CHAIN), ("block", CHAIN), ("spectr", CHAIN), ("specinfer", TREE)]
)
def test_min_p_keeps_the_joint_distribution(verifier: str, children: tuple[int, ...]) -> None:
    """Target and drafter are both processed; of the 27 outcomes, those that min-p removes never occur."""
    assert 1 < (processed(TARGET, MIN_P)[2] == 0).sum() < 18
    draft = sampled_tree(children, SAMPLES, drafter=processed(DRAFTER, MIN_P))
    assert p_value(emitted(VERIFIERS[verifier], draft, MIN_P), MIN_P) > LEVEL


@pytest.mark.matrix
def test_the_chi_square_test_detects_min_p_on_only_one_side() -> None:
    """A drafter that reports its distribution after min-p, but samples before it."""
    plain = sampled_tree(CHAIN, SAMPLES)
    reported = sampled_tree(CHAIN, SAMPLES, drafter=processed(DRAFTER, MIN_P)).probs_BNV
    assert p_value(emitted(rejection, replace(plain, probs_BNV=reported), MIN_P), MIN_P) < LEVEL
    assert p_value(emitted(rejection, plain), MIN_P) == 0  # without min-p: outcomes that it removes


# Wrong rules, each a mistake that has been made.


def recover_from_p_minus_one(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """'P_draft = 1': the recovered distribution max(p - 1, 0) is zero everywhere, so p is sampled instead."""
    return _rejection_with(lambda p, q, token: p, logits_BRV, draft, round)


def recover_from_target(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """After a rejection, sample p instead of (p - q)+."""
    return _rejection_with(lambda p, q, token: p, logits_BRV, draft, round)


def remove_the_token(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Apply the deterministic rule's recovery to a sampled draft."""
    return _rejection_with(lambda p, q, token: p * (1 - one_hot(token, V)), logits_BRV, draft, round)


def one_number_for_all(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Compare all positions with the same random number, also used for the recovered token."""

    class Same(Noise):
        def uniform(self, stream: int, count: int) -> Tensor:
            return super().uniform(0, 1).expand(-1, count)

    return rejection(logits_BRV, draft, replace(round, noise=Same(round.noise.seed_B, round.noise.position_B)))


def wrong_q(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Use q before temperature, although the draft was sampled after it."""
    assert draft.probs_BNV is not None
    flatter = draft.probs_BNV.sqrt()
    return rejection(logits_BRV, replace(draft, probs_BNV=flatter / flatter.sum(-1, keepdim=True)), round)


def block_that_forgets_pi(logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    """Combine block verification's path with token-wise recovery from (p - q)+."""
    verdict = block(logits_BRV, draft, round)
    assert draft.probs_BNV is not None
    q_BRV = torch.cat([draft.probs_BNV, torch.zeros_like(draft.probs_BNV[:, :1])], 1)
    rest_BRV = (logits_BRV.softmax(-1) - q_BRV).clamp(min=0)
    rest_BV = rest_BRV[torch.arange(len(rest_BRV)), verdict.accepted_B]
    return Verdict(verdict.kept_BR, draw(rest_BV, round.noise.uniform(RECOVER, 1)[:, 0]))


def _rejection_with(recover: object, logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
    p_BRV, uniform_BN = logits_BRV.softmax(-1), round.noise.uniform(VERIFY, draft.nodes)
    rest_BV = p_BRV[:, 0]

    def survives(node: int, here_B: Tensor, tried_B: Tensor) -> Tensor:
        nonlocal rest_BV
        token_B = draft.tokens_BN[:, node]
        q_BV = one_hot(token_B, V).double() if draft.probs_BNV is None else draft.probs_BNV[:, node]
        accepted_B = tried_B & (uniform_BN[:, node] * chosen(q_BV, token_B) < chosen(p_BRV[:, node], token_B))
        recovered_BV = recover(p_BRV[:, node], q_BV, token_B)  # type: ignore[operator]
        rest_BV = torch.where(tried_B.unsqueeze(1), recovered_BV, rest_BV)
        rest_BV = torch.where(accepted_B.unsqueeze(1), p_BRV[:, node + 1], rest_BV)
        return accepted_B

    kept_BR, _ = walk(draft, survives)
    return Verdict(kept_BR, draw(rest_BV, round.noise.uniform(RECOVER, 1)[:, 0]))


def top_k_scored_with_q(children: tuple[int, ...], batch: int) -> Draft:
    """Return a deterministic tree that claims to have been sampled from q."""
    best = best_tree(children, batch)
    prefixes = [torch.zeros(1, 0, dtype=torch.long)]
    probs = []
    for node, parent in enumerate(best.parents()[0].tolist()):
        probs.append(after(DRAFTER, prefixes[parent])[0])
        prefixes.append(torch.cat([prefixes[parent], best.tokens_BN[:1, node : node + 1]], 1))
    return replace(best, probs_BNV=torch.stack(probs).expand(batch, -1, -1))


@pytest.mark.parametrize(
    ("rule", "make", "children"),
    tiered(
        [
            (recover_from_p_minus_one, best_tree, CHAIN),
            (recover_from_target, sampled_tree, CHAIN),
            (remove_the_token, sampled_tree, CHAIN),
            (one_number_for_all, sampled_tree, CHAIN),
            (wrong_q, sampled_tree, CHAIN),
            (block_that_forgets_pi, sampled_tree, CHAIN),
            (rejection, top_k_scored_with_q, TREE),
        ],
        [
            (recover_from_p_minus_one, best_tree, CHAIN),
            (wrong_q, sampled_tree, CHAIN),
            (rejection, top_k_scored_with_q, TREE),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_chi_square_test_detects_wrong_rules(rule: object, make: object, children: tuple[int, ...]) -> None:
    samples = 500_000 if rule is block_that_forgets_pi else SAMPLES  # the rule closest to correct
    assert fit(rule, make, children, samples) < LEVEL  # type: ignore[arg-type]


def _mean_accepted(verifier: str, draft: Draft) -> float:
    batch = draft.tokens_BN.size(0)
    round = Round(Sampling(temperature=1.0), Noise(torch.arange(batch), torch.zeros(batch, dtype=torch.long)), PLAIN)
    return VERIFIERS[verifier](logits_of(draft), draft, round).accepted_B.double().mean().item()


def test_block_accepts_at_least_as_much_as_rejection_and_q_more_than_matching() -> None:
    draft = sampled_tree(CHAIN, SAMPLES)
    by_q = _mean_accepted("rejection", draft)
    assert _mean_accepted("block", draft) > by_q
    assert by_q > _mean_accepted("rejection", replace(draft, probs_BNV=None))


def test_rho_solves_its_equation() -> None:
    p, q, k = after(TARGET, torch.tensor([[0]])), after(DRAFTER, torch.tensor([[0]])), torch.tensor([3.0])
    rho = solve_rho(p, q, k)
    beta = torch.minimum(q, p / rho).sum(-1)
    torch.testing.assert_close(1 - (1 - beta) ** 3, rho * beta)
    assert 1 <= rho <= 3


def _one_hot_logits(*best: int) -> Tensor:
    return 10.0 * one_hot(torch.tensor([best]), 5).double()


def _round(**settings: object) -> Round:
    text = torch.tensor([settings.pop("text", [0])], dtype=torch.long)
    noise = Noise(torch.tensor([1]), torch.tensor([text.size(1)]))
    temperature = float(str(settings.pop("temperature", 0.0)))
    beyond = torch.tensor([[3, 4, 3]])  # drafter leftovers there are not part of the text
    tokens_BT = torch.cat([text, beyond], dim=1)
    return Round(Sampling(temperature), noise, config_from({"method": "mtp", **settings}), tokens_BT=tokens_BT)


@pytest.mark.parametrize("verifier", ["greedy", "rejection", "specinfer", "spectr"])
def test_a_greedy_walk_through_a_tree(verifier: str) -> None:
    #   row    0   1  2  3  4      the target wants 2 after the root, 4 after row 2, 1 after row 4
    #   token  -   3  2  4  4
    #   parent     0  0  1  2
    draft = Draft(torch.tensor([[3, 2, 4, 4]]), None, torch.tensor([[0, 0, 1, 2]]))
    verdict = VERIFIERS[verifier](_one_hot_logits(2, 0, 4, 0, 1), draft, _round())
    assert verdict.kept_BR.tolist() == [[True, False, True, False, True]]
    assert verdict.token_B.tolist() == [1]


@pytest.mark.parametrize("verifier", ["greedy", "rejection", "block", "spectr", "joint", "mtjd", "bild", "relaxed"])
def test_an_empty_draft_is_plain_decoding(verifier: str) -> None:
    draft = Draft(torch.zeros(1, 0, dtype=torch.long))
    settings = {"verifier": verifier} | ({"think_start": 1, "think_end": 2} if verifier == "relaxed" else {})
    verdict = VERIFIERS[verifier](_one_hot_logits(3), draft, _round(**settings))
    assert verdict.accepted_B.tolist() == [0]
    assert verdict.token_B.tolist() == [3]


@pytest.mark.parametrize(("tau", "accepted"), [(1.0, 0), (0.0, 2), (0.35, 2), (0.45, 1)])
def test_joint_ignores_earlier_failures(tau: float, accepted: int) -> None:
    """p/q of the prefixes is 0.5 and 0.4; tau = 1 is plain decoding, tau = 0 accepts everything."""
    probs = torch.tensor([[[0.25, 0.75], [0.8, 0.2], [0.5, 0.5]]], dtype=torch.double)
    draft = Draft(torch.tensor([[0, 0]]), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]], dtype=torch.double))
    verdict = joint(probs.log(), draft, _round(verifier="joint", threshold=tau, temperature=1.0))
    assert verdict.accepted_B.tolist() == [accepted]


def test_joint_keeps_a_prefix_whose_first_token_fails() -> None:
    """p/q is 0.5 after one token and 0.75 after two: tau = 0.6 keeps both, although the first alone would fail."""
    probs = torch.tensor([[[0.25, 0.75], [0.75, 0.25], [0.5, 0.5]]], dtype=torch.double)
    draft = Draft(torch.tensor([[0, 0]]), torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.double))
    verdict = joint(probs.log(), draft, _round(verifier="joint", threshold=0.6, temperature=1.0))
    assert verdict.accepted_B.tolist() == [2]


#  rows 0: the root, 1: a, 2: b, 3: a again where it is not a candidate
PAIRS = torch.tensor([[[0.6, 0.4], [0.5, 0.5], [0.1, 0.9], [1.0, 0.0]]], dtype=torch.double)


def test_mtjd_emits_the_likeliest_pair() -> None:
    """b b has 0.4 * 0.9 = 0.36; the best pair starting with the more likely a has 0.30."""
    valid_BN = torch.tensor([[True, True, False]])
    draft = Draft(torch.tensor([[0, 1, 0]]), None, torch.tensor([[0, 0, 0]]), valid_BN)
    verdict = mtjd(PAIRS.log(), draft, _round(verifier="mtjd"))
    assert verdict.kept_BR.tolist() == [[True, False, True, False]]
    assert verdict.token_B.tolist() == [1]


def test_mtjd_compares_sequences_of_full_depth_alone() -> None:
    """a alone has 0.6 and a a 0.3; the tree's third node continues a, so that only its pairs have three tokens."""
    draft = Draft(torch.tensor([[0, 1, 0]]), None, torch.tensor([[0, 0, 1]]))
    verdict = mtjd(PAIRS.log(), draft, _round(verifier="mtjd"))
    assert verdict.kept_BR.tolist() == [[True, True, False, True]]
    assert verdict.token_B.tolist() == [0]


def test_bild_rolls_back_at_the_first_unlikely_token() -> None:
    probs = torch.tensor([[[0.5, 0.5], [0.04, 0.96], [0.5, 0.5], [0.5, 0.5]]])
    draft = Draft(torch.tensor([[0, 0, 0]]))
    assert bild(probs.log(), draft, _round(verifier="bild", rollback=3.0)).accepted_B.tolist() == [1]
    assert bild(probs.log(), draft, _round(verifier="bild", rollback=4.0)).accepted_B.tolist() == [3]


THINK = {"verifier": "relaxed", "think_start": 3, "think_end": 4}
THINKING, ANSWERS = [4, 3], [3, 4]


def _relaxed(drafted: list[int], text: list[int], top_n: int = 3, delta: float = 0.3) -> int:
    """Every row's target is 0.4, 0.3, 0.2, 0.06, 0.04."""
    probs = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).expand(1, len(drafted) + 1, 5)
    round = _round(**THINK, top_n=top_n, delta=delta, text=text)
    return int(relaxed(probs.log(), Draft(torch.tensor([drafted])), round).accepted_B)


def test_relaxed_acceptance_nests_and_is_strict_outside_the_phase() -> None:
    assert [_relaxed([2, 1, 0], THINKING, top_n=n) for n in (1, 2, 3)] == [0, 0, 3]
    assert [_relaxed([1, 1, 2], THINKING, delta=d) for d in (0.0, 0.15, 0.25)] == [0, 2, 3]
    assert _relaxed([1, 1, 2], ANSWERS) == _relaxed([1, 1, 2], [0, 1]) == 0
    assert _relaxed([0, 0, 1], ANSWERS) == 2


def test_the_phase_flips_inside_a_draft() -> None:
    assert _relaxed([4, 1, 1], THINKING, top_n=5, delta=0.5) == 1  # accepts the end of thinking, then is strict
    greedy_start = torch.tensor([[0.0, 0, 0, 9, 0], [0.4, 0.39, 0, 0, 0], [0.5, 0, 0, 0, 0]]).unsqueeze(0)
    round = _round(**THINK, text=[])
    assert relaxed(greedy_start, Draft(torch.tensor([[3, 1]])), round).accepted_B.tolist() == [2]
    assert greedy(greedy_start, Draft(torch.tensor([[3, 1]])), round).accepted_B.tolist() == [1]


def test_block_refuses_a_tree() -> None:
    with pytest.raises(ValueError, match="judges chains"):
        block(_one_hot_logits(1, 1, 1), Draft(torch.tensor([[1, 2]]), None, torch.tensor([[0, 0]])), _round())


def test_spectr_accepts_more_than_a_single_candidate() -> None:
    one, several = (_mean_accepted("spectr", sampled_tree(shape, 20_000)) for shape in (CHAIN, TREE))
    assert several > one
