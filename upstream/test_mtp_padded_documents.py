"""MTP shifts labels within the documents of a packed row; each document may be followed by padding."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor


def test_documents_with_padding_are_shifted_where_they_stand():
    """Documents of 3 and 2 tokens, each padded to 4 slots; 0 is padding."""
    row = torch.tensor([[11, 12, 13, 0, 21, 22, 0, 0]])
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 3, 5], dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0, 3, 5], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 4, 8], dtype=torch.int32),
        cu_seqlens_kv_padded=torch.tensor([0, 4, 8], dtype=torch.int32),
    )
    shifted, _ = roll_tensor(row, shifts=-1, dims=-1, packed_seq_params=params)
    assert shifted.tolist() == [[12, 13, 0, 0, 22, 0, 0, 0]]


def test_documents_without_padding_are_shifted_as_before():
    """Documents of 3 and 2 tokens."""
    row = torch.tensor([[11, 12, 13, 21, 22]])
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    shifted, _ = roll_tensor(row, shifts=-1, dims=-1, packed_seq_params=params)
    assert shifted.tolist() == [[12, 13, 0, 22, 0]]
