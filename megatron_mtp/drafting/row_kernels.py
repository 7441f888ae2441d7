"""Kernels for a GPU: what a dense layer does between its products, a row's part of it in one program each.

fused_rows.py calls them. All is computed in float32, and rounded to the rows' type where `dense_layer` rounds in its
own operations: a kernel and they differ in float32's last digits alone.

Letters as in dense_layer.py: S rows of a forward, B batch, G key heads, Q query heads of one key head, C channels.
"""

import triton
import triton.language as tl


@triton.jit
def normalise(
    hidden, added, weight, sums, normalised, eps, CHANNELS: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """RMSNorm of a row, or of its sum with the row of `added`, which is written to `sums`."""
    start = tl.program_id(0).to(tl.int64) * CHANNELS
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, CHANNELS, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = _summed(hidden + start, added + start, places, CHANNELS, ADDS)
        squares += values * values
        if ADDS:
            tl.store(sums + start + places, values.to(sums.dtype.element_ty), mask=places < CHANNELS)
    length = tl.sqrt(tl.sum(squares) / CHANNELS + eps)
    for first in range(0, CHANNELS, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_channel = places < CHANNELS
        values = _summed(hidden + start, added + start, places, CHANNELS, ADDS)
        factors = tl.load(weight + places, mask=is_channel, other=0.0).to(tl.float32)
        scaled = values / length * factors
        tl.store(normalised + start + places, scaled.to(normalised.dtype.element_ty), mask=is_channel)


@triton.jit
def _summed(hidden, added, places, CHANNELS: tl.constexpr, ADDS: tl.constexpr):
    """Float32, rounded to the rows' type before; 0 beyond the channels."""
    is_channel = places < CHANNELS
    values = tl.load(hidden + places, mask=is_channel, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(added + places, mask=is_channel, other=0.0).to(tl.float32)
        values = values.to(hidden.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def place(
    mixed,
    cosine,
    signed_sine,
    angle_stride_S,
    angle_stride_B,
    query_weight,
    key_weight,
    query_eps,
    key_eps,
    slots,
    slot_stride_B,
    slot_stride_R,
    queries,
    keys,
    values,
    rows,
    batch,
    capacity,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TURNED: tl.constexpr,
    NORMS_QUERIES: tl.constexpr,
    NORMS_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A head of a row of `mixed` [S, B, G, Q + 2, C]: a query goes to [B, N, R, C], keys and values to their slots.

    Queries and keys are normalised where there are weights for it, and their first `TURNED` channels are turned.
    """
    both, head = tl.program_id(0), tl.program_id(1)
    row, text, group, part = both // batch, both % batch, head // (QUERIES + 2), head % (QUERIES + 2)
    places = tl.arange(0, BLOCK)
    is_channel = places < CHANNELS
    mixed += (both.to(tl.int64) * GROUPS * (QUERIES + 2) + head) * CHANNELS
    angle = row.to(tl.int64) * angle_stride_S + text * angle_stride_B
    cosine, signed_sine = cosine + angle, signed_sine + angle
    if part < QUERIES:
        made = _turned(mixed, cosine, signed_sine, query_weight, query_eps, CHANNELS, TURNED, NORMS_QUERIES, BLOCK)
        target = (text.to(tl.int64) * GROUPS * QUERIES + group * QUERIES + part) * rows + row
        tl.store(queries + target * CHANNELS + places, made, mask=is_channel)
    else:
        slot = tl.load(slots + text * slot_stride_B + row * slot_stride_R)
        target = (text.to(tl.int64) * GROUPS + group) * capacity + slot
        if part == QUERIES:
            made = _turned(mixed, cosine, signed_sine, key_weight, key_eps, CHANNELS, TURNED, NORMS_KEYS, BLOCK)
            tl.store(keys + target * CHANNELS + places, made, mask=is_channel)
        else:
            made = tl.load(mixed + places, mask=is_channel)
            tl.store(values + target * CHANNELS + places, made, mask=is_channel)


@triton.jit
def _turned(
    head,
    cosine,
    signed_sine,
    weight,
    eps,
    CHANNELS: tl.constexpr,
    TURNED: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Channels of a head in their own type: normalised with `NORMS`, and the first `TURNED` of them turned."""
    places = tl.arange(0, BLOCK)
    is_channel = places < CHANNELS
    length = 1.0
    if NORMS:
        values = tl.load(head + places, mask=is_channel, other=0.0).to(tl.float32)
        length = tl.sqrt(tl.sum(values * values) / CHANNELS + eps)
    own = _normed(head, weight, places, is_channel, length, NORMS)
    if TURNED > 0:
        is_turned = places < TURNED
        other = _normed(head, weight, (places + TURNED // 2) % TURNED, is_turned, length, NORMS)
        cosines = tl.load(cosine + places, mask=is_turned, other=0.0).to(tl.float32)
        sines = tl.load(signed_sine + places, mask=is_turned, other=0.0).to(tl.float32)
        front = (own * cosines).to(head.dtype.element_ty).to(tl.float32) + other * sines
        own = tl.where(is_turned, front, own)
    return own.to(head.dtype.element_ty)


@triton.jit
def _normed(head, weight, places, mask, length, NORMS: tl.constexpr):
    """Channels of a head in float32; normalised, and rounded to their own type, with `NORMS`."""
    values = tl.load(head + places, mask=mask, other=0.0).to(tl.float32)
    if NORMS:
        factors = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
        values = (values / length * factors).to(head.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def gate(wide, inner, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """SiLU of a row's first half times its second half."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = places < WIDTH
    wide += row * 2 * WIDTH
    gates = tl.load(wide + places, mask=is_channel, other=0.0).to(tl.float32)
    values = tl.load(wide + WIDTH + places, mask=is_channel, other=0.0).to(tl.float32)
    activated = (gates / (1 + tl.exp(-gates))).to(wide.dtype.element_ty).to(tl.float32)
    tl.store(inner + row * WIDTH + places, (activated * values).to(inner.dtype.element_ty), mask=is_channel)
