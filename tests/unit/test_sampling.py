"""Sampling: what temperature, top-k and top-p leave, and random numbers that belong to a request."""

import pytest
import torch

from megatron_mtp.drafting.sampling import DRAFT, RECOVER, VERIFY, Noise, Sampling, draw

LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def test_temperature_zero_is_one_hot() -> None:
    assert Sampling().probabilities(LOGITS).tolist() == [0, 0, 0, 1]


def test_top_k_and_top_p() -> None:
    torch.testing.assert_close(Sampling(1.0).probabilities(LOGITS), LOGITS.exp())
    torch.testing.assert_close(Sampling(1.0, top_k=2).probabilities(LOGITS), torch.tensor([0, 0, 3 / 7, 4 / 7]))
    # 0.4 does not hold 0.5 yet, 0.4 + 0.3 does
    torch.testing.assert_close(Sampling(1.0, top_p=0.5).probabilities(LOGITS), torch.tensor([0, 0, 3 / 7, 4 / 7]))
    torch.testing.assert_close(Sampling(0.5).probabilities(LOGITS), torch.tensor([1, 4, 9, 16]) / 30)


@pytest.mark.parametrize(("field", "value"), [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)])
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
    """Neighbouring seeds, positions and indices: the mean, the variance, and correlations within 5 standard errors."""
    noise = Noise(torch.arange(10_000), torch.arange(10_000) % 7)
    numbers = torch.cat([noise.uniform(DRAFT, 4), noise.uniform(VERIFY, 4)], 1)
    assert abs(numbers.mean().item() - 0.5) < 5 * (1 / 12) ** 0.5 / 80_000**0.5
    assert abs(numbers.var().item() - 1 / 12) < 5 * (1 / 180) ** 0.5 / 80_000**0.5
    correlation = torch.corrcoef(numbers.T) - torch.eye(8)
    assert correlation.abs().max() < 5 / 10_000**0.5
    assert torch.corrcoef(torch.stack([numbers[1:, 0], numbers[:-1, 0]]))[0, 1].abs() < 5 / 10_000**0.5
