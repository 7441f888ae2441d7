"""Compile the operations between a dense layer's products as on a GPU, in a process without the CPU stand-ins.

python fused_functions.py DEVICE BACKEND    prints name, largest difference and number of compilations per case
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import rms_norm, silu

from megatron_mtp.decoding import dense_layer

CASES = (0, False), (0, True), (1, False), (2, False)
"""Function numbers, and whether queries and keys have norms."""
GROUPS, QUERIES, CHANNELS, LAYERS = 4, 3, 64, 3
SHAPES = (32, 1), (1, 1), (4, 1), (32, 4), (1, 4), (4, 4)
"""Rows and sequences of prompts, of plain decoding, and of drafts."""


class Norm(torch.nn.Module):
    """RMSNorm; every layer has its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(channels))

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight.shape, self.weight, 1e-5)


def given(rows: int, batch: int, norms: tuple[Norm, Norm] | tuple[None, None], after: Norm) -> dict[Any, list[Any]]:
    """Return the functions and their arguments."""
    caches = torch.randn(6, GROUPS, 640, CHANNELS), torch.randn(6, GROUPS, 640, CHANNELS)
    angles = torch.randn(rows, batch, 1, 1, CHANNELS), torch.randn(rows, batch, 1, 1, CHANNELS)
    places = torch.arange(batch).unsqueeze(1), torch.arange(rows).expand(batch, -1) + 7
    mixed = torch.randn(rows, batch, GROUPS, QUERIES + 2, CHANNELS)
    return {
        dense_layer._kept_heads: [mixed, norms, angles, caches, places],
        dense_layer._sum_and_norm: [torch.randn(rows, batch, 512), torch.randn(rows, batch, 512), after],
        dense_layer._gated: [torch.randn(rows, batch, 1024), silu],
    }


@torch.inference_mode()
def main(device: str, backend: str) -> None:
    torch.set_default_device(device)
    print(json.dumps([compared(number, has_norms, backend) for number, has_norms in CASES]))


def compared(number: int, has_norms: bool, backend: str) -> tuple[str, float, int]:
    """Return a function's name, its largest difference, and how often it was compiled."""
    torch.compiler.reset()
    counters.clear()
    largest = 0.0
    for _ in range(LAYERS):
        norms, after = (Norm(CHANNELS), Norm(CHANNELS)) if has_norms else (None, None), Norm(512)
        for rows, batch in SHAPES:
            function, arguments = [*given(rows, batch, norms, after).items()][number]
            twins = [copied(one) for one in arguments]
            made, meant = torch.compile(function, dynamic=True, backend=backend)(*arguments), function(*twins)
            pairs = zip(leaves((made, arguments)), leaves((meant, twins)), strict=True)
            largest = max(largest, *((one - other).abs().max().item() for one, other in pairs))
    return function.__name__, largest, counters["stats"]["unique_graphs"]


def copied(argument: Any) -> Any:
    """Copy tensors."""
    if isinstance(argument, tuple):
        return tuple(map(copied, argument))
    return argument.clone() if isinstance(argument, Tensor) else argument


def leaves(values: Any) -> list[Tensor]:
    """Return all floating-point tensors: results, and arguments, which may have been overwritten."""
    if isinstance(values, Tensor):
        return [values] if values.is_floating_point() else []
    return [leaf for value in values for leaf in leaves(value)] if isinstance(values, list | tuple) else []


if __name__ == "__main__":
    main(*sys.argv[1:])
