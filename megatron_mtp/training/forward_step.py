"""The forward step that Megatron's schedule calls for every microbatch: a batch in, the loss function's input out.

`ForwardStep` is what `pretrain()` takes as `forward_step_func`. Batches come from Megatron's loader and broadcasts; the
depths are added on whole sequences, before they are cut for context parallelism.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_mtp.config import MTPConfig
from megatron_mtp.data.batch import add_depths, depth_batch, join_rows, keep_positions, mask_ignored_labels
from megatron_mtp.data.context_parallel import slots_of_ranks
from megatron_mtp.data.shift import documents_from_eod, documents_from_offsets
from megatron_mtp.losses import depth_loss
from megatron_mtp.losses.schedule import depth_weights, kept_positions, scaling_factor
from megatron_mtp.training.metrics import Metrics
from megatron_mtp.training.objective import NextTokensObjective, ObjectiveOutput
from megatron_mtp.training.refusals import refusal_of_diverged

SPIKE = 10
"""`--check-for-spiky-loss` calls a loss spiky that is this many times the largest seen."""


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

        depths = None if batch["labels"] is None else depth_batch(batch)
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            packed_seq_params=_packed_seq_params(batch),
            output_processor=self._objective(),
            output_processor_context=depths,
        )
        return output, self.loss

    def loss(self, output: ObjectiveOutput) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Megatron's loss function: the loss, the tokens to divide it by, and what to log, each as [sum, tokens]."""
        args = get_args()
        per_token, loss = args.calculate_per_token_loss, output.loss
        if not per_token:
            loss = loss * args.context_parallel_size  # parts of a sum, of which Megatron takes the mean over the ranks
        _validate(loss)
        report = {"lm loss": output.main.report()}
        for depth, sums in enumerate(output.depths, start=1):
            report[f"mtp_{depth} loss"] = sums.report()
        self.metrics.add(report, output.acceptance)
        tokens = output.main.tokens if per_token else output.main.whole_tokens
        return loss, tokens.detach().int(), report

    def _objective(self) -> NextTokensObjective:
        """The objective of this step, whose weights may follow a schedule."""
        args, settings = get_args(), self.settings
        step = args.curr_iteration if torch.is_grad_enabled() else 0  # --skip-train knows no step
        fraction = settings.mtp_token_fraction if torch.is_grad_enabled() else 1.0
        return NextTokensObjective(
            depth_weights=depth_weights(settings, args.mtp_num_layers or 0, scaling_factor(args, settings, step)),
            cp_group=mpu.get_context_parallel_group(),
            depth_loss=depth_loss(settings),
            per_token=args.calculate_per_token_loss,
            linear_main=settings.mtp_linear_ce_main or settings.mtp_train_only,
            trains_trunk=not settings.mtp_train_only,
            kept_positions=partial(kept_positions, fraction, (args.seed, step)),
            measures_acceptance=self._measures_acceptance(),
        )

    def _measures_acceptance(self) -> bool:
        """In evaluation always, in training on the steps that were asked for."""
        interval = self.settings.mtp_acceptance_interval
        is_asked_for = interval > 0 and (get_args().curr_iteration + 1) % interval == 0
        return is_asked_for or not torch.is_grad_enabled()


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None) -> dict[str, Any]:
    """This rank's part of the next microbatch; every entry None on a stage that needs none.

    Keys are Megatron's (`tokens`, `labels`, `loss_mask`, `position_ids` [B, S], `attention_mask`, `cu_seqlens`, ...),
    and `depth_*` [B, S, D] where there are labels.
    """
    args = get_args()
    if not reads_data(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)

    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        if data_iterator is None:
            raise ValueError(
                "this pipeline stage reads batches, but the data sets provider built none for it; give pretrain() the "
                "datasets_provider of megatron_mtp.training.datasets, or build them wherever its reads_data says."
            )
        loaded = next(data_iterator)
        for key in _BATCH_KEYS:
            value = loaded.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=_reads_packed_rows(),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=2,  # it decides only whether padded offsets are broadcast; without context parallelism they matter too
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_reads_everything(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    document_BS = None if batch["labels"] is None else _documents(batch)
    if batch["cu_seqlens"] is not None:
        join_rows(batch)
    if batch["labels"] is not None:
        mask_ignored_labels(batch)
        add_depths(batch, args.mtp_num_layers or 0, document_BS)
    if _reads_positions(vp_stage):
        _keep_own_positions(batch)
    return batch


def reads_data(vp_stage: int | None) -> bool:
    """Whether this pipeline stage takes part of a batch, so that the data sets are built for it."""
    return _reads_packed_rows() or _reads_positions(vp_stage)


def _reads_packed_rows() -> bool:
    """Every stage then needs to know at least where documents start, for its attention."""
    args = get_args()
    return bool(args.sft or args.dataloader_inter_document_masking)


def _reads_positions(vp_stage: int | None) -> bool:
    return is_first_or_last_pipeline_stage(vp_stage) or _reads_everything(vp_stage)


def _reads_everything(vp_stage: int | None) -> bool:
    """Whether it takes tokens, labels and all: to run the depths, to see where documents end in their losses, or to
    keep attention within documents, which Megatron's own script does on the first and last stage alone."""
    args = get_args()
    if holds_mtp_depths(vp_stage) or args.reset_attention_mask:
        return True
    return bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def holds_mtp_depths(vp_stage: int | None) -> bool:
    """Whether the depths live on this pipeline stage."""
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    if args.pipeline_model_parallel_layout is None:
        layout = None
    else:
        layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    return mtp_on_this_rank(layout=layout, mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)


_BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
)


def _documents(batch: dict[str, Any]) -> Tensor | None:
    """The document of every position, [B, S], or [1, B * S] of packed rows; None where documents do not matter."""
    args = get_args()
    if batch["cu_seqlens"] is not None:
        rows = documents_from_offsets(batch["cu_seqlens"], batch["cu_seqlens_padded"], batch["labels"].size(1))
        return rows.view(1, -1)
    if (args.reset_attention_mask or args.eod_mask_loss) and batch["tokens"] is not None:
        return documents_from_eod(batch["tokens"], get_tokenizer().eod)
    return None


def _keep_own_positions(batch: dict[str, Any]) -> None:
    """Cut the batch for context parallelism, in place; in a packed row every document by itself."""
    group = mpu.get_context_parallel_group()
    if group.size() == 1:
        return
    sequence_BS = batch["labels"] if batch["tokens"] is None else batch["tokens"]
    offsets = torch.tensor([0, sequence_BS.size(1)]) if batch["cu_seqlens"] is None else _offsets(batch)
    keep_positions(batch, slots_of_ranks(offsets, group.size())[group.rank()].to(sequence_BS.device))


def _packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    if batch["cu_seqlens"] is None:
        return None
    update_seqlen_stats_from_cu_seqlens(batch["cu_seqlens"])
    padded = batch["cu_seqlens_padded"]
    longest = int(_offsets(batch).diff().max().item())  # `max_seqlen` may not count padding
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=_offsets(batch),
        cu_seqlens_kv=_offsets(batch),
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _offsets(batch: dict[str, Any]) -> Tensor:
    """Where the documents of a packed row start, and its end; attention walks the positions, padding included."""
    return batch["cu_seqlens"] if batch["cu_seqlens_padded"] is None else batch["cu_seqlens_padded"]


def _validate(loss: Tensor) -> None:
    """Megatron's checks of a microbatch's loss, which its own forward step makes too."""
    args = get_args()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, message in ((torch.isnan, "found NaN in the loss"), (torch.isinf, "found Inf in the loss")):
            with refusal_of_diverged(args):
                machine.validate_result(result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
