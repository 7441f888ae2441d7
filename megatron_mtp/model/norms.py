"""Norms for machines without Transformer Engine."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm


class PortableNorm(torch.nn.Module):
    """RMSNorm or LayerNorm (`config.normalization`), with sequence parallelism and zero-centered weights.

    With sequence parallelism, each rank normalizes its own positions and has a partial gradient of the weights.
    Megatron sums the gradients of parameters that are marked `sequence_parallel` over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 0.0 if self.centered else 1.0))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalized values [..., H]."""
        weight = self.weight + 1 if self.centered else self.weight
        if self.bias is None:
            return rms_norm(hidden, weight.shape, weight, self.eps)
        return layer_norm(hidden, weight.shape, weight, self.bias, self.eps)
