"""Kernels for a GPU: attention of few rows over a long cache, whose slots are split over programs (flash-decoding).

split_attention.py calls them. A program of the first kernel attends to one part of the slots, with a softmax of its
own; the second kernel merges the parts by their largest scores and their sums. Both compute in float32; the products
take the type of queries and values, as attention does elsewhere.

Letters in names: B batch, G key heads, M rows of a key head (those of a forward for each of its query heads), W slots.
"""

import triton
import triton.language as tl


@triton.jit
def attend_to_part(
    queries,
    keys,
    values,
    masks,
    made,
    largest,
    total,
    scale,
    key_stride_B,
    key_stride_G,
    value_stride_B,
    value_stride_G,
    mask_stride_B,
    mask_stride_R,
    rows,
    window,
    EACH: tl.constexpr,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What rows of a key head [B, G, M, C] make of `EACH` slots: [B G, parts, M, D] before the division, the largest
    score and the sum of exponentials. The first slot of a part is in the window; blocks beyond it change nothing.
    """
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text, group = pair // GROUPS, pair % GROUPS
    row_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel_C, value_D = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    is_row_M, is_channel_C, is_value_D = row_M < QUERIES * rows, channel_C < CHANNELS, value_D < VALUES
    places = (pair * QUERIES * rows + row_M)[:, None] * CHANNELS + channel_C[None, :]
    query_MC = tl.load(queries + places, mask=is_row_M[:, None] & is_channel_C[None, :], other=0.0)
    keys += text * key_stride_B + group * key_stride_G
    values += text * value_stride_B + group * value_stride_G
    masks += text * mask_stride_B + (row_M % rows)[:, None] * mask_stride_R
    largest_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total_M = tl.zeros((BLOCK_M,), tl.float32)
    made_MD = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, EACH, BLOCK_W):
        slot_W = part * EACH + start + tl.arange(0, BLOCK_W)
        is_slot_W = slot_W < window
        key_places = slot_W[None, :] * CHANNELS + channel_C[:, None]
        key_CW = tl.load(keys + key_places, mask=is_slot_W[None, :] & is_channel_C[:, None], other=0.0)
        value_places = slot_W[:, None] * VALUES + value_D[None, :]
        value_WD = tl.load(values + value_places, mask=is_slot_W[:, None] & is_value_D[None, :], other=0.0)
        added_MW = tl.load(masks + slot_W[None, :], mask=is_row_M[:, None] & is_slot_W[None, :], other=0.0)
        score_MW = tl.dot(query_MC, key_CW, input_precision="ieee") * scale + added_MW
        score_MW = tl.where(is_slot_W[None, :], score_MW, float("-inf"))
        made_MD, largest_M, total_M = _with_block(made_MD, largest_M, total_M, score_MW, value_WD)
    target_M = (pair * tl.num_programs(1) + part) * QUERIES * rows + row_M
    tl.store(largest + target_M, largest_M, mask=is_row_M)
    tl.store(total + target_M, total_M, mask=is_row_M)
    target_MD = target_M[:, None] * VALUES + value_D[None, :]
    tl.store(made + target_MD, made_MD, mask=is_row_M[:, None] & is_value_D[None, :])


@triton.jit
def _with_block(made_MD, largest_M, total_M, score_MW, value_WD):
    """Sums of values and of exponentials, relative to the largest score, with those of a further block."""
    new_M = tl.maximum(largest_M, tl.max(score_MW, axis=1))
    shrunk_M = tl.exp(largest_M - new_M)
    weight_MW = tl.exp(score_MW - new_M[:, None])
    own_MD = tl.dot(weight_MW.to(value_WD.dtype), value_WD, input_precision="ieee")
    total_M = total_M * shrunk_M + tl.sum(weight_MW, axis=1)
    made_MD = made_MD * shrunk_M[:, None] + own_MD
    return made_MD, new_M, total_M


@triton.jit
def merge(
    made,
    largest,
    total,
    attended,
    rows,
    batch,
    parts,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row of a key head, from all parts of its slots to [R, B, N, D]."""
    pair, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = QUERIES * rows
    part_P, value_D = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    is_part_P = part_P < parts
    source_P = (pair * parts + part_P) * count + own
    largest_P = tl.load(largest + source_P, mask=is_part_P, other=float("-inf"))
    weight_P = tl.exp(largest_P - tl.max(largest_P))
    total_P = tl.load(total + source_P, mask=is_part_P, other=0.0)
    is_read_PD = is_part_P[:, None] & (value_D < VALUES)[None, :]
    made_PD = tl.load(made + source_P[:, None] * VALUES + value_D[None, :], mask=is_read_PD, other=0.0)
    sum_D = tl.sum(made_PD * weight_P[:, None], axis=0) / tl.sum(total_P * weight_P)
    text, group, query, row = pair // GROUPS, pair % GROUPS, own // rows, own % rows
    target = ((row * batch + text) * GROUPS + group) * QUERIES + query
    tl.store(attended + target * VALUES + value_D, sum_D.to(attended.dtype.element_ty), mask=value_D < VALUES)
