"""--mtp-mask-prompts: labels outside of answers count neither for the trunk nor for an MTP layer, wherever rows are
split.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answer_texts import EOD, config, rows, written
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron_mtp.data.batch import depth_batch
from megatron_mtp.training import datasets, megatron_lm
from megatron_mtp.training.texts import AnswersDataset, TextDataset, read_answers

pytestmark = pytest.mark.usefixtures("megatron")


def test_answer_rows_match_the_docstring_example(tmp_path: Path) -> None:
    prefix = written(tmp_path, [[5, 6, 7, 8], [3, 4, 9, 1]], [(2, 5), (2, 4)])
    data = rows(AnswersDataset, prefix, config(8))
    data.document_index, data.sample_index = np.array([0, 1]), np.array([[0, 1], [1, 4]])
    (row,) = [data[0]]
    assert row["tokens"].tolist() == [6, 7, 8, 0, 3, 4, 9, 1]
    assert row["labels"].tolist() == [7, 8, 0, 3, 4, 9, 1, 0]
    assert row["loss_mask"].tolist() == [1, 1, 1, 0, 0, 1, 1, 0]
    batch = torch.utils.data.default_collate([row])
    assert depth_batch(batch, 2).loss_mask_DBS[:, 0].tolist() == [[1, 1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0, 0, 0]]


def chosen(ids: list[int], first: int, stop: int) -> list[tuple[int, int]]:
    """Return the tokens of an answer, each with its predecessor."""
    whole = [*ids, EOD]
    return [(whole[place - 1], whole[place]) for place in range(first, stop)]


@pytest.mark.parametrize("length", [4, 7, 64])
@pytest.mark.parametrize("changes", [{}, {"inter_document_masking": True}, {"add_extra_token_to_sequence": False}])
def test_only_answers_count_in_megatrons_rows(length: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Every token except EOD occurs once, so a label, or that of EOD with its token, identifies the position."""
    sizes = np.random.default_rng(1).integers(3, 19, 40)
    ends = sizes.cumsum()
    documents = [list(range(end - size + 1, end + 1)) for size, end in zip(sizes, ends, strict=True)]
    ended = np.random.default_rng(2).integers(0, 2, 40).tolist()
    answers = [(int(size) // 2, int(size) + end) for size, end in zip(sizes, ended, strict=True)]
    pairs = {pair for ids, (first, stop) in zip(documents, answers, strict=True) for pair in chosen(ids, first, stop)}
    prefix, settings = written(tmp_path, documents, answers), config(length, **changes)
    ours, theirs = (rows(kind, prefix, settings, 30) for kind in (AnswersDataset, GPTDataset))
    assert len(ours) == len(theirs) >= 30
    for number in range(len(ours)):
        row, plain = ours[number], theirs[number]
        expected = [
            float(pair in pairs) for pair in zip(plain["tokens"].tolist(), plain["labels"].tolist(), strict=True)
        ]
        counted = torch.tensor(expected) * plain["loss_mask"]
        assert row["loss_mask"].tolist() == counted.tolist()
        assert all(torch.equal(row[name], plain[name]) for name in plain if name != "loss_mask")
    assert ours[None]["loss_mask"].sum() == 0  # Megatron fills batches with it


def test_the_flag_chooses_the_data_set() -> None:
    given = Namespace(mock_data=False, reads_chats=False, mtp_mask_prompts=True, mtp_state_cache=None)
    assert datasets.KINDS[datasets.kind_of_data(given)] is AnswersDataset
    assert datasets.KINDS[datasets.kind_of_data(Namespace(**{**vars(given), "mtp_mask_prompts": False}))] is TextDataset


def test_data_without_answers_is_refused(tmp_path: Path) -> None:
    prefix = written(tmp_path, [[5, 6], [7, 8]], [(1, 2), (1, 3)])
    assert read_answers(prefix).tolist() == [[1, 2], [1, 3]]
    file = tmp_path / "own.answers.npy"
    for damaged in (file.read_bytes()[:-4], b"junk", b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged or of other samples than the 2 of"):
            read_answers(prefix)
    np.save(file, np.array([[1, 2]] * 3, dtype=np.int32))
    with pytest.raises(ValueError, match="damaged or of other samples than the 2 of"):
        read_answers(prefix)
    file.unlink()
    with pytest.raises(ValueError, match=r"is missing, .* positions of answers; give data of"):
        read_answers(prefix)


def test_a_script_with_data_sets_of_its_own_is_refused() -> None:
    args = Namespace(mtp_mask_prompts=True, mtp_draft_prompts=None)
    megatron_lm._check_prompts(args, megatron_lm.datasets_provider)
    megatron_lm._check_prompts(Namespace(mtp_mask_prompts=False, mtp_draft_prompts=None), lambda: None)
    with pytest.raises(ValueError, match="the script's own data sets do not read it; call"):
        megatron_lm._check_prompts(args, lambda: None)
