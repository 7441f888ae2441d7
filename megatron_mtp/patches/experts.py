"""Token counts of the MoE router, where some tokens are masked, as the last positions of every depth are.

T tokens, E experts.
"""

from collections.abc import Callable
from typing import Any

import torch


def counted_without_padding(_: Any) -> Callable[..., None]:
    """In the place of `TopKRouter._apply_expert_bias`, which combines a map [T, E] with a mask [T]."""
    return _count_for_expert_bias


def _count_for_expert_bias(router: Any, routing_map_TE: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map_TE = routing_map_TE & ~padding_mask.reshape(-1, 1)
            router.local_tokens_per_expert += routing_map_TE.sum(dim=0)


def with_mean_count(count: Callable[..., Any]) -> Callable[..., Any]:
    """`get_tokens_per_expert_and_token_count`, with the mean over ranks as this rank's count of unmasked tokens.

    Megatron sums over the ranks in place, which overwrites this rank's own count. The caller multiplies the count by
    the number of ranks, so the mean gives the right balancing loss.
    """

    def token_counts(
        routing_map: torch.Tensor,
        reduce_group: torch.distributed.ProcessGroup,
        topk: int | None = None,
        with_padding_mask: bool = False,
    ) -> Any:
        of_experts, of_rank, of_all = count(routing_map, reduce_group, topk, with_padding_mask)
        return of_experts, of_all / reduce_group.size() if with_padding_mask else of_rank, of_all

    return token_counts
