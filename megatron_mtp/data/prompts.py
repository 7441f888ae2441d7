"""Texts of which only the answers are trained on: Megatron's data set, where labels inside prompts are masked.

In:  PREFIX.bin and .idx, and PREFIX.prompts.npy of `megatron-mtp sample`: the tokens of every document's prompt.
Out: samples whose loss mask is 0 where the label is a token of a prompt. The depths' masks are shifted from it
     (shift.py), so no depth is trained on a prompt either.

A row of six positions, over the documents 5 6 7 8 0 and 3 4 9 0, whose first two tokens are prompts:

    token  6 7 8 0 3 4
    label  7 8 0 3 4 9
    mask   1 1 1 0 0 1
"""

from pathlib import Path
from typing import Any, override

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron_mtp.data.checks import read_index


class AnswersDataset(GPTDataset):
    """Megatron's, over texts whose prompts are known; its arguments are Megatron's."""

    def __init__(self, indexed_dataset: Any, dataset_path: str, *others: Any) -> None:
        super().__init__(indexed_dataset, dataset_path, *others)
        self._prompts = read_prompts(dataset_path)

    @override
    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(idx)
        asked_S = torch.from_numpy(self._asked(idx or 0))
        return {**sample, "loss_mask": sample["loss_mask"].masked_fill(asked_S, 0)}

    def _asked(self, idx: int) -> np.ndarray:
        """Whether the label of every position, which is the next token, belongs to a prompt: [S]."""
        place = self.shuffle_index[idx]
        (first, start), (last, end) = self.sample_index[place], self.sample_index[place + 1]
        found: list[np.ndarray] = []
        for document in range(first, last + 1):
            number = self.document_index[document]
            stop = end + 1 if document == last else self.dataset.sequence_lengths[number]
            found.append(np.arange(start if document == first else 0, stop) < self._prompts[number])
        labels = np.concatenate(found)[1 : self.config.sequence_length + 1]
        return np.pad(labels, (0, self.config.sequence_length - len(labels)))


def read_prompts(prefix: str) -> np.ndarray:
    """The tokens of every document's prompt: [documents], int32.

    Raises:
        ValueError: no such file is beside the dataset, or it is that of other texts.
    """
    file = Path(f"{prefix}.prompts.npy")
    if not file.is_file():
        raise ValueError(
            f"--mtp-mask-prompts: '{file}' is not there, which says where prompts end; give data of megatron-mtp "
            "sample, or drop the flag."
        )
    try:
        found: np.ndarray = np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError):
        found = np.empty(0)
    sequences = read_index(prefix).sequences
    if found.shape != (sequences,) or found.dtype != np.int32:
        raise ValueError(
            f"--mtp-mask-prompts: '{file}' is damaged or of other texts than the {sequences} of '{prefix}.idx'; run "
            "megatron-mtp sample again with --overwrite."
        )
    return found
