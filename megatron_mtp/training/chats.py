"""Rows of chats, in the format of Megatron's packed data sets.

The data sets are made by `preprocess --chat`, or by `train --chat` before its first step (`given_chats.py`).
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, override

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.training import print_rank_0

from megatron_mtp.data.best_fit import best_fit, order_of_rows
from megatron_mtp.data.chat_counts import COUNTS, lines_of
from megatron_mtp.data.checks import read_sidecar
from megatron_mtp.data.sources import first_number

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
        for number in self._rows[order_of_rows(self.config.random_seed, len(self._rows), epoch)[place]]:
            ids, counts = tokens_and_counts(self.dataset, self._documents[number])
            begin, count = ends[-1] if ends else 0, min(len(ids) - 1, length)
            for name, values in (("tokens", ids), ("labels", ids[1:]), ("loss_mask", counts[1:])):
                row[name][begin : begin + count] = values[:count]
            ends.append(begin + int(self._held(count)))
            row["position_ids"][begin : ends[-1]] = np.arange(ends[-1] - begin)
            row["documents"][begin : ends[-1]] = self._first + int(self._documents[number])
        offsets = np.full(length + 1, length, dtype=np.int32)  # equal lengths, so that rows can be stacked
        offsets[: len(ends) + 1] = [0, *ends]
        sample = {name: torch.from_numpy(values) for name, values in row.items()}
        sample["loss_mask"] = sample["loss_mask"].float()
        return {**sample, "cu_seqlens": torch.from_numpy(offsets), "max_seqlen": torch.tensor(np.diff(offsets).max())}

    def _held(self, positions: Any) -> Any:
        return -(-positions // self._multiple) * self._multiple

    @staticmethod
    def described(prefixes: Sequence[str], args: Namespace) -> list[str]:
        """Check data sets of chats before the run, and return lines that report what counts in them."""
        return [f"> {line}" for prefix in prefixes for line in counted_part(prefix, args.seq_length)]


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
