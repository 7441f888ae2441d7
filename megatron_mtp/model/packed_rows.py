"""Documents of a packed row: where they start and end."""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's description of packed rows, with the offsets on the host too.

    Without TE, layers compute every document by itself. Each would wait for the GPU to read the offsets there.
    """

    bounds: Tensor | None = None


def bounds_of(packed: PackedSeqParams) -> Tensor:
    """`offsets_of`, on the host."""
    known = packed.bounds if isinstance(packed, PackedRows) else None
    return offsets_of(packed).cpu() if known is None else known


def offsets_of(packed: PackedSeqParams) -> Tensor:
    """Start and end of the documents of a packed row; padding belongs to the document before it."""
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
