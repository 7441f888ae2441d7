"""Checkpoints where a pipeline stage has nothing to train, as the trunk's stages have under `--mtp-train-only`.

Megatron (0.19.2) gives such a stage an optimizer of empty groups, of which torch's Adam cannot tell the step; and what
rank 0, which alone writes what is not sharded, writes of empty groups, the other stages cannot read. But Megatron knows
stubs: optimizers that are left out of checkpoints. Such a stage's is one here, and where rank 0 has none, it writes
what the first rank that has one would write.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from megatron.core.optimizer import get_megatron_optimizer


def install() -> None:
    """Let Megatron's loop make stubs where there is nothing to train."""
    from megatron.training import training

    training.get_megatron_optimizer = _optimizer


def _optimizer(config: Any, model_chunks: list[torch.nn.Module], *rest: Any, **settings: Any) -> Any:
    """Megatron's function of this name."""
    optimizer = get_megatron_optimizer(config, model_chunks, *rest, **settings)
    if not any(parameter.requires_grad for chunk in model_chunks for parameter in chunk.parameters()):
        optimizer.is_stub_optimizer = True
    return optimizer


def with_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """What this rank saves; on rank 0 with another's `optimizer`, less what is sharded, where it has none itself."""
    has_one = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(has_one, "optimizer" in state)
    if has_one[0] or not any(has_one):
        return state
    lender, rank = has_one.index(True), torch.distributed.get_rank()
    lent = [_not_sharded(state["optimizer"]) if rank == lender else None]
    torch.distributed.broadcast_object_list(lent, src=lender)
    return {**state, "optimizer": lent[0]} if rank == 0 else state


def _not_sharded(optimizer: dict[str, Any]) -> Any:
    _, stored = extract_nonpersistent(optimizer)
    return extract_sharded_base(stored)[1]
