"""One training run: arguments, model configuration, data sets, and Megatron's `pretrain()` with them."""

import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_mtp.model.sharing import embedding_ranks
from megatron_mtp.training.arguments import fail, parse_checked_args, set_machine_flags
from megatron_mtp.training.forward_step import ForwardStep, holds_mtp_depths
from megatron_mtp.training.metrics import Metrics


def main(argv: list[str], on_cpu: bool) -> None:
    """Run what the command line asks for; bad input ends with one sentence and exit status 2."""
    _join_single_process()
    note = set_machine_flags(argv, on_cpu)
    if note and os.environ["RANK"] == "0":
        print(f"> {note}", flush=True)
    try:
        args, model_config = parse_checked_args()
    except ValueError as error:
        fail(Path(argv[0]).name, error)
        return
    settings = model_config.mtp
    metrics = Metrics(None if settings.mtp_metrics_dir is None else Path(settings.mtp_metrics_dir))
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            datasets_provider,
            ModelType.encoder_or_decoder,
            ForwardStep(settings, metrics),
            get_embedding_ranks=get_embedding_ranks,
            non_loss_data_func=metrics.end_evaluation,
        )
    except SystemExit:  # --exit-interval and its like end the loop so, on all ranks together
        metrics.close()
        raise
    metrics.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def get_embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Megatron's question which ranks of a pipeline hold the word embedding."""
    args = get_args()
    tied = not args.untie_embeddings_and_output_weights
    return embedding_ranks(pipeline_ranks, core_transformer_config_from_args(args), tied)


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test sets (Megatron's), for so many samples each."""
    args = get_args()
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset

    def is_built_here() -> bool:
        if mpu.get_tensor_model_parallel_rank() != 0:
            return False
        return args.sft or is_first_or_last_pipeline_stage(vp_stage) or holds_mtp_depths(vp_stage)

    print_rank_0(f"> building {kind.__name__} for {samples} training, validation and test samples")
    return BlendedMegatronDatasetBuilder(kind, samples, is_built_here, _dataset_config(args)).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )


def _join_single_process() -> None:
    """Started as plain `python`, be the one rank of a job, as torchrun would say it."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
