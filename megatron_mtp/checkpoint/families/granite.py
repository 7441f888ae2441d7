"""Granite: factors of muP, and in some models windows with attention sinks, or routed experts beside a shared one."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron_mtp.checkpoint.families.blocks import Place
from megatron_mtp.checkpoint.families.decoder import Decoder, Multipliers, trunk_family
from megatron_mtp.checkpoint.families.dense import three_windows
from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.flags import pairs, softmax_router_flags
from megatron_mtp.checkpoint.families.llama import llama_attention
from megatron_mtp.checkpoint.families.rules import Rule, rename
from megatron_mtp.checkpoint.families.trunk import ORIGINAL_WEIGHTS, layers, moe
from megatron_mtp.checkpoint.hf.config import ConfigError, HFConfig


class _GraniteExperts(Decoder):
    """Experts of a layer as two tensors, and one shared expert."""

    def mlp_or_experts(self, config: HFConfig, layout: Layout, place: Place, sparse: bool) -> list[Rule]:
        """Rules of a router and its experts; all layers are sparse."""
        experts, hidden = config.integer("num_local_experts"), config.integer("hidden_size")
        width, shared = config.integer("intermediate_size"), _shared(config)
        hf, mcore = f"{place.hf}block_sparse_moe.", f"{place.mcore}mlp."
        fc1, fc2 = "linear_fc1.weight", "linear_fc2.weight"
        rules = [
            rename(f"{hf}router.layer.weight", f"{mcore}router.weight", (experts, hidden)),
            rename(f"{hf}input_linear.weight", f"{mcore}experts.experts.{fc1}", (experts, 2 * width, hidden)),
            rename(f"{hf}output_linear.weight", f"{mcore}experts.experts.{fc2}", (experts, hidden, width)),
        ]
        if shared:
            beside, ours = f"{place.hf}shared_mlp.", f"{mcore}shared_experts."
            rules.append(rename(f"{beside}input_linear.weight", f"{ours}{fc1}", (2 * shared, hidden)))
            rules.append(rename(f"{beside}output_linear.weight", f"{ours}{fc2}", (hidden, shared)))
        return rules


def _shared(config: HFConfig) -> int:
    return config.integer("shared_intermediate_size", default=0, least=0)


def _expert_flags(config: HFConfig) -> list[str]:
    shared = {"moe-shared-expert-intermediate-size": _shared(config)} if _shared(config) else {}
    return [*softmax_router_flags(config, normed=True), *pairs(shared)]


def _multipliers(config: HFConfig) -> Multipliers:
    return Multipliers(
        embedding=config.number("embedding_multiplier"),
        logits=1 / config.number("logits_scaling"),
        residual=config.number("residual_multiplier"),
        scores=config.number("attention_multiplier"),
    )


def _bases(config: HFConfig) -> list[Any]:
    """The rotary base of every layer, 0 for a layer without positions; empty without the key.

    Raises:
        ValueError: `layer_rope_theta` is no list of a number for each layer.
    """
    bases, count = config.keys.get("layer_rope_theta"), layers(config)
    if bases is None:
        return []
    if not isinstance(bases, list) or len(bases) < count or not all(isinstance(one, int | float) for one in bases):
        raise ConfigError(f"{config.source}: 'layer_rope_theta' must be a list of {count} numbers, one a layer.")
    return bases[:count]


def _unplaced(config: HFConfig) -> list[bool]:
    return [not base for base in _bases(config)]


def _swa_refused(config: HFConfig) -> str | None:
    differ = {base for base in _bases(config) if base} - {config.rope.get("rope_theta")}
    return "rotary bases that differ from layer to layer" if differ else None


_FACTORS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **dict.fromkeys(_FACTORS, 1.0)}
_EXPERTS = {**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}
_GRANITE = Decoder(llama_attention, multipliers=_multipliers)
_ROUTED = _GraniteExperts(llama_attention, multipliers=_multipliers, experts=moe, expert_flags=_expert_flags)
_family = partial(trunk_family, features={ORIGINAL_WEIGHTS: r"\.o_proj\.weight$"})

GRANITE: tuple[Family, ...] = (
    _family("Granite", "Granite 3", ("granite",), _GRANITE, _DEFAULTS),
    _family(
        "Granite, windows",
        "Granite with sliding windows",
        ("granite_swa",),
        replace(_GRANITE, sinks=True, windows=three_windows, unplaced=_unplaced, refused=_swa_refused),
        {
            **_DEFAULTS,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
    ),
    _family("Granite, experts", "Granite 3, 1B-A400M, 3B-A800M", ("granitemoe",), _ROUTED, _EXPERTS),
    _family("Granite, shared expert", "Granite with a shared expert", ("granitemoeshared",), _ROUTED, _EXPERTS),
)
