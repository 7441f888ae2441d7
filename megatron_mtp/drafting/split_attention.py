"""Attention of few rows over a long cache on a GPU: slots are split over programs, and the parts merged.

torch's attention with a mask gives a key head of a text to one program, however many slots it has. A step of one text
and 8 key heads then occupies 8 of 132 processors. `is_worth` says where splitting is worth a second kernel; the slots
of a part depend on shapes alone, so that a CUDA graph can hold both. It is flash-decoding (Dao et al., 2023), with the
mask of any rows: chains of unequal length and trees. flash-attn's `flash_attn_with_kvcache` takes lengths alone.

Letters in names: B batch, N query heads, G key heads, R rows, W slots, C channels, D those of a value.
"""

from functools import cache

import torch
from torch import Tensor
from torch.library import custom_op

from megatron_mtp.drafting.fused_rows import has_kernels, power_of_two

LEAST_WINDOW = 512
"""Slots from which on attention is split. By arithmetic, not measured: one processor reads so many keys and values, of
128 channels in bfloat16, in some 4 us, and a second kernel takes 2 us."""

MOST_ROWS = 64
"""Of a key head: its query heads times the rows of the forward. With more, other programs take other rows."""

WIDEST = 512
"""Bytes of a key or a value: 256 channels in half precision. The tiles of larger ones do not fit into a processor."""

LEAST_EACH = 128
"""Slots of a part, at least. They are a power of two, so that few kernels are compiled."""

BLOCK_M, BLOCK_W, WARPS = 64, 64, 4
"""Rows of a key head and slots that a program takes at once, and its warps."""


def is_worth(query_BNRC: Tensor, key_BGWC: Tensor, value_BGWD: Tensor) -> bool:
    """Whether there are kernels for these, and processors that would be idle without."""
    batch, heads, rows, channels = query_BNRC.shape
    groups, window = key_BGWC.shape[1:3]
    widest = max(channels, value_BGWD.size(3)) * query_BNRC.element_size()
    fits = heads // groups * rows <= MOST_ROWS and widest <= WIDEST
    if window < LEAST_WINDOW or not fits or not has_kernels(query_BNRC):
        return False
    return batch * groups < processors(query_BNRC.device)


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_attention(
    query_BNRC: Tensor, key_BGWC: Tensor, value_BGWD: Tensor, mask_B1RW: Tensor, scale: float
) -> Tensor:
    """The attention output [B, N, R, D], in one or two parts for every processor."""
    pairs = key_BGWC.size(0) * key_BGWC.size(1)
    wanted = -(-2 * processors(query_BNRC.device) // pairs)
    each = max(LEAST_EACH, power_of_two(-(-key_BGWC.size(2) // wanted)))
    return attend_in_parts(query_BNRC, key_BGWC, value_BGWD, mask_B1RW, scale, each).permute(1, 2, 0, 3)


@custom_op("megatron_mtp::attend_in_parts", mutates_args=())
def attend_in_parts(
    query_BNRC: Tensor, key_BGWC: Tensor, value_BGWD: Tensor, mask_B1RW: Tensor, scale: float, each: int
) -> Tensor:
    """The attention output [R, B, N, D], from parts of `each` slots.

    Args:
        key_BGWC, value_BGWD: the first slots of a cache, each slot's channels side by side.
        mask_B1RW: added to the scores; finite for a slot at least.
        each: a power of two, not below `BLOCK_W`.
    """
    from megatron_mtp.drafting import split_kernels

    batch, heads, rows, channels = query_BNRC.shape
    groups, window, values = key_BGWC.size(1), key_BGWC.size(2), value_BGWD.size(3)
    count, parts = heads // groups * rows, -(-window // each)
    made = query_BNRC.new_empty(batch * groups, parts, count, values, dtype=torch.float32)
    largest, total = (made.new_empty(batch * groups, parts, count) for _ in range(2))
    sizes = {"GROUPS": groups, "QUERIES": heads // groups, "VALUES": values, "BLOCK_D": _tile(values)}
    block = min(BLOCK_M, _tile(count))
    split_kernels.attend_to_part[(batch * groups, parts, -(-count // block))](
        query_BNRC.contiguous(),
        key_BGWC,
        value_BGWD,
        mask_B1RW,
        made,
        largest,
        total,
        scale,
        *key_BGWC.stride()[:2],
        *value_BGWD.stride()[:2],
        mask_B1RW.stride(0),
        mask_B1RW.stride(2),
        rows,
        window,
        EACH=each,
        CHANNELS=channels,
        BLOCK_M=block,
        BLOCK_W=BLOCK_W,
        BLOCK_C=_tile(channels),
        num_warps=WARPS,
        **sizes,
    )
    attended = _output_of(query_BNRC, key_BGWC, value_BGWD)
    split_kernels.merge[(batch * groups, count)](
        made, largest, total, attended, rows, batch, parts, BLOCK_P=power_of_two(parts), num_warps=WARPS, **sizes
    )
    return attended


@attend_in_parts.register_fake
def _output_of(query_BNRC: Tensor, key_BGWC: Tensor, value_BGWD: Tensor, *_: object) -> Tensor:
    batch, heads, rows = query_BNRC.shape[:3]
    return query_BNRC.new_empty(rows, batch, heads, value_BGWD.size(3))


def _tile(count: int) -> int:
    """The least side of a tensor core's tile that holds so many."""
    return max(16, power_of_two(count))
