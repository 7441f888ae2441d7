"""Decoders with routed experts and without depths of their own, each as the facts of its class in transformers."""

from functools import partial

from megatron_mtp.checkpoint.families.blocks import GQA, MoE
from megatron_mtp.checkpoint.families.decoder import Decoder, trunk_family
from megatron_mtp.checkpoint.families.dense import windows_by_type
from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.flags import expert_flags, softmax_expert_flags, softmax_router_flags
from megatron_mtp.checkpoint.families.llama import qwen3_attention
from megatron_mtp.checkpoint.families.trunk import PACKED, gqa, layers, moe, sparse_layers
from megatron_mtp.checkpoint.hf.config import ConfigError, HFConfig


def _qwen2_attention(config: HFConfig) -> GQA:
    return gqa(config, bias=config.flag("qkv_bias"))


def _solar_attention(config: HFConfig) -> GQA:
    return gqa(config, bias=config.flag("attention_bias"))


def _qwen2_experts(config: HFConfig, layout: Layout) -> MoE:
    shared = config.integer("shared_expert_intermediate_size")
    return moe(config, layout, shared=shared, shared_name="shared_expert", shared_gate=True, bias=None)


def _qwen3_experts(config: HFConfig, layout: Layout) -> MoE:
    return moe(config, layout, shared=0, bias=None)


def _mixtral_experts(config: HFConfig, layout: Layout) -> MoE:
    width = config.integer("intermediate_size")
    keys = config.with_defaults({"moe_intermediate_size": width})
    return moe(keys, layout, shared=0, bias=None, module="block_sparse_moe", parts=("w1", "w3", "w2"))


def _qwen_sparse(config: HFConfig) -> list[bool]:
    """Experts in every `decoder_sparse_step`th layer that `mlp_only_layers` does not name.

    Raises:
        ValueError: `mlp_only_layers` is no list.
    """
    step, dense = config.integer("decoder_sparse_step", default=1), config.keys.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(f"{config.source}: 'mlp_only_layers' is {dense!r:.40}; it must be a list of layers.")
    return [(index + 1) % step == 0 and index not in dense for index in range(layers(config))]


def _qwen_flags(config: HFConfig) -> list[str]:
    return softmax_router_flags(config, config.flag("norm_topk_prob"))


def _qwen_refused(config: HFConfig) -> str | None:
    return "sliding windows" if config.flag("use_sliding_window") else None


def _dots_windows(config: HFConfig) -> list[bool]:
    """Windows from layer `max_window_layers` on, unless `layer_types` says otherwise."""
    count, first = layers(config), config.integer("max_window_layers", default=62, least=0)
    return windows_by_type(config, [config.has("sliding_window") and index >= first for index in range(count)])


def _mixtral_windows(config: HFConfig) -> list[bool]:
    return [config.has("sliding_window")] * layers(config)


_QWEN3_MOE = Decoder(
    qwen3_attention, experts=_qwen3_experts, sparse=_qwen_sparse, expert_flags=_qwen_flags, refused=_qwen_refused
)
_QWEN2_MOE = Decoder(
    _qwen2_attention,
    experts=_qwen2_experts,
    sparse=_qwen_sparse,
    expert_flags=softmax_expert_flags,
    refused=_qwen_refused,
)
_MIXTRAL = Decoder(
    gqa,
    windows=_mixtral_windows,
    experts=_mixtral_experts,
    expert_flags=partial(softmax_router_flags, normed=True),
)
_DOTS = Decoder(qwen3_attention, windows=_dots_windows, experts=moe, sparse=sparse_layers, expert_flags=expert_flags)
_SOLAR = Decoder(_solar_attention, experts=moe, sparse=sparse_layers, expert_flags=expert_flags)

ROUTED: tuple[Family, ...] = (
    trunk_family(
        "Qwen3-MoE",
        "Qwen3, with experts",
        ("qwen3_moe",),
        _QWEN3_MOE,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
        features=PACKED,
    ),
    trunk_family(
        "Qwen2-MoE",
        "Qwen1.5-MoE, Qwen2-57B-A14B",
        ("qwen2_moe",),
        _QWEN2_MOE,
        {
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "qkv_bias": True,
        },
        features=PACKED,
    ),
    trunk_family(
        "Mixtral",
        "Mixtral 8x7B, 8x22B",
        ("mixtral",),
        _MIXTRAL,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
    ),
    trunk_family(
        "dots.llm1",
        "dots.llm1",
        ("dots1",),
        _DOTS,
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "routed_scaling_factor": 1.0,
            "sliding_window": 4096,
        },
        features=PACKED,
    ),
    trunk_family(
        "Solar Open",
        "Solar Open",
        ("solar_open",),
        _SOLAR,
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        features=PACKED,
    ),
)
