"""Small random models of classes without MTP layers, made by transformers, with their special cases."""

from typing import Any

from hf_models import LATENT, NEMOTRON, Model, nemotron_depths

NO_WIDTH: dict[str, Any] = {"head_dim": None}
"""For classes that compute `hidden_size // num_attention_heads`."""
MUP: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.15,
}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEP_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}

OSS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
V2: dict[str, Any] = {**LATENT, **DEEP_EXPERTS, "num_attention_heads": 4, "norm_topk_prob": False}


def _trunk(model_type: str, **config: Any) -> Model:
    return Model(model_type, config, depths=(0,), depth_key=None)


def _windows(*kinds: str) -> list[str]:
    return [f"{kind}_attention" for kind in kinds]


TRUNKS: dict[str, Model] = {
    "mistral": _trunk("mistral", sliding_window=None),
    "mistral-windows": _trunk("mistral", sliding_window=6),
    "ministral": _trunk("ministral", sliding_window=6, layer_types=_windows("sliding", "full", "sliding")),
    "smollm3": _trunk("smollm3", no_rope_layers=[1, 0, 1], tie_word_embeddings=True),
    "seed_oss": _trunk("seed_oss", attention_bias=True, attention_out_bias=False),
    "granite": _trunk("granite", **MUP, tie_word_embeddings=True),
    "phi3": _trunk("phi3", partial_rotary_factor=0.75, sliding_window=None),
    "phi3-windows": _trunk("phi3", sliding_window=6),
    "glm": _trunk("glm", attention_bias=True),
    "helium": _trunk("helium", head_dim=12),
    "ernie4_5": _trunk("ernie4_5", tie_word_embeddings=True),
    "cwm": _trunk("cwm", sliding_window=6, layer_types=_windows("full", "sliding", "sliding")),
    "internlm3": _trunk("internlm3"),
    "iquestcoder": _trunk("iquestcoder"),
    "arcee": _trunk("arcee"),
    "nemotron": _trunk("nemotron"),
    "stablelm": _trunk("stablelm", **NO_WIDTH, use_qkv_bias=True, partial_rotary_factor=0.5),
    "qwen3_moe": _trunk("qwen3_moe", **QWEN_EXPERTS, norm_topk_prob=True, mlp_only_layers=[0]),
    "qwen3_moe-unnormed": _trunk("qwen3_moe", **QWEN_EXPERTS, norm_topk_prob=False, decoder_sparse_step=1),
    "qwen2_moe": _trunk("qwen2_moe", **QWEN_EXPERTS, shared_expert_intermediate_size=20),
    "mixtral": _trunk("mixtral", num_local_experts=6, num_experts_per_tok=2),
    "mixtral-windows": _trunk("mixtral", num_local_experts=6, num_experts_per_tok=2, sliding_window=6),
    "dots1": _trunk("dots1", **DEEP_EXPERTS, first_k_dense_replace=1, sliding_window=None),
    "dots1-windows": _trunk("dots1", **DEEP_EXPERTS, sliding_window=6, max_window_layers=2),
    "deepseek_v2": _trunk("deepseek_v2", **V2, first_k_dense_replace=1),
    "deepseek_v2-groups": _trunk("deepseek_v2", **V2, topk_method="group_limited_greedy", n_group=3, topk_group=2),
    # transformers zeroes a padding token's embedding after loading this class, so the model has no padding token.
    "youtu": _trunk("youtu", **LATENT, num_attention_heads=4, tie_word_embeddings=True, pad_token_id=None),
    "solar_open": _trunk("solar_open", **DEEP_EXPERTS),
    "gpt_oss": _trunk("gpt_oss", **OSS, layer_types=_windows("full", "full", "full")),
    "gpt_oss-windows": _trunk("gpt_oss", **OSS, sliding_window=6),
    "granite_swa": _trunk("granite_swa", **MUP, layer_types=_windows("full", "full", "full")),
    "granite_swa-windows": _trunk("granite_swa", **MUP, sliding_window=6, layer_rope_theta=[10000.0, 0.0, 10000.0]),
    "jais2": _trunk("jais2"),
    "granitemoe": _trunk("granitemoe", head_dim=12, **MUP, **OSS, tie_word_embeddings=True),
    "granitemoeshared": _trunk("granitemoeshared", head_dim=12, **MUP, **OSS, shared_intermediate_size=20),
}
"""Models that Megatron runs."""
LARGER: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
"""Settings for another size of each, if the table has no number."""


SQUARE = ("helium", "granitemoe", "granitemoeshared")
"""Models whose total head width equals the hidden size."""


def larger(name: str) -> dict[str, Any]:
    """Return the changes that give the larger size of a model."""
    own = {"head_dim": 8} if name in SQUARE else {}
    return {key: LARGER[key] for key in LARGER if key not in (TRUNKS | LEFT)[name].config} | own


DEEP: dict[str, Any] = {**LATENT, **DEEP_EXPERTS, "num_attention_heads": 4}
INDEXED: dict[str, Any] = {**DEEP, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
LEFT: dict[str, Model] = {
    "exaone4": _trunk("exaone4", sliding_window=6),
    "deepseek_v32": _trunk("deepseek_v32", **INDEXED),
    "glm_moe_dsa": _trunk("glm_moe_dsa", **INDEXED),
    "mellum": _trunk("mellum", **QWEN_EXPERTS),
    "nemotron_h_puzzle": Model(
        "nemotron_h", NEMOTRON, (0, 1), nemotron_depths, keys={"model_type": "nemotron_h_puzzle"}
    ),
}
"""Models whose layers are passed through."""
OTHERS: dict[str, Model] = {
    "gemma3_text": _trunk("gemma3_text", sliding_window=6),
    "olmo2": _trunk("olmo2"),
    "cohere": _trunk("cohere"),
    "phi": _trunk("phi", head_dim=12),
    "minimax_m2": _trunk("minimax_m2", num_local_experts=6, num_experts_per_tok=2),
    "minicpm3": _trunk("minicpm3", **LATENT, num_attention_heads=4, tie_word_embeddings=False),
    "afmoe": _trunk("afmoe", **QWEN_EXPERTS, num_shared_experts=1, num_dense_layers=1, sliding_window=6),
    "kimi_linear": _trunk("kimi_linear", **DEEP, num_local_experts=6, linear_head_dim=8, linear_num_heads=4),
    "llama4_text": _trunk("llama4_text", num_local_experts=6, num_experts_per_tok=1, intermediate_size_mlp=56),
}
"""Models that do not convert, which an audit compares with transformers' class."""
EYE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
DEEP_EYE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 48,
}


SECTIONS: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}


def _seeing(model_type: str, text: str, eye: str, keys: dict[str, Any] | None = None, **vision: Any) -> Model:
    around = {"vision_config": {"model_type": eye, **(vision or EYE)}}
    return Model(model_type, {"model_type": text, **(keys or {})}, (0,), depth_key=None, around=around)


SEEING: dict[str, Model] = {
    "exaone4_5": _seeing("exaone4_5", "exaone4", "exaone4_5_vision", **DEEP_EYE),
    "glm_ocr": _seeing("glm_ocr", "glm_ocr_text", "glm_ocr_vision", SECTIONS, **DEEP_EYE),
    "got_ocr2": _seeing("got_ocr2", "qwen2", "got_ocr2_vision"),
    "idefics3": _seeing("idefics3", "llama", "idefics3_vision"),
    "internvl": _seeing(
        "internvl", "qwen2", "internvl_vision", **{**EYE, "image_size": [28, 28], "patch_size": [14, 14]}
    ),
    "lighton_ocr": _seeing("lighton_ocr", "qwen3", "pixtral"),
    "llava": _seeing("llava", "llama", "clip_vision_model"),
    "llava_onevision": _seeing("llava_onevision", "qwen2", "siglip_vision_model"),
    "mistral3": _seeing("mistral3", "mistral", "pixtral"),
    "smolvlm": _seeing("smolvlm", "llama", "smolvlm_vision"),
    "video_llava": _seeing("video_llava", "llama", "clip_vision_model"),
    "vipllava": _seeing("vipllava", "llama", "clip_vision_model"),
}
"""Models that contain a text model."""
