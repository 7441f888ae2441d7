"""Determines which pipeline stages read batches, and which parts of them."""

from argparse import Namespace

from megatron.core import mpu
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args
from megatron.training.utils import is_first_or_last_pipeline_stage


def reads_data(vp_stage: int | None) -> bool:
    """Return whether this pipeline stage reads batches and needs its data sets."""
    return reads_packed_rows() or reads_positions(vp_stage)


def reads_packed_rows() -> bool:
    """Return whether rows are packed, so that attention on every stage needs the start of each document."""
    return is_packed(get_args())


def is_packed(args: Namespace) -> bool:
    """Return whether rows are packed, from arguments that Megatron has not processed yet."""
    return bool(args.dataloader_inter_document_masking or args.reads_chats)


def reads_positions(vp_stage: int | None) -> bool:
    """Return whether a stage reads tokens or labels in addition to the offsets of packed rows."""
    return is_first_or_last_pipeline_stage(vp_stage) or reads_everything(vp_stage)


def reads_everything(vp_stage: int | None) -> bool:
    """Return whether a stage reads tokens, labels and all other entries.

    MTP layers need them, and so do document boundaries in their losses and attention within documents, which Megatron's
    own script supports only on two stages.
    """
    args = get_args()
    if holds_mtp_depths(vp_stage) or args.reset_attention_mask:
        return True
    return bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def holds_mtp_depths(vp_stage: int | None) -> bool:
    """Return whether the MTP layers are on this pipeline stage."""
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    if args.pipeline_model_parallel_layout is None:
        layout = None
    else:
        layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    return mtp_on_this_rank(layout=layout, mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)
