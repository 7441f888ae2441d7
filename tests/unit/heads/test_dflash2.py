"""heads/dflash2/ and losses/selector.py: equal to DFlash initially, convolutions within blocks, choice among 16 tokens.

Losses and gradients of whole blocks against the definition are in test_block_drafter.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from block_reference import DRAFTS, KINDS, LAYERS, READ, drafter_model, losses
from drafting_single import Recorder, model_of, prefilled, prompts_of, run, runner_of, trained_forward
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_single import our_model, transformer_config
from torch import Tensor

from megatron_mtp.decoding.draft import Round
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Noise, Sampling
from megatron_mtp.heads.dflash2.block import Convolution
from megatron_mtp.losses.linear_cross_entropy import Targets
from megatron_mtp.losses.selector import candidate_logits, chosen_logits_, selector_loss
from megatron_mtp.model.head import Head
from megatron_mtp.model.initialize import RandomWeights
from megatron_mtp.model.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("megatron")


def made(kind: str) -> GPTModel:
    given: dict[str, Any] = {"num_layers": LAYERS, "drafter_layers": READ, "drafter": KINDS[kind]}
    model = our_model(DRAFTS, **given).eval()
    model.max_sequence_length = 160
    return model


def new_beside(flash: GPTModel, monkeypatch: pytest.MonkeyPatch) -> GPTModel:
    """Return a newly initialized DFlash2 drafter with the weights of a DFlash drafter."""
    with monkeypatch.context() as patch:
        patch.setattr("megatron_single.randomize", lambda _: None)
        new = made("dflash2")
    lost, unknown = new.load_state_dict(flash.state_dict(), strict=False)
    assert {name.rpartition(".")[2] for name in lost} == {
        *("base_kernel", "kernel_projection", "markov_w1", "markov_w2", "markov_projection")
    }
    assert not unknown
    weights = RandomWeights(seed=1, deviation=0.1, layers=LAYERS)
    with torch.no_grad():
        for name in lost:
            weight = new.get_parameter(name)
            drawn = weights.draw(name, weight.shape)
            assert drawn is not None
            if not name.endswith(("markov_w1", "markov_projection")):
                assert torch.equal(weight, drawn.to(weight)), name
            weight.copy_(drawn)
    return new


def test_a_new_drafter_is_the_dflash_drafter_of_its_weights_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, and in drafting with Megatron's modules."""
    monkeypatch.setattr("megatron_mtp.decoding.backend.lean", lambda *_: None)
    flash = made("dflash")
    new, recorded = new_beside(flash, monkeypatch), []
    trained = [trained_forward(model, [*range(5, 25)])[1] for model in (flash, new)]
    assert_same_choice(torch.cat(trained[0]), torch.cat(trained[1]))
    for model, method in ((flash, "dflash"), (new, "dflash2")):
        with monkeypatch.context() as patch:
            recorder = Recorder(patch)
            texts = run(Runner(model), prompts_of(2), 12, {"method": method})[0].token_ids
        recorded.append((texts, recorder.drafts))
    (texts, drafts), (same, chosen) = recorded
    assert same == texts
    assert len(chosen) == len(drafts) > 10
    for (*when, logits_BV), (*own_when, own_BV) in zip(drafts, chosen, strict=True):
        assert own_when == when
        assert_same_choice(logits_BV, own_BV)


def assert_same_choice(logits_NV: Tensor, chosen_NV: Tensor) -> None:
    """Check for the same bits for 16 tokens, including the most likely one."""
    is_candidate_NV = chosen_NV > -torch.inf
    assert (is_candidate_NV.sum(1) == 16).all()
    assert torch.equal(chosen_NV[is_candidate_NV], logits_NV[is_candidate_NV])
    assert torch.equal(chosen_NV.argmax(1), logits_NV.argmax(1))


# --- convolutions -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_convolution_adds_the_row_before_within_each_block() -> None:
    conv = Convolution(transformer_config(None, hidden_size=16))
    conv.rows = 3
    conv.base_kernel[0], conv.base_kernel[1] = torch.tensor([[2.0], [10.0]]), torch.tensor([[1.0], [-1.0]])
    values_SBH = torch.arange(1.0, 7).view(6, 1, 1).expand(6, 1, 16).cuda()
    added = conv.of_rows(values_SBH)
    assert conv(values_SBH, added, 0)[:, 0, 5].tolist() == [2, 14, 26, 8, 50, 62]
    assert conv(values_SBH, added, 1)[:, 0, 5].tolist() == [1, 1, 1, 4, 1, 1]
    assert conv(values_SBH[:2], added[:2], 0)[:, 0, 5].tolist() == [2, 14]


@torch.no_grad()
def test_a_row_adds_one_kernel_offset_per_16_channels() -> None:
    """Outputs of the projection: side by side, then tap by tap, then group by group."""
    conv = Convolution(transformer_config(None, hidden_size=32))
    conv.rows = 2
    conv.base_kernel.zero_()
    conv.kernel_projection[:, 0] = torch.arange(1.0, 9).cuda()
    values_SBH = torch.ones(2, 1, 32).cuda()
    added = conv.of_rows(values_SBH)
    for side, first, second in ((0, (1, 2), (4, 6)), (1, (5, 6), (12, 14))):
        made_SG = conv(values_SBH, added, side)[:, 0].unflatten(1, (2, 16))
        assert made_SG[0].tolist() == [[each] * 16 for each in first]
        assert made_SG[1].tolist() == [[each] * 16 for each in second]


def test_a_convolution_that_crosses_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drafter_model("dflash2")
    for module in model.modules():
        if isinstance(module, Convolution):
            module.rows *= 2
    ours, expected, _, _ = losses(model, "dflash2", blocks=4)
    assert abs(ours - expected) / expected > 1e-3


# --- the choice among candidates --------------------------------------------------------------------------------------

ROWS, HIDDEN, RANK, TOKENS, COUNT = 10, 8, 3, 40, 16


def head_of(weight_VH: Tensor, bias_VR: Tensor, **others: Any) -> Head:
    group = parallel_state.get_tensor_model_parallel_group()
    nothing: Any = None
    return Head(nothing, nothing, group, weight_VH, nothing, bias_rows=bias_VR, candidates=COUNT, **others)


def plain_loss(states_DNX: Tensor, weight_VH: Tensor, bias_VR: Tensor, labels_DN: Tensor) -> tuple[Tensor, int]:
    """Return cross-entropies [D, N] of the choice, row by row, and how many rows have no candidate as label."""
    lost, found = 0, []
    for state_X, label in zip(states_DNX.flatten(0, 1), labels_DN.flatten().tolist(), strict=True):
        unary_V = weight_VH @ state_X[:HIDDEN]
        candidates = sorted(range(TOKENS), key=lambda token: -float(unary_V[token]))[:COUNT]
        if label not in candidates:
            candidates, lost = [*candidates[:-1], label], lost + 1
        scores = torch.stack([unary_V[token] + bias_VR[token] @ state_X[HIDDEN:] for token in candidates])
        found.append(-scores.log_softmax(0)[candidates.index(label)])
    return torch.stack(found).view_as(labels_DN), lost


def test_the_selector_loss_matches_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, in float32; rows that do not count have no gradient, and the head has none at all."""
    monkeypatch.setattr("megatron_mtp.losses.selector.ROWS_AT_ONCE", 7)
    generator = torch.Generator().manual_seed(4)
    states_DNX = torch.randn(2, ROWS, HIDDEN + RANK, generator=generator).cuda().requires_grad_()
    weight_VH = torch.randn(TOKENS, HIDDEN, generator=generator).cuda()
    bias_VR = torch.randn(TOKENS, RANK, generator=generator).cuda().requires_grad_()
    labels_DN = torch.randint(0, TOKENS, (2, ROWS), generator=generator).cuda()
    mask_DN = (torch.rand(2, ROWS, generator=generator) > 0.3).float().cuda()
    scale_D, head = torch.tensor([0.5, 2.0]).cuda(), head_of(weight_VH, bias_VR)
    likeliest_DNC = head.vocabulary().largest((states_DNX[..., :HIDDEN] @ weight_VH.t()).detach(), COUNT)
    targets = Targets(labels_DN, mask_DN, scale_D, likeliest_DNC=likeliest_DNC)
    ours = selector_loss(list(states_DNX.unbind(0)), targets, head)
    losses_DN, lost = plain_loss(states_DNX, weight_VH, bias_VR, labels_DN)
    wanted = ((losses_DN * mask_DN).sum(1) * scale_D).sum()
    assert 0 < lost < 2 * ROWS
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=0)
    for found, right in zip(*(torch.autograd.grad(one, (states_DNX, bias_VR)) for one in (ours, wanted)), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
        assert right.abs().max() > 0.1


def test_a_label_replaces_the_weakest_candidate() -> None:
    """The label 4 is compared with 7 and 2; the logits are 0.5 of token 7, -0.5 of 2, and 0.25 of 4."""
    logits_V = torch.tensor([0.0, 0.0, -0.5, 0.0, 0.25, -9.0, 0.0, 0.5]).cuda()
    head = head_of(logits_V.unsqueeze(1), torch.zeros(8, 1).cuda())
    one_11 = torch.ones(1, 1).cuda()
    targets = Targets(
        torch.tensor([[4]]).cuda(), one_11, torch.ones(1).cuda(), likeliest_DNC=torch.tensor([[[7, 2, 5]]]).cuda()
    )
    loss = selector_loss([torch.tensor([[1.0, 0.0]]).cuda()], targets, head)
    wanted = -torch.tensor([0.5, -0.5, 0.25]).log_softmax(0)[2]
    torch.testing.assert_close(loss.cpu(), wanted)


def test_vocabulary_padding_is_never_a_candidate() -> None:
    """The head has four rows for three tokens; the fourth row has the largest logit."""
    vocabulary = Vocabulary(4, tokens=3)
    assert vocabulary.largest(torch.tensor([[0.0, 5.0, 1.0, 9.0]]), 2).tolist() == [[1, 2]]
    head = head_of(torch.tensor([[0.0], [5.0], [1.0], [9.0]]).cuda(), torch.tensor([[0.0], [0.0], [7.0], [0.0]]).cuda())
    states_NX, tokens_NC = torch.tensor([[1.0, 1.0]]).cuda(), torch.tensor([[1, 2]]).cuda()
    assert candidate_logits(states_NX, tokens_NC, head).tolist() == [[5, 8]]
    few = replace(head, candidates=2, vocab_size=3)
    logits_NV = chosen_logits_(torch.tensor([[0.0, 5.0, 1.0, 9.0]]).cuda(), states_NX, few)
    assert logits_NV.softmax(-1)[0].tolist() == pytest.approx([0, 0.0474259, 0.9525741, 0])


def p_of(tokens: list[int], q_V: Tensor) -> float:
    """Return p of the chi-square test over the tokens that q allows."""
    counts_V = torch.bincount(torch.tensor(tokens), minlength=len(q_V)).double()
    assert counts_V[q_V == 0].sum() == 0
    expected = q_V[q_V > 0] * len(tokens)
    statistic = ((counts_V[q_V > 0] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


@torch.inference_mode()
def test_a_sampled_walk_has_the_distribution_of_its_scores() -> None:
    """softmax(S / T) over the 16 candidates, from the training forward pass; the second draft given the first."""
    target, twin, temperature, rows = runner_of("dflash2"), model_of("dflash2"), 0.5, 500
    (text,) = run(target, [[4, 8, 15, 16, 23]], 1, None)[0].token_ids
    sampling, firsts, pairs, q = Sampling(temperature), list[int](), list[tuple[int, int]](), None
    for turn in range(4):
        sequences = prefilled(target, [text[:-1]] * rows).sequences
        assert sequences.token_ids == [text] * rows
        method = make_method(target, config_from({"method": "dflash2"}), sampling)
        noise = Noise(torch.arange(rows).to(sequences.newest_B) + turn * rows, sequences.noise.position_B)
        draft = method.proposer.propose(sequences, Round(sampling, noise, method.config), method.count)
        firsts += draft.tokens_BN[:, 0].tolist()
        pairs += [(first, second) for first, second, _ in draft.tokens_BN.tolist()]
        assert draft.probs_BNV is not None
        q = draft.probs_BNV[0, 0]

    def wanted(path: list[int]) -> Tensor:
        logits_SV = trained_forward(twin, [*text, *path, *[0] * (3 - len(path))])[1][len(path)]
        return (logits_SV[len(text) - 2] / temperature).softmax(-1)

    first_V, likeliest = wanted([]), max(set(firsts), key=firsts.count)
    assert q is not None
    assert int((q > 0).sum()) == 16
    torch.testing.assert_close(q, first_V, rtol=1e-6, atol=1e-9)
    assert p_of(firsts, first_V) > 0.001
    seconds = [second for first, second in pairs if first == likeliest]
    assert len(seconds) > 150
    assert p_of(seconds, wanted([likeliest])) > 0.001
    hotter_V = first_V.sqrt() / first_V.sqrt().sum()  # planted: twice the temperature
    assert p_of(firsts, hotter_V) < 0.001


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_draft_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a draft vocabulary has 3; leave out --mtp-draft-"):
        our_model(DRAFTS, drafted=[1, 2, 3], num_layers=LAYERS, drafter_layers=READ, drafter=KINDS["dflash2"])


def test_a_hidden_size_that_is_not_a_multiple_of_16_is_rejected() -> None:
    with pytest.raises(ValueError, match="size is 40, and --drafter dflash2 needs a multiple of 16"):
        our_model(DRAFTS, num_layers=LAYERS, hidden_size=40, drafter_layers=READ, drafter=KINDS["dflash2"])
