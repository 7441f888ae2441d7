"""Training, validation and test sets: Megatron's, by Megatron's flags, and which pipeline stages read them."""

from argparse import Namespace
from typing import Any

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_mtp.data.answers import AnswersDataset
from megatron_mtp.training.chat import sft_dataset


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test sets (Megatron's), for so many samples each."""
    args = get_args()
    kind = _kind(args)

    def is_built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and reads_data(vp_stage)

    print_rank_0(f"> building {kind.__name__} for {samples} training, validation and test samples")
    return BlendedMegatronDatasetBuilder(kind, samples, is_built_here, dataset_config(args)).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank


def _kind(args: Namespace) -> type[GPTDataset]:
    if args.sft:
        return sft_dataset()
    if args.mock_data:
        return MockGPTDataset
    if args.mtp_mask_prompts:
        return AnswersDataset
    return GPTFIMDataset if args.fim_data else GPTDataset


_SAME_NAME = (
    "split multiple_validation_sets full_validation num_dataset_builder_threads mmap_bin_files reset_position_ids "
    "reset_attention_mask eod_mask_loss object_storage_cache_path mid_level_dataset_surplus allow_ambiguous_pad_tokens "
    "context_parallel_size data_parallel_size hybrid_context_parallel"
).split()
_OTHER_NAME = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
    "inter_document_masking": "dataloader_inter_document_masking",
}
_FIM = "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix".split()


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Settings of the data sets by Megatron's flags; a setting is called as its flag, or as `_OTHER_NAME` has it."""
    flag_of = {name: name for name in _SAME_NAME} | _OTHER_NAME
    settings = {name: getattr(args, flag) for name, flag in flag_of.items()}
    settings["tokenizer"] = get_tokenizer()
    settings["blend"], settings["blend_per_split"] = get_blend_and_blend_per_split(args)
    settings["sequence_parallel_size"] = args.tensor_model_parallel_size * args.sequence_parallel
    if not args.fim_data:
        return GPTDatasetConfig(**settings)
    tokens = {name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")}
    rates = {name: getattr(args, name) for name in _FIM}
    return GPTFIMDatasetConfig(**settings, **rates, fim_extra_tokens=tokens)


def reads_data(vp_stage: int | None) -> bool:
    """Return whether this pipeline stage reads batches, so that its data sets are built."""
    return reads_packed_rows() or reads_positions(vp_stage)


def reads_packed_rows() -> bool:
    """Return whether rows are packed: attention on every stage needs the starts of documents."""
    args = get_args()
    return bool(args.sft or args.dataloader_inter_document_masking)


def reads_positions(vp_stage: int | None) -> bool:
    """Return whether a stage reads tokens or labels, beside the offsets of packed rows."""
    return is_first_or_last_pipeline_stage(vp_stage) or reads_everything(vp_stage)


def reads_everything(vp_stage: int | None) -> bool:
    """Return whether a stage reads tokens, labels and all other entries: for the depths, for the ends of documents in
    their losses, or for attention within documents, which Megatron's own script has on two stages alone."""
    args = get_args()
    if holds_mtp_depths(vp_stage) or args.reset_attention_mask:
        return True
    return bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def holds_mtp_depths(vp_stage: int | None) -> bool:
    """Return whether the depths live on this pipeline stage."""
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    if args.pipeline_model_parallel_layout is None:
        layout = None
    else:
        layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    return mtp_on_this_rank(layout=layout, mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)
