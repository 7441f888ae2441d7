"""What Megatron does around the trunk's layers, for MTP layers: recomputation, and the recipe of quantization."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup


def checkpointed[T](
    run: Callable[..., T], config: TransformerConfig, tp_group: ProcessGroup, hidden_SBH: Tensor, *others: Tensor | None
) -> T:
    """Run a function with activation checkpointing: the backward pass recomputes it."""
    if torch.is_grad_enabled() and not hidden_SBH.requires_grad:
        # With a detached or frozen trunk no input requires a gradient, and then the output would not require one
        # either.
        hidden_SBH = hidden_SBH.detach().requires_grad_()
    inputs = hidden_SBH, *others
    # --distribute-saved-activations would keep only a slice of the input, and the losses need all of it.
    distributes, rng_tracker = False, tensor_parallel.get_cuda_rng_tracker
    if config.fp8 or config.fp4:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        # Delayed scaling saves its amax history only if FP8 is already on when the checkpointed region starts.
        delayed = config.fp8 and config.fp8_recipe == Fp8Recipe.delayed
        with get_fp8_context(config) if delayed else nullcontext():
            return te_checkpoint(run, distributes, rng_tracker, tp_group, *inputs)
    return tensor_parallel.checkpoint(run, distributes, *inputs)


def set_quantization(block: torch.nn.Module, config: TransformerConfig) -> None:
    """Pass their part of the quantization recipe to the MTP layers' TE modules, as Megatron does for the trunk's."""
    for name, module in block.named_modules(prefix="mtp"):
        if hasattr(module, "finish_init"):
            module.finish_init(get_quant_config_or_none(name, config.quant_recipe))
