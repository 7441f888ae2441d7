"""Patches of layers: token counts of routers and their logged losses, YaRN angles, fused weight gradients; data sets.

T tokens, E experts.
"""

import copy
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from inspect import getfile, unwrap
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch

from megatron_mtp.megatron.patches.code import names_in, with_globals
from megatron_mtp.megatron.patches.patch import Function


def count_for_expert_bias(router: Any, routing_map_TE: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Replacement of `TopKRouter._apply_expert_bias`, which combines a map [T, E] with a mask [T]."""
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map_TE = routing_map_TE & ~padding_mask.reshape(-1, 1)
            router.local_tokens_per_expert += routing_map_TE.sum(dim=0)


def with_mean_count(count: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_tokens_per_expert_and_token_count` to return the mean over ranks as this rank's unmasked tokens.

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


def over_all_routers(report: Callable[..., str]) -> Callable[..., str]:
    """Wrap `MoEMetricsTracker.report` to average over the existing routers, with the same tensor size on all stages.

    Megatron counts the trunk's expert layers and one router per depth, whatever its layers are. Its tensors have one
    entry per trunk layer and per pass of a depth.
    """

    @wraps(report)
    def averaged(tracker: Any, *given: Any, **named: Any) -> str:
        from megatron.training import get_args

        args = get_args()
        places = args.num_layers + (getattr(args, "mtp_unroll", None) or args.mtp_num_layers or 0)
        counts = {"num_layers": places, "moe_layer_freq": [routers_of(args)], "mtp_num_layers": None}
        return report(tracker, *given, **{**named, **counts})

    return averaged


def routers_of(args: Namespace) -> int:
    """Return the number of routers whose losses are logged; a repeated layer counts once, a frozen trunk not at all."""
    if args.hybrid_layer_pattern is not None:
        trunk, *depths = (stack.count("E") for stack in args.hybrid_layer_pattern.split("/"))
        of_depth = depths[0] if depths else 0
    else:
        frequency, layers = args.moe_layer_freq, range(args.num_layers)
        has_experts = frequency if isinstance(frequency, list) else [layer % frequency == 0 for layer in layers]
        trunk, of_depth = sum(has_experts), int(has_experts[-1])  # MTP layers have the last layer's type
    depths_apart = 1 if args.mtp_use_repeated_layer else args.mtp_num_layers or 0
    is_frozen = getattr(args, "mtp_train_only", False)
    return max(1, (0 if is_frozen else trunk) + of_depth * depths_apart)


# --- YaRN ------------------------------------------------------------------------------------------------------------


def with_yarn(validate_args: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `validate_args` to treat a model with YaRN and MTP layers like one with plain rotary positions.

    Megatron rejects it, because its own MTP does not support these angles. Our MTP layers get the trunk's angles, and
    their attention has the same factor.
    """

    @wraps(validate_args)
    def validate(args: Namespace, *others: Any, **named: Any) -> Any:
        if args.position_embedding_type != "yarn":
            return validate_args(args, *others, **named)
        args.position_embedding_type, args.apply_rope_fusion = "rope", False
        try:
            return validate_args(args, *others, **named)
        finally:
            args.position_embedding_type = "yarn"

    return validate


# --- fused weight gradients ------------------------------------------------------------------------------------------

Initializer = Callable[..., None]


def fused_where_possible(init: Initializer) -> Initializer:
    """Wrap `ColumnParallelLinear.__init__` to use a plain weight gradient if Apex's extension is missing.

    Transformer Engine's layers read the same setting and fuse by themselves; only Megatron's own layers do not.
    """
    scope = unwrap(init).__globals__

    @wraps(init)
    def make(layer: Any, *sizes: Any, config: Any, **settings: Any) -> None:
        own = config
        if config.gradient_accumulation_fusion and not scope["_grad_accum_fusion_available"]:
            own = copy.copy(config)
            own.gradient_accumulation_fusion = False
        init(layer, *sizes, config=own, **settings)
        layer.config = config  # Megatron may change `config` later, and the layer must see it

    return make


# --- data sets -------------------------------------------------------------------------------------------------------


def import_helpers() -> None:
    """Replacement of `compile_helpers`, which runs a Makefile: the wheel has none, and the process would exit.

    The wheel includes the compiled `helpers_cpp`. A checkout of Megatron-LM has the Makefile and compiles as usual.
    """
    from megatron.core.datasets import helpers_cpp  # noqa: F401  (raises ImportError if it is missing)


# --- probes: is the bug present? -------------------------------------------------------------------------------------


def compiles_without_makefile(compile_helpers: Function) -> bool:
    """Return whether it runs make in a folder without a Makefile."""
    folder = Path(getfile(unwrap(compile_helpers))).parent
    return "make" in names_in(compile_helpers) and not (folder / "Makefile").exists()


def refuses_yarn(validate_args: Function) -> bool:
    """Return whether MTP layers are rejected by the kind of positions. The code of a wrapper does not reject them."""
    code = cast(FunctionType, validate_args).__code__
    return any(
        isinstance(text, str) and text.startswith("Multi-Token Prediction (MTP) is not") for text in code.co_consts
    )


def mask_hits_experts(apply_expert_bias: Function) -> bool | None:
    """Probe with two tokens and two experts, the second token masked: counts are [1, 1], or [2, 0] with the bug."""
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
    with torch.enable_grad():
        apply_expert_bias(router, torch.tensor([[True, True], [True, False]]), torch.tensor([False, True]))
    return {(1.0, 1.0): False, (2.0, 0.0): True}.get(tuple(router.local_tokens_per_expert.tolist()))


def sum_overwrites_count(get_counts: Function) -> bool | None:
    """Probe with two tokens of an expert, one masked, on each of two ranks: this rank has 1 token, both have 2."""
    counted = with_globals(get_counts, reduce_from_tensor_model_parallel_region=lambda counts, _: counts.mul_(2))
    _, own, total = counted(torch.tensor([[1, 0], [0, 0]]), SimpleNamespace(size=lambda: 2), 1, True)
    return {(1, 2): False, (2, 2): True}.get((int(own), int(total)))


def counts_other_routers(report: Function) -> bool | None:
    """Probe with a trunk of one expert layer and a depth without experts: the average is 1.0, or 0.5 with the bug."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    class OfOneRank(MoEMetricsTracker):
        def _sync_metrics(self, *_: Any) -> None:
            pass

    tracker, losses = OfOneRank(), dict[str, Any]()
    tracker.record("loss", torch.ones(()), 1, 2)
    counts = {"num_layers": 1, "moe_layer_freq": [1], "mtp_num_layers": 1}
    report(tracker, 1.0, 0, track_names="loss", total_loss_dict=losses, **counts)
    return {1.0: False, 0.5: True}.get(float(losses["loss"]))


def refuses_without_apex(init: Function) -> bool:
    """Return whether creating a layer requires Apex's extension."""
    return "_grad_accum_fusion_available" in names_in(init)
