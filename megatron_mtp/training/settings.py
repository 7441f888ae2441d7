"""Derived arguments: of a drafter, of --mtp-num-layers 0, of a layer pattern, of data without validation."""

from argparse import Namespace
from dataclasses import fields
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_mtp.data.checks import split_weights
from megatron_mtp.model.arguments import as_mtp_layers, layers_to_read, trunk_spec
from megatron_mtp.spec.attention import LATENT, own_sizes
from megatron_mtp.spec.config import MTPConfig, flag_of
from megatron_mtp.spec.head import WITH_MTP, has_both, layers_of, only_drafter
from megatron_mtp.spec.kinds import drafts_of, kind_of
from megatron_mtp.training.short_log import say

PATTERN, SHARES = "--hybrid-layer-pattern", "--mtp-repeated-layer-shares-kv"
FIRST_PASS = "--mtp-repeated-layer-first-pass-kv"

WITHOUT_DEPTHS = ("mtp_metrics_dir", "mtp_linear_ce_main", "mtp_mask_prompts")
"""Settings of this package that apply to a run without MTP layers."""


def with_changes(args: Namespace, changes: dict[str, Any]) -> Namespace:
    """Return a copy of the arguments with some of them replaced."""
    return Namespace(**{**vars(args), **changes})


def of_drafter(args: Namespace) -> dict[str, Any]:
    """Return the arguments that follow from --drafter (ours).

    Raises:
        ValueError: --drafter was combined with a flag that a drafter run does not support.
    """
    if args.drafter is None:
        return {WITH_MTP: False}
    is_alone = not args.mtp_num_layers
    for given, flag, why in (
        (is_alone and args.mtp_unroll, "--mtp-unroll", "its passes are --drafter-steps"),
        (is_alone and args.mtp_init, "--mtp-init", "a new drafter is drawn"),
        (is_alone and args.mtp_hidden_state_mixing, "--mtp-hidden-state-mixing", "a step reads its own states"),
        (is_alone and args.mtp_repeated_layer_shares_kv, SHARES, "its steps always do"),
        (is_alone and args.mtp_repeated_layer_first_pass_kv, FIRST_PASS, "its steps attend to their own chain too"),
        (
            args.overlap_moe_expert_parallel_comm,
            "--overlap-moe-expert-parallel-comm",
            "its schedule takes apart the layers whose states are read",
        ),
    ):
        if given:
            raise ValueError(f"--drafter {args.drafter} was given with {flag}, but {why}; drop one of the two.")
    both = {WITH_MTP: not is_alone}
    return both | drafter_arguments(with_changes(args, both))


def drafter_arguments(args: Namespace) -> dict[str, Any]:
    """Return the arguments of a drafter run: K passes on a frozen trunk instead of MTP layers.

    Raises:
        ValueError: the trunk does not have the layers to read.
    """
    kind, given, chosen = kind_of(args.drafter), vars(args), args.drafter_layers
    if (layers := layers_to_read(args)) is not None:
        chosen = [*layers_of(kind, given, layers)]
        _check_heads(args)
    return {
        "drafter_layers": chosen or None,
        **{name: value for name, value in kind.own(given).items() if kind.settings[name].is_size},
        **({} if has_both(args) else _in_their_place(args)),
    }


def _in_their_place(args: Namespace) -> dict[str, Any]:
    loss = kind_of(args.drafter).loss if args.mtp_loss == "ce" else {}
    return loss | as_mtp_layers(drafts_of(vars(args)), args)


def _check_heads(args: Namespace) -> None:
    """Raise ValueError if tensor-parallel ranks cannot share the drafter's heads, or its compressed sizes."""
    if args.num_attention_heads is None:
        return
    sizes = own_sizes(args.hidden_size, trunk_spec(args).attention, vars(args))
    ranks = args.tensor_model_parallel_size
    shared = [(sizes.heads, "heads", "--drafter-num-attention-heads")]
    if sizes.latents is None:
        shared.append((sizes.groups, "key heads", "--drafter-num-query-groups"))
    else:
        keys = sizes.latents.kv_lora_rank + sizes.latents.qk_pos_emb_head_dim
        shared.append((sizes.latents.q_lora_rank or 0, "channels of compressed queries", f"another Q in {LATENT}"))
        shared.append((keys, "channels of compressed keys (KV + ROPE)", f"others in {LATENT}"))
    for number, what, remedy in shared:
        if number % ranks:
            raise ValueError(
                f"the drafter has {number} {what}, which {ranks} tensor-parallel ranks cannot share; give {remedy}."
            )


def without_depths(args: Namespace) -> dict[str, Any]:
    """Return the defaults of the flags that have no effect with --mtp-num-layers 0 (ours).

    Raises:
        ValueError: there would be nothing to train.
    """
    if args.mtp_train_only:
        raise ValueError(
            "--mtp-train-only was given with --mtp-num-layers 0, which leaves nothing to train; give 1 or more MTP "
            "layers, or train the trunk, without --mtp-train-only."
        )
    own = [one for one in fields(MTPConfig) if one.name not in WITHOUT_DEPTHS and "drafter" not in one.name]
    defaults = {one.name: one.default for one in own} | {"mtp_use_repeated_layer": False, "mtp_detach_heads": False}
    given = [flag_of(name) for name, default in defaults.items() if getattr(args, name) != default]
    if given and args.rank == 0:
        say(f"> --mtp-num-layers is 0: training without MTP layers, and without {' '.join(given)}")
    return defaults


def counted_depths(args: Namespace) -> int | None:
    """Return --mtp-num-layers, or the number of MTP layers in --hybrid-layer-pattern; None if there are none (ours).

    Raises:
        ValueError: the pattern is invalid, or contradicts --mtp-num-layers.
    """
    for old in ("hybrid_override_pattern", "mtp_hybrid_override_pattern"):
        if getattr(args, old) is not None:
            raise ValueError(f"{flag_of(old)} is deprecated; give {PATTERN}, as '<trunk>/<depth>/...'.")
    if args.hybrid_layer_pattern is None or only_drafter(args) is not None:
        return args.mtp_num_layers or None
    depths = parse_hybrid_pattern(args.hybrid_layer_pattern).mtp_num_depths
    if args.mtp_num_layers == 0 and depths:
        trunk = args.hybrid_layer_pattern.partition(Symbols.MTP_SEPARATOR)[0]
        raise ValueError(
            f"--mtp-num-layers is 0, but {PATTERN} has MTP layers behind its trunk; give {PATTERN} '{trunk}'."
        )
    if args.mtp_num_layers not in (None, depths):
        raise ValueError(
            f"--mtp-num-layers is {args.mtp_num_layers}, but {PATTERN} {args.hybrid_layer_pattern} has {depths} MTP "
            "layers behind its trunk, one after each '/'; give as many, or leave --mtp-num-layers out."
        )
    return depths or None


def leave_out_evaluations(args: Namespace) -> None:
    """Turn off evaluation (--eval-iters 0) if the flags name only training data; Megatron would read from no data set.

    Raises:
        ValueError: an evaluation on other data was requested, and no validation data are given.
    """
    if args.mock_data or not (args.eval_iters or args.full_validation):
        return
    blend, per_split = get_blend_and_blend_per_split(args)
    weights = split_weights(args.split) if args.split is not None and blend is not None else [1, 1, 1]
    parts = per_split if per_split is not None else (*weights, 0, 0)
    training, validation, test = [bool(part) for part in parts[:3]]
    if validation:
        return
    said = f"--split is {args.split}" if args.data_path is not None else "--valid-data-path is missing"
    if test or not training or args.full_validation or args.skip_train:
        raise ValueError(f"{said}, which leaves nothing to validate on; give validation data, or --eval-iters 0.")
    args.eval_iters = 0
    if args.rank == 0:
        say(f"> {said}, which leaves nothing to evaluate on: training without evaluations, as with --eval-iters 0")
