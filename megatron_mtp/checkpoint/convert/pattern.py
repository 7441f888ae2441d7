"""A GPT's layers as the pattern of a hybrid, and back: two symbols for every layer, in Megatron's arguments.

    two layers, the second with experts, and two depths   <->   *-*E/*E/*E

In:  the arguments of a checkpoint.
Out: those of the other form, or a ValueError with one sentence.
"""

from argparse import Namespace
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_mtp.model.hybrid import KINDS, trunk_and_depths

ATTENTION = (Symbols.ATTENTION, Symbols.MLA)
CHANNELS = (Symbols.MLP, Symbols.MOE)
"""The symbols of the first and of the second half of a GPT's layer."""

POSITIONS = ("rope", "learned_absolute", "none")
"""Position embeddings that both forms compute alike."""

NOT_IN_HYBRIDS = (
    "use_rope_scaling no_rope_freq window_attn_skip_freq experimental_attention_variant "
    "heterogeneous_layers_config_path use_mup spec"
).split()
"""Arguments that a hybrid does not read, or whose layers it counts in another way."""


def hybrid_arguments(args: Namespace, source: str) -> Namespace:
    """The arguments of the hybrid that computes what a GPT of these arguments does.

    Args:
        args: the GPT's.
        source: what messages call the checkpoint.

    Raises:
        ValueError: it is a hybrid, or computes something that a hybrid does not.
    """
    if (pattern := getattr(args, "hybrid_layer_pattern", None)) is not None:
        raise ValueError(f"{source} is a hybrid model of layers {pattern} already; hybrid-to-gpt is the other way.")
    wrong = [name for name in NOT_IN_HYBRIDS if _is_set(getattr(args, name, None))]
    if args.position_embedding_type not in POSITIONS:
        wrong.append(f"position_embedding_type {args.position_embedding_type}")
    if wrong:
        raise ValueError(
            f"{source} was trained with --{wrong[0].replace('_', '-')}, which a hybrid model does not compute as a GPT "
            "does; it has to stay a GPT."
        )
    _check_layers(args, source)
    layers = [_attention(args) + channel for channel in _channels(args)]
    depths = [layers[-1]] * (args.mtp_num_layers or 0)
    return _changed(args, hybrid_layer_pattern="/".join(["".join(layers), *depths]), moe_layer_freq=1)


def gpt_arguments(args: Namespace, source: str) -> Namespace:
    """The arguments of the GPT that computes what a hybrid of these arguments does.

    Args:
        args: the hybrid's.
        source: what messages call the checkpoint.

    Raises:
        ValueError: it is a GPT, or its layers are not those of one.
    """
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None:
        raise ValueError(f"{source} is a GPT already; gpt-to-hybrid is the other way.")
    trunk, depths = trunk_and_depths(pattern)
    _check_order(trunk, f"{source} has the layers {pattern}")
    if not trunk:
        raise ValueError(f"the arguments in {source} have a pattern without layers; the checkpoint is damaged.")
    if (other := next((depth for depth in depths if depth != trunk[-2:]), None)) is not None:
        raise ValueError(
            f"{source} has the layers {pattern}, whose depths are {other}, but a GPT's depths are layers like the "
            f"last one of its trunk, {trunk[-2:]} here; it has to stay a hybrid."
        )
    if (Symbols.MLA in trunk) != bool(args.multi_latent_attention):
        raise ValueError(
            f"{source} has the layers {pattern}, but its arguments say multi_latent_attention "
            f"{args.multi_latent_attention}; the checkpoint is damaged."
        )
    moe = [int(symbol == Symbols.MOE) for symbol in trunk[1::2]]
    experts = {"num_experts": args.num_experts if any(moe) else None}
    return _changed(args, hybrid_layer_pattern=None, moe_layer_freq=moe if 0 < sum(moe) < len(moe) else 1, **experts)


def _check_layers(args: Namespace, source: str) -> None:
    """Raises ValueError where the arguments of a GPT do not say what its layers are."""
    layers, frequency = args.num_layers, args.moe_layer_freq
    counts = {"num_layers": layers, "mtp_num_layers": args.mtp_num_layers or 1}
    if isinstance(frequency, int):
        counts["moe_layer_freq"] = frequency
    wrong = next((name for name, value in counts.items() if not isinstance(value, int) or value < 1), None)
    if wrong is None and not isinstance(frequency, int) and len(frequency or ()) != layers:
        wrong = "moe_layer_freq"
    if wrong is not None:
        raise ValueError(f"the arguments in {source} say {wrong} {getattr(args, wrong)!r}; the checkpoint is damaged.")


def _check_order(trunk: str, said: str) -> None:
    """Raises ValueError at the first symbol that is no half of a GPT's layer, or in another order."""
    for index, symbol in enumerate(trunk):
        if symbol not in ATTENTION + CHANNELS:
            raise ValueError(
                f"{said}, and no GPT has {symbol} ({KINDS.get(symbol, 'no layer of Megatron')}); it has to stay "
                "a hybrid."
            )
        if symbol not in (CHANNELS if index % 2 else ATTENTION):
            raise ValueError(
                f"{said}, whose symbol {index + 1} is {symbol} ({KINDS[symbol]}), but a GPT's layers are attention "
                "(* or +) followed by an MLP (-) or MoE (E); it has to stay a hybrid."
            )
    if len(trunk) % 2:
        raise ValueError(f"{said}, whose last {trunk[-1]} is half of a GPT's layer; it has to stay a hybrid.")


def _attention(args: Namespace) -> str:
    return Symbols.MLA if args.multi_latent_attention else Symbols.ATTENTION


def _channels(args: Namespace) -> list[str]:
    """The second half of every layer: an MLP, or experts by --moe-layer-freq."""
    layers, frequency = range(args.num_layers), args.moe_layer_freq
    if not args.num_experts:
        return [Symbols.MLP for _ in layers]
    moe = [n % frequency == 0 for n in layers] if isinstance(frequency, int) else frequency
    return [Symbols.MOE if has_experts else Symbols.MLP for has_experts in moe]


def _changed(args: Namespace, hybrid_layer_pattern: str | None, **changes: Any) -> Namespace:
    """The arguments with another pattern (None: of a GPT), and the number of layers that goes with it."""
    changes["hybrid_layer_pattern"] = hybrid_layer_pattern
    layers = args.num_layers * 2 if hybrid_layer_pattern else args.num_layers // 2
    changes |= {name: layers for name in ("num_layers", "encoder_num_layers") if getattr(args, name, None) is not None}
    return Namespace(**{**vars(args), **changes})


def _is_set(value: Any) -> bool:
    return any(value) if isinstance(value, list) else bool(value)
