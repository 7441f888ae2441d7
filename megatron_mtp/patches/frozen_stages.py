"""Checkpoints where a pipeline stage has nothing to train, as the trunk's stages have under `--mtp-train-only`.

Megatron gives such a stage an optimizer of empty groups. torch's Adam has no step for empty groups. And rank 0
alone writes what is not sharded: what it writes of empty groups, the other stages cannot read. Megatron already has
stubs: optimizers that are left out of checkpoints. Here the optimizer of such a stage is a stub, and where rank 0 has
none to write, it writes that of the first rank that has one.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def with_stubs(get_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """`get_megatron_optimizer`, which makes a stub where no parameter is trained."""

    @functools.wraps(get_optimizer)
    def get(config: Any, model_chunks: list[torch.nn.Module], *rest: Any, **settings: Any) -> Any:
        optimizer = get_optimizer(config, model_chunks, *rest, **settings)
        if not any(parameter.requires_grad for chunk in model_chunks for parameter in chunk.parameters()):
            optimizer.is_stub_optimizer = True
        return optimizer

    return get


def with_lent_optimizer(save: Callable[..., Any]) -> Callable[..., Any]:
    """`dist_checkpointing.save`; rank 0 saves another rank's `optimizer`, less what is sharded, if it has none."""

    @functools.wraps(save)
    def saved(state: dict[str, Any], *rest: Any, **settings: Any) -> Any:
        return save(_with_optimizer(state), *rest, **settings)

    return saved


def _with_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    has_one = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(has_one, "optimizer" in state)
    if has_one[0] or not any(has_one):
        return state
    lender, rank = has_one.index(True), torch.distributed.get_rank()
    lent = [_not_sharded(state["optimizer"]) if rank == lender else None]
    torch.distributed.broadcast_object_list(lent, src=lender)
    return {**state, "optimizer": lent[0]} if rank == 0 else state


def _not_sharded(optimizer: dict[str, Any]) -> Any:
    from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base

    _, stored = extract_nonpersistent(optimizer)
    return extract_sharded_base(stored)[1]
