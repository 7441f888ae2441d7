"""What the published megatron-core 0.19.2 wheel needs put right on any machine, with or without a GPU.

The wheel carries the compiled `helpers_cpp`, but not the Makefile that `compile_helpers` calls, so that the call would
end the process. Its router cannot count tokens for the expert bias when some are masked, as shifted-in slots are. With
`--calculate-per-token-loss` it then takes the tokens of all tensor- and context-parallel ranks for those of one, and
makes the balancing loss of the depths as many times too large. And its distributed optimizer saves the wrong slices in
the fully reshardable format where a bucket is padded before others, as that of the embedding's copy on a later pipeline
stage is.
"""

import functools
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as moe_router
from megatron.core.transformer.moe.router import TopKRouter

_STATE_WITH_GAPS = DistributedOptimizer.sharded_param_state_fully_reshardable
"""Megatron's own, kept here so that a second `install()` does not close the gaps twice."""


def install() -> None:
    """Replace the four functions; a checkout of Megatron-LM, which has the Makefile, compiles as ever."""
    if not Path(dataset_utils.__file__).with_name("Makefile").exists():
        dataset_utils.compile_helpers = _already_compiled
    TopKRouter._apply_expert_bias = _count_for_expert_bias
    moe_router.get_tokens_per_expert_and_token_count = _token_counts
    DistributedOptimizer.sharded_param_state_fully_reshardable = _without_gaps(_STATE_WITH_GAPS)


def _already_compiled() -> None:
    from megatron.core.datasets import helpers_cpp  # noqa: F401  (an ImportError here names what is missing)


def _count_for_expert_bias(router: Any, routing_map_TE: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Tokens per expert without padding; 0.19.2 combines [T, E] with [T] (NVIDIA/Megatron-LM#6111, fixed by #6114)."""
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map_TE = routing_map_TE & ~padding_mask.reshape(-1, 1)
            router.local_tokens_per_expert += routing_map_TE.sum(dim=0)


def _token_counts(
    routing_map: torch.Tensor,
    reduce_group: torch.distributed.ProcessGroup,
    topk: int | None = None,
    with_padding_mask: bool = False,
) -> Any:
    """Megatron's; where tokens are masked its sum over ranks, made in place, overwrites this rank's own count.

    The mean takes the count's place: its caller multiplies it by the number of ranks.
    """
    count = moe_utils.get_tokens_per_expert_and_token_count
    of_experts, of_rank, of_all = count(routing_map, reduce_group, topk, with_padding_mask)
    return of_experts, of_all / reduce_group.size() if with_padding_mask else of_rank, of_all


def _without_gaps(state_of: Callable[..., Any]) -> Callable[..., Any]:
    """The same method; parameters stand where its gathered tensors have them, which leave out padding."""

    @functools.wraps(state_of)
    def state(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        maps = [buffer.param_index_map for buffer in optimizer.buffers]
        for buffer in optimizer.buffers:
            padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            gaps = list(accumulate(padding, initial=0))
            buffer.param_index_map = {
                parameter: (start - gaps[bucket], end - gaps[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }
        try:
            return state_of(optimizer, *args, **kwargs)
        finally:
            for buffer, index_map in zip(optimizer.buffers, maps, strict=True):
                buffer.param_index_map = index_map

    return state
