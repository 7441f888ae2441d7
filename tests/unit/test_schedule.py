"""losses/objective.py: what the depths weigh, step by step, and which slots are drawn."""

from argparse import Namespace

import pytest

from megatron_mtp.config import MTPConfig
from megatron_mtp.losses.objective import depth_weights, kept_positions, scaling_factor


def factors(steps: list[int], **settings: object) -> list[float]:
    config = MTPConfig(**settings)  # type: ignore[arg-type]
    return [scaling_factor(Namespace(mtp_loss_scaling_factor=0.3), config, step) for step in steps]


def test_lambda_is_constant_by_default() -> None:
    assert factors([0, 1000]) == [0.3, 0.3]


def test_a_step_comes_after_its_steps() -> None:
    settings = {"mtp_loss_schedule": "step", "mtp_loss_schedule_steps": 10, "mtp_loss_final_factor": 0.1}
    assert factors([0, 9, 10, 99], **settings) == [0.3, 0.3, 0.1, 0.1]


def test_a_cosine_takes_its_steps() -> None:
    settings = {"mtp_loss_schedule": "cosine", "mtp_loss_schedule_steps": 10, "mtp_loss_final_factor": 0.1}
    assert factors([0, 5, 10, 99], **settings) == pytest.approx([0.3, 0.2, 0.1, 0.1])


def test_depths_share_lambda_by_their_weights() -> None:
    assert depth_weights(MTPConfig(), 3, 0.3) == pytest.approx([0.1, 0.1, 0.1])
    assert depth_weights(MTPConfig(mtp_loss_weights="1,0.8,0.6"), 3, 0.3) == pytest.approx([0.1, 0.08, 0.06])


def test_weights_of_depths_that_a_loss_couples_add_to_lambda() -> None:
    assert depth_weights(MTPConfig(mtp_loss_weights="1,2,1"), 3, 0.4, True) == pytest.approx([0.1, 0.2, 0.1])
    assert depth_weights(MTPConfig(), 4, 0.4, True) == depth_weights(MTPConfig(), 4, 0.4)


def test_positions_are_drawn_from_run_and_step_alone() -> None:
    assert kept_positions(1.0, (1, 2), 10) is None
    first, again, other = (kept_positions(0.25, seed, 10) for seed in ((1, 2), (1, 2), (1, 3)))
    assert first is not None
    assert again is not None
    assert other is not None
    assert len(set(first.tolist())) == 3  # 0.25 of 10, rounded up
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
