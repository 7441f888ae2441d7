"""Linear layer for machines without Transformer Engine: projections to and from the latent of experts."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear


class PortableLinear(torch.nn.Module):
    """TE's linear layer with the whole weight on every tensor-parallel rank, as latent projections use it.

    Args:
        input_size, output_size: sizes of the last dimension.
        config: model configuration.
        init_method: draws the weight in place.
        bias: must be false.
        others: additional arguments of TE's layer, ignored.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        **others: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("latent projections of experts have no biases; give --disable-bias-linear.")
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                init_method(self.weight)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the projection [..., output] and None for the bias."""
        return linear(hidden, self.weight), None
