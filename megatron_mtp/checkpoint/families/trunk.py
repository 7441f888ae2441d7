"""Rules that all families share: sizes from the config, embedding, final norm and head."""

from collections.abc import Callable

from megatron_mtp.checkpoint.families.blocks import GQA, MoE, Place
from megatron_mtp.checkpoint.families.family import Layout
from megatron_mtp.checkpoint.families.rules import Copies, HFTensor, Piece, Rule, rename
from megatron_mtp.checkpoint.hf.config import ConfigError, HFConfig

HEAD = "lm_head.weight"
STORED_HEAD = {"head": r"(^|\.)lm_head\.weight$"}
"""Most folders do not store a tied head, but some do."""
COPIES = {
    "embedding copies": r"layers\.\d+\.embed_tokens\.weight$",
    "head copies": r"layers\.\d+\.shared_head\.head\.weight$",
}
"""DeepSeek's folders repeat embedding and head in every depth; other folders do not."""
ZERO_QKV_BIAS, ZERO_ROUTER_BIAS = "zero biases of queries, keys and values", "zero biases of routers"
"""Forms of an export whose model has no such biases."""
ORIGINAL_NORMS, ORIGINAL = "originals of norms", "original."
"""Form of a checkpoint that holds the weights of norms as in the folder, under keys with this prefix (`MinusOne`)."""
ORIGINAL_WEIGHTS = "originals of scaled weights"
"""Form of a checkpoint that also holds weights without the factor that Megatron's contain (`Scaled`)."""
PACKED = {"packed experts": r"mlp\.experts\.gate_up_proj$"}

MOST_LAYERS, MOST_EXPERTS, MOST_OF_BOTH = 10_000, 10_000, 200_000
"""A config with more is corrupted: the largest published models have about 10^2 layers of about 10^2 experts."""


def layers(config: HFConfig, *names: str) -> int:
    """Number of the trunk's layers, by `num_hidden_layers` or other keys.

    Raises:
        ValueError: there are more layers, or layers times experts, than in any model.
    """
    count = config.integer(*(names or ("num_hidden_layers",)))
    numbers = [config.keys.get(key) for key in _EXPERTS]
    experts = max((number for number in numbers if isinstance(number, int)), default=1)
    if count > MOST_LAYERS or count * max(experts, 1) > MOST_OF_BOTH:
        raise ConfigError(f"{config.source}: {count} layers of {experts} experts are more than any model has.")
    return count


_EXPERTS = ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts")


def gqa(config: HFConfig, **changes: object) -> GQA:
    """Attention from the usual config keys.

    Args:
        config: the model's config.
        changes: fields of `GQA` that differ.

    Raises:
        ValueError: the number of heads is no multiple of the number of key-value heads.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    groups = config.integer("num_key_value_heads", default=heads)
    if heads % groups:
        raise ConfigError(
            f"{config.source}: 'num_attention_heads' {heads} is no multiple of 'num_key_value_heads' {groups}."
        )
    width = config.integer("head_dim", default=max(hidden // heads, 1))
    sizes: dict[str, object] = {"hidden": hidden, "heads": heads, "groups": groups, "widths": (width, width, width)}
    return GQA(**{**sizes, **changes})  # type: ignore[arg-type]


def moe(config: HFConfig, layout: Layout, **changes: object) -> MoE:
    """Experts from DeepSeek's config keys, which most families use.

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
    """For each layer of the trunk whether it has experts, by `mlp_layer_types` or `first_k_dense_replace`.

    A config without a number of experts has none.

    Raises:
        ValueError: a kind of layer is unknown.
    """
    count = layers(config)
    dense = config.integer("first_k_dense_replace", default=0, least=0)
    usual = [index >= dense and any(config.has(key) for key in _EXPERTS) for index in range(count)]
    kinds = config.words("mlp_layer_types", count)
    if kinds is None:
        return usual
    unknown = sorted(set(kinds) - {"dense", "sparse"})
    if unknown:
        raise ValueError(f"{config.source}: 'mlp_layer_types' has '{unknown[0]:.40}'; known are dense, sparse.")
    return [kind == "sparse" for kind in kinds]


def is_dense(config: HFConfig) -> bool:
    """Whether the experts are the parts of a dense MLP (`split_mlp_rules`): all of them are always chosen."""
    experts, chosen = config.integer("n_routed_experts", "num_experts"), config.integer("num_experts_per_tok")
    parts = config.integer("n_shared_experts", "num_shared_experts", default=0, least=0)
    dense = config.integer("first_k_dense_replace", default=0, least=0)
    whole = 4 * config.integer("moe_intermediate_size") == config.integer("intermediate_size")
    return experts == chosen == parts == 2 and whole and dense >= layers(config) - 1


def frame(
    config: HFConfig,
    layout: Layout,
    prefix: str = "model.",
    *,
    embedding: str = "embed_tokens.weight",
    norm: str = "norm.weight",
    head: str = HEAD,
    final: str = "final_layernorm",
    embedding_copies: Callable[[int], str] | None = None,
    head_copies: Callable[[int], str] | None = None,
) -> list[Rule]:
    """Rules of embedding, final norm and head, with the depths' copies if the folder has them.

    Args:
        config: the model's config.
        layout: depths and forms of the folder.
        prefix: HF's prefix of embedding and norm.
        embedding, norm, head: HF's names.
        final: Megatron's name of the final norm.
        embedding_copies, head_copies: HF's name of a depth's copy, from the depth's index; None if there are none.
    """
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    copies = [embedding_copies(k) for k in range(layout.depths)] if embedding_copies else []
    head_names = [head_copies(k) for k in range(layout.depths)] if head_copies else []
    embeddings = [f"{prefix}{embedding}", *(copies if layout.has("embedding copies") else [])]
    heads = [head, *(head_names if layout.has("head copies") else [])]
    tied = config.flag("tie_word_embeddings")
    if tied:
        embeddings += heads if layout.has("head") else heads[1:]
    rules = [_shared(embeddings, "embedding.word_embeddings.weight", (vocabulary, hidden))]
    if not tied:
        rules.append(_shared(heads, "output_layer.weight", (vocabulary, hidden)))
    rules.append(rename(f"{prefix}{norm}", f"decoder.{final}.weight", (hidden,)))
    return rules


def _shared(names: list[str], key: str, shape: tuple[int, int]) -> Rule:
    """A rule for one Megatron tensor with padded rows, and all HF tensors that must equal it."""
    return Rule(tuple(HFTensor(name, shape) for name in names), (Piece(key, shape, padded=True),), Copies(tuple(names)))


def trunk_places(count: int, prefix: str = "model.") -> list[Place]:
    """The prefixes of every trunk layer on both sides."""
    return [Place(f"{prefix}layers.{index}.", f"decoder.layers.{index}.") for index in range(count)]
