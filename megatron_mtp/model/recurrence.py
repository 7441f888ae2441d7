"""Common parts of recurrent layers: documents, causal convolution, decays of chunks, context parallelism.

A recurrent layer keeps one state per head and sequence. It is computed chunk by chunk: positions of a chunk see each
other through a matrix, and earlier chunks through the state before the chunk. A state ends with its document:

    position   0 1 2 | 3 4 5      document 0 0 0 0 1 1, chunks of three
    position 3 sees the state before its chunk, positions 4 and 5 do not; the state after it holds 4 and 5 alone

Letters in names: B batch, L positions of the whole sequence, S those of a context-parallel rank, R such ranks, C
channels, H heads, K chunks, Q positions of a chunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import tensor_a2a_cp2hp, tensor_a2a_hp2cp
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.data.batch import positions_of_ranks

CHUNK = 64
"""Positions of a chunk: the matrices within chunks grow with it, the number of steps between chunks falls."""


@contextmanager
def having(modules: list[ModuleType], **values: Any) -> Iterator[None]:
    """While this lasts, these names of the modules have other values, in the modules that have the names."""
    before = [(module, name, getattr(module, name)) for module in modules for name in values if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, values[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def offsets_of(packed_seq_params: PackedSeqParams | None) -> Tensor | None:
    """Where the documents of a packed row start and end; padding belongs to the document before it."""
    if packed_seq_params is None:
        return None
    padded = packed_seq_params.cu_seqlens_q_padded
    return packed_seq_params.cu_seqlens_q if padded is None else padded


def documents_of(offsets: Tensor | None, like_BLC: Tensor) -> Tensor:
    """The document of every position, [1, L]; rows that are not packed are one document."""
    length, device = like_BLC.size(1), like_BLC.device
    if offsets is None:
        return torch.zeros(1, length, dtype=torch.long, device=device)
    position_L = torch.arange(length, device=device)
    return torch.searchsorted(offsets[1:].to(position_L).contiguous(), position_L, right=True)[None]


def causal_convolution(x_BLC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, document_BL: Tensor) -> Tensor:
    """Every channel with its own W last positions of the same document, [B, L, C]; the last weight is of its own."""
    width, length = weight_CW.size(1), x_BLC.size(1)
    mixed_BLC = x_BLC * weight_CW[:, -1]
    for back in range(1, min(width, length)):
        same_BL1 = (document_BL[:, back:] == document_BL[:, :-back]).unsqueeze(-1)
        earlier = pad(x_BLC[:, :-back] * same_BL1, (0, 0, back, 0))
        mixed_BLC = mixed_BLC + earlier * weight_CW[:, -1 - back]
    return mixed_BLC if bias_C is None else mixed_BLC + bias_C


def chunked(values: Tensor, chunk: int) -> Tensor:
    """[B, L, H, ...] as [B, H, K, Q, ...], float32 or wider; zeros after the last position fill the last chunk."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    missing = -values.size(1) % chunk
    values = pad(values, (0, 0) * (values.dim() - 2) + (0, missing))
    return values.unflatten(1, (-1, chunk)).movedim(3, 1)


def joined(values: Tensor, length: int) -> Tensor:
    """[B, H, K, Q, ...] as [B, L, H, ...]: the inverse of `chunked`."""
    return values.movedim(1, 3).flatten(1, 2)[:, :length]


@dataclass(frozen=True)
class Decays:
    """The remainder of an input after some positions, 0 where another document begins between.

    Attributes:
        within: at position i of what position j of the chunk brought in, [B, H, K, Q, Q]; 0 where j is later.
        before: at a position of the state before its chunk, [B, H, K, Q].
        after: at the end of the chunk of what a position brought in, [B, H, K, Q].
        across: at the end of the chunk of the state before it, [B, H, K].
    """

    within: Tensor
    before: Tensor
    after: Tensor
    across: Tensor

    @classmethod
    def of(cls, logarithm_BLH: Tensor, document_BL: Tensor, chunk: int) -> "Decays":
        """From the logarithm of every position's decay, 0 or less."""
        so_far = chunked(logarithm_BLH, chunk).cumsum(-1)
        document = pad(document_BL, (0, -document_BL.size(1) % chunk), value=-1).unflatten(1, (-1, chunk))[:, None]
        last = document[..., -1]
        previous = pad(last[..., :-1], (1, 0), value=-1)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        between = (so_far.unsqueeze(-1) - so_far.unsqueeze(-2)).masked_fill(~same.tril(), float("-inf"))
        return cls(
            within=between.exp(),
            before=so_far.exp() * (document == previous.unsqueeze(-1)),
            after=(so_far[..., -1:] - so_far).exp() * (document == last.unsqueeze(-1)),
            across=so_far[..., -1].exp() * (last == previous),
        )


class ContextParallelHeads:
    """Exchanges some positions of all heads, which a context-parallel rank has, for all positions of its own heads."""

    def __init__(self, group: torch.distributed.ProcessGroup, positions: int, offsets: Tensor | None) -> None:
        """`positions`: of this rank; `offsets`: of a packed row's documents, which are cut one by one."""
        self.group = group
        self.ranks, self.rank = group.size(), group.rank()
        if self.ranks > 1:
            bounds = torch.tensor([0, positions * self.ranks]) if offsets is None else offsets
            self.order_L = positions_of_ranks(bounds, self.ranks).flatten()

    def to_heads(self, values_SBC: Tensor, columns_RC: Tensor) -> Tensor:
        """All positions in order of the columns of this rank's heads; `columns_RC` names those of every rank."""
        if self.ranks == 1:
            return values_SBC
        of_ranks = values_SBC.index_select(-1, columns_RC.flatten())
        whole_LBC = tensor_a2a_cp2hp(of_ranks, 0, -1, self.group, undo_attention_load_balancing=False)
        return whole_LBC.index_select(0, self.order_L.argsort().to(whole_LBC.device))

    def to_positions(self, values_LBC: Tensor) -> Tensor:
        """This rank's positions, with the columns of rank 0's heads first."""
        if self.ranks == 1:
            return values_LBC
        ordered_LBC = values_LBC.index_select(0, self.order_L.to(values_LBC.device))
        return tensor_a2a_hp2cp(ordered_LBC, 0, -1, self.group, redo_attention_load_balancing=False)


def columns_of_ranks(sizes: list[int], ranks: int, shared: tuple[int, ...] = ()) -> list[Tensor]:
    """For every part of consecutive columns, [R, C] of all columns: those of every rank's heads.

    Args:
        sizes: of the parts; each is cut evenly.
        shared: by part, by how many neighbouring ranks a slice is shared; 1 where left out.
    """
    columns, start = [], 0
    for index, size in enumerate(sizes):
        copies = shared[index] if index < len(shared) else 1
        slices = torch.arange(start, start + size).view(ranks // copies, -1)
        columns.append(slices.repeat_interleave(copies, dim=0))
        start += size
    return columns
