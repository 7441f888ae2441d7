"""Standard decoders: each transformers class is a row of facts, its differences from Llama's layer.

In:  `Decoder`, the facts of a class, and a model's config.
Out: the rules of its tensors, and Megatron's flags. What Megatron cannot compute is rejected by name.

A layer is norm, attention, norm, MLP or experts, each added to the residual stream. Other layers (norms after
attention, parallel branches) are in depths_only.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_mtp.checkpoint.families.blocks import (
    GQA,
    MLA,
    MoE,
    Place,
    gqa_rules,
    mla_rules,
    mlp_norm_keys,
    mlp_rules,
    moe_rules,
    norm_rules,
    split_mlp_rules,
)
from megatron_mtp.checkpoint.families.family import ATTACHED, STORED_HEAD, Depths, Family, Layout, UntrainableError
from megatron_mtp.checkpoint.families.flags import (
    CENTRED,
    IGNORED_PART,
    PARTLY_BIASED,
    RMS_NORM,
    by_layer,
    expert_flags,
    gqa_flags,
    latent_flags,
    pairs,
    rope_flags,
    rotated_part,
    size_flags,
    swiglu_flags,
)
from megatron_mtp.checkpoint.families.rules import Computed, Piece, Rule, rename
from megatron_mtp.checkpoint.families.trunk import (
    ORIGINAL,
    ORIGINAL_WEIGHTS,
    ZERO_QKV_BIAS,
    depth_frames,
    depth_places,
    frame,
    gqa,
    is_dense,
    layers,
    sparse_layers,
    trunk_places,
)
from megatron_mtp.checkpoint.hf.config import HFConfig

MLPRules = Callable[[str, str, int, int, bool], list[Rule]]
ADDED = ("o_proj.weight", "down_proj.weight", "output_linear.weight")
"""Last projections of attention and MLP, whose output is added to the residual stream."""


@dataclass(frozen=True)
class Multipliers:
    """Factors of a model with muP (arXiv:2203.03466).

    Attributes:
        embedding, logits: factors of the embedding and of the logits.
        residual: factor of what attention and MLP add; Megatron has none, so the projections before it hold it.
        scores: factor of the attention scores.
    """

    embedding: float
    logits: float
    residual: float
    scores: float


def no_windows(config: HFConfig) -> list[bool]:
    """Reject windows if the class has none, or their rule is unknown here."""
    if config.flag("use_sliding_window") or "sliding_attention" in (config.keys.get("layer_types") or ()):
        raise UntrainableError("sliding windows")
    return []


def mlp_bias_refused(config: HFConfig) -> str | None:
    """Reject MLP biases if the class has them on only some projections."""
    return PARTLY_BIASED if config.flag("mlp_bias") else None


@dataclass(frozen=True)
class Decoder:
    """Differences of a transformers class from Llama.

    Attributes:
        attention: sizes and names of the attention.
        zero_bias: whether a folder may have zero biases of queries, keys and values where Megatron has none.
        embedding: HF's name of the embedding.
        mlp: rules of a dense MLP.
        mlp_bias: config key of the MLP's biases; None if there are never any. Megatron has biases either on all
            projections, including queries, keys and values, or on none.
        activation: Megatron's flags of the MLP's activation.
        norms: Megatron's flags of the norms.
        partial: whether `partial_rotary_factor` rotates only part of each head; other classes ignore the key.
        interleaved: whether RoPE rotates adjacent channels instead of those of both halves.
        sinks: whether every head has an attention sink (`self_attn.sinks`) with a trained score.
        windows: function that returns for each layer whether it has a sliding window of `sliding_window` positions;
            rejects a config with windows that the class does not support.
        unplaced: function that returns for each layer whether it has no rotary positions.
        experts: routed experts; None if all layers are dense.
        sparse: function that returns for each layer whether it has experts.
        expert_flags: Megatron's flags of the experts; DeepSeek-V3's by default.
        depths: the MTP layers, whose layers are like those of the trunk; None if the class has none.
        multipliers: muP factors; None if the class has none.
        refused: why Megatron cannot run this model, in addition to what this file checks; None if it can.
    """

    attention: Callable[[HFConfig], GQA | MLA]
    zero_bias: bool = False
    embedding: str = "embed_tokens"
    mlp: MLPRules = mlp_rules
    mlp_bias: str | None = "mlp_bias"
    activation: Callable[[HFConfig], list[str]] = swiglu_flags
    norms: Sequence[str] = RMS_NORM
    partial: bool = False
    interleaved: bool = False
    sinks: bool = False
    windows: Callable[[HFConfig], list[bool]] = no_windows
    unplaced: Callable[[HFConfig], list[bool]] = lambda config: []
    experts: Callable[[HFConfig, Layout], MoE] | None = None
    sparse: Callable[[HFConfig], list[bool]] = sparse_layers
    expert_flags: Callable[[HFConfig], list[str]] = expert_flags
    depths: Depths | None = None
    multipliers: Callable[[HFConfig], Multipliers] | None = None
    refused: Callable[[HFConfig], str | None] = lambda config: None

    def rules(self, config: HFConfig, layout: Layout) -> list[Rule]:
        """Return rules of all tensors."""
        outer = "language_model." if layout.has("nested") else ""
        model, several = f"{outer}model.", self.experts is not None
        depths = depth_places(self.depths, config, layout, model)
        rules = frame(config, layout, model, head=f"{outer}lm_head", embedding=self.embedding, copies=depths)
        if self._has_norm_biases:
            rules.append(rename("model.norm.bias", "decoder.final_layernorm.bias", (config.integer("hidden_size"),)))
        for place, sparse in zip(trunk_places(layers(config), model), self._sparse(config), strict=True):
            rules += self.layer(config, layout, place, sparse)
        if self.depths is not None:
            for place, around in zip(depths, depth_frames(self.depths, config, depths), strict=True):
                rules += [*around, *self.layer(config, layout, place, several)]
        if self.multipliers is not None:
            rules = [_scaled(rule, self.multipliers(config).residual, layout) for rule in rules]
        return rules

    def flags(self, config: HFConfig, layout: Layout) -> list[str]:
        """Return Megatron's flags.

        Raises:
            UntrainableError: Megatron cannot run the model.
        """
        attention, sparse = self.attention(config), self._sparse(config)
        self._check(config, attention)
        width = config.integer("intermediate_size", "moe_intermediate_size")
        norms = [*self.norms, *["--disable-bias-linear"] * (not self._has_all_biases(config, attention))]
        flags = [*size_flags(config, layout.depths, layers(config), width, norms), *self.activation(config)]
        if isinstance(attention, MLA):
            flags += latent_flags(config)
        else:
            flags += [*gqa_flags(attention), *rope_flags(config, self.interleaved)]
        flags += ["--softmax-type", "learnable"] * self.sinks
        flags += [*self._window_flags(config), *_where("no-rope-freq", self.unplaced(config))]
        several = self.experts is not None and (self.depths is not None or any(sparse))
        if several and not is_dense(config):
            flags += [*self.expert_flags(config), *by_layer("moe-layer-freq", sparse)]
        return flags + self._multiplier_flags(config)

    def layer(self, config: HFConfig, layout: Layout, place: Place, sparse: bool) -> list[Rule]:
        """Return rules of a layer, of the trunk or of an MTP layer.

        Experts of a sparse one may be parts of a dense MLP.
        """
        attention, hidden = self.attention(config), config.integer("hidden_size")
        latent, split = isinstance(attention, MLA), sparse and is_dense(config)
        rules = norm_rules(place, hidden, mla=latent, moe=sparse and not split)
        if isinstance(attention, MLA):
            rules += mla_rules(place, attention)
        else:
            rules += gqa_rules(place, replace(attention, zero_bias=self.zero_bias and layout.has(ZERO_QKV_BIAS)))
        if self.sinks:
            key = f"{place.mcore}self_attention.core_attention.softmax_offset"
            rules.append(rename(f"{place.hf}self_attn.sinks", key, (config.integer("num_attention_heads"),)))
        if self._has_norm_biases:
            rules += _norm_biases(place, hidden, moe=sparse)
        if split:
            return rules + split_mlp_rules(place, hidden, config.integer("intermediate_size"))
        return rules + self.mlp_or_experts(config, layout, place, sparse)

    def mlp_or_experts(self, config: HFConfig, layout: Layout, place: Place, sparse: bool) -> list[Rule]:
        """Return rules of a layer's MLP, or of its experts if it is sparse."""
        if sparse and self.experts is not None:
            return moe_rules(place, self.experts(config, layout))
        hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
        return self.mlp(f"{place.hf}mlp.", f"{place.mcore}mlp.", hidden, width, self._has_mlp_bias(config))

    @property
    def _has_norm_biases(self) -> bool:
        return "LayerNorm" in self.norms

    def _sparse(self, config: HFConfig) -> list[bool]:
        return [False] * layers(config) if self.experts is None else self.sparse(config)

    def _has_all_biases(self, config: HFConfig, attention: GQA | MLA) -> bool:
        return isinstance(attention, GQA) and attention.bias and attention.out_bias and self._has_mlp_bias(config)

    def _has_mlp_bias(self, config: HFConfig) -> bool:
        return self.mlp_bias is not None and config.flag(self.mlp_bias)

    def _check(self, config: HFConfig, attention: GQA | MLA) -> None:
        some = (isinstance(attention, GQA) and attention.out_bias) or self._has_mlp_bias(config)
        if some and not self._has_all_biases(config, attention):
            raise UntrainableError(PARTLY_BIASED)
        if (reason := self.refused(config)) is not None:
            raise UntrainableError(reason)
        if not self.partial and not isinstance(attention, MLA) and rotated_part(config) != 1:
            raise UntrainableError(IGNORED_PART)

    def _window_flags(self, config: HFConfig) -> list[str]:
        """Return flags of sliding windows: transformers counts a query's own position, Megatron only earlier ones."""
        if not any(windows := self.windows(config)):
            return []
        before = config.integer("sliding_window") - 1
        return [*pairs({"window-size": f"{before},0"}), *by_layer("window-attn-skip-freq", windows)]

    def _multiplier_flags(self, config: HFConfig) -> list[str]:
        """Return flags of muP: Megatron multiplies scores by sqrt(base) / width; the base is chosen for the factor."""
        if self.multipliers is None:
            return []
        factors = self.multipliers(config)
        base = (factors.scores * gqa(config).widths[0]) ** 2
        sizes = {"mup-embedding-mult": factors.embedding, "mup-output-mult": factors.logits, "mup-base-head-dim": base}
        return ["--use-mup", *pairs(sizes)]


def _where(flag: str, chosen: list[bool]) -> list[str]:
    """Return `by_layer`, if a layer is chosen."""
    return by_layer(flag, chosen) if any(chosen) else []


def _norm_biases(place: Place, hidden: int, *, moe: bool) -> list[Rule]:
    key, *aliases = (f"{place.mcore}{norm}bias" for norm in mlp_norm_keys(mla=False, moe=moe))
    first = f"{place.mcore}self_attention.linear_qkv.layer_norm_bias"
    return [
        rename(f"{place.hf}input_layernorm.bias", first, (hidden,)),
        rename(f"{place.hf}post_attention_layernorm.bias", key, (hidden,), *aliases),
    ]


def _scaled(rule: Rule, factor: float, layout: Layout) -> Rule:
    """Return the rule with the factor in Megatron's tensor, if the rule is a projection into the residual stream."""
    if factor == 1 or not rule.hf[0].name.endswith(ADDED):
        return rule
    original = layout.has(ORIGINAL_WEIGHTS)
    kept = (Piece(f"{ORIGINAL}{rule.hf[0].name}", rule.hf[0].shape),) * original
    return Rule(rule.hf, (*kept, replace(rule.mcore[0], wide=True)), Computed(original, factor))


CENTRED_LAYER_NORM = ["--normalization", "LayerNorm", *CENTRED]
LAYER_NORM = ["--normalization", "LayerNorm"]


def family_of_decoder(
    title: str, published: str, model_types: tuple[str, ...], decoder: Decoder, **others: Any
) -> Family:
    """Create a family whose rules, MTP layers and flags come from its decoder.

    Args:
        title, published, model_types: as in `Family`.
        decoder: facts of the class.
        others: other fields of `Family`; `features` in addition to a stored output layer.
    """
    forms = {**STORED_HEAD, **others.pop("features", {})}
    others |= {"features": forms, "depths": decoder.depths, "flags": decoder.flags}
    if decoder.depths is None:
        others["attached"] = replace(decoder, depths=ATTACHED).rules
    return Family(title, published, model_types, decoder.rules, **others)
