"""Rules that all families share: sizes from the config, embedding, final norm, output layer, frames of MTP layers."""

from collections.abc import Callable, Sequence
from functools import partial

from megatron_mtp.checkpoint.families.blocks import GQA, MLA, MoE, Place, depth_frame
from megatron_mtp.checkpoint.families.family import Depths, Layout
from megatron_mtp.checkpoint.families.rules import Copies, HFTensor, Piece, Rule, rename
from megatron_mtp.checkpoint.hf.config import EXPERTS, ConfigError, HFConfig
from megatron_mtp.megatron.checkpoint import EMBEDDING, OUTPUT

ZERO_QKV_BIAS, ZERO_ROUTER_BIAS = "zero biases of queries, keys and values", "zero biases of routers"
"""Forms of an export for a model without these biases."""
ORIGINAL_NORMS, ORIGINAL = "originals of norms", "original."
"""Form of a checkpoint that stores the norm weights as in the folder, under keys with this prefix (`Computed`)."""
ORIGINAL_WEIGHTS = "originals of scaled weights"
"""Form of a checkpoint that also stores weights without the factor that Megatron's include (`Computed`)."""

MOST_LAYERS, MOST_EXPERTS, MOST_OF_BOTH = 10_000, 10_000, 200_000
"""A config with more is corrupted: the largest published models have about 10^2 layers of about 10^2 experts."""


def layers(config: HFConfig) -> int:
    """Return the number of trunk layers.

    Raises:
        ValueError: there are more layers, or layers times experts, than in any model.
    """
    count = config.integer("num_hidden_layers")
    numbers = [config.keys.get(key) for key in EXPERTS]
    experts = max((number for number in numbers if isinstance(number, int)), default=1)
    if count > MOST_LAYERS or count * max(experts, 1) > MOST_OF_BOTH:
        raise ConfigError(f"{config.source}: {count} layers of {experts} experts are more than any model has.")
    return count


def gqa(config: HFConfig, **changes: object) -> GQA:
    """Return attention sizes from the usual config keys.

    Args:
        config: the model's config.
        changes: fields of `GQA` that differ.

    Raises:
        ValueError: the number of heads is not a multiple of the number of key-value heads.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    groups = config.integer("num_key_value_heads", default=heads)
    if heads % groups:
        raise ConfigError(
            f"{config.source}: 'num_attention_heads' {heads} is not a multiple of 'num_key_value_heads' {groups}."
        )
    width = config.integer("head_dim", default=max(hidden // heads, 1))
    sizes: dict[str, object] = {"hidden": hidden, "heads": heads, "groups": groups, "widths": (width, width, width)}
    return GQA(**{**sizes, **changes})  # type: ignore[arg-type]


def biased(config: HFConfig, key: str = "attention_bias", out: str | None = None, **changes: object) -> GQA:
    """Return attention with biases of queries, keys and values if the key `key` is true, and of the output if `out`."""
    return gqa(config, bias=config.flag(key), out_bias=out is not None and config.flag(out), **changes)


llama_attention = partial(biased, out="attention_bias")
"""Biases on all projections if `attention_bias` is true."""
qwen3_attention = partial(llama_attention, norms=True)
"""Llama's attention with norms of queries and keys."""


def all_windows(config: HFConfig) -> list[bool]:
    """Return a window in every layer if `sliding_window` is a number."""
    return [config.has("sliding_window")] * layers(config)


def windows_by_type(usual: Callable[[int], bool], config: HFConfig) -> list[bool]:
    """Return windows of the layers that `layer_types` marks, or else of those for whose index `usual` is true.

    There are none without `sliding_window`.

    Raises:
        ValueError: a kind of layer is unknown.
    """
    kinds = config.words("layer_types", layers(config))
    if kinds is None:
        return [config.has("sliding_window") and usual(index) for index in range(layers(config))]
    check_words(config, "layer_types", kinds, ("full_attention", "sliding_attention"))
    return [config.has("sliding_window") and kind == "sliding_attention" for kind in kinds]


def check_words(config: HFConfig, key: str, words: list[str], known: Sequence[str]) -> None:
    """Raise ValueError if a list with one word per layer has an unknown one."""
    if unknown := sorted(set(words) - {*known}):
        raise ValueError(f"{config.source}: '{key}' has '{unknown[0]:.40}'; known are {', '.join(known)}.")


def latent_attention(config: HFConfig) -> MLA:
    """Return sizes of multi-head latent attention (arXiv:2405.04434), from the config."""
    return MLA(
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        query_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        key_rank=config.integer("kv_lora_rank"),
        content=config.integer("qk_nope_head_dim"),
        position=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
    )


def moe(config: HFConfig, layout: Layout, **changes: object) -> MoE:
    """Return experts from DeepSeek's config keys, which most families use.

    Args:
        config: the model's config.
        layout: forms of the folder.
        changes: fields of `MoE` that differ.

    Raises:
        ValueError: there are more experts than in any model.
    """
    width, experts = (
        config.integer("moe_intermediate_size"),
        config.integer("n_routed_experts", "num_experts", "num_local_experts"),
    )
    if experts > MOST_EXPERTS:
        raise ConfigError(f"{config.source}: {experts} experts are more than any model has.")
    shared = config.integer("n_shared_experts", "num_shared_experts", default=0, least=0)
    sizes: dict[str, object] = {
        "hidden": config.integer("hidden_size"),
        "experts": experts,
        "width": width,
        "shared": shared * width,
        "packed": layout.has("packed experts"),
        "zero_bias": layout.has(ZERO_ROUTER_BIAS),
    }
    return MoE(**{**sizes, **changes})  # type: ignore[arg-type]


def sparse_layers(config: HFConfig) -> list[bool]:
    """Return for each trunk layer whether it has experts, by `mlp_layer_types` or `first_k_dense_replace`.

    A config without a number of experts has none.

    Raises:
        ValueError: a kind of layer is unknown.
    """
    count = layers(config)
    dense = config.integer("first_k_dense_replace", default=0, least=0)
    usual = [index >= dense and any(config.has(key) for key in EXPERTS) for index in range(count)]
    kinds = config.words("mlp_layer_types", count)
    if kinds is None:
        return usual
    check_words(config, "mlp_layer_types", kinds, ("dense", "sparse"))
    return [kind == "sparse" for kind in kinds]


def all_layers(config: HFConfig) -> list[bool]:
    """Return experts in every layer."""
    return [True] * layers(config)


def stepped_layers(config: HFConfig) -> list[bool]:
    """Return for each layer whether it has experts: every `decoder_sparse_step`th not named by `mlp_only_layers`.

    Raises:
        ValueError: `mlp_only_layers` is not a list.
    """
    step, dense = config.integer("decoder_sparse_step", default=1), config.keys.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(f"{config.source}: 'mlp_only_layers' is {dense!r:.40}; it must be a list of layers.")
    return [(index + 1) % step == 0 and index not in dense for index in range(layers(config))]


def is_dense(config: HFConfig) -> bool:
    """Return whether the experts are parts of a dense MLP (`split_mlp_rules`), so all of them are always chosen."""
    parts = config.integer("n_shared_experts", "num_shared_experts", default=0, least=0)
    if parts != 2:
        return False
    experts, chosen = config.integer("n_routed_experts", "num_experts"), config.integer("num_experts_per_tok")
    dense = config.integer("first_k_dense_replace", default=0, least=0)
    whole = 4 * config.integer("moe_intermediate_size") == config.integer("intermediate_size")
    return experts == chosen == 2 and whole and dense >= layers(config) - 1


def frame(
    config: HFConfig,
    layout: Layout,
    prefix: str = "model.",
    *,
    embedding: str = "embed_tokens",
    norm: str = "norm",
    head: str = "lm_head",
    final: str = "final_layernorm",
    copies: Sequence[Place] = (),
) -> list[Rule]:
    """Return rules of embedding, final norm and output layer, with the MTP layers' copies if the folder has them.

    Args:
        config: the model's config.
        layout: MTP layers and forms of the folder.
        prefix: HF's prefix of embedding and norm.
        embedding, norm, head: HF's names.
        final: Megatron's name of the final norm.
        copies: places of the MTP layers' own layers, which may have copies of embedding and head.
    """
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    embeddings, heads = [f"{prefix}{embedding}.weight"], [f"{head}.weight"]
    if layout.has("embedding copies"):
        embeddings += [f"{place.hf}embed_tokens.weight" for place in copies]
    if layout.has("head copies"):
        heads += [f"{place.hf}shared_head.head.weight" for place in copies]
    tied = config.flag("tie_word_embeddings")
    if tied:
        embeddings += heads if layout.has("head") else heads[1:]
    rules = [_shared(embeddings, EMBEDDING, (vocabulary, hidden), tied)]
    if not tied:
        rules.append(_shared(heads, OUTPUT, (vocabulary, hidden)))
    rules.append(rename(f"{prefix}{norm}.weight", f"decoder.{final}.weight", (hidden,)))
    return rules


def _shared(names: list[str], key: str, shape: tuple[int, int], tied: bool = False) -> Rule:
    """Return a rule for one Megatron tensor with padded rows, and all HF tensors that must equal it."""
    return Rule(
        tuple(HFTensor(name, shape) for name in names), (Piece(key, shape, padded=True),), Copies(tuple(names), tied)
    )


def trunk_places(count: int, prefix: str = "model.") -> list[Place]:
    """Return the prefixes of every trunk layer on both sides."""
    return [Place(f"{prefix}layers.{index}.", f"decoder.layers.{index}.") for index in range(count)]


def depth_places(depths: Depths | None, config: HFConfig, layout: Layout, prefix: str = "model.") -> list[Place]:
    """Return the prefixes of every MTP layer's inner layer on both sides; `prefix` is HF's of the trunk."""
    if depths is None:
        return []
    count = layers(config) if "{n}" in depths.prefix else 0
    return [
        Place(depths.prefix.format(k=k, n=count + k, model=prefix), f"mtp.layers.{k}.transformer_layer.")
        for k in range(layout.depths)
    ]


def depth_frames(depths: Depths, config: HFConfig, places: Sequence[Place]) -> list[list[Rule]]:
    """Return, for every MTP layer, the rules of the parts around its inner layer at this place."""
    hidden = config.integer("hidden_size")
    return [
        depth_frame(
            depth,
            hidden,
            [
                None if name is None else name[1:].format(k=depth) if name[0] == "." else f"{place.hf}{name}"
                for name in depths.names
            ],
            hidden_first=not depths.embedding_first,
        )
        for depth, place in enumerate(places)
    ]
