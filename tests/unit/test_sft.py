"""Megatron's --sft rows with depths: shifts end with their conversation, and prompts count at no depth."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.utils import Split
from packed_runs import set_packed_run

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.training import forward_step
from megatron_mtp.training.datasets import ChatDataset, trained_part

pytestmark = pytest.mark.usefixtures("megatron")

LENGTH, PAD = 12, 99
CHATS = [
    {"role": "system", "content": "1"},
    {"role": "user", "content": "2 3"},
    {"role": "assistant", "content": "4 5 6"},
    {"role": "system", "content": "1"},
    {"role": "user", "content": "7"},
    {"role": "assistant", "content": "8 9"},
]


class Words:
    """A tokenizer of numbers; as Megatron's, it gives prompts the target -100."""

    eod, pad = 98, PAD

    def tokenize_conversation(self, conversation: list[dict[str, str]], **_: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, targets = [], []
        for message in conversation:
            ids = [int(word) for word in message["content"].split()]
            tokens += ids
            targets += ids if message["role"] == "assistant" else [-100] * len(ids)
        return np.array(tokens), np.array(targets)


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], DepthBatch]:
    """What the forward step makes of a row with both conversations."""
    (tmp_path / "chats.jsonl").write_text("\n" + json.dumps({"messages": CHATS}) + "\n")
    config = Namespace(
        tokenizer=Words(),
        sequence_length=LENGTH,
        context_parallel_size=1,
        reset_position_ids=False,
        reset_attention_mask=False,
        create_attention_mask=False,
    )
    rows = ChatDataset.__new__(ChatDataset)
    rows.dataset, rows.config = ChatDataset.build_low_level_dataset(str(tmp_path / "chats.jsonl"), config), config  # type: ignore[arg-type]
    rows.indices, rows.index_split, rows.num_samples = np.array([0]), Split.train, 1
    set_packed_run(monkeypatch, 1, LENGTH, 2, of_chats=False)
    found, depths = forward_step.get_batch(iter([torch.utils.data.default_collate([rows[0]])]), None, 2)
    assert depths is not None
    return found, depths


@pytest.mark.parametrize(
    ("masks", "pad", "messages", "said"),
    [
        (True, PAD, CHATS[:3], ["of 6 tokens of the first conversation 3 are trained on: '4 5 6'"]),
        (False, PAD, CHATS[:3], ["6 are trained on: '1 2 3 4 5 6'", "this format masks nothing: system and user"]),
        (True, 6, CHATS[1:3], ["2 are trained on: '4 5'", "pads with '6', so that the end", "lines without system"]),
    ],
)
def test_what_is_trained_on_is_said(
    masks: bool, pad: int, messages: list[dict[str, str]], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Words()
    if not masks:
        monkeypatch.setattr(words, "tokenize_conversation", lambda *_, **__: (np.arange(1, 7), np.arange(1, 7)))
    monkeypatch.setattr(Words, "pad", pad)
    monkeypatch.setattr(Words, "eod", 6, raising=False)
    monkeypatch.setattr(Words, "detokenize", lambda _, ids: " ".join(map(str, ids)), raising=False)
    lines = trained_part(words, messages, "default")
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True)), lines


def test_masks_end_with_the_answer_and_prompts_count_nowhere(batch: tuple[dict[str, Any], DepthBatch]) -> None:
    """Slots 0 .. 5 are the first conversation, 6 .. 9 the second, and then there is padding."""
    whole, depths = batch
    assert whole["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 1, 7, 8, 9, PAD, PAD]]
    assert whole["cu_seqlens"].tolist() == [0, 6, 12]
    assert whole["loss_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0]]
    assert (whole["labels"] * whole["loss_mask"]).tolist() == [[0, 0, 4, 5, 6, 0, 0, 8, 9, 0, 0, 0]]
    assert depths.tokens_DBS is not None
    masks, labels, tokens = (each[:, 0] for each in (depths.loss_mask_DBS, depths.labels_DBS, depths.tokens_DBS))
    assert masks.tolist() == [[0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]]
    assert (labels * masks).tolist() == [[0, 4, 5, 6, 0, 0, 8, 9, 0, 0, 0, 0], [4, 5, 6, 0, 0, 0, 9, 0, 0, 0, 0, 0]]
    assert tokens[0].tolist() == [2, 3, 4, 5, 6, 0, 7, 8, 9, PAD, PAD, 0]
    assert tokens[1].tolist() == [3, 4, 5, 6, 0, 0, 8, 9, PAD, PAD, 0, 0]
    assert depths.whole_tokens.tolist() == [5, 5, 4]
