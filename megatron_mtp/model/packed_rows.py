"""Document boundaries of packed rows."""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's description of packed rows, with the offsets also on the host.

    Without TE, layers process each document separately. Reading the offsets from the GPU would block in each of them.
    """

    bounds: Tensor | None = None


def bounds_of(packed: PackedSeqParams) -> Tensor:
    """Return `offsets_of` as a list on the host."""
    known = packed.bounds if isinstance(packed, PackedRows) else None
    return offsets_of(packed).cpu() if known is None else known


def offsets_of(packed: PackedSeqParams) -> Tensor:
    """Return start and end of the documents of a packed row; padding belongs to the previous document."""
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
