"""Multi-token joint decoding (arXiv:2407.09722): beams of a small model, the rule `joint`, and the exact `mtjd`."""

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from drafting_single import model_of, prompts_of, runner_of, trained_forward
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_mtp.decoding.draft import Draft
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.proposers.tree import _without_replacement
from megatron_mtp.decoding.requests import Update
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling

pytestmark = pytest.mark.usefixtures("megatron")

TOKENS, PROMPT = 3, [0, 1, 2, 0, 1]
TARGET, SMALL = "gqa", "mha-tied-layernorm"
BEAM = {"method": "draft_model", "model": "-", "verifier": "joint"}


def log_probs(model: GPTModel, text: list[int], count: int) -> Tensor:
    """Return log-probabilities of the last `count` tokens, among the first `TOKENS`."""
    logits_SV = trained_forward(model, text)[0][-count - 1 : -1, :TOKENS]
    return logits_SV.log_softmax(-1).gather(1, torch.tensor(text[-count:]).unsqueeze(1))[:, 0]


def likeliest(model: GPTModel, text: list[int], count: int) -> list[int]:
    """Return the `count` tokens with the highest joint probability, from all possibilities."""
    every = [list(one) for one in product(range(TOKENS), repeat=count)]
    return max(every, key=lambda one: log_probs(model, text + one, count).sum().item())


def test_every_step_emits_the_argmax_of_the_joint_of_three_tokens() -> None:
    target, twin = Runner(model_of(TARGET), vocab_size=TOKENS), model_of(TARGET)
    seen: list[Update] = []
    config = {"method": "exhaustive", "num_speculative_tokens": 2, "verifier": "mtjd"}
    made = generate(target, [PROMPT], 13, speculative=config, emit=seen.append)
    (text,) = made.token_ids
    assert [len(update.tokens) for update in seen] == [1, 3, 3, 3, 3]
    for start in (1, 4, 7, 10):
        assert text[start : start + 3] == likeliest(twin, PROMPT + text[:start], 3)
    greedy = generate(target, [PROMPT], 13).token_ids[0]
    assert text != greedy
    ours, theirs = (log_probs(twin, PROMPT + one[:4], 3).sum() for one in (text, greedy))
    assert ours > theirs


def test_a_wide_beam_of_the_small_model_drafts_the_argmax_of_its_joint() -> None:
    """9 chains of three tokens are all possibilities before the last token."""
    target, small = (Runner(model_of(kind), vocab_size=TOKENS) for kind in (TARGET, SMALL))
    seen: list[Update] = []
    config = {**BEAM, "beam_width": 9, "num_speculative_tokens": 3}
    (text,) = generate(target, [PROMPT], 16, speculative=config, drafter=small, emit=seen.append).token_ids
    before = 0
    for update in seen:
        if update.draft is not None:
            assert update.draft.tokens_BN[0].tolist() == likeliest(model_of(SMALL), PROMPT + text[:before], 3)
        before += len(update.tokens)
    assert len(seen) > 4


def test_the_target_as_its_own_small_model_has_all_drafts_accepted() -> None:
    target, itself = (Runner(model_of(TARGET), vocab_size=TOKENS) for _ in range(2))
    config = {**BEAM, "beam_width": 4, "num_speculative_tokens": 3, "threshold": 0.999}
    made = generate(target, prompts_of_few(4), 41, Sampling(1.0), config, drafter=itself)
    assert made.stats.accepted_per_position == [1.0, 1.0, 1.0]


def prompts_of_few(batch: int) -> list[list[int]]:
    return [[token % TOKENS for token in prompt] for prompt in prompts_of(batch)]


@pytest.mark.parametrize("tau", [0.3, 0.8])
def test_joint_accepts_the_longest_prefix_above_tau(tau: float) -> None:
    """p > tau q holds for all that a step accepts, and for no longer prefix of its draft."""
    target, small = (Runner(model_of(kind), vocab_size=TOKENS) for kind in (TARGET, SMALL))
    twin, sampling, seen = model_of(TARGET), Sampling(1.5), list[Update]()
    config = {**BEAM, "beam_width": 2, "num_speculative_tokens": 3, "threshold": tau}
    (text,) = generate(target, [PROMPT], 60, sampling, config, [3], drafter=small, emit=seen.append).token_ids
    before, lengths = 0, set()
    for update in seen:
        if update.draft is not None and update.finish is None:
            ratios = ratios_of(twin, PROMPT + text[:before], update.draft, sampling)
            above = [number for number, ratio in enumerate(ratios, start=1) if ratio > tau]
            assert update.accepted == max(above, default=0)
            lengths.add(update.accepted)
        before += len(update.tokens)
    assert len(lengths) > 2


def ratios_of(twin: GPTModel, text: list[int], draft: Draft, sampling: Sampling) -> list[float]:
    """Return min(1, p/q) of every prefix of a draft."""
    tokens, probs = draft.tokens_BN[0].tolist(), draft.probs_BNV
    assert probs is not None
    q = [probs[0, place, token].item() for place, token in enumerate(tokens)]
    logits_SV = trained_forward(twin, text + tokens)[0][-len(tokens) - 1 : -1, :TOKENS]
    p = [sampling.probabilities(one_V)[token].item() for one_V, token in zip(logits_SV, tokens, strict=True)]
    return [min(1.0, prod(p[:end]) / prod(q[:end])) for end in range(1, len(tokens) + 1)]


def test_samples_without_replacement() -> None:
    """With weights 1/2, 3/10, 1/5: the pair i j has probability w_i w_j / (1 - w_i)."""
    count = 20000
    uniform_BN = torch.rand(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    drawn = _without_replacement(torch.tensor([0.5, 0.3, 0.2]).double().log().expand(count, -1), uniform_BN)
    expected = {(0, 1): 0.3, (0, 2): 0.2, (1, 0): 0.2143, (1, 2): 0.0857, (2, 0): 0.125, (2, 1): 0.075}
    for (one, other), chance in expected.items():
        found = ((drawn[:, 0] == one) & (drawn[:, 1] == other)).double().mean().item()
        assert found == pytest.approx(chance, abs=0.01)


@pytest.mark.parametrize(
    ("config", "vocab_size", "said"),
    [
        ({"method": "exhaustive", "num_speculative_tokens": 5}, 3, "at most 4 here, as a tree of all sequences may"),
        ({"method": "exhaustive"}, 300, "'exhaustive' drafts every token, and the vocabulary has 300; with more than"),
        ({"method": "exhaustive", "verifier": "spectr", "num_speculative_tokens": 1}, 3, "needs siblings that are"),
        ({**BEAM, "beam_width": 2, "num_speculative_tokens": 2, "verifier": "bild"}, 3, "give beam_width 1, or choose"),
    ],
)
def test_incompatible_settings_of_joint_decoding_are_rejected(
    config: dict[str, Any], vocab_size: int, said: str
) -> None:
    target, small = runner_of(TARGET), runner_of(SMALL)
    target.vocab_size = small.vocab_size = vocab_size
    with pytest.raises(ValueError, match=said):
        make_method(target, config_from(config), Sampling(), small)


def test_a_small_model_with_states_drafts_chains_alone() -> None:
    target, small = runner_of(TARGET), runner_of(SMALL)
    small.recurrent_trunk = True
    make_method(
        target, config_from({"method": "draft_model", "model": "-", "num_speculative_tokens": 2}), Sampling(), small
    )
    for config in (
        {**BEAM, "beam_width": 2, "num_speculative_tokens": 2},
        {"method": "draft_model_tree", "model": "-"},
    ):
        with pytest.raises(ValueError, match="recurrent layers, whose states do not branch; draft"):
            make_method(target, config_from(config), Sampling(), small)
