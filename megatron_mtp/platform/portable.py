"""Modules for where Transformer Engine is not, on any device: they do what Megatron's own local modules refuse.

A spec for Megatron's local modules goes in, the same spec with ours in their places comes out.
"""

import dataclasses
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm


class PortableNorm(torch.nn.Module):
    """RMSNorm or LayerNorm (`config.normalization`), with sequence parallelism and zero-centred weights.

    With sequence parallelism every rank norms its own slots, so that each has a part of the weights' gradients;
    Megatron sums them over the tensor-parallel group where a parameter is marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.centred = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 0.0 if self.centred else 1.0))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """The normed values, [..., H] as given."""
        weight = self.weight + 1 if self.centred else self.weight
        if self.bias is None:
            return rms_norm(hidden, weight.shape, weight, self.eps)
        return layer_norm(hidden, weight.shape, weight, self.bias, self.eps)


SWAPS: dict[Any, Any] = {WrappedTorchNorm: PortableNorm}
"""Megatron's local module, and ours in its place."""


def with_portable_modules(spec: Any) -> Any:
    """The spec (a module, a `ModuleSpec`, or a dataclass or list of such) with every row of `SWAPS` applied."""
    if isinstance(spec, list):
        return [with_portable_modules(one) for one in spec]
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(spec, submodules=with_portable_modules(spec.submodules))
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        swapped = {field.name: with_portable_modules(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **swapped)
    return SWAPS.get(spec, spec) if isinstance(spec, type) else spec
