"""What the published megatron-core 0.19.2 wheel needs put right on any machine, with or without a GPU.

The wheel carries the compiled `helpers_cpp`, but not the Makefile that `compile_helpers` calls, so that the call would
end the process. And its router cannot count tokens for the expert bias when some are masked, as shifted-in slots are.
"""

from typing import Any

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.transformer.moe.router import TopKRouter


def install() -> None:
    """Replace the two functions."""
    dataset_utils.compile_helpers = _already_compiled
    TopKRouter._apply_expert_bias = _count_for_expert_bias


def _already_compiled() -> None:
    from megatron.core.datasets import helpers_cpp  # noqa: F401  (an ImportError here names what is missing)


def _count_for_expert_bias(router: Any, routing_map_TE: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Tokens per expert without padding; 0.19.2 combines [T, E] with [T] (NVIDIA/Megatron-LM#6111, fixed by #6114)."""
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map_TE = routing_map_TE & ~padding_mask.reshape(-1, 1)
            router.local_tokens_per_expert += routing_map_TE.sum(dim=0)
