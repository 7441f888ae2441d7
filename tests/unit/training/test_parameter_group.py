"""training/parameter_group.py: learning rates of the MTP layers, including in a run resumed with other flags."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron_mtp.config import MTPConfig

from megatron_mtp.training import run
from megatron_mtp.training.parameter_group import get_mtp_optimizer, keep_schedule

KINDS = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


def optimizer(rate: float, start: float) -> ChainedOptimizer:
    """Return three groups: trunk weights, trunk norms, and MTP layers at half the rate; parameters are `start`."""
    groups = [
        {"params": [torch.nn.Parameter(torch.tensor([start]))], **KINDS, "max_lr": rate, "min_lr": 0.0},
        {"params": [torch.nn.Parameter(torch.tensor([start]))], **KINDS, "max_lr": rate, "min_lr": 0.0, "wd_mult": 0.0},
        {"params": [torch.nn.Parameter(torch.tensor([start]))], **KINDS, "max_lr": rate / 2, "min_lr": 0.0},
    ]
    return ChainedOptimizer([FP32Optimizer(torch.optim.Adam(groups, lr=rate), OptimizerConfig(), None)])


def test_the_state_is_loaded_and_the_rates_are_kept() -> None:
    saved, run = optimizer(1e-3, 1.0), optimizer(1e-2, 1.0)
    for number, group in enumerate(saved.param_groups, start=1):
        group["params"][0].grad = torch.tensor([float(number)])
    saved.chained_optimizers[0].optimizer.step()
    state = saved.state_dict()
    with pytest.raises(ValueError, match="Could not find parameter group"):
        optimizer(1e-2, 1.0).load_state_dict(deepcopy(state))
    keep_schedule(run)
    run.load_state_dict(deepcopy(state))
    assert [(group["max_lr"], group["wd_mult"]) for group in run.param_groups] == [(1e-2, 1), (1e-2, 0), (5e-3, 1)]
    moments = [run.chained_optimizers[0].optimizer.state[group["params"][0]]["exp_avg"] for group in run.param_groups]
    assert torch.cat(moments).tolist() == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("overrides", [False, True])
def test_an_optimizer_keeps_the_flags_learning_rates_if_requested(
    overrides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "get_args", lambda: SimpleNamespace(override_opt_param_scheduler=overrides))
    made = run._optimizers(MTPConfig(), lambda *_, **__: optimizer(1e-2, 1.0))(OptimizerConfig(), [])
    assert ("load_state_dict" in vars(made.chained_optimizers[0])) == overrides


def test_the_lowest_rate_of_the_mtp_layers_is_in_proportion_to_their_highest() -> None:
    given: dict[str, Any] = {}
    config = OptimizerConfig(lr=1e-2, min_lr=1e-3)
    get_mtp_optimizer(config, [], lr=3e-2, make=lambda *_, **settings: given.update(settings))
    *_, own = given["config_overrides"].values()
    assert own == {"max_lr": 3e-2, "min_lr": pytest.approx(3e-3)}
