"""What a dense layer does between its products, as one kernel each: norm, queries and keys in place, gated SiLU.

On a GPU a step of few rows is bound by reading weights, and by launching kernels: torch's own operations take some 26 a
layer for these. The kernels (row_kernels.py) are used on CUDA, where Triton can be imported, by whoever asks
`has_kernels` for the weight at hand. They are operators of torch, so that FakeTensorMode and dispatch modes see them.

`torch.compile` would fuse the same operations. It was not chosen: what it makes can be seen on a GPU alone, it compiles
anew for every K and window, and a layer has only four places to fuse.

Letters in names: S rows of a forward, B batch, H hidden, F inner channels, G key heads, Q query heads of one key head,
N = G Q, R the same rows as S, L slots of the cache, C channels.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from megatron_mtp.platform.kernels import why_not

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 4096
"""Channels that a program of a norm has in registers at once; of wider rows it reads one part after another."""

GATED = 1024
"""Channels that a program of a gated SiLU computes."""


def has_kernels(weight: Tensor) -> bool:
    """Whether rows of this weight's type and device have kernels."""
    return weight.is_cuda and weight.dtype in DTYPES and why_not("triton") is None


@custom_op("megatron_mtp::rms_norm", mutates_args=())
def rms_norm(hidden: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Rows [..., H], normalised by their root mean square and multiplied with the weight."""
    hidden = hidden.contiguous()
    normalised = torch.empty_like(hidden)
    _normalise(hidden, hidden, weight_H, hidden, normalised, eps, adds=False)
    return normalised


@rms_norm.register_fake
def _(hidden: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return hidden.new_empty(hidden.shape)


@custom_op("megatron_mtp::sum_and_rms_norm", mutates_args=())
def sum_and_rms_norm(hidden: Tensor, added: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of rows [..., H], and the sum as `rms_norm` normalises it."""
    hidden, added = hidden.contiguous(), added.contiguous()
    sums, normalised = torch.empty_like(hidden), torch.empty_like(hidden)
    _normalise(hidden, added, weight_H, sums, normalised, eps, adds=True)
    return sums, normalised


@sum_and_rms_norm.register_fake
def _(hidden: Tensor, added: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)


def _normalise(
    hidden: Tensor, added: Tensor, weight_H: Tensor, sums: Tensor, normalised: Tensor, eps: float, adds: bool
) -> None:
    from megatron_mtp.drafting import row_kernels

    channels = weight_H.numel()
    block = min(WIDEST, power_of_two(channels))
    row_kernels.normalise[(hidden.numel() // channels,)](
        hidden,
        added,
        weight_H,
        sums,
        normalised,
        eps,
        CHANNELS=channels,
        ADDS=adds,
        BLOCK=block,
        num_warps=_warps(block),
    )


@custom_op("megatron_mtp::place_rows", mutates_args=("keys_BGLC", "values_BGLC"))
def place_rows(
    mixed_SBGQC: Tensor,
    cosine: Tensor | None,
    signed_sine: Tensor | None,
    query_weight_C: Tensor | None,
    key_weight_C: Tensor | None,
    query_eps: float,
    key_eps: float,
    slots_BR: Tensor,
    keys_BGLC: Tensor,
    values_BGLC: Tensor,
) -> Tensor:
    """The queries [B, N, R, C], normalised and turned; keys, likewise, and values are written to the cache.

    Args:
        mixed_SBGQC: the product: Q query heads, a key and a value for every key head, Q + 2 in all.
        cosine, signed_sine: of the rows' angles, [S, B, 1, 1, turned channels]; None turns nothing.
        query_weight_C, key_weight_C: of their RMSNorm; None normalises nothing.
        slots_BR: where keys and values go.
        keys_BGLC, values_BGLC: the cache of the layer.
    """
    from megatron_mtp.drafting import row_kernels

    rows, batch, groups, heads, channels = mixed_SBGQC.shape
    mixed_SBGQC, queries_BNRC = mixed_SBGQC.contiguous(), _queries_like(mixed_SBGQC)
    angles = (mixed_SBGQC, mixed_SBGQC) if cosine is None or signed_sine is None else (cosine, signed_sine)
    row_kernels.place[(rows * batch, groups * heads)](
        mixed_SBGQC,
        *angles,
        *angles[0].stride()[:2],
        *(mixed_SBGQC if weight is None else weight for weight in (query_weight_C, key_weight_C)),
        query_eps,
        key_eps,
        slots_BR,
        *slots_BR.stride(),
        queries_BNRC,
        keys_BGLC,
        values_BGLC,
        rows,
        batch,
        keys_BGLC.size(2),
        GROUPS=groups,
        QUERIES=heads - 2,
        CHANNELS=channels,
        TURNED=0 if cosine is None else cosine.size(-1),
        NORMS_QUERIES=query_weight_C is not None,
        NORMS_KEYS=key_weight_C is not None,
        BLOCK=power_of_two(channels),
        num_warps=1,
    )
    return queries_BNRC


@place_rows.register_fake
def _(mixed_SBGQC: Tensor, *_: object) -> Tensor:
    return _queries_like(mixed_SBGQC)


def _queries_like(mixed_SBGQC: Tensor) -> Tensor:
    rows, batch, groups, heads, channels = mixed_SBGQC.shape
    return mixed_SBGQC.new_empty(batch, groups * (heads - 2), rows, channels)


@custom_op("megatron_mtp::gated_silu", mutates_args=())
def gated_silu(wide: Tensor) -> Tensor:
    """SiLU of the first half of rows [..., 2 F] times their second half, [..., F]."""
    from megatron_mtp.drafting import row_kernels

    wide, inner = wide.contiguous(), _half_of(wide)
    width = inner.size(-1)
    block = min(GATED, power_of_two(width))
    grid = (inner.numel() // width, -(-width // block))
    row_kernels.gate[grid](wide, inner, WIDTH=width, BLOCK=block, num_warps=_warps(block))
    return inner


@gated_silu.register_fake
def _half_of(wide: Tensor) -> Tensor:
    return wide.new_empty(*wide.shape[:-1], wide.size(-1) // 2)


def power_of_two(count: int) -> int:
    """The least power of two that is not below it."""
    return 1 << (count - 1).bit_length()


def _warps(block: int) -> int:
    """Eight numbers a thread."""
    return max(1, min(16, block // 256))
