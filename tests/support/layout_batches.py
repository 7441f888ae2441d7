"""The global batch of every kind that layouts are tested with: plain tensors with the keys of Megatron's datasets.

stream      unpacked rows; the loss masks have holes, more of them in later microbatches
documents   the same with EOD tokens: attention and loss stop at document ends
packed      rows of documents without padding, which two context-parallel ranks split evenly
ragged      rows of documents of any length, without padding: some of one token
padded      rows of documents of any length, each padded to a multiple of four
"""

from itertools import accumulate

import torch

SEQUENCE, MICROBATCHES, VOCABULARY = 32, 4, 128
ROWS = {"stream": 2, "documents": 2, "packed": 1, "ragged": 1, "padded": 1}
"""Rows per microbatch: Megatron's pipeline takes one packed row at a time."""

EOD = VOCABULARY - 1  # of NullTokenizer
LENGTHS = {
    "packed": [[4, 8, 4, 16], [32], [8, 8, 8, 8], [4] * 8],
    "ragged": [[1, 7, 12, 3, 9], [31, 1], [1] * 32, [2, 30]],
    "padded": [[3, 1, 8, 5, 8], [29], [8, 2, 8, 9], [1] * 8],
}


def microbatches(kind: str) -> list[dict[str, torch.Tensor]]:
    """Return the same microbatches at every call."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for index in range(MICROBATCHES):
        stream_BS = torch.randint(0, EOD, (ROWS[kind], SEQUENCE + 1), generator=generator)
        mask_BS = torch.rand(ROWS[kind], SEQUENCE, generator=generator) > 0.15 * index
        if kind == "documents":
            ends_BS = torch.rand(stream_BS.shape, generator=generator) < 0.15
            stream_BS = stream_BS.masked_fill(ends_BS, EOD)
        batch = {
            "tokens": stream_BS[:, :-1].contiguous(),
            "labels": stream_BS[:, 1:].contiguous(),
            "loss_mask": mask_BS.float(),
            "position_ids": torch.arange(SEQUENCE).expand(ROWS[kind], -1).contiguous(),
        }
        batches.append(batch | (_unpacked(batch) if kind in ("stream", "documents") else _packed(kind, index, batch)))
    return batches


def _unpacked(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the attention mask, True for slots that are not attended to, and the loss mask. A row without EOD is one
    document.
    """
    is_end_BS = (batch["tokens"] == EOD).long()
    document_BS = is_end_BS.cumsum(1) - is_end_BS
    visible_BSS = (document_BS[:, :, None] == document_BS[:, None, :]).tril()
    return {"attention_mask": ~visible_BSS.unsqueeze(1), "loss_mask": batch["loss_mask"] * (1 - is_end_BS)}


def _packed(kind: str, index: int, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return offsets, as long as a row could need; padding is masked."""
    lengths = LENGTHS[kind][index]
    held = [-(-length // 4) * 4 for length in lengths] if kind == "padded" else lengths
    starts = list(accumulate(held, initial=0))[:-1]
    mask_S = torch.zeros(SEQUENCE)
    for start, length in zip(starts, lengths, strict=True):
        mask_S[start : start + length] = 1
    packed = {
        "loss_mask": batch["loss_mask"] * mask_S,
        "cu_seqlens": _offsets(lengths),
        "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32),
    }
    return packed | ({"cu_seqlens_padded": _offsets(held)} if kind == "padded" else {})


def _offsets(lengths: list[int]) -> torch.Tensor:
    offsets = list(accumulate(lengths, initial=0))
    return torch.tensor([offsets + offsets[-1:] * (SEQUENCE + 1 - len(offsets))], dtype=torch.int32)
