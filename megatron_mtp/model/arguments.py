"""Megatron's model arguments, parsed from flags or completed from a checkpoint's, and the model configuration.

Also parses patterns of hybrid models, without building a model.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import arguments as megatrons
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models import gpt as megatron_gpt
from megatron.training.models import hybrid as megatron_hybrid
from torch import Tensor

from megatron_mtp.megatron.model_arguments import MODEL_ARGUMENTS
from megatron_mtp.megatron.parser import CUDA, arguments_without, parse_flags
from megatron_mtp.megatron.patterns import symbols_of_a_layer, trunk_and_depths, without_stages
from megatron_mtp.spec.attention import AttentionSizes, LatentSizes
from megatron_mtp.spec.config import (
    BESIDE_MTP,
    DRAFTER_SETTINGS,
    SHARED_KEYS,
    HeadSettings,
    MTPConfig,
    drafted_steps,
    heads_of,
    stands_beside,
    trained_depths,
)
from megatron_mtp.spec.head import HeadSpec, TrunkSpec
from megatron_mtp.spec.rope_scaling import MSCALES, megatrons_scaling, scaling_of, yarn_factor


def completed(stored: Namespace) -> Namespace:
    """Complete a checkpoint's arguments to all of Megatron's, for one process without TE."""
    args = parse_flags("--micro-batch-size 1 --train-iters 1 --lr 1e-4 --eval-interval 1000".split())
    for name, value in arguments_without(CUDA).items():
        setattr(args, name, value)
    for name in MODEL_ARGUMENTS:
        if getattr(stored, name, None) is not None:
            setattr(args, name, getattr(stored, name))
    if args.hybrid_layer_pattern is not None:
        args.hybrid_layer_pattern = without_stages(args.hybrid_layer_pattern)
    megatrons.validate_args(args)  # by its module, where a patch may have replaced it
    return args


def check_trainable(args: Namespace, name: str) -> None:
    """Reject a converted checkpoint whose model Megatron cannot run.

    Args:
        args: arguments of the checkpoint.
        name: name of the checkpoint in messages.

    Raises:
        ValueError: Megatron cannot run its model.
    """
    reason = getattr(args, "megatron_mtp_untrainable", None)
    if reason:
        why = f": it has {reason}" if isinstance(reason, str) else ""  # older conversions did not store the reason
        raise ValueError(
            f"{name} was converted from a model that Megatron cannot run{why}; mcore-to-hf converts it back."
        )


@dataclass(kw_only=True)
class DepthFields:
    """Fields that our configurations add to Megatron's."""

    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Settings of the run."""
    drafter_steps: int = 0
    """Tokens that a drafter drafts in addition to MTP layers; 0 without a drafter."""
    mtp_init_seed: int = 0
    loads_trunk: bool = False
    """Whether all weights of the trunk come from a checkpoint, so that none need to be drawn."""
    absent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Layers that the checkpoint to load does not have, by head; all layers of a drafter are number 0."""
    draft_vocabulary: Tensor | None = None
    absent_draft_vocabulary: bool = False
    true_vocab_size: int | None = None
    """Number of tokens; `vocab_size` also counts the padding rows that Megatron appends. None if every row is a token.
    """

    @property
    def heads(self) -> list[HeadSettings]:
        """Names of the MTP layers and drafters."""
        transformer: TransformerConfig = self.transformer  # type: ignore[attr-defined]
        return heads_of(self.mtp, transformer.mtp_num_layers or 0, self.drafter_steps)


@dataclass(kw_only=True)
class MTPGPTModelConfig(DepthFields, megatron_gpt.GPTModelConfig):
    """Megatron's GPT configuration with our fields."""

    builder: ClassVar[str] = "megatron_mtp.model.build.MTPGPTModelBuilder"


@dataclass(kw_only=True)
class MTPHybridModelConfig(DepthFields, megatron_hybrid.HybridModelConfig):
    """Megatron's hybrid model configuration with our fields."""

    builder: ClassVar[str] = "megatron_mtp.model.hybrid.MTPHybridModelBuilder"


type MTPModelConfig = MTPGPTModelConfig | MTPHybridModelConfig


def config_of(args: Namespace, **given: Any) -> MTPModelConfig:
    """Build the configuration of a model's computation from all of Megatron's arguments.

    Includes nothing about training.

    Args:
        given: additional arguments of Megatron's `gpt_config_from_args` or `hybrid_config_from_args`.
    """
    config: MTPModelConfig
    if args.hybrid_layer_pattern is None:
        config = gpt_config_from_args(args, **{"model_config_cls": MTPGPTModelConfig, **given})
        config.rope_scaling_factor = args.rope_scaling_factor  # Megatron's own builder keeps the default
    else:
        config = hybrid_config_from_args(args, **{"model_config_cls": MTPHybridModelConfig, **given})
    config.true_vocab_size = args.vocab_size
    if args.mtp_num_layers is not None:
        config.transformer.mtp_num_layers = trained_depths(args)  # the model has a depth for every pass
    of_drafter = (*DRAFTER_SETTINGS, "drafter_steps") if getattr(args, "drafter", None) is not None else ()
    shared: dict[str, Any] = {name: bool(getattr(args, name, False)) for name in SHARED_KEYS}
    config.mtp = MTPConfig(
        mtp_architecture=getattr(args, "mtp_architecture", None) or "sequential",
        mtp_unroll=getattr(args, "mtp_unroll", None),
        **shared,
        **{name: value for name in of_drafter if (value := getattr(args, name, None)) is not None},
    )
    config.drafter_steps = drafted_steps(args)
    return config


# --- patterns of hybrids ---------------------------------------------------------------------------------------------
#
# `--hybrid-layer-pattern`: a symbol a layer, the trunk's, and after each `/` a depth's.
#
#     M*-|M*-/*-    a trunk of six layers on two pipeline stages, and one depth


# --- Megatron's arguments of a model with a drafter ------------------------------------------------------------------


def as_mtp_layers(steps: int, args: Namespace) -> dict[str, Any]:
    """Return Megatron's arguments of a model with a drafter: an MTP layer in K passes on the frozen trunk of `args`."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    trunk = {} if pattern is None else {"hybrid_layer_pattern": pattern.split(Symbols.MTP_SEPARATOR)[0]}
    return {
        **trunk,
        "mtp_num_layers": 1,
        "mtp_use_repeated_layer": True,
        "mtp_unroll": steps,
        **dict.fromkeys(SHARED_KEYS, False),
        "mtp_architecture": "sequential",
        "mtp_init": None,
        "mtp_train_only": True,
        "mtp_loss_scaling_factor": 1.0,
        BESIDE_MTP: False,
    }


def alone(args: Namespace, is_drafter: bool) -> Namespace:
    """Return the arguments of a model that drafts with only one of two: the drafter or the MTP layers."""
    if not stands_beside(args):
        return args
    changes = as_mtp_layers(drafted_steps(args), args) if is_drafter else {"drafter": None, BESIDE_MTP: False}
    return Namespace(**{**vars(args), **changes})


def stored_with(drafter: HeadSpec, args: Namespace) -> dict[str, Any]:
    """Return the arguments of a checkpoint whose only draft module is a drafter, on the trunk of these arguments."""
    return drafter.arguments(trunk_spec(args)) | as_mtp_layers(drafter.drafts, args)


def layers_to_read(args: Namespace) -> int | None:
    """Return the number of trunk layers, as drafters count them; None if a checkpoint's arguments are not read yet."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is not None:
        return len(trunk_and_depths(pattern)[0]) // symbols_of_a_layer(pattern)
    layers: int | None = args.num_layers
    return layers


def trunk_spec(args: Namespace) -> TrunkSpec:
    """Return the trunk facts that a drafter depends on, from complete arguments."""
    heads, is_latent = args.num_attention_heads, _has_latent(args)
    layers = layers_to_read(args)
    assert layers is not None

    def argument(name: str) -> Any:
        return getattr(args, name, None)

    attention = AttentionSizes(
        heads,
        args.num_query_groups if args.group_query_attention else heads,
        args.kv_channels or args.hidden_size // heads,
        args.layernorm_epsilon,
        args.rotary_base,
        _trunk_scaling(argument, is_latent),
        LatentSizes.of(argument) if is_latent else None,
    )
    return TrunkSpec(layers, args.vocab_size, args.hidden_size, args.ffn_hidden_size, attention)


def trunk_spec_of(config: MTPModelConfig) -> TrunkSpec:
    """Return the trunk facts that a drafter depends on, from a model configuration."""
    own = config.transformer
    is_latent = own.multi_latent_attention
    tokens = config.true_vocab_size or config.vocab_size
    assert tokens is not None

    def setting(argument: str) -> Any:
        if argument in _OF_MODEL:
            return getattr(config, _OF_MODEL[argument], None)
        return getattr(own, argument if is_latent else f"yarn_{argument.removeprefix('yarn_')}", None)

    attention = AttentionSizes(
        own.num_attention_heads,
        own.num_query_groups or own.num_attention_heads,
        own.kv_channels or own.hidden_size // own.num_attention_heads,
        own.layernorm_epsilon,
        own.rotary_base if isinstance(own, MLATransformerConfig) else config.rotary_base,
        _trunk_scaling(setting, is_latent),
        LatentSizes.of(partial(getattr, own)) if is_latent else None,
    )
    layers = own.num_layers // symbols_of_a_layer(getattr(config, "hybrid_layer_pattern", None))
    return TrunkSpec(layers, tokens, own.hidden_size, own.ffn_hidden_size, attention)


_OF_MODEL = {
    "position_embedding_type": "position_embedding_type",
    "use_rope_scaling": "rope_scaling",
    "rope_scaling_factor": "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}
"""Arguments of rotary positions with their fields in a model's configuration; YaRN's are in the configuration of its
layers.
"""


def _has_latent(args: Namespace) -> bool:
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    is_latent = getattr(args, "multi_latent_attention", False)
    return bool(is_latent) or not {Symbols.MLA, Symbols.DS_ATTENTION}.isdisjoint(pattern)


def _trunk_scaling(argument: Callable[[str], Any], is_latent: bool) -> dict[str, Any] | None:
    """Return the scaling of a trunk's angles, as a drafter with the same attention has it."""
    keys = megatrons_scaling(argument, is_latent)
    if keys["rope_type"] == "yarn":
        if keys["factor"] == 1:
            return None
        if not is_latent:
            factors = [yarn_factor(keys["factor"], keys.pop(name)) for name in MSCALES]
            keys["attention_factor"] = factors[0] / factors[1]
    return scaling_of(keys, is_latent)
