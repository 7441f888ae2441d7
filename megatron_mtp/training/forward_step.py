"""The forward step that Megatron's schedule calls for every microbatch: batch -> model -> loss function.

`ForwardStep` is what `pretrain()` takes as `forward_step_func`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers
from torch import Tensor

from megatron_mtp.config import MTPConfig, trained_depths
from megatron_mtp.data.batch import DepthBatch, depth_batch
from megatron_mtp.losses import depth_loss
from megatron_mtp.losses.schedule import depth_weights, kept_positions, scaling_factor
from megatron_mtp.model.mixing import drawn_ages
from megatron_mtp.training.batches import get_batch, packed_seq_params
from megatron_mtp.training.metrics import Metrics
from megatron_mtp.training.objective import NextTokensObjective, ObjectiveOutput

SPIKE = 10
"""`--check-for-spiky-loss` reports a loss that is this many times the largest so far."""


@dataclass
class ForwardStep:
    """Megatron's `forward_step_func`, with the settings and the metrics of this run."""

    settings: MTPConfig
    metrics: Metrics

    def __call__(self, data_iterator: Iterator[Any] | None, model: torch.nn.Module) -> tuple[Any, Any]:
        """The model's output and the function that makes a loss of it."""
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
        timers("batch-generator").stop()

        depths = None if batch["labels"] is None else self._mixed(depth_batch(batch))
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            packed_seq_params=packed_seq_params(batch),
            output_processor=self._objective(),
            output_processor_context=depths,
        )
        return output, self.loss

    def loss(self, output: ObjectiveOutput) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Megatron's loss function: the loss, the tokens to divide it by, and what to log, each as [sum, tokens]."""
        args = get_args()
        per_token, loss = args.calculate_per_token_loss, output.loss
        if not per_token:
            loss = (
                loss * args.context_parallel_size
            )  # Megatron takes the mean over ranks that each have a part of the sum
        _validate(loss)
        report = {"lm loss": output.main.report()}
        for depth, sums in enumerate(output.depths, start=1):
            report[f"mtp_{depth} loss"] = sums.report()
        self.metrics.add(report, output.acceptance)
        tokens = output.main.tokens if per_token else output.main.whole_tokens
        return loss, tokens.detach().int(), report

    def _mixed(self, batch: DepthBatch) -> DepthBatch:
        """In training with --mtp-hidden-state-mixing, with the ages of the states that the depths continue from."""
        if not (self.settings.mtp_hidden_state_mixing and torch.is_grad_enabled()):
            return batch
        args, positions_S = get_args(), batch.positions_S
        whole = positions_S.numel() * args.context_parallel_size
        seed = args.seed, args.curr_iteration
        return replace(batch, ages_DS=drawn_ages(trained_depths(args), seed, positions_S, whole))

    def _objective(self) -> NextTokensObjective:
        """The objective of this step, with the weights of its schedules."""
        args, settings = get_args(), self.settings
        step = args.curr_iteration if torch.is_grad_enabled() else 0  # --skip-train knows no step
        fraction = settings.mtp_token_fraction if torch.is_grad_enabled() else 1.0
        loss, factor = depth_loss(settings), scaling_factor(args, settings, step)
        return NextTokensObjective(
            depth_weights=depth_weights(settings, trained_depths(args), factor, loss.couples_depths),
            cp_group=mpu.get_context_parallel_group(),
            depth_loss=loss,
            per_token=args.calculate_per_token_loss,
            linear_main=settings.mtp_linear_ce_main or settings.mtp_train_only,
            trains_trunk=not settings.mtp_train_only,
            kept_positions=partial(kept_positions, fraction, (args.seed, step)),
            measures_acceptance=self._measures_acceptance(),
        )

    def _measures_acceptance(self) -> bool:
        """In evaluations, and on every N-th training step (--mtp-acceptance-interval)."""
        interval = self.settings.mtp_acceptance_interval
        is_asked_for = interval > 0 and (get_args().curr_iteration + 1) % interval == 0
        return is_asked_for or not torch.is_grad_enabled()


def _validate(loss: Tensor) -> None:
    """The checks of a microbatch's loss that Megatron's own forward step makes."""
    args = get_args()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, message in ((torch.isnan, "found NaN in the loss"), (torch.isinf, "found Inf in the loss")):
            machine.validate_result(result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
