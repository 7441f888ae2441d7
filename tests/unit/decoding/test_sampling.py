"""Sampling: what temperature, top-k, top-p and min-p keep, and random numbers that belong to a request."""

import pytest
import torch
from drafting_single import Launches
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron_mtp.decoding.sampling import (
    DRAFT,
    RECOVER,
    VERIFY,
    Noise,
    Penalties,
    Sampling,
    draw,
    penalized,
)

LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def test_temperature_zero_is_one_hot() -> None:
    assert Sampling().probabilities(LOGITS).tolist() == [0, 0, 0, 1]


def test_top_k_and_top_p() -> None:
    torch.testing.assert_close(Sampling(1.0).probabilities(LOGITS), LOGITS.exp())
    torch.testing.assert_close(Sampling(1.0, top_k=2).probabilities(LOGITS), torch.tensor([0, 0, 3 / 7, 4 / 7]))
    # 0.4 does not reach 0.5 yet, 0.4 + 0.3 does
    torch.testing.assert_close(Sampling(1.0, top_p=0.5).probabilities(LOGITS), torch.tensor([0, 0, 3 / 7, 4 / 7]))
    torch.testing.assert_close(Sampling(0.5).probabilities(LOGITS), torch.tensor([1, 4, 9, 16]) / 30)


def test_top_p_stops_where_the_mass_is_reached() -> None:
    """Of four equal tokens, two have exactly one half."""
    assert Sampling(1.0, top_p=0.5).probabilities(torch.zeros(4)).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_min_p() -> None:
    # 0.2 is half of 0.4
    torch.testing.assert_close(Sampling(1.0, min_p=0.49).probabilities(LOGITS), torch.tensor([0, 2 / 9, 3 / 9, 4 / 9]))
    torch.testing.assert_close(Sampling(1.0, min_p=0.51).probabilities(LOGITS), torch.tensor([0, 0, 3 / 7, 4 / 7]))
    assert Sampling(1.0, min_p=1.0).probabilities(LOGITS).tolist() == [0, 0, 0, 1]
    # temperature is applied first: 1, 4, 9, 16 of 30, where half of the best is 8
    torch.testing.assert_close(Sampling(0.5, min_p=0.5).probabilities(LOGITS), torch.tensor([0, 0, 9 / 25, 16 / 25]))
    # top-p is applied before min-p: 0.4 and 0.3 reach 0.55; after min-p, 4 of 7 would reach it alone
    both = Sampling(1.0, top_p=0.55, min_p=0.6).probabilities(LOGITS)
    torch.testing.assert_close(both, torch.tensor([0, 0, 3 / 7, 4 / 7]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.2), (12, 1.0, 0.1), (0, 0.8, 0.15), (9, 0.7, 0.3)])
def test_all_settings_together_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = 2 * torch.randn(64, 50, generator=torch.Generator().manual_seed(5), dtype=torch.double)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k or 50), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    expected = warpers(torch.zeros(64, 1, dtype=torch.long), logits).softmax(-1)
    made = Sampling(temperature, top_k, top_p, min_p).probabilities(logits)
    torch.testing.assert_close(made, expected)
    assert (made == 0).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1), ("min_p", 1.5)],
)
def test_values_that_are_not_allowed(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is {value}"):
        Sampling(**{"temperature": 1.0, field: value})  # type: ignore[arg-type]


def test_draw_never_gives_a_token_without_probability() -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-32], dtype=torch.double)
    assert draw(weights.expand(4, 5), uniform).tolist() == [1, 1, 3, 3]


def test_numbers_depend_on_seed_position_and_stream_alone() -> None:
    seeds, positions = torch.tensor([5, 6, 5, 5]), torch.tensor([1, 1, 1, 2])
    numbers = Noise(seeds, positions).uniform(DRAFT, 3)
    assert torch.equal(numbers[0], numbers[2])
    assert torch.equal(Noise(seeds[:1], positions[:1]).uniform(DRAFT, 3)[0], numbers[0])
    assert torch.equal(Noise(seeds, positions).uniform(DRAFT, 2), numbers[:, :2])
    others = [Noise(seeds, positions).uniform(stream, 3)[0] for stream in (VERIFY, RECOVER)]
    assert len({tuple(row.tolist()) for row in (*numbers[[0, 1, 3]], *others)}) == 5


def test_numbers_are_uniform_and_independent() -> None:
    """Adjacent seeds, positions and indices: the mean, the variance, and correlations within 5 standard errors."""
    noise = Noise(torch.arange(10_000), torch.arange(10_000) % 7)
    numbers = torch.cat([noise.uniform(DRAFT, 4), noise.uniform(VERIFY, 4)], 1)
    assert abs(numbers.mean().item() - 0.5) < 5 * (1 / 12) ** 0.5 / 80_000**0.5
    assert abs(numbers.var().item() - 1 / 12) < 5 * (1 / 180) ** 0.5 / 80_000**0.5
    correlation = torch.corrcoef(numbers.T) - torch.eye(8)
    assert correlation.abs().max() < 5 / 10_000**0.5
    assert torch.corrcoef(torch.stack([numbers[1:, 0], numbers[:-1, 0]]))[0, 1].abs() < 5 / 10_000**0.5


@pytest.mark.parametrize(("sampling", "launches"), [(Sampling(1.0), 18), (Sampling(0.7, 20, 0.9, 0.1), 29)])
@torch.inference_mode()
def test_a_token_is_drawn_in_few_launches(sampling: Sampling, launches: int) -> None:
    """From bfloat16 logits, with the random numbers of the round."""
    logits_BV, noise = torch.randn(2, 50).bfloat16(), Noise(torch.tensor([1, 2]), torch.tensor([5, 6]))
    with Launches() as counted:
        draw(sampling.probabilities(logits_BV), noise.uniform(RECOVER, 1)[:, 0])
    assert counted.names.total() == launches


@pytest.mark.parametrize("emitted", [256, 1029, 2099])
def test_least_tokens_are_counted_whatever_the_type_of_the_logits(emitted: int) -> None:
    """bfloat16 cannot represent 257, 1030 and 2100."""
    logits_RV, text = torch.zeros(1, 8, dtype=torch.bfloat16), [place % 7 for place in range(emitted)]
    early, enough = Penalties(least=emitted + 1, ends=frozenset([7])), Penalties(least=emitted, ends=frozenset([7]))
    assert penalized(early, text, 0, logits_RV)[0, 7] == -torch.inf
    assert penalized(enough, text, 0, logits_RV)[0, 7] == 0


def test_a_penalty_is_not_rounded_to_the_type_of_the_logits() -> None:
    penalized_RV = penalized(Penalties(frequency=0.25), [0] * 257, 0, torch.full((1, 2), 64.0, dtype=torch.bfloat16))
    assert penalized_RV.tolist() == [[64 - 0.25 * 257, 64]]
