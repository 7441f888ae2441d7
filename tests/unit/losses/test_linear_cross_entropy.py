"""losses/linear_cross_entropy.py and its chunked losses, against their definitions: values and gradients."""

import pytest
import torch
from linear_cases import SETTINGS, Case, worst
from tiers import tiered
from torch import Tensor

from megatron_mtp.losses import linear_cross_entropy
from megatron_mtp.losses.distillation import (
    AcceptedLength,
    AdaptiveDivergence,
    Divergence,
    NegativeLogOverlap,
    TotalVariation,
)
from megatron_mtp.losses.linear_cross_entropy import Targets, Teacher, linear_loss
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.losses.token_loss import Chunk, CrossEntropy, TokenLoss
from megatron_mtp.megatron import cpu
from megatron_mtp.model.vocabulary import Vocabulary
from megatron_mtp.spec.config import MTPConfig

TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def usual_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "BLOCK_BYTES", "LEAST_POSITIONS"):
        monkeypatch.setattr(linear_cross_entropy, name, getattr(linear_cross_entropy, name))


some_seeds = pytest.mark.parametrize("seeds", tiered([range(10), range(10, 40)], [range(10)]), ids=["few", "many"])


@some_seeds
@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_gradients_are_those_of_the_definition(name: str, seeds: range) -> None:
    config = MTPConfig(**SETTINGS[name])
    found = {case: worst(case.chunked(config), case.plain(config)) for case in map(Case.drawn, seeds)}
    assert max(found.values()) <= TOLERANCE, max(found.items(), key=lambda item: item[1])


@some_seeds
@pytest.mark.parametrize("name", tiered(SETTINGS, ("ce with both", "kd", "mix")))
def test_a_draft_vocabulary_has_the_values_and_gradients_of_the_definition(name: str, seeds: range) -> None:
    config = MTPConfig(**SETTINGS[name])
    found = {}
    for case in map(Case.drawn, seeds):
        drafted_K = case.drafted()
        found[case] = worst(case.chunked(config, drafted_K=drafted_K), case.plain(config, drafted_K))
    assert max(found.values()) <= TOLERANCE, max(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize("drafted", [False, True], ids=["all-tokens", "drafted"])
@pytest.mark.parametrize("depths", [1, 2, 3, 4, 5])
def test_the_accepted_length_is_the_product_of_the_depths(depths: int, drafted: bool) -> None:
    """Any number of depths, in chunks and blocks that would split a position's depths."""
    config = MTPConfig(mtp_loss="e2e_tv")
    for rows_at_once in (1, 4, 7, 64):
        case = Case(11, depths, 8, 20, rows_at_once, 0.5, depths)
        drafted_K = case.drafted() if drafted else None
        assert worst(case.chunked(config, drafted_K=drafted_K), case.plain(config, drafted_K)) <= TOLERANCE


def test_the_logs_have_every_depths_own_rate_of_rejection() -> None:
    config = MTPConfig(mtp_loss="e2e_tv")
    states, targets, weight_VH, trunk_TH = CASE.leaves(config)
    arguments = states, targets, weight_VH, Vocabulary(len(weight_VH)), Teacher(trunk_TH)
    joint, sums_D = linear_loss(depth_loss(config), *arguments)
    alone, alone_D = linear_loss(TotalVariation(), *arguments)
    assert torch.allclose(sums_D, alone_D)
    assert joint > alone


@pytest.mark.parametrize("name", ["ce", "kd", "tv", "nla", "lk", "e2e_tv"])
def test_the_comparison_sees_another_draft_vocabulary(name: str) -> None:
    config, drafted_K = MTPConfig(**SETTINGS[name]), CASE.drafted()
    assert worst(CASE.chunked(config, drafted_K=drafted_K), CASE.plain(config, drafted_K[:-1])) > 1e-4


CASE = Case(8, 2, 8, 20, 4, 1.0, 3)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("ce", CrossEntropy(label_smoothing=0.01)),
        ("ce with z-loss", CrossEntropy(z_loss=0.0)),
        ("tv", TotalVariation(temperature=1.01)),
        ("nla", NegativeLogOverlap(temperature=1.01)),
        ("lk", AdaptiveDivergence(eta=3.1)),
        ("e2e_tv", AcceptedLength(temperature=1.01)),
    ],
)
def test_the_comparison_sees_a_wrong_loss(given: str, wrong: TokenLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MTPConfig(**SETTINGS[given])
    monkeypatch.setattr(type(wrong), "of", lambda _: wrong)
    assert worst(CASE.chunked(config), CASE.plain(config)) > 1e-4


def test_a_frozen_head_gets_no_gradient_and_states_get_the_same() -> None:
    states, targets, weight_VH, _ = CASE.leaves()
    trained = CASE.chunked(MTPConfig())
    leaves = [state_NH.requires_grad_() for state_NH in states]
    total, _ = linear_loss(CrossEntropy(), leaves, targets, weight_VH, Vocabulary(len(weight_VH)))
    total.backward()
    assert weight_VH.grad is None
    for leaf, gradient in zip(leaves, trained[1:], strict=False):
        assert torch.allclose(leaf.grad, gradient, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SETTINGS)
def test_padding_of_the_vocabulary_has_no_gradient_at_all(name: str) -> None:
    case = CASE.padded(6)
    *_, weight_grad_VH = case.chunked(MTPConfig(**SETTINGS[name]))
    assert not weight_grad_VH[case.vocabulary :].any()
    assert weight_grad_VH[: case.vocabulary].any(1).all()


def test_the_comparison_sees_padding_that_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE.padded(6)
    monkeypatch.setattr(Case, "entries", lambda _, slice_size, *__: Vocabulary(slice_size))
    assert worst(case.chunked(MTPConfig()), case.plain(MTPConfig())) > 1e-2


def test_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd functions are told that their inputs need gradients even if none are recorded."""
    states, targets, weight_VH, _ = CASE.leaves()
    leaves = [state_NH.requires_grad_() for state_NH in states]
    products: list[str] = []
    monkeypatch.setattr(linear_cross_entropy, "add_product", lambda *_: products.append("of the weight"))
    monkeypatch.setattr(torch, "mm", lambda *_, out: products.append("of the states"))
    values = []
    for training in (True, False):
        with torch.set_grad_enabled(training):
            arguments = leaves, targets, weight_VH.requires_grad_(), Vocabulary(len(weight_VH))
            values.append(linear_loss(CrossEntropy(), *arguments)[1])
        assert set(products) == ({"of the weight", "of the states"} if training else set())
        products.clear()
    assert torch.allclose(*values)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("surplus", [15, 25, 41, 60, 80, 95, 101, 110, 300])
def test_tokens_that_the_trunk_rules_out_have_a_finite_divergence(surplus: float, temperature: float) -> None:
    """Regression: log q - log p of 88 was inf in float32, and NaN if p was 0; here it is about `surplus`, at three
    tokens.
    """
    generator = torch.Generator().manual_seed(0)
    logits_NV, teacher_NV = torch.randn(2, 5, 50, generator=generator)
    teacher_NV[:, [3, 20, 49]] -= surplus * temperature
    leaf_NV = logits_NV.double().requires_grad_()
    log_p_NV, log_q_NV = ((each / temperature).log_softmax(1) for each in (teacher_NV.double(), leaf_NV))
    exact_N = temperature**2 * (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(1)
    (exact_NV,) = torch.autograd.grad(exact_N.sum(), leaf_NV)
    labels_N = torch.zeros(5, dtype=torch.int64)
    loss_N, gradient_NV = Divergence(temperature)(
        Chunk(logits_NV.clone(), labels_N, teacher_NV.clone(), Vocabulary(50))
    )
    assert worst([loss_N, gradient_NV], [exact_N.detach(), exact_NV]) <= 1e-6


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("apart", [5, 17, 40, 80, 100, 110, 300])
def test_a_small_overlap_has_its_exact_logarithm_and_a_gradient_that_does_not_vanish(
    apart: float, temperature: float
) -> None:
    """Trunk and MTP layer favor different tokens by so many nats; 1 - tv is 0 in float32 from 17 on."""
    generator = torch.Generator().manual_seed(0)
    logits_NV, teacher_NV = torch.randn(2, 5, 50, generator=generator)
    logits_NV[:, 3] += apart * temperature
    teacher_NV[:, 20] += apart * temperature
    leaf_NV = logits_NV.double().requires_grad_()
    q_NV, p_NV = ((each / temperature).softmax(1) for each in (leaf_NV, teacher_NV.double()))
    exact_N = -torch.minimum(q_NV, p_NV).sum(1).log()
    (exact_NV,) = torch.autograd.grad(exact_N.sum(), leaf_NV)
    chunk = Chunk(logits_NV.clone(), torch.zeros(5, dtype=torch.int64), teacher_NV.clone(), Vocabulary(50))
    assert worst([*NegativeLogOverlap(temperature)(chunk)], [exact_N.detach(), exact_NV]) <= 1e-5
    assert exact_NV.abs().amax(1).min() > 0.1


@pytest.mark.parametrize("loss", [TotalVariation(), NegativeLogOverlap(), AdaptiveDivergence()])
def test_distributions_with_nothing_in_common_have_finite_losses_and_gradients(loss: TokenLoss) -> None:
    logits_NV, teacher_NV = torch.zeros(2, 3, 50)
    logits_NV[:, 3] = teacher_NV[:, 20] = 1e5
    loss_N, gradient_NV = loss(Chunk(logits_NV, torch.zeros(3, dtype=torch.int64), teacher_NV, Vocabulary(50)))
    assert loss_N.isfinite().all()
    assert gradient_NV.isfinite().all()


def test_a_position_of_weight_zero_counts_nowhere_whatever_its_loss() -> None:
    states_NH = torch.tensor([[1.0, 0.0], [1e30, 0.0]]).requires_grad_()
    weight_VH = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    targets = Targets(torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]), torch.tensor([1.0]))
    total, sums_D = linear_loss(CrossEntropy(), [states_NH], targets, weight_VH, Vocabulary(2))
    total.backward()
    assert sums_D.tolist() == [pytest.approx(0.126928)]  # log(1 + exp(-2))
    assert states_NH.grad is not None
    assert states_NH.grad[1].tolist() == [0, 0]


def batch_with_prompts() -> tuple[list[Tensor], Targets, Tensor, Teacher]:
    """Two depths of 2 rows of 6, and a trunk. The first 4 positions of row 0 and the last one of row 1 are masked.

    Position 2 of row 1 counts at depth 1 alone.
    """
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 6, 8, generator=generator).requires_grad_() for _ in range(2)]
    mask_DBS = torch.ones(2, 2, 6)
    mask_DBS[:, 0, :4] = mask_DBS[:, 1, 5] = mask_DBS[1, 1, 2] = 0
    taught_DBS = torch.arange(12).view(2, 6) + torch.arange(2).view(2, 1, 1)
    targets = Targets(
        torch.randint(20, (2, 2, 6), generator=generator),
        mask_DBS,
        torch.tensor([0.5, 2.0]),
        taught_DBS,
        torch.zeros(2, 2, 6),
        torch.zeros(2, 2, 6, 3, dtype=torch.int64),
    )
    weight_VH, trunk_TH = torch.randn(20, 8, generator=generator), torch.randn(13, 8, generator=generator)
    return states, targets, weight_VH, Teacher(trunk_TH)


@pytest.mark.skipif(not cpu.installed(), reason="a GPU computes them, so that the host need not wait for the mask")
def test_positions_that_count_at_no_depth_cost_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    product = linear_cross_entropy._Products.of

    def counted(products: linear_cross_entropy._Products, states_NH: Tensor, chunk: slice) -> Tensor:
        rows.append(len(states_NH))
        return product(products, states_NH, chunk)

    monkeypatch.setattr(linear_cross_entropy._Products, "of", counted)
    states, targets, weight_VH, teacher = batch_with_prompts()
    linear_loss(TotalVariation(), states, targets, weight_VH, Vocabulary(20), teacher)
    assert sorted(rows) == [8, 2 * 7]  # 8 states of the trunk teach 7 positions, at two depths each


def test_skipping_uncounted_positions_changes_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for leaves_out in (True, False):
        if not leaves_out:
            monkeypatch.setattr(linear_cross_entropy, "_counted", lambda _: None)
        states, targets, weight_VH, teacher = batch_with_prompts()
        total, sums_D = linear_loss(TotalVariation(), states, targets, weight_VH, Vocabulary(20), teacher)
        total.backward()
        counts_BS = targets.mask_DN.any(0)
        assert targets.overlap_DN is not None
        assert targets.likeliest_DNC is not None
        outputs = targets.overlap_DN[:, counts_BS], targets.likeliest_DNC[:, counts_BS].double()
        gradients = [state.grad for state in states if state.grad is not None]
        assert len(gradients) == 2
        found.append([total.detach(), sums_D, *gradients, *outputs])
    assert worst(*found) <= TOLERANCE


@pytest.mark.parametrize("scale", tiered([400.0, 0.1, 0.01], (400.0,)))
def test_float16_keeps_the_gradients_of_unlikely_tokens(scale: float) -> None:
    """As with autograd, where the loss scale is applied before rounding; gradients of many slots do not overflow
    either.
    """
    generator = torch.Generator().manual_seed(0)
    slots, hidden, entries, often = 512, 64, 32_000, 640
    states_NH = torch.randn(slots, hidden, generator=generator).half().cuda() + 0.5
    weight_VH = (0.06 * torch.randn(entries, hidden, generator=generator)).half().cuda()
    labels_N = torch.randint(often, (slots,), generator=generator).cuda()
    labels_N[: slots // 2] = 7  # half of the slots add to one row
    leaves = [states_NH.double().requires_grad_(), weight_VH.double().requires_grad_()]
    exact = scale * torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].t(), labels_N, reduction="sum")
    exact_NH, exact_VH = torch.autograd.grad(exact, leaves)
    halves = [states_NH.requires_grad_(), weight_VH.requires_grad_()]
    targets = Targets(labels_N[None], torch.ones(1, slots).cuda(), torch.tensor([scale]).cuda())
    total, _ = linear_loss(CrossEntropy(), halves[:1], targets, weight_VH, Vocabulary(entries))
    loss_scale = 16 / scale
    found_NH, found_VH = torch.autograd.grad(loss_scale * total, halves)
    for found, expected in ((found_NH, exact_NH), (found_VH, exact_VH), (found_VH[often:], exact_VH[often:])):
        assert (found.double() / loss_scale - expected).norm() <= 1e-3 * expected.norm()


def test_bfloat16_keeps_its_statistics_in_float32() -> None:
    states, targets, weight_VH, _ = Case(512, 1, 32, 4096, 64, 1.0, 0).leaves()
    rounded = [states[0].bfloat16().requires_grad_()], weight_VH.bfloat16().requires_grad_()
    exact = [rounded[0][0].detach().float().requires_grad_()], rounded[1].detach().float().requires_grad_()
    found = []
    for hidden, weight in (rounded, exact):
        total, _ = linear_loss(CrossEntropy(), hidden, targets, weight, Vocabulary(4096))
        total.backward()
        found.append((total, hidden[0].grad, weight.grad))
    (total, *gradients), (exact_total, *exact_gradients) = found
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact_total.item(), rel=2e-3)
    for gradient, other in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.float() - other).norm() <= 1e-2 * other.norm()
