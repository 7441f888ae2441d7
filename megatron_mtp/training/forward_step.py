"""Forward step that Megatron's schedule calls for every microbatch: batch -> model -> loss function.

`ForwardStep` is the `forward_step_func` of `pretrain()`. `get_batch` reads a rank's microbatch with Megatron's loader,
adds the entries of all MTP layers, and slices it for context parallelism.

Letters in names: D depths, S sequence, B batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from torch import Tensor

from megatron_mtp.data.batch import (
    DepthBatch,
    depth_batch,
    documents_from_eod,
    documents_from_offsets,
    join_rows,
    keep_positions,
    mask_ignored_labels,
    positions_of_ranks,
    to_device,
)
from megatron_mtp.losses.acceptance import measured
from megatron_mtp.losses.head_objective import HeadObjective, base_share, depth_weights, with_draws
from megatron_mtp.losses.objective import NextTokensObjective, ObjectiveOutput, kept_positions, scaling_factor
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.losses.token_loss import TokenLoss
from megatron_mtp.model.packed_rows import PackedRows
from megatron_mtp.model.stage_output import StageOutput
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import HEADS, HeadSettings, drafted_steps, heads_of, trained_depths
from megatron_mtp.training.reading_stages import reads_data, reads_everything, reads_packed_rows, reads_positions
from megatron_mtp.training.short_log import say

if TYPE_CHECKING:
    from megatron_mtp.training.metrics import Metrics
    from megatron_mtp.training.state_cache import StateCache

SPIKE = 10
"""Factor over the largest loss so far at which `--check-for-spiky-loss` reports a loss."""


@dataclass(frozen=True)
class _Learner:
    """Constants of a draft head that are the same in every step.

    Attributes:
        weights: of depth 1 .. D, where lambda is 1.
    """

    head: HeadSettings
    loss: TokenLoss
    weights: list[float]

    @classmethod
    def of(cls, head: HeadSettings) -> "_Learner":
        loss = depth_loss(head.settings)
        return cls(head, loss, depth_weights(head.settings, head.depths, 1.0, loss))

    @property
    def figures(self) -> str:
        """Return the prefix of its metrics."""
        return HEADS[self.head.name]


@dataclass
class ForwardStep:
    """Megatron's `forward_step_func`, with the settings and metrics of this run."""

    settings: MTPConfig
    metrics: "Metrics"
    _named: int | None = field(default=None, init=False)  # the phase that was last logged
    _cache: "StateCache | None" = field(default=None, init=False)

    @cached_property
    def _phases(self) -> list[list[_Learner]]:
        """Return the learners of every phase of --mtp-loss: one for every draft head."""
        args = get_args()
        sizes = trained_depths(args), drafted_steps(args)
        return [[_Learner.of(head) for head in heads_of(phase, *sizes)] for phase in self.settings.phases()]

    @property
    def _learners(self) -> list[_Learner]:
        """Return the learners of this step's phase."""
        return self._phases[self._phase]

    @property
    def _phase(self) -> int:
        """Return the phase of this step; in an evaluation, of the step before it; with --skip-train, the last one."""
        args = get_args()
        if len(self._phases) == 1 or args.skip_train:
            return -1
        step = max(args.curr_iteration, args.iteration)  # a run that starts after its last step counts from 0
        return self.settings.phase_at(step, args.train_iters)

    def __call__(
        self, data_iterator: Iterator[Any] | None, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Return the model's output, or Megatron's schedule plan of the forward pass, and the loss function."""
        self._name_phase()
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        most = max((learner.head.depths for learner in self._learners), default=0)
        keeps_states = self.settings.mtp_state_cache is not None
        batch, depths = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"), most, keeps_states)
        timers("batch-generator").stop()
        if keeps_states:
            self._state_cache(model).expect(batch["rows"])

        inputs = batch["tokens"], batch["position_ids"], batch["attention_mask"]
        named = {
            "labels": batch["labels"],
            "packed_seq_params": packed_seq_params(batch),
            "output_processor_context": None if depths is None else self._batches(depths),
        }
        objective = self._objective()
        if not return_schedule_plan:
            return model(*inputs, **named, output_processor=objective), self.loss

        from megatron_mtp.model.schedule_plan import HeadsSchedulePlan

        outputs: list[ObjectiveOutput] = []  # the plan's last node must return a tensor, the loss

        def loss_of(stage: StageOutput) -> Tensor:
            outputs.append(objective(stage))
            return outputs[-1].loss

        plan = HeadsSchedulePlan(model, *inputs, **named, output_processor=loss_of)
        return plan, lambda loss: self.loss(replace(outputs.pop(), loss=loss))

    def _state_cache(self, model: Any) -> "StateCache":
        if self._cache is None:
            from megatron_mtp.training.state_cache import StateCache

            self._cache = StateCache(get_attr_wrapped_model(model, "mtp_attached"), get_args())
        return self._cache

    def close(self) -> None:
        """Write what --mtp-state-cache has not written yet."""
        if self._cache is not None:
            self._cache.close()

    def loss(self, output: ObjectiveOutput) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss, the number of tokens to divide it by, and [sum, tokens] of every logged value."""
        args = get_args()
        per_token, loss = args.calculate_per_token_loss, output.loss
        if not per_token:
            loss = loss * args.context_parallel_size  # Megatron averages over ranks, each with a part of the sum
        _validate(loss)
        report = {"lm loss": output.main.report()}
        counts, documents = {}, {}
        for learner, made in zip(self._learners, output.heads, strict=True):
            name = learner.figures
            report |= {f"{name}_{depth} loss": sums.report() for depth, sums in enumerate(made.depths, start=1)}
            if made.acceptance is not None:
                counts[name] = made.acceptance
            if made.documents is not None:
                documents[name] = made.documents
        self.metrics.add(report, counts, documents)
        tokens = output.main.tokens if per_token else output.main.whole_tokens
        return loss, tokens.detach().int(), report

    def _name_phase(self) -> None:
        """Log the loss of a phase when it begins or a run resumes in it, because its metrics change."""
        if len(self._phases) == 1 or not torch.is_grad_enabled() or self._phase == self._named:
            return
        args, self._named = get_args(), self._phase
        if args.rank == 0:
            name = self.settings.phases()[self._phase].mtp_loss
            say(f"> from step {args.curr_iteration + 1} on --mtp-loss is {name}")

    def _batches(self, whole: DepthBatch) -> list[DepthBatch]:
        """Return the microbatch of every head, with its random draws of this step; unchanged for a trunk alone."""
        args = get_args()
        seed = args.seed, args.curr_iteration if torch.is_grad_enabled() else 0
        positions = whole.positions_S.numel() * args.context_parallel_size
        made = [
            with_draws(whole.first(each.head.depths), each.head.settings, seed, positions) for each in self._learners
        ]
        return made or [whole]

    def _objective(self) -> NextTokensObjective:
        """Return the objective of this step."""
        args, settings = get_args(), self.settings
        step = args.curr_iteration if torch.is_grad_enabled() else 0  # --skip-train has no step
        progress = step / args.train_iters
        interval = settings.mtp_acceptance_interval
        is_asked_for = interval > 0 and (args.curr_iteration + 1) % interval == 0
        factor, trains_trunk = scaling_factor(args, settings, step), not settings.mtp_train_only
        heads = [
            HeadObjective(
                depth_weights=[(factor if each.head.has_lambda else 1.0) * weight for weight in each.weights],
                cp_group=mpu.get_context_parallel_group(),
                depth_loss=each.loss,
                per_token=args.calculate_per_token_loss,
                beside_main=trains_trunk and each.head.has_lambda,
                kept_positions=partial(kept_positions, _fraction(each), (args.seed, step)),
                measure=measured if is_asked_for or not torch.is_grad_enabled() else None,
                base_share=base_share(each.head.settings, progress),
            )
            for each in self._learners
        ]
        known = None if self._cache is None or trains_trunk else self._cache.main_loss
        return NextTokensObjective(heads, settings.mtp_linear_ce_main or settings.mtp_train_only, trains_trunk, known)


def _fraction(learner: _Learner) -> float:
    return learner.head.settings.mtp_token_fraction if torch.is_grad_enabled() else 1.0


def _validate(loss: Tensor) -> None:
    """Run the checks of a microbatch's loss that Megatron's own forward step makes."""
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


# --- the batch -------------------------------------------------------------------------------------------------------

OFFSETS = ("cu_seqlens", "cu_seqlens_padded")
BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", *OFFSETS, "max_seqlen")


def get_batch(
    data_iterator: Iterator[Any] | None, vp_stage: int | None, count: int, keeps_states: bool = False
) -> tuple[dict[str, Any], DepthBatch | None]:
    """Return this rank's part of the next microbatch, with the entries of this many MTP layers if it has labels.

    Keys are Megatron's: `tokens`, `labels`, `loss_mask` and `position_ids` [B, S], `attention_mask`, and for packed
    rows `cu_seqlens` and `cu_seqlens_padded`, which stay on the host. On a stage that needs no data, every entry is
    None. With `keeps_states`, `rows` identifies the rows for --mtp-state-cache.
    """
    args = get_args()
    if not reads_data(vp_stage):
        return dict.fromkeys(BATCH_KEYS), None
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        if data_iterator is None:
            raise ValueError(
                "this pipeline stage reads batches, but the data sets provider built none for it; give pretrain() the "
                "datasets_provider of megatron_mtp.training.datasets, or build them wherever reads_data of "
                "megatron_mtp.training.forward_step is true."
            )
        loaded = next(data_iterator)
        for key in BATCH_KEYS:
            value = loaded.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=reads_packed_rows(),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=2,  # only decides whether padded offsets are broadcast; they are always needed
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=reads_everything(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    document_BS = None if batch["labels"] is None else _documents(batch)
    if batch["cu_seqlens"] is not None:
        offsets = loaded if tp_rank == 0 else batch  # on other ranks, wait for the broadcast
        batch.update({name: None if batch[name] is None else offsets[name].cpu() for name in OFFSETS})
    ranks_RS = rows = None
    if keeps_states:
        from megatron_mtp.training.row_keys import rows_of

        rows = rows_of(batch, args.reset_attention_mask)
    if batch["cu_seqlens"] is not None:
        join_rows(batch)
    depths = None
    if batch["labels"] is not None:
        mask_ignored_labels(batch)
        depths = depth_batch(batch, count, document_BS)
        if tp_rank == 0 and not torch.is_grad_enabled() and "documents" in loaded:
            numbers_BS = to_device(loaded["documents"].view_as(batch["labels"]), batch["labels"].device)
            if args.mtp_context_lengths is not None:
                from megatron_mtp.training.contexts import numbers_of_contexts

                numbers_BS = numbers_of_contexts(numbers_BS, args.mtp_context_lengths)
            depths = replace(depths, document_BS=numbers_BS)
    group = mpu.get_context_parallel_group()
    if group.size() > 1 and reads_positions(vp_stage):
        whole_BS = batch["labels"] if batch["tokens"] is None else batch["tokens"]
        offsets = torch.tensor([0, whole_BS.size(1)]) if batch["cu_seqlens"] is None else _offsets(batch)
        ranks_RS = positions_of_ranks(offsets, group.size())
        positions_S = ranks_RS[group.rank()]
        keep_positions(batch, to_device(positions_S, whole_BS.device))
        depths = None if depths is None else depths.at(positions_S)
    if rows is not None:
        batch["rows"] = replace(rows, positions_RS=ranks_RS)
    return batch, depths


def _documents(batch: dict[str, Any]) -> Tensor | None:
    """Return the document of every position, [B, S], or [1, B * S] of packed rows; None if documents do not matter."""
    args = get_args()
    if batch["cu_seqlens"] is not None:
        rows = documents_from_offsets(batch["cu_seqlens"], batch["cu_seqlens_padded"], batch["labels"].size(1))
        return rows.view(1, -1)
    if (args.reset_attention_mask or args.eod_mask_loss) and batch["tokens"] is not None:
        return documents_from_eod(batch["tokens"], get_tokenizer().eod)
    return None


def packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Return Megatron's `packed_seq_params` of packed rows; None for other batches."""
    if batch["cu_seqlens"] is None:
        return None
    bounds, device = _offsets(batch), torch.device(torch.cuda.current_device())
    update_seqlen_stats_from_cu_seqlens(to_device(batch["cu_seqlens"], device))
    offsets, longest = to_device(bounds, device), int(bounds.diff().max())  # `max_seqlen` may omit padding
    padded = None if batch["cu_seqlens_padded"] is None else offsets
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        # Megatron's own Mamba layers read the document of every position, which is then computed from the offsets.
        total_tokens=None if get_args().hybrid_layer_pattern is None else int(bounds[-1]),
        bounds=bounds,
    )


def _offsets(batch: dict[str, Any]) -> Tensor:
    """Return the starts of a packed row's documents, and its end, with padding, as attention needs them."""
    return batch["cu_seqlens"] if batch["cu_seqlens_padded"] is None else batch["cu_seqlens_padded"]
