"""Training, validation and test sets, built by Megatron from Megatron's flags.

They extend Megatron's classes: samples of `TextDataset` include the document of each position, `AnswersDataset` masks
everything but the model's own responses, and `PackedChats` packs chats.
"""

import os
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any, override

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_mtp.common.files import one_writer
from megatron_mtp.data.best_fit import best_fit
from megatron_mtp.data.chat_files import COUNTS, lines_of, prefix_in_cache, write_chats
from megatron_mtp.data.checks import read_index, read_sidecar
from megatron_mtp.data.corpus import choose_documents, find_files, list_documents
from megatron_mtp.data.counted_tokens import Counted, marked, spans_of
from megatron_mtp.data.sources import first_number
from megatron_mtp.data.tokenizer import Encoder, read_tokenizer
from megatron_mtp.training.documents import named_prefixes
from megatron_mtp.training.reading_stages import reads_data


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    """Build Megatron's training, validation and test sets for the given numbers of samples."""
    args = get_args()
    _evaluate_again(args)
    kind = _kind(args)

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
    # Megatron's loaders refuse a blend of no samples, as with --eval-iters 0.
    evaluated = [None if number == 0 else data for number, data in zip(samples[1:], (validation, test), strict=True)]
    return training, *evaluated


def _evaluate_again(args: Namespace) -> None:
    """Let a resumed run that has already taken its last step evaluate it on the same samples, not on the next ones."""
    has_ended = args.train_iters is not None and 0 < args.train_iters <= args.iteration
    if not has_ended or args.skip_train or args.full_validation or args.iteration % args.eval_interval:
        return
    again = args.eval_iters * args.eval_global_batch_size
    args.consumed_valid_samples = max(args.consumed_valid_samples - again, 0)


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank


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


def _kind(args: Namespace) -> type[GPTDataset]:
    if args.reads_chats:
        return PackedChats
    if args.mock_data:
        return MockGPTDataset
    if args.mtp_mask_prompts:
        return AnswersDataset if args.mtp_state_cache is None else AnswersCutOnce
    return TextDataset if args.mtp_state_cache is None else TextCutOnce


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


# --- text ------------------------------------------------------------------------------------------------------------


class TextDataset(GPTDataset):
    """Megatron's GPTDataset; samples of evaluations include the document of every position."""

    def __init__(self, indexed_dataset: Any, dataset_path: str, *others: Any) -> None:
        super().__init__(indexed_dataset, dataset_path, *others)
        self._first = first_number(dataset_path)

    @override
    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(idx)
        if self.index_split is Split.train:
            return sample
        number_T, _ = self.places(idx or 0)
        number_S = number_T[: self.config.sequence_length]
        padded_S = np.pad(number_S, (0, self.config.sequence_length - len(number_S)), mode="edge")
        return {**sample, "documents": torch.from_numpy(self._first + padded_S)}

    def places(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Return document and offset of each token of a sample: one more than positions, or fewer where the data end.
        at the end.
        """
        place = self.shuffle_index[idx]
        (first, start), (last, end) = self.sample_index[place], self.sample_index[place + 1]
        numbers, tokens = list[np.ndarray](), list[np.ndarray]()
        for document in range(first, last + 1):
            number = self.document_index[document]
            stop = end + 1 if document == last else self.dataset.sequence_lengths[number]
            tokens.append(np.arange(start if document == first else 0, stop))
            numbers.append(np.full(len(tokens[-1]), number, dtype=np.int64))
        return np.concatenate(numbers), np.concatenate(tokens)


# --- answers of the model itself -------------------------------------------------------------------------------------


class AnswersDataset(TextDataset):
    """GPTDataset over sequences whose responses are known. Labels outside the responses are masked.

    `megatron-mtp sample` writes PREFIX.answers.npy with the start and end of every response. The masks of all MTP
    layers are shifted from the loss mask, so the MTP layers are trained only on responses, too.

    Every document ends with the EOD 0, because Megatron concatenates documents. It is part of the response only if the
    model generated it. A row of eight positions, over 5 6 7 8 0, which the model ended, and 3 4 9 1 0, which was
    truncated; the first two tokens of each are prompts:

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
        number_T, token_T = self.places(idx)
        begin_T, stop_T = self._answers[number_T].T
        labels = ((begin_T <= token_T) & (token_T < stop_T))[1 : self.config.sequence_length + 1]
        return np.pad(labels, (0, self.config.sequence_length - len(labels)))


def read_answers(prefix: str) -> np.ndarray:
    """Read the start of every document's response and the token after its end: [documents, 2], int32.

    Raises:
        ValueError: there is no such file next to the data set, or it belongs to other data.
    """
    file = Path(f"{prefix}.answers.npy")
    if not file.is_file():
        raise ValueError(
            f"--mtp-mask-prompts: '{file}' is missing, which has the positions of answers; give data of megatron-mtp "
            "sample (the same command writes it for existing samples), or drop the flag."
        )
    try:
        found: np.ndarray = np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError):
        found = np.empty(0)
    sequences = read_index(prefix).sequences
    if found.shape != (sequences, 2) or found.dtype != np.int32:
        raise ValueError(
            f"--mtp-mask-prompts: '{file}' is damaged or of other samples than the {sequences} of '{prefix}.idx'; run "
            "megatron-mtp sample again with --overwrite."
        )
    return found


# --- text that is cut once --------------------------------------------------------------------------------------------


class _CutOnce(GPTDataset):
    """Mixin before a text dataset class: samples are the same in every epoch and for every seed.

    Only the order differs.

    Megatron shuffles the documents of all epochs together before it cuts them, so that another seed or another number
    of epochs makes other samples, whose states --mtp-state-cache would not have.
    """

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        self._wanted, self._seed = num_samples, config.random_seed
        same = replace(config, random_seed=0)
        super().__init__(indexed_dataset, dataset_path, indices, None, index_split, same)

    @override
    def __len__(self) -> int:
        return self._wanted or super().__len__()

    @override
    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        rows = super().__len__()
        epoch, place = divmod(idx or 0, rows)
        sample: dict[str, torch.Tensor] = super().__getitem__(_order(self._seed, rows, epoch)[place])
        return sample


class TextCutOnce(_CutOnce, TextDataset):
    """TextDataset that is cut into rows once, the same for all seeds and epochs."""


class AnswersCutOnce(_CutOnce, AnswersDataset):
    """AnswersDataset that is cut into rows once, the same for all seeds and epochs."""


# --- chats -----------------------------------------------------------------------------------------------------------
#
# Made into a dataset once, from files of --chat or by `preprocess --chat` (`data/chat_files.py`), counted, and packed
# into rows in the format of Megatron's packed data sets.


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


def make_chats(args: Namespace) -> None:
    """Tokenize --chat to a data set on one rank and set --data-path to it. The other ranks wait and read the same file.

    Raises:
        ValueError: the files or the tokenizer cannot be used.
    """
    folder, trusts = args.tokenizer_model, args.trust_remote_code
    if args.tokenizer_type != "HuggingFaceTokenizer" or not Path(folder or "").is_dir():
        raise ValueError(
            f"--chat was given with --tokenizer-type {args.tokenizer_type} and --tokenizer-model {folder}; give "
            "HuggingFaceTokenizer and the folder of a tokenizer with a chat template."
        )
    empty, last = bool(args.chat_count_empty_thinking), bool(args.chat_mask_history)
    skips = bool(args.chat_skip_bad_lines)
    settings = {
        "seed": args.seed,
        "chat_count_empty_thinking": empty,
        "chat_mask_history": last,
        "chat_skip_bad_lines": skips,
    }
    prefix = prefix_in_cache(args.chat, folder, args.data_cache_path, settings)
    args.data_path, done = [prefix], Path(f"{prefix}.idx")
    if args.rank == 0 and not done.is_file():
        lines = choose_documents(list_documents(find_files(args.chat, ["*.jsonl"], "--chat")), None, args.seed, True)
        encoder = Encoder.from_folder(folder, trust_remote_code=trusts)
        with one_writer(Path(prefix), f"--chat: '{prefix}'"):
            write_chats(lines, encoder, prefix, empty, os.cpu_count() or 1, settings, last, skips)
    _await(prefix, done, args.distributed_timeout_minutes)


def _await(prefix: str, done: Path, minutes: int) -> None:
    """Wait until another rank has built a dataset. Raise ValueError if its files have not grown for some minutes."""
    sizes, since = dict[str, int](), monotonic()
    while not done.is_file():
        known = sizes
        with suppress(FileNotFoundError):  # a file that is whole has just been renamed
            sizes = {file.name: file.stat().st_size for file in done.parent.glob(f"{Path(prefix).name}.*")}
        if sizes != known:
            since = monotonic()
        elif monotonic() - since >= 60 * minutes:
            raise ValueError(
                f"--chat: rank 0 has written nothing at {prefix} for {minutes} minutes (--distributed-timeout-minutes)"
                "; look into its log, and give --data-cache-path, a folder that all nodes share."
            )
        sleep(1)


OF_POSITIONS = ("tokens", "labels", "loss_mask", "position_ids", "documents")


class PackedChats(MegatronDataset):
    """Rows of packed chats. Each chat is a document, and only labels that count are trained on.

    A chat of n tokens has n - 1 positions, because its last token is only a label. Chats longer than a row are
    truncated. Under context parallelism with R ranks, a chat is padded to a multiple of 2R positions. The rest of a row
    is a padding document. Rows are packed once, and each epoch shuffles them by the seed. Two chats in a row of seven,
    where tokens from 50 on count:

        tokens      1  2 50 51 | 3  4 60 | 0      the chats are 1 2 50 51 52 and 3 4 60 61
        labels      2 50 51 52 | 4 60 61 | 0
        loss_mask   0  1  1  1 | 0  1  1 | 0
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._multiple = 2 * config.context_parallel_size if config.context_parallel_size > 1 else 1
        lengths, counted = lengths_and_counted(dataset, config.sequence_length)
        self._documents, self._first = indices[counted[indices] > 0], first_number(dataset_path)
        held = self._held(np.minimum(lengths[self._documents] - 1, config.sequence_length))
        self._rows = best_fit(held, config.sequence_length)
        if not self._rows:
            raise ValueError(
                f"--seq-length is {config.sequence_length}, and none of the {len(indices)} chats for "
                f"{index_split.name} in '{dataset_path}' has a token that counts within it; give more, or other chats."
            )
        filled = held.sum() / len(self._rows) / config.sequence_length
        print_rank_0(f"> {len(held)} chats for {index_split.name} in {len(self._rows)} rows, filled to {filled:.1%}")

    @staticmethod
    @override
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        return IndexedDataset(dataset_path, multimodal=True, mmap=config.mmap_bin_files)

    @staticmethod
    @override
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        return len(low_level_dataset.document_indices) - 1

    @override
    def __len__(self) -> int:
        return self.num_samples or len(self._rows)

    @override
    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        length = self.config.sequence_length
        epoch, place = divmod(idx, len(self._rows))
        row = {name: np.zeros(length, dtype=np.int64) for name in OF_POSITIONS}
        ends: list[int] = []
        for number in self._rows[_order(self.config.random_seed, len(self._rows), epoch)[place]]:
            ids, counts = tokens_and_counts(self.dataset, self._documents[number])
            begin, count = ends[-1] if ends else 0, min(len(ids) - 1, length)
            for name, values in (("tokens", ids), ("labels", ids[1:]), ("loss_mask", counts[1:])):
                row[name][begin : begin + count] = values[:count]
            ends.append(begin + int(self._held(count)))
            row["position_ids"][begin : ends[-1]] = np.arange(ends[-1] - begin)
            row["documents"][begin : ends[-1]] = self._first + int(self._documents[number])
        offsets = np.full(length + 1, length, dtype=np.int32)  # as many in every row, so that rows can be stacked
        offsets[: len(ends) + 1] = [0, *ends]
        sample = {name: torch.from_numpy(values) for name, values in row.items()}
        sample["loss_mask"] = sample["loss_mask"].float()
        return {**sample, "cu_seqlens": torch.from_numpy(offsets), "max_seqlen": torch.tensor(np.diff(offsets).max())}

    def _held(self, positions: Any) -> Any:
        return -(-positions // self._multiple) * self._multiple


@lru_cache(maxsize=4)
def _order(seed: int, rows: int, epoch: int) -> list[int]:
    found: list[int] = np.random.default_rng([seed, epoch]).permutation(rows).tolist()
    return found


def tokens_and_counts(dataset: IndexedDataset, document: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a chat and whether each counts."""
    first, end = dataset.document_indices[document : document + 2]
    sequences, modes = dataset[first:end]
    return np.concatenate(sequences), np.repeat(modes == COUNTS, [len(sequence) for sequence in sequences])


def lengths_and_counted(dataset: IndexedDataset, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of tokens of every chat, and of labels that count after truncation to this many positions."""
    sizes, firsts = dataset.sequence_lengths.astype(np.int64), dataset.document_indices[:-1]
    lengths = np.add.reduceat(sizes, firsts)
    starts = sizes.cumsum() - sizes
    starts -= np.repeat(starts[firsts], np.diff(dataset.document_indices))
    labels = (starts + sizes).clip(1, positions + 1) - starts.clip(1, positions + 1)
    return lengths, np.add.reduceat(labels * (dataset.index.sequence_modes == COUNTS), firsts)


def counted_part(prefix: str, positions: int) -> list[str]:
    """Return lines that report how many tokens of a data set of chats count, and which do not.

    Raises:
        ValueError: no token counts.
    """
    dataset, about = IndexedDataset(prefix, multimodal=True), read_sidecar(prefix)
    lengths, counted = lengths_and_counted(dataset, positions)
    _, whole = lengths_and_counted(dataset, int(lengths.max()))
    if not counted.any():
        raise ValueError(f"--seq-length is {positions}, and no chat in '{prefix}' has a token that counts within it.")
    chats, without = about.get("chats", len(lengths)), about.get("chats_without_counted_tokens", 0)
    lines = [f"chats in '{prefix}': {counted.sum():,} of {lengths.sum():,} tokens count, in {len(lengths):,} documents"]
    lines += lines_of(about.get("left_out", {}), chats, about.get("bad_lines", ()))
    if len(lengths) > chats - without:
        lines.append(
            f"{len(lengths) - chats + without:,} documents are earlier turns, which the chat template renders "
            "differently once others follow"
        )
    if (is_cut := lengths > positions + 1).any():
        lines.append(
            f"{is_cut.sum():,} documents are truncated to --seq-length {positions}: {(whole - counted).sum():,} tokens "
            f"that count are lost, and {(counted == 0).sum():,} documents are skipped because no such token remains"
        )
    return lines


def example(prefix: str, tokenizer: str, trust_remote_code: bool = False) -> str:
    """Return the text of the first chat with the tokens that count in white brackets; `tokenizer` is a folder."""
    ids, counts = tokens_and_counts(IndexedDataset(prefix, multimodal=True), 0)
    document = Counted(ids.tolist(), spans_of(counts))
    return marked(read_tokenizer(Path(tokenizer), trust_remote_code), document)
