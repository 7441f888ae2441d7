"""Texts of which only the answers are trained on: Megatron's data set, where labels outside of answers are masked.

In:  PREFIX.bin and .idx, and PREFIX.answers.npy of `megatron-mtp sample`: where every answer begins and ends.
Out: samples whose loss mask is 0 where the label is no token of an answer. The depths' masks are shifted from it
     (shift.py), so no depth is trained on anything else either.

Every document ends with the EOD 0, since Megatron puts documents one behind the other. It belongs to the answer only if
the model chose it. A row of eight positions, over 5 6 7 8 0, which the model ended, and 3 4 9 1 0, which was cut; the
first two tokens of each are prompts:

    token  6 7 8 0 3 4 9 1
    label  7 8 0 3 4 9 1 0
    mask   1 1 1 0 0 1 1 0
"""

from pathlib import Path
from typing import Any, override

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron_mtp.data.checks import read_index


class AnswersDataset(GPTDataset):
    """Megatron's, over texts whose answers are known; its arguments are Megatron's."""

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
    """Where the answer of every document begins, and the token behind it: [documents, 2], int32.

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
