"""Rows of text: Megatron's GPTDataset, of known responses alone, and cut into the same rows by every run."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, override

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from megatron_mtp.data.best_fit import order_of_rows
from megatron_mtp.data.checks import read_index
from megatron_mtp.data.sources import first_number


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
        """Return document and offset of each token of a sample: one more than positions, or fewer at the data's end."""
        place = self.shuffle_index[idx]
        (first, start), (last, end) = self.sample_index[place], self.sample_index[place + 1]
        numbers, tokens = list[np.ndarray](), list[np.ndarray]()
        for document in range(first, last + 1):
            number = self.document_index[document]
            stop = end + 1 if document == last else self.dataset.sequence_lengths[number]
            tokens.append(np.arange(start if document == first else 0, stop))
            numbers.append(np.full(len(tokens[-1]), number, dtype=np.int64))
        return np.concatenate(numbers), np.concatenate(tokens)

    @staticmethod
    def described(prefixes: Sequence[str], args: Namespace) -> list[str]:
        """Check data sets of this kind before the run, and return lines that report on them."""
        return []


# --- the model's own answers ------------------------------------------------------------------------------------------


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

    @staticmethod
    @override
    def described(prefixes: Sequence[str], args: Namespace) -> list[str]:
        for prefix in prefixes:
            read_answers(prefix)
        return []


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


# --- text that is split once ------------------------------------------------------------------------------------------


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
        sample: dict[str, torch.Tensor] = super().__getitem__(order_of_rows(self._seed, rows, epoch)[place])
        return sample


class TextCutOnce(_CutOnce, TextDataset):
    """TextDataset that is cut into rows once, the same for all seeds and epochs."""


class AnswersCutOnce(_CutOnce, AnswersDataset):
    """AnswersDataset that is cut into rows once, the same for all seeds and epochs."""
