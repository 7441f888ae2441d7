"""losses/objective.py: one scalar from all losses, in numbers that can be checked by hand."""

import math

import pytest
import torch
from torch import Tensor

from megatron_mtp.losses.head_objective import LossSum, depth_scales
from megatron_mtp.losses.objective import sum_losses


def loss_sum(total: float, tokens: int) -> LossSum:
    return LossSum(torch.tensor(total), torch.tensor(float(tokens)), torch.tensor(float(tokens)))


def whole_sum(losses_BS: Tensor, mask_BS: Tensor) -> LossSum:
    """Return the sum over a microbatch that is not split."""
    return sum_losses(losses_BS, mask_BS, mask_BS.float().sum())


def combined(main: LossSum, depths: list[LossSum], factor: float, per_token: bool) -> Tensor:
    """Return the scalar for Megatron's schedule, with lambda / D for every depth."""
    whole_tokens = torch.stack([sums.whole_tokens for sums in (main, *depths)])
    scales = depth_scales(whole_tokens, [factor / max(len(depths), 1)] * len(depths), per_token)
    return main.total + sum(scale * depth.total for scale, depth in zip(scales, depths, strict=True))


MAIN = loss_sum(8.0, 4)  # mean 2
DEPTHS = [loss_sum(9.0, 3), loss_sum(10.0, 2)]  # means 3 and 5


def test_default_is_the_main_mean_plus_lambda_over_d_times_the_depths_means() -> None:
    scalar = combined(MAIN, DEPTHS, 0.5, per_token=False)
    assert scalar.item() / 4 == 2 + 0.5 / 2 * (3 + 5)  # the schedule divides by the 4 main tokens


def test_per_token_adds_sums_which_the_schedule_divides_by_the_main_tokens() -> None:
    assert combined(MAIN, DEPTHS, 0.5, per_token=True).item() == 8 + 0.5 / 2 * (9 + 10)


@pytest.mark.parametrize("per_token", [False, True])
def test_without_depths_the_loss_is_the_trunks(per_token: bool) -> None:
    assert combined(MAIN, [], 0.5, per_token).item() == 8


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("factor", [0.0, 0.1])
def test_a_depth_without_tokens_adds_nothing(factor: float, per_token: bool) -> None:
    alone = combined(MAIN, [DEPTHS[0], loss_sum(0, 0)], factor, per_token)
    assert alone.item() == pytest.approx(8 + factor / 2 * (9 if per_token else 4 * 3))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("main_tokens", [0, 2])
def test_an_empty_mask_gives_gradient_zero_and_not_nan(main_tokens: int, per_token: bool) -> None:
    losses_BS = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    depth_losses_BS = torch.tensor([[4.0, 5.0, 6.0]], requires_grad=True)
    mask_BS = torch.zeros(1, 3)
    main_mask_BS = (torch.arange(3) < main_tokens).float().unsqueeze(0)
    main, empty = whole_sum(losses_BS, main_mask_BS), whole_sum(depth_losses_BS, mask_BS)
    loss = combined(main, [empty, empty], 0.3, per_token)
    loss.backward()
    assert loss.item() == [0, 1, 3][main_tokens]
    assert losses_BS.grad is not None
    assert losses_BS.grad.tolist() == main_mask_BS.tolist()
    assert depth_losses_BS.grad is not None
    assert depth_losses_BS.grad.tolist() == [[0, 0, 0]]


def test_a_masked_position_does_not_count_whatever_its_loss() -> None:
    mask_BS = torch.tensor([[1, 0, 1, 0]])
    sums = whole_sum(torch.tensor([[1.0, 3e38, 2.0, -7.0]]), mask_BS)
    assert (sums.total.item(), sums.tokens.item()) == (3, 2)


def test_sums_are_made_in_float32() -> None:
    sums = whole_sum(torch.full((1, 4096), 1.0, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bool))
    assert (sums.total.item(), sums.tokens.item()) == (4096, 4096)


def gradient_of_cut(cut: list[int], per_token: bool) -> Tensor:
    """Return the gradient of 12 slots' losses for a global batch split into microbatches of these sizes, as Megatron
    sums it.
    """
    losses = torch.arange(24, dtype=torch.float64).view(2, 12).requires_grad_()  # the trunk's and one depth's
    masks = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0]])
    start, total, tokens = 0, torch.tensor(0.0), torch.tensor(0.0)
    for size in cut:
        slots = slice(start, start + size)
        main, depth = (whole_sum(losses[row : row + 1, slots], masks[row : row + 1, slots]) for row in (0, 1))
        scalar = combined(main, [depth], 0.5, per_token)
        total = total + (scalar if per_token else scalar / main.tokens / len(cut))
        start, tokens = start + size, tokens + main.tokens
    (total / tokens if per_token else total).backward()
    assert losses.grad is not None
    return losses.grad


def test_per_token_gradients_do_not_depend_on_the_cut_into_microbatches() -> None:
    whole = gradient_of_cut([12], per_token=True)
    assert whole[0].tolist() == pytest.approx([m / 10 for m in (1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1)])
    assert whole[1].tolist() == pytest.approx([m / 20 for m in (1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0)])
    for cut in ([6, 6], [4, 4, 4], [1, 11], [5, 3, 4]):
        assert torch.allclose(gradient_of_cut(cut, per_token=True), whole)


def test_default_gradients_depend_on_the_cut_into_microbatches() -> None:
    """The reason for the per-token mode; if this fails, the test above proves nothing."""
    assert not torch.allclose(gradient_of_cut([5, 7], per_token=False), gradient_of_cut([12], per_token=False))


def test_report_is_sum_and_tokens_and_logs_zero_where_there_are_none() -> None:
    assert MAIN.report().tolist() == [8, 4]
    total, tokens = loss_sum(0, 0).report()
    assert (total / tokens).item() == 0
    total, tokens = loss_sum(0, 0).report() + loss_sum(9.0, 3).report()
    assert math.isclose((total / tokens).item(), 3)


def test_report_holds_no_graph() -> None:
    sums = whole_sum(torch.ones(1, 2, requires_grad=True), torch.ones(1, 2))
    assert not sums.report().requires_grad
