"""What a drafter depends on of a built model's trunk; arguments.py has it of arguments."""

from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_mtp.megatron.patterns import symbols_of_a_layer
from megatron_mtp.model.arguments import MTPModelConfig, trunk_scaling
from megatron_mtp.spec.attention import AttentionSizes, LatentSizes
from megatron_mtp.spec.head import TrunkSpec

_OF_MODEL = {
    "position_embedding_type": "position_embedding_type",
    "use_rope_scaling": "rope_scaling",
    "rope_scaling_factor": "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}
"""Arguments of rotary positions with their fields in a model's configuration; YaRN's are in the configuration of its
layers.
"""


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
        trunk_scaling(setting, is_latent),
        LatentSizes.of(partial(getattr, own)) if is_latent else None,
    )
    layers = own.num_layers // symbols_of_a_layer(getattr(config, "hybrid_layer_pattern", None))
    return TrunkSpec(layers, tokens, own.hidden_size, own.ffn_hidden_size, attention)
