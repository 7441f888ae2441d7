"""Training, validation and test sets, built by Megatron from Megatron's flags."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, override

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_mtp.data.checks import read_index
from megatron_mtp.spec.registry import Imported
from megatron_mtp.training.documents import named_prefixes
from megatron_mtp.training.reading_stages import reads_data


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    """Build Megatron's training, validation and test sets for the given numbers of samples."""
    args = get_args()
    _evaluate_again(args)
    kind = KINDS[kind_of_data(args)]

    def is_built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and reads_data(vp_stage)

    repeats, wanted = args.mtp_patience is not None and bool(args.eval_iters), samples[1]
    if repeats:
        samples = [samples[0], args.eval_iters * args.eval_global_batch_size, samples[2]]
    print_rank_0(f"> building {kind.__name__} for {samples} training, validation and test samples")
    training, validation, test = BlendedMegatronDatasetBuilder(
        kind, samples, is_built_here, dataset_config(args)
    ).build()
    if repeats and validation is not None:
        validation = SameSamples(validation, samples[1], wanted)
    # Megatron's loaders reject a blend without samples, as with --eval-iters 0.
    evaluated = [None if number == 0 else data for number, data in zip(samples[1:], (validation, test), strict=True)]
    return training, *evaluated


def _evaluate_again(args: Namespace) -> None:
    """Let a resumed run that has already taken its last step evaluate it on the same samples, not on the next ones."""
    has_ended = args.train_iters is not None and 0 < args.train_iters <= args.iteration
    if not has_ended or args.skip_train or args.full_validation or args.iteration % args.eval_interval:
        return
    again = args.eval_iters * args.eval_global_batch_size
    args.consumed_valid_samples = max(args.consumed_valid_samples - again, 0)


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # makes Megatron call it on every rank


class SameSamples(torch.utils.data.Dataset[Any]):
    """Repeats the first samples of a validation set, so that every evaluation uses the same ones.

    Args:
        data: the data set.
        count: number of samples of one evaluation.
        length: number of samples of all evaluations.
    """

    index_split = Split.valid

    def __init__(self, data: Any, count: int, length: int) -> None:
        self._data, self._count, self._length = data, count, length

    def __len__(self) -> int:
        return self._length

    @override
    def __getitem__(self, idx: int | None) -> Any:
        return self._data[None if idx is None else idx % self._count]


KINDS: Imported[Any] = Imported(
    {
        "chats": "megatron_mtp.training.chats:PackedChats",
        "mock": "megatron.core.datasets.gpt_dataset:MockGPTDataset",
        "text": "megatron_mtp.training.texts:TextDataset",
        "text cut once": "megatron_mtp.training.texts:TextCutOnce",
        "answers": "megatron_mtp.training.texts:AnswersDataset",
        "answers cut once": "megatron_mtp.training.texts:AnswersCutOnce",
    }
)
"""Data sets by the kind of their data."""

OF_CHAT_FLAGS: Imported[Callable[[Namespace], None]] = Imported(
    {
        "chat": "megatron_mtp.training.given_chats:make_chats",
        "show_example": "megatron_mtp.training.given_chats:show_example",
    }
)
"""What flags do that need the tokenizer's chat template, by the name of the argument."""


def kind_of_data(args: Namespace) -> str:
    """Return which of `KINDS` the flags ask for."""
    if args.reads_chats:
        return "chats"
    if args.mock_data:
        return "mock"
    return ("answers" if args.mtp_mask_prompts else "text") + ("" if args.mtp_state_cache is None else " cut once")


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


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Build the data set settings from Megatron's flags.

    A setting has the name of its flag, or that in `_OTHER_NAME`.
    """
    flag_of = {name: name for name in _SAME_NAME} | _OTHER_NAME
    settings = {name: getattr(args, flag) for name, flag in flag_of.items()}
    settings["tokenizer"] = get_tokenizer()
    settings["blend"], settings["blend_per_split"] = get_blend_and_blend_per_split(args)
    settings["sequence_parallel_size"] = args.tensor_model_parallel_size * args.sequence_parallel
    return GPTDatasetConfig(**settings)


def reads_chats(args: Namespace) -> bool:
    """Return whether the data are chats: files of --chat, or data sets made by `preprocess --chat`.

    Raises:
        ValueError: some data sets are chats and others are not.
    """
    if args.chat is not None:
        return True
    kinds = {read_index(prefix).has_modes for prefix in named_prefixes(args) if Path(f"{prefix}.idx").is_file()}
    if len(kinds) > 1:
        raise ValueError("--data-path names datasets of chats and of text, whose rows differ; give one kind.")
    return kinds == {True}
