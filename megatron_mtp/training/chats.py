"""Chats as training data: made into a dataset once, counted, and packed into rows by Megatron's flags.

In:  files of --chat, or datasets that `preprocess --chat` made (`data/chat.py`).
Out: `PackedChats`, rows in the format of Megatron's packed data sets; lines that say what counts.
"""

import os
from argparse import Namespace
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any, override

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.training import print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_mtp.data.chat import COUNTS, Counted, best_fit, marked, prefix_in_cache, spans_of, write_chats
from megatron_mtp.data.checks import read_index, read_sidecar
from megatron_mtp.data.documents import choose_documents, find_files, list_documents
from megatron_mtp.data.tokenizer import Encoder, read_tokenizer
from megatron_mtp.files import one_writer


def reads_chats(args: Namespace) -> bool:
    """Return whether the data is chats: files of --chat, or datasets that `preprocess --chat` made.

    Raises:
        ValueError: some datasets are chats and others are not.
    """
    if args.chat is not None:
        return True
    kinds = {read_index(prefix).has_modes for prefix in named_prefixes(args) if Path(f"{prefix}.idx").is_file()}
    if len(kinds) > 1:
        raise ValueError("--data-path names datasets of chats and of text, whose rows differ; give one kind.")
    return kinds == {True}


def named_prefixes(args: Namespace) -> list[str]:
    """The prefixes of all data sets that flags name."""
    blend, per_split = get_blend_and_blend_per_split(args)
    return [prefix for one in (blend, *(per_split or ())) if one is not None for prefix in one[0]]


def make_chats(args: Namespace) -> None:
    """Make --chat a dataset, on one rank, and --data-path its prefix; the others wait, since they read the same file.

    Raises:
        ValueError: the files or the tokenizer cannot be used.
    """
    folder, trusts = args.tokenizer_model, args.trust_remote_code
    if args.tokenizer_type != "HuggingFaceTokenizer" or not Path(folder or "").is_dir():
        raise ValueError(
            f"--chat was given with --tokenizer-type {args.tokenizer_type} and --tokenizer-model {folder}; give "
            "HuggingFaceTokenizer and the folder of a tokenizer with a chat template."
        )
    counts_empty = bool(args.chat_count_empty_thinking)
    settings = {"seed": args.seed, "chat_count_empty_thinking": counts_empty}
    prefix = prefix_in_cache(args.chat, folder, args.data_cache_path, settings)
    args.data_path, done = [prefix], Path(f"{prefix}.idx")
    if args.rank == 0 and not done.is_file():
        lines = choose_documents(list_documents(find_files(args.chat, ["*.jsonl"], "--chat")), None, args.seed, True)
        encoder = Encoder.from_folder(folder, trust_remote_code=trusts)
        with one_writer(Path(prefix), f"--chat: '{prefix}'"):
            write_chats(lines, encoder, prefix, counts_empty, os.cpu_count() or 1, settings)
    _await(prefix, done, args.distributed_timeout_minutes)


def _await(prefix: str, done: Path, minutes: int) -> None:
    """Wait until another rank has made a dataset. Raises ValueError where its files have not grown for some minutes."""
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


class PackedChats(MegatronDataset):
    """Rows of chats: each is a document, and the labels that count are the tokens that count.

    A chat of n tokens has n - 1 positions, since its last token is a label alone; longer ones than a row are cut to it.
    Under context parallelism a chat takes a multiple of 2R positions for R ranks. What is left of a row is a document
    of padding. Rows are packed once, and each epoch draws their order from the seed. Two chats in a row of seven, where
    tokens from 50 on count:

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
        self._documents = indices[counted[indices] > 0]
        held = self._held(np.minimum(lengths[self._documents] - 1, config.sequence_length))
        self._rows = best_fit(held, config.sequence_length)
        if not self._rows:
            raise ValueError(
                f"--seq-length is {config.sequence_length}, and in that many tokens none counts of the {len(indices)} "
                f"chats for {index_split.name} in '{dataset_path}'; give more, or other chats."
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
        row = {name: np.zeros(length, dtype=np.int64) for name in ("tokens", "labels", "loss_mask", "position_ids")}
        ends: list[int] = []
        for number in self._rows[_order(self.config.random_seed, len(self._rows), epoch)[place]]:
            ids, counts = tokens_and_counts(self.dataset, self._documents[number])
            begin, count = ends[-1] if ends else 0, min(len(ids) - 1, length)
            for name, values in (("tokens", ids), ("labels", ids[1:]), ("loss_mask", counts[1:])):
                row[name][begin : begin + count] = values[:count]
            ends.append(begin + int(self._held(count)))
            row["position_ids"][begin : ends[-1]] = np.arange(ends[-1] - begin)
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
    """The tokens of a chat, and whether each counts."""
    first, end = dataset.document_indices[document : document + 2]
    sequences, modes = dataset[first:end]
    return np.concatenate(sequences), np.repeat(modes == COUNTS, [len(sequence) for sequence in sequences])


def lengths_and_counted(dataset: IndexedDataset, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of every chat, and how many of its labels count where it is cut to so many positions."""
    sizes, firsts = dataset.sequence_lengths.astype(np.int64), dataset.document_indices[:-1]
    lengths = np.add.reduceat(sizes, firsts)
    starts = sizes.cumsum() - sizes
    starts -= np.repeat(starts[firsts], np.diff(dataset.document_indices))
    labels = (starts + sizes).clip(1, positions + 1) - starts.clip(1, positions + 1)
    return lengths, np.add.reduceat(labels * (dataset.index.sequence_modes == COUNTS), firsts)


def counted_part(prefix: str, positions: int) -> list[str]:
    """Lines that say how many tokens of a dataset of chats count, and which do not.

    Raises:
        ValueError: none does.
    """
    dataset, about = IndexedDataset(prefix, multimodal=True), read_sidecar(prefix)
    lengths, counted = lengths_and_counted(dataset, positions)
    _, whole = lengths_and_counted(dataset, int(lengths.max()))
    if not counted.any():
        raise ValueError(f"--seq-length is {positions}, within which no token counts of any chat in '{prefix}'.")
    chats, without = about.get("chats", len(lengths)), about.get("chats_without_counted_tokens", 0)
    lines = [f"chats in '{prefix}': {counted.sum():,} of {lengths.sum():,} tokens count, in {len(lengths):,} documents"]
    if without:
        lines.append(f"{without:,} of {chats:,} chats are left out, since they hold no answer of the assistant")
    if len(lengths) > chats - without:
        lines.append(
            f"{len(lengths) - chats + without:,} documents are earlier turns, which the chat template renders "
            "otherwise once others follow"
        )
    if (is_cut := lengths > positions + 1).any():
        lines.append(
            f"{is_cut.sum():,} documents are cut to --seq-length {positions}: {(whole - counted).sum():,} tokens that "
            f"count are lost, and {(counted == 0).sum():,} documents are left out, since nothing that counts is left"
        )
    return lines


def example(prefix: str, tokenizer: str, trust_remote_code: bool = False) -> str:
    """The text of the first chat of a dataset, with what counts in white brackets; `tokenizer` is a folder."""
    ids, counts = tokens_and_counts(IndexedDataset(prefix, multimodal=True), 0)
    document = Counted(ids.tolist(), spans_of(counts))
    return marked(read_tokenizer(Path(tokenizer), trust_remote_code), document)
