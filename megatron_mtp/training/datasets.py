"""Training, validation and test sets: Megatron's, by Megatron's flags.

Three of Megatron's classes are extended: `AnswersDataset` masks all but the answers that a model has written itself,
`PackedChats` (chats.py) packs chats, and `ChatDataset` reads conversations for `--sft` without the package `datasets`.
"""

import json
from argparse import Namespace
from array import array
from pathlib import Path
from typing import Any, override

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_mtp.data.batch import IGNORED_LABEL
from megatron_mtp.data.checks import read_index
from megatron_mtp.training.chats import PackedChats
from megatron_mtp.training.forward_step import reads_data


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
        return ChatDataset
    if args.reads_chats:
        return PackedChats
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


# --- answers of the model itself -------------------------------------------------------------------------------------


class AnswersDataset(GPTDataset):
    """Megatron's, over sequences whose answers are known: labels outside of them are masked.

    `megatron-mtp sample` writes PREFIX.answers.npy, where every answer begins and ends. The depths' masks are shifted
    from the loss mask, so no depth is trained on anything else either.

    Every document ends with the EOD 0, since Megatron puts documents one behind the other. It belongs to the answer
    only if the model chose it. A row of eight positions, over 5 6 7 8 0, which the model ended, and 3 4 9 1 0, which
    was cut; the first two tokens of each are prompts:

        token  6 7 8 0 3 4 9 1
        label  7 8 0 3 4 9 1 0
        mask   1 1 1 0 0 1 1 0
    """

    def __init__(self, indexed_dataset: Any, dataset_path: str, *others: Any) -> None:
        super().__init__(indexed_dataset, dataset_path, *others)
        self._answers = read_answers(dataset_path)

    @override
    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(idx)
        chosen_S = torch.from_numpy(self._chosen(idx or 0))
        return {**sample, "loss_mask": sample["loss_mask"].masked_fill(~chosen_S, 0)}

    def _chosen(self, idx: int) -> np.ndarray:
        """Return whether the label of every position, which is the next token, belongs to an answer: [S]."""
        place = self.shuffle_index[idx]
        (first, start), (last, end) = self.sample_index[place], self.sample_index[place + 1]
        found: list[np.ndarray] = []
        for document in range(first, last + 1):
            number = self.document_index[document]
            stop = end + 1 if document == last else self.dataset.sequence_lengths[number]
            token = np.arange(start if document == first else 0, stop)
            found.append((self._answers[number, 0] <= token) & (token < self._answers[number, 1]))
        labels = np.concatenate(found)[1 : self.config.sequence_length + 1]
        return np.pad(labels, (0, self.config.sequence_length - len(labels)))


def read_answers(prefix: str) -> np.ndarray:
    """Start of every document's answer, and the token behind it: [documents, 2], int32.

    Raises:
        ValueError: no such file is beside the dataset, or it is that of other texts.
    """
    file = Path(f"{prefix}.answers.npy")
    if not file.is_file():
        raise ValueError(
            f"--mtp-mask-prompts: '{file}' is not there, which says where answers are; give data of megatron-mtp "
            "sample (the same command writes it for texts that are there), or drop the flag."
        )
    try:
        found: np.ndarray = np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError):
        found = np.empty(0)
    sequences = read_index(prefix).sequences
    if found.shape != (sequences, 2) or found.dtype != np.int32:
        raise ValueError(
            f"--mtp-mask-prompts: '{file}' is damaged or of other texts than the {sequences} of '{prefix}.idx'; run "
            "megatron-mtp sample again with --overwrite."
        )
    return found


SHOWN = 200
"""Characters that `trained_part` shows of what is trained on."""

# --- conversations ---------------------------------------------------------------------------------------------------


class ChatFile:
    """The messages of every line; only the offsets of lines are in memory.

    A line is an object whose "messages" are [{"role": "system", "content": ...}, {"role": "user", ...}, ...], one or
    more conversations of which each begins with a system message. Megatron's own class packs rows and masks prompts.
    """

    def __init__(self, path: str) -> None:
        self.path, self._starts = path, array("q")
        with open(path, "rb") as file:
            place = 0
            for line in file:
                if line.strip():
                    self._starts.append(place)
                place += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        with open(self.path, "rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        try:
            messages: list[dict[str, Any]] = json.loads(line)["messages"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"--data-path: '{self.path}' has a line without messages ({line[:40]!r}); with --sft every line is an "
                "object whose messages have a role and a content."
            ) from None
        return messages


class ChatDataset(SFTDataset):
    """Megatron's, over a `ChatFile`."""

    @staticmethod
    @override
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> ChatFile:
        return ChatFile(dataset_path)


def trained_part(tokenizer: Any, messages: list[dict[str, Any]], prompt_format: str) -> list[str]:
    """Lines that say which part of a conversation Megatron trains on, by the format and the tokenizer.

    Args:
        tokenizer: Megatron's SFTTokenizer.
        messages: of a line.
        prompt_format: the value of `--sft-tokenizer-prompt-format`.
    """
    begins = [place for place, message in enumerate(messages) if message["role"] == "system" and place]
    first = messages[: begins[0]] if begins else messages
    tokens, targets = tokenizer.tokenize_conversation(first, return_target=True, add_generation_prompt=False)
    is_trained = (targets != IGNORED_LABEL) & (targets != tokenizer.pad)
    shown = tokenizer.detokenize(targets[is_trained].tolist())
    lines = [
        f"--sft by --sft-tokenizer-prompt-format {prompt_format}: of {len(tokens)} tokens of the first conversation "
        f"{int(is_trained.sum())} are trained on: {shown[:SHOWN]!r}{' ...' if len(shown) > SHOWN else ''}"
    ]
    if (targets != IGNORED_LABEL).all():
        lines.append(
            "this format masks nothing: system and user messages are trained on like answers; --chat trains "
            "on answers alone"
        )
    if tokenizer.pad == tokenizer.eod:
        ends = tokenizer.detokenize([tokenizer.eod])
        lines.append(f"the tokenizer pads with {ends!r}, so that the end of an answer is never trained on")
    if messages[0]["role"] != "system":
        lines.append("lines without system messages are one document each, however many conversations they hold")
    return lines
