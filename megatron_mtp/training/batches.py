"""The microbatch of one rank: read by Megatron's loader, given its depths, and cut for context parallelism."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_mtp.config import trained_depths
from megatron_mtp.data.batch import add_depths, join_rows, keep_positions, mask_ignored_labels
from megatron_mtp.data.context_parallel import positions_of_ranks
from megatron_mtp.data.shift import documents_from_eod, documents_from_offsets


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None) -> dict[str, Any]:
    """This rank's part of the next microbatch; on a stage that needs none every entry is None.

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
        cp_size=2,  # only decides whether padded offsets are broadcast; they are needed without context parallelism too
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
        add_depths(batch, trained_depths(args), document_BS)
    if _reads_positions(vp_stage):
        _keep_own_positions(batch)
    return batch


def reads_data(vp_stage: int | None) -> bool:
    """Whether this pipeline stage reads batches, so that its data sets are built."""
    return _reads_packed_rows() or _reads_positions(vp_stage)


def _reads_packed_rows() -> bool:
    """Packed rows: attention on every stage needs the starts of documents."""
    args = get_args()
    return bool(args.sft or args.dataloader_inter_document_masking)


def _reads_positions(vp_stage: int | None) -> bool:
    return is_first_or_last_pipeline_stage(vp_stage) or _reads_everything(vp_stage)


def _reads_everything(vp_stage: int | None) -> bool:
    """Whether a stage reads tokens, labels and all other entries: for the depths, for the ends of documents in their
    losses, or for attention within documents, which Megatron's own script has on the first and last stage alone."""
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
    """Cut the batch for context parallelism, in place; a packed row is cut document by document."""
    group = mpu.get_context_parallel_group()
    if group.size() == 1:
        return
    sequence_BS = batch["labels"] if batch["tokens"] is None else batch["tokens"]
    offsets = torch.tensor([0, sequence_BS.size(1)]) if batch["cu_seqlens"] is None else _offsets(batch)
    keep_positions(batch, positions_of_ranks(offsets, group.size())[group.rank()].to(sequence_BS.device))


def packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Megatron's description of packed rows for attention; None for other batches."""
    if batch["cu_seqlens"] is None:
        return None
    update_seqlen_stats_from_cu_seqlens(batch["cu_seqlens"])
    padded = batch["cu_seqlens_padded"]
    longest = int(_offsets(batch).diff().max().item())  # `max_seqlen` may leave out padding
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=_offsets(batch),
        cu_seqlens_kv=_offsets(batch),
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        # Megatron's own Mamba layers read the document of every position, which is then made of the offsets.
        total_tokens=None if get_args().hybrid_layer_pattern is None else int(_offsets(batch)[-1].item()),
    )


def _offsets(batch: dict[str, Any]) -> Tensor:
    """Starts of the documents of a packed row, and its end, with padding, as attention needs them."""
    return batch["cu_seqlens"] if batch["cu_seqlens_padded"] is None else batch["cu_seqlens_padded"]
