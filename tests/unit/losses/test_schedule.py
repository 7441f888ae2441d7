"""Losses and weights of the MTP layers, step by step, and which slots are drawn."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mtp.data.batch import depth_batch
from megatron_mtp.losses.distillation import AcceptedLength
from megatron_mtp.losses.head_objective import LossSum, depth_weights
from megatron_mtp.losses.objective import ObjectiveOutput, kept_positions, scaling_factor
from megatron_mtp.losses.paced import PacedCrossEntropy
from megatron_mtp.losses.table import check_loss, depth_loss
from megatron_mtp.spec.config import MTPConfig, loss_parts
from megatron_mtp.training import forward_step
from megatron_mtp.training.metrics import Metrics


def factors(steps: list[int], **settings: object) -> list[float]:
    config = MTPConfig(**settings)  # type: ignore[arg-type]
    return [scaling_factor(Namespace(mtp_loss_scaling_factor=0.3, train_iters=1000), config, step) for step in steps]


def test_lambda_is_constant_by_default() -> None:
    assert factors([0, 1000]) == [0.3, 0.3]


def test_a_step_schedule_changes_lambda_after_its_steps() -> None:
    settings = {"mtp_loss_schedule": "step", "mtp_loss_schedule_steps": 10, "mtp_loss_final_factor": 0.1}
    assert factors([0, 9, 10, 99], **settings) == [0.3, 0.3, 0.1, 0.1]


def test_a_schedule_below_one_is_a_fraction_of_all_steps() -> None:
    settings = {"mtp_loss_schedule": "step", "mtp_loss_schedule_steps": 0.676, "mtp_loss_final_factor": 0.1}
    assert factors([0, 675, 676, 999], **settings) == [0.3, 0.3, 0.1, 0.1]


def test_a_cosine_schedule_ends_after_its_steps() -> None:
    settings = {"mtp_loss_schedule": "cosine", "mtp_loss_schedule_steps": 10, "mtp_loss_final_factor": 0.1}
    assert factors([0, 5, 10, 99], **settings) == pytest.approx([0.3, 0.2, 0.1, 0.1])


def test_depths_share_lambda_by_their_weights() -> None:
    assert depth_weights(MTPConfig(), 3, 0.3) == pytest.approx([0.1, 0.1, 0.1])
    assert depth_weights(MTPConfig(mtp_loss_weights="1,0.8,0.6"), 3, 0.3) == pytest.approx([0.1, 0.08, 0.06])


def test_weights_of_depths_that_a_loss_couples_add_to_lambda() -> None:
    weights = depth_weights(MTPConfig(mtp_loss_weights="1,2,1"), 3, 0.4, AcceptedLength)
    assert weights == pytest.approx([0.1, 0.2, 0.1])
    assert depth_weights(MTPConfig(), 4, 0.4, AcceptedLength) == depth_weights(MTPConfig(), 4, 0.4)


def test_a_loss_with_its_own_depth_weights_ignores_the_default_ones() -> None:
    assert depth_weights(MTPConfig(drafter="dflash"), 3, 1.0) == pytest.approx([1, 0.607, 0.368], abs=1e-3)
    assert depth_weights(MTPConfig(drafter="dflash"), 3, 1.0, PacedCrossEntropy) == [1, 1, 1]
    given = MTPConfig(drafter="dflash", mtp_loss_weights="1,2,1")
    assert depth_weights(given, 3, 1.0, PacedCrossEntropy) == [1, 2, 1]


def test_positions_are_drawn_from_run_and_step_alone() -> None:
    assert kept_positions(1.0, (1, 2), 10) is None
    first, again, other = (kept_positions(0.25, seed, 10) for seed in ((1, 2), (1, 2), (1, 3)))
    assert first is not None
    assert again is not None
    assert other is not None
    assert len(set(first.tolist())) == 3  # 0.25 of 10, rounded up
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


# --- a schedule of losses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("kd", [("kd", 1.0)]),
        ("kd:1", [("kd", 1.0)]),
        ("lk:0.7,e2e_tv:0.3", [("lk", 0.7), ("e2e_tv", 0.3)]),
        ("ce:0.2,kd:0.5,ce:0.3", [("ce", 0.2), ("kd", 0.5), ("ce", 0.3)]),
    ],
)
def test_a_loss_schedule_is_parsed_into_parts(given: str, parts: list[tuple[str, float]]) -> None:
    assert loss_parts(given) == parts


WRONG_PARTS = "lk:0.7 lk:0.7,e2e_tv:0.2 lk:0.7,e2e_tv:0.4 lk,e2e_tv lk:0.7,e2e_tv lk:1.5,kd:-0.5 lk:1,kd:0 lk:nan,kd:1"


@pytest.mark.parametrize("given", [*WRONG_PARTS.split(), "lk:0.5,,kd:0.5", "lk:x,kd:1", "lk:0.5:kd:0.5"])
def test_wrong_parts_are_named_with_the_remedy(given: str) -> None:
    with pytest.raises(ValueError, match=r"; give one loss, .*, as in lk:0\.7,e2e_tv:0\.3") as caught:
        MTPConfig(mtp_loss=given)
    assert str(caught.value).startswith(f"--mtp-loss is '{given}'; ")


def phases(given: str, steps: int) -> list[int]:
    return [MTPConfig(mtp_loss=given).phase_at(step, steps) for step in range(steps)]


def test_a_phase_gets_its_share_of_the_steps() -> None:
    assert phases("kd", 3) == [0, 0, 0]
    assert phases("lk:0.7,e2e_tv:0.3", 10) == [0] * 7 + [1] * 3
    assert phases("lk:0.34,e2e_tv:0.66", 6) == [0, 0, 1, 1, 1, 1]
    assert phases("ce:0.2,kd:0.5,ce:0.3", 10) == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert phases("ce:0.1,kd:0.9", 3) == [1, 1, 1]  # a tenth of three steps rounds to zero
    assert MTPConfig(mtp_loss="lk:0.7,e2e_tv:0.3").phase_at(10, 10) == 1  # after the last step


def test_a_mix_can_be_a_phase() -> None:
    settings = MTPConfig(mtp_loss="mix:0.5,tv:0.5", mtp_loss_mix="ce=0.1,tv=0.9")
    assert settings.phases() == [MTPConfig(mtp_loss="mix", mtp_loss_mix="ce=0.1,tv=0.9"), MTPConfig(mtp_loss="tv")]
    check_loss(*settings.phases())
    with pytest.raises(ValueError, match=r"mix:0\.5,tv:0\.5 and --mtp-loss-mix None; 'mix' needs"):
        MTPConfig(mtp_loss="mix:0.5,tv:0.5")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mtp_lk_eta": 1.0}, None),
        ({"mtp_temperature": 2.0}, None),
        ({"mtp_z_loss": 0.1}, "--mtp-z-loss is 0.1, which --mtp-loss lk and e2e_tv does not read; drop the flag, "),
        ({"mtp_loss": "dpace", "mtp_z_loss": 0.1}, "--mtp-z-loss is 0.1, which --mtp-loss dpace does not read; drop"),
        ({"mtp_loss": "lk:0.7,mse:0.3"}, "--mtp-loss is 'mse'; choose one of ce, kd, tv, nla, lk, e2e_tv, dpace, mix."),
        ({"mtp_loss": "lk:0.7,kd:0.3", "drafter": "dspark"}, "--mtp-loss is kd, from which the confidence of"),
        ({"mtp_loss": "lk:0.7,tv:0.3", "drafter": "dspark"}, None),
    ],
)
def test_a_setting_is_read_in_one_phase_and_a_confidence_learns_in_all(
    settings: dict[str, Any], said: str | None
) -> None:
    made = MTPConfig(**{"mtp_loss": "lk:0.7,e2e_tv:0.3", **settings})
    if said is None:
        check_loss(*made.phases())
        return
    with pytest.raises(ValueError, match="--") as caught:
        check_loss(*made.phases())
    assert str(caught.value).startswith(said)


def test_a_drafter_beside_mtp_layers_keeps_its_own_loss() -> None:
    of_layers, of_drafter = MTPConfig(mtp_loss="lk:0.7,e2e_tv:0.3", drafter="eagle3").apart()
    assert (of_layers.mtp_loss, of_drafter.mtp_loss) == ("lk:0.7,e2e_tv:0.3", "kd")


def test_a_loop_without_step_numbers_rejects_a_loss_schedule() -> None:
    assert depth_loss(MTPConfig(mtp_loss="kd:1")) == depth_loss(MTPConfig(mtp_loss="kd"))
    with pytest.raises(ValueError, match=r"^--mtp-loss is 'lk:0\.7,e2e_tv:0\.3', .*; give one"):
        depth_loss(MTPConfig(mtp_loss="lk:0.7,e2e_tv:0.3"))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"curr_iteration": 6, "iteration": 0}, "lk"),
        ({"curr_iteration": 7, "iteration": 0}, "e2e_tv"),
        ({"curr_iteration": 0, "iteration": 10}, "e2e_tv"),  # an evaluation of a finished run
        ({"skip_train": True, "train_iters": None}, "e2e_tv"),
    ],
)
def test_a_forward_step_uses_the_loss_of_its_phase(
    state: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(mtp_num_layers=2, **{"train_iters": 10, "skip_train": False, **state})
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    step = forward_step.ForwardStep(MTPConfig(mtp_loss="lk:0.7,e2e_tv:0.3"), Metrics(None))
    (learner,) = step._learners
    assert learner.loss == depth_loss(MTPConfig(mtp_loss=expected))
    assert sum(learner.weights) == 1


def test_positions_and_blocks_are_drawn_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And equal in a run that resumes at that step; evaluations have the same blocks at every step."""
    args = SimpleNamespace(
        **{"mtp_num_layers": 2, "train_iters": 9, "skip_train": False, "calculate_per_token_loss": False, "seed": 5},
        **{"mtp_loss_scaling_factor": 0.3, "context_parallel_size": 1},
    )
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    monkeypatch.setattr(forward_step, "mpu", SimpleNamespace(get_context_parallel_group=lambda: None))
    batch = {name: torch.ones(1, 64) for name in ("tokens", "labels", "loss_mask")}
    drafter = MTPConfig(drafter="dflash", drafter_steps=2, drafter_blocks=8)
    drawn, begun, evaluated = list[list[int]](), list[list[int]](), list[list[int]]()
    for args.curr_iteration in (3, 4, 3):
        step = forward_step.ForwardStep(MTPConfig(mtp_token_fraction=0.25), Metrics(None))
        kept = step._objective().heads[0].kept_positions(64)
        assert kept is not None
        drawn.append(kept.tolist())
        for trains, found in ((True, begun), (False, evaluated)):
            with torch.set_grad_enabled(trains):
                (part,) = forward_step.ForwardStep(drafter, Metrics(None))._batches(depth_batch(batch, 2))
            assert part.blocks_A is not None
            found.append(part.blocks_A.tolist())
    for found in (drawn, begun):
        assert found[0] == found[2] != found[1]
    assert evaluated[0] == evaluated[1]


@pytest.mark.usefixtures("megatron")
def test_every_nth_step_measures_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 2 and 4 of 5, which the loop counts from 0; evaluations always measure."""
    args = SimpleNamespace(mtp_num_layers=1, seed=7, iteration=0, train_iters=5, skip_train=False)
    args.calculate_per_token_loss, args.mtp_loss_scaling_factor = False, 0.1
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    step = forward_step.ForwardStep(MTPConfig(mtp_acceptance_interval=2), Metrics(None))
    measured = []
    for args.curr_iteration in range(5):
        measured.append(step._objective().heads[0].measure is not None)
        with torch.no_grad():
            assert step._objective().heads[0].measure is not None
    assert measured == [False, True, False, True, False]


@pytest.mark.parametrize(("per_token", "expected"), [(False, (6.0, 9)), (True, (3.0, 5))])
def test_a_context_parallel_rank_returns_a_mean_of_all_ranks_or_its_own_sum(
    per_token: bool, expected: tuple[float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron averages over two ranks, or adds sums and tokens: 5 of this rank's, 9 of both."""
    args = SimpleNamespace(mtp_num_layers=0, train_iters=5, skip_train=False, context_parallel_size=2)
    args.calculate_per_token_loss, args.check_for_nan_in_loss_and_grad, args.check_for_spiky_loss = per_token, 0, 0
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    loss, tokens, whole_tokens = torch.tensor([3.0, 5.0, 9.0]).unbind()
    output = ObjectiveOutput(loss, LossSum(loss, tokens, whole_tokens), [])
    found = forward_step.ForwardStep(MTPConfig(), Metrics(None)).loss(output)
    assert (found[0].item(), found[1].item()) == expected


def test_the_log_names_each_loss_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(mtp_num_layers=2, train_iters=4, skip_train=False, iteration=1, rank=0)
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    step = forward_step.ForwardStep(MTPConfig(mtp_loss="lk:0.5,e2e_tv:0.5"), Metrics(None))
    for args.curr_iteration in (1, 1, 2, 3):
        step._name_phase()
        with torch.no_grad():
            step._name_phase()
    assert capsys.readouterr().out == "> from step 2 on --mtp-loss is lk\n> from step 3 on --mtp-loss is e2e_tv\n"
