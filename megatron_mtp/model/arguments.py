"""Megatron's model arguments, parsed from flags or completed from a checkpoint's, and the model configuration.

Also parses patterns of hybrid models, without building a model.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models import gpt as megatron_gpt
from megatron.training.models import hybrid as megatron_hybrid
from torch import Tensor

from megatron_mtp.megatron.patterns import symbols_of_a_layer, trunk_and_depths
from megatron_mtp.spec.attention import AttentionSizes, LatentSizes
from megatron_mtp.spec.config import SHARED_KEYS, MTPConfig
from megatron_mtp.spec.head import (
    DRAFTER_SETTINGS,
    WITH_MTP,
    HeadSettings,
    TrunkSpec,
    drafted_steps,
    heads_of,
    trained_depths,
)
from megatron_mtp.spec.rope_scaling import MSCALES, megatrons_scaling, scaling_of, yarn_factor


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
        config.rope_scaling_factor = args.rope_scaling_factor  # Megatron's builder drops this argument
    else:
        config = hybrid_config_from_args(args, **{"model_config_cls": MTPHybridModelConfig, **given})
    config.true_vocab_size = args.vocab_size
    if args.mtp_num_layers is not None:
        config.transformer.mtp_num_layers = trained_depths(args)  # one depth per pass
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
# `--hybrid-layer-pattern`: one symbol per layer, first the trunk's, then after each `/` those of an MTP layer.
# `--hybrid-layer-pattern`: one symbol per layer, first the trunk's, then after each `/` those of an MTP layer.
#
#     M*-|M*-/*-    a trunk of six layers on two pipeline stages, and one MTP layer


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
        WITH_MTP: False,
    }


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
        trunk_scaling(argument, is_latent),
        LatentSizes.of(argument) if is_latent else None,
    )
    return TrunkSpec(layers, args.vocab_size, args.hidden_size, args.ffn_hidden_size, attention)


def _has_latent(args: Namespace) -> bool:
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    is_latent = getattr(args, "multi_latent_attention", False)
    return bool(is_latent) or not {Symbols.MLA, Symbols.DS_ATTENTION}.isdisjoint(pattern)


def trunk_scaling(argument: Callable[[str], Any], is_latent: bool) -> dict[str, Any] | None:
    """Return the scaling of a trunk's angles, as a drafter with the same attention has it."""
    keys = megatrons_scaling(argument, is_latent)
    if keys["rope_type"] == "yarn":
        if keys["factor"] == 1:
            return None
        if not is_latent:
            factors = [yarn_factor(keys["factor"], keys.pop(name)) for name in MSCALES]
            keys["attention_factor"] = factors[0] / factors[1]
    return scaling_of(keys, is_latent)
