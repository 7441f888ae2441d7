"""The Triton kernels in Triton's interpreter, against the losses' definitions: prints worst differences as JSON.

TRITON_INTERPRET=1 python triton_cases.py losses faults
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from interpreted import planted
from linear_cases import SETTINGS, Case, worst

from megatron_mtp.config import MTPConfig
from megatron_mtp.losses import depth_loss, triton_chunk, triton_kernels
from megatron_mtp.losses.token_loss import Chunk
from megatron_mtp.losses.vocabulary import Vocabulary

NAMES = [name for name, given in SETTINGS.items() if type(depth_loss(MTPConfig(**given))) in triton_chunk.KERNELS]
CASES = [
    Case(4, 2, 7, 43, 2, 0.5, 0).padded(6),
    Case(3, 1, 9, 67, 3, 1.0, 1),
    Case(2, 1, 5, 20, 2, 2.0, 3).padded(40),
]


def main(wanted: list[str]) -> None:
    """Every loss, with all tokens and with a draft vocabulary, or every fault."""
    triton_chunk.BLOCK = 32  # several blocks a row
    used: set[str] = set()
    triton_chunk.has_kernel = lambda loss, *_: used.add(type(loss).__name__) is None
    parts: dict[str, Callable[[], Any]] = {
        "losses": lambda: {name: differences(MTPConfig(**SETTINGS[name])) for name in NAMES},
        "rounded": lambda: {str(dtype): rounded(dtype) for dtype in (torch.bfloat16, torch.float16)},
        "masked": masked,
        "empty": lambda: {name: empty_block(name) for name in ("ce", "tv", "nla")},
        "faults": lambda: {fault: faulty(*given) for fault, given in FAULTS.items()},
        "used": lambda: sorted(used),
    }
    print(json.dumps({name: parts[name]() for name in wanted}))


def differences(settings: MTPConfig, cases: list[Case] = CASES) -> tuple[float, float]:
    """Of the value and of the gradients."""
    pairs = []
    for case in cases:
        for drafted_K in (None, case.drafted()):
            pairs.append((case.chunked(settings, drafted_K=drafted_K), case.plain(settings, drafted_K)))
    return (
        max(worst(ours[:1], plain[:1]) for ours, plain in pairs),
        max(worst(ours[1:], plain[1:]) for ours, plain in pairs),
    )


def products(dtype: torch.dtype, **changes: Any) -> triton_chunk.Products:
    generator = torch.Generator().manual_seed(0)
    values_NV = 3 * torch.randn(5, 50, generator=generator)
    given = triton_chunk.Products(
        values_NV.to(dtype),
        torch.tensor([0, 49, 7, -100, 3]),
        torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0]),
        torch.tensor([0.25]),
        None,
        None,
        Vocabulary(50),
    )
    return replace(given, **changes)


def rounded(dtype: torch.dtype) -> tuple[float, float]:
    """Of products in half precision: the losses and the gradients, by their own size, less those in float32."""
    loss, given = depth_loss(MTPConfig()), products(dtype)
    exact_N, exact_NV = loss(Chunk(given.products_NV.float(), given.labels_N, None, given.vocabulary))
    exact_NV *= (given.mask_N * given.scale_D).unsqueeze(1)
    losses_N = triton_chunk.losses_(loss, given)
    difference_NV = (given.products_NV.float() - exact_NV).abs()
    return worst([losses_N], [exact_N]), (difference_NV / exact_NV.abs().clamp(min=1e-3)).max().item()


def masked() -> tuple[float, float]:
    """A masked position has gradient 0, whatever its products; so do all where the scale is 0."""
    given = products(torch.float32)
    given.products_NV[3, 5] = float("nan")
    triton_chunk.losses_(depth_loss(MTPConfig()), given)
    unscaled = products(torch.float32, scale_D=torch.tensor([0.0]))
    losses_N = triton_chunk.losses_(depth_loss(MTPConfig()), unscaled)
    assert losses_N[[0, 1, 2, 4]].all()
    return given.products_NV[3].abs().max().item(), unscaled.products_NV.abs().max().item()


def empty_block(name: str) -> float:
    """The worst difference where the first tokens, more than a block, have no probability."""
    loss, given = depth_loss(MTPConfig(**SETTINGS[name])), products(torch.float32)
    given.products_NV[:, :40] = float("-inf")
    labels_N = torch.tensor([45, 49, 47, 40, 43])
    teacher_NV = products(torch.float32).products_NV.flip(0).contiguous()
    teacher_NV[:, :40] = float("-inf")
    given = replace(given, labels_N=labels_N, mask_N=torch.ones(5), teacher_TW=teacher_NV, taught_N=torch.arange(5))
    chunk = Chunk(given.products_NV.clone(), labels_N, teacher_NV.clone(), given.vocabulary)
    exact_N, exact_NV = loss(chunk)
    losses_N = triton_chunk.losses_(loss, given)
    return worst([losses_N, given.products_NV], [exact_N, exact_NV * given.scale_D])


FAULTS = {
    "sum": ("ce", "total * tl.exp(largest - finite) + tl.sum(tl", "total + tl.sum(tl"),
    "padding": ("ce", "tl.where(places < TOKENS, gradient, 0.0)", "gradient + 0.001"),
    "label": ("ce", "tl.where(places == label, 1 - SMOOTHING, 0.0)", "0.0"),
    "label that is not drafted": ("ce", "weight = tl.where(label < 0, 0.0, weight)", "weight = weight"),
    "smoothing": ("ce smoothed", " - SMOOTHING / size\n", "\n"),
    "loss of smoothing": ("ce smoothed", " - SMOOTHING * (surplus / size)", ""),
    "z-loss": ("ce with z-loss", "(1 + 2 * Z_LOSS * normalizer) * q", "q"),
    "temperature": ("kd tempered", "temperature * (q - p)", "q - p"),
    "series": ("kd", "1.0 + x / divisor * series", "1.0 + x / divisor"),
    "drafted columns": ("tv", "tl.load(columns + places,", "tl.load(columns + places * 0,"),
    "overlap": ("tv", "q * short -", "q -"),
    "sum of the overlap": ("nla", "total = total * tl.exp(largest - finite) + tl.sum(parts)", "total += tl.sum(parts)"),
    "sum of the short": ("nla", "short = short * tl.exp(largest - finite) + tl", "short += tl"),
    "another row of the trunk": ("kd", "teachers += tl.load(taught + row) *", "teachers += 0 *"),
    "slope": ("tv", "gradient = slope * (q", "gradient = (q"),
    "logarithm": ("nla", "tl.store(found, tl.log(total) + largest)", "tl.store(found, tl.log(total))"),
    "slopes of both": ("lk", "tl.load(divergence_slopes + row) * temp", "slope * temp"),
    "drafted tokens of the trunk": ("lk", "if DIVERGES and GATHERED:", "if False:"),
}
"""Faults to plant in the kernels: the loss that they spoil, and what of the source becomes what."""


def faulty(name: str, old: str, new: str) -> float:
    """The worst difference with a kernel in which `old` is `new`."""
    with planted(triton_kernels, old, new):
        return max(differences(MTPConfig(**SETTINGS[name]), CASES[:1]))


if __name__ == "__main__":
    main(sys.argv[1:])
