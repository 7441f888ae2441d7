"""Small random Hugging Face models of every family, made by transformers' own classes if it has them.

MTP tensors that transformers drops are added here under the names that serving engines load. The names are written out
from published folders, not taken from the rules that they test.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HIDDEN, VOCABULARY = 48, 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
ROUTER: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """One kind of folder.

    Attributes:
        model_type: transformers class that creates the trunk.
        config: changes to `SIZES`.
        depths: numbers of MTP layers to test.
        add_depths: creates the tensors of so many MTP layers from the trunk's.
        depth_key: config key that counts them, if there is one.
        keys: keys added to `config.json`.
        named: renames the tensors for a family that transformers does not have.
        around: other parts of a model whose text model `config` describes.
        text_alone: the folder contains only the text model.
        inside: type of a larger model, and its config's key of the text model; None for no larger model.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    depths: tuple[int, ...] = (1, 3)
    add_depths: Callable[[Tensors, int], Tensors] = lambda trunk, depths: {}
    depth_key: str | None = "num_nextn_predict_layers"
    keys: dict[str, Any] = field(default_factory=dict)
    named: Callable[[Tensors], Tensors] = lambda tensors: tensors
    around: dict[str, Any] | None = None
    text_alone: bool = False
    inside: tuple[str, str] | None = None


def layer_of(trunk: Tensors, prefix: str) -> Tensors:
    """Return new tensors shaped like a trunk layer's, by name without the prefix."""
    return {name.removeprefix(prefix): torch.randn_like(t) for name, t in trunk.items() if name.startswith(prefix)}


def frame(size: int = HIDDEN, **names: str) -> Tensors:
    """Return two norms, the input projection and a final norm under these names."""
    shapes = {"embedding": (size,), "hidden": (size,), "projection": (size, 2 * size), "final": (size,)}
    return {name: torch.randn(shapes[part]) for part, name in names.items()}


def last_layer(trunk: Tensors) -> int:
    return max(int(match.group(1)) for name in trunk if (match := re.match(r"model\.layers\.(\d+)\.", name)))


def deepseek_depths(copies: bool = True) -> Callable[[Tensors, int], Tensors]:
    def add(trunk: Tensors, depths: int) -> Tensors:
        out: Tensors = {}
        last, hidden = last_layer(trunk), trunk["model.norm.weight"].numel()
        for k in range(depths):
            hf = f"model.layers.{last + 1 + k}."
            out |= {hf + name: tensor for name, tensor in layer_of(trunk, f"model.layers.{last}.").items()}
            out |= frame(
                hidden,
                embedding=f"{hf}enorm.weight",
                hidden=f"{hf}hnorm.weight",
                projection=f"{hf}eh_proj.weight",
                final=f"{hf}shared_head.norm.weight",
            )
            if copies:
                out[f"{hf}embed_tokens.weight"] = trunk["model.embed_tokens.weight"].clone()
                out[f"{hf}shared_head.head.weight"] = trunk["lm_head.weight"].clone()
        return out

    return add


def mimo_depths(trunk: Tensors, depths: int) -> Tensors:
    out: Tensors = {}
    last, hidden = last_layer(trunk), trunk["model.norm.weight"].numel()
    for k in range(depths):
        hf = f"model.mtp_layers.{k}."
        out |= {hf + name: tensor for name, tensor in layer_of(trunk, f"model.layers.{last}.").items()}
        out |= frame(
            hidden,
            embedding=f"{hf}token_layernorm.weight",
            hidden=f"{hf}hidden_layernorm.weight",
            projection=f"{hf}input_proj.weight",
            final=f"{hf}final_layernorm.weight",
        )
    return out


def under_mtp(trunk: Tensors, depths: int) -> Tensors:
    """Return one MTP layer of Qwen or EXAONE: a full-attention layer, here shaped like the trunk's last."""
    last = max(match.group(0) for name in trunk if (match := re.match(r"model\.(language_model\.)?layers\.\d\.", name)))
    layer = layer_of(trunk, last)
    return {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()} | frame(
        embedding="mtp.pre_fc_norm_embedding.weight",
        hidden="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc.weight",
        final="mtp.norm.weight",
    )


def packed_under_mtp(trunk: Tensors, depths: int) -> Tensors:
    """Return the same with the MTP layer's experts as two tensors."""
    out = under_mtp(trunk, depths)
    experts = [f"mtp.layers.0.mlp.experts.{index}." for index in range(EXPERTS["n_routed_experts"])]
    both = [torch.cat([out.pop(f"{e}{part}_proj.weight") for part in ("gate", "up")]) for e in experts]
    out["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.stack(both)
    out["mtp.layers.0.mlp.experts.down_proj"] = torch.stack([out.pop(f"{e}down_proj.weight") for e in experts])
    return out


def ernie_depths(trunk: Tensors, depths: int) -> Tensors:
    out: Tensors = {}
    for k in range(depths):
        out |= {f"model.mtp_block.{k}.{name}": t for name, t in layer_of(trunk, "model.layers.0.").items()}
        out |= frame(
            embedding=f"model.mtp_emb_norm.{k}.weight",
            hidden=f"model.mtp_hidden_norm.{k}.weight",
            projection=f"model.mtp_linear_proj.{k}.weight",
        )
    return out


def mimo_v2_depths(trunk: Tensors, depths: int) -> Tensors:
    """Return dense layers with sliding-window attention."""
    out: Tensors = {}
    attention = {n: t for n, t in layer_of(trunk, "model.layers.1.").items() if n.startswith("self_attn.")}
    mlp = {n: t for n, t in layer_of(trunk, "model.layers.0.").items() if n.startswith("mlp.")}
    for k in range(depths):
        hf = f"model.mtp.layers.{k}."
        out |= {hf + name: tensor for name, tensor in (attention | mlp).items()}
        out |= {f"{hf}{name}.weight": torch.randn(HIDDEN) for name in ("input_layernorm", "pre_mlp_layernorm")}
        out |= frame(
            embedding=f"{hf}enorm.weight",
            hidden=f"{hf}hnorm.weight",
            projection=f"{hf}eh_proj.weight",
            final=f"{hf}final_layernorm.weight",
        )
    return out


def longcat_depths(trunk: Tensors, depths: int) -> Tensors:
    hf, layer = "model.mtp.layers.0.", layer_of(trunk, "model.layers.0.")
    out = {f"{hf}{n.replace('.0.', '.', 1)}": t for n, t in layer.items() if n.startswith(("self_attn.0.", "input_l"))}
    out = {name: tensor for name, tensor in out.items() if "layernorm.1" not in name}
    out |= {f"{hf}transformer_layer.mlp.{n[7:]}": t for n, t in layer.items() if n.startswith("mlps.0.")}
    out[f"{hf}post_attention_layernorm.weight"] = torch.randn(HIDDEN)
    out["model.mtp.embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN)
    return out | frame(
        embedding=f"{hf}enorm.m.weight",
        hidden=f"{hf}hnorm.m.weight",
        projection=f"{hf}eh_proj.weight",
        final="model.mtp.norm.weight",
    )


def without_idle_experts(tensors: Tensors) -> Tensors:
    """Remove weights of experts that return their input (4 and 5), as in published LongCat folders."""
    return {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.[45]\.", name)}


def nemotron_depths(trunk: Tensors, depths: int) -> Tensors:
    """Return attention and experts, each as a layer."""
    out: Tensors = {}
    for k in range(depths):
        first, last = f"mtp.layers.{2 * k}.", f"mtp.layers.{2 * k + 1}."
        out |= {first + name: tensor for name, tensor in layer_of(trunk, "backbone.layers.2.").items()}
        out |= {last + name: tensor for name, tensor in layer_of(trunk, "backbone.layers.1.").items()}
        out |= frame(
            embedding=f"{first}enorm.weight",
            hidden=f"{first}hnorm.weight",
            projection=f"{first}eh_proj.weight",
            final=f"{last}final_layernorm.weight",
        )
    return out


def step_depths(trunk: Tensors, depths: int) -> Tensors:
    """Return dense layers with window attention, each with its own head."""
    out: Tensors = {}
    for k in range(depths):
        hf = f"model.layers.{SIZES['num_hidden_layers'] + k}."
        windows, dense = layer_of(trunk, "model.layers.1."), layer_of(trunk, "model.layers.0.")
        layer = {n: t for n, t in windows.items() if "moe" not in n and "expert" not in n}
        layer |= {n: t for n, t in dense.items() if n.startswith("mlp.")}
        out |= {hf + name: tensor for name, tensor in layer.items()}
        out[f"{hf}transformer.shared_head.output.weight"] = torch.randn(VOCABULARY, HIDDEN)
        out |= frame(
            embedding=f"{hf}enorm.weight",
            hidden=f"{hf}hnorm.weight",
            projection=f"{hf}eh_proj.weight",
            final=f"{hf}transformer.shared_head.norm.weight",
        )
    return out


def glm_ocr_depths(trunk: Tensors, depths: int) -> Tensors:
    """Add MTP layers with DeepSeek's names after the text model's layers, without copies of embedding and head."""
    out: Tensors = {}
    for k in range(depths):
        hf = f"model.language_model.layers.{SIZES['num_hidden_layers'] + k}."
        out |= {hf + name: tensor for name, tensor in layer_of(trunk, "model.language_model.layers.2.").items()}
        out |= frame(
            embedding=f"{hf}enorm.weight",
            hidden=f"{hf}hnorm.weight",
            projection=f"{hf}eh_proj.weight",
            final=f"{hf}shared_head.norm.weight",
        )
    return out


def bailing_names(tensors: Tensors) -> Tensors:
    """Rename GLM-4 MoE's tensors to Bailing-MoE V2's, which computes the same: QKV fused, queries first."""
    swaps = {
        "embed_tokens": "word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "gate.e_score_correction_bias": "gate.expert_bias",
        "shared_head.norm": "final_layernorm",
    }
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            out[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            for theirs, bailing in swaps.items():
                name = name.replace(theirs, bailing)
            out[name] = tensor
    return out


def hunyuan_names(tensors: Tensors) -> Tensors:
    """Rename an MTP layer's final norm as in Hunyuan 3."""
    return {name.replace("shared_head.norm", "final_layernorm"): tensor for name, tensor in tensors.items()}


LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "layers_block_type": ["mamba", "moe", "full_attention"],
}
STEP: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mtp_layer_types": ["sliding_attention"] * 3,
    "moe_layers_enum": "1,2",
    "sliding_window": 6,
    "attention_other_setting": {"num_attention_heads": 6},
    "rope_theta": [50000, 10000, 50000],
    "partial_rotary_factors": [0.5, 1.0, 0.5],
}
EYES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
DEEP_EYES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": HIDDEN,
}
"""Vision settings of EXAONE 4.5 and GLM-OCR."""
QWEN_EYES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
TURNED_BY_PARTS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
EYE: Tensors = {"vision_model.proj.weight": torch.randn(4, 4)}
EAR: Tensors = {"perception.encoder.proj.weight": torch.randn(4, 4)}


def spoken(name: str) -> str:
    """Rename a Nemotron-H tensor as in NeMo's speech models."""
    swaps = {"backbone.embeddings.": "model.embed_tokens.", "backbone.norm_f.": "model.norm.", "backbone.": "model."}
    old = next((old for old in swaps if name.startswith(old)), "")
    return f"llm.{swaps.get(old, '')}{name.removeprefix(old)}"


MODELS: dict[str, Model] = {
    "llama": Model("llama", depths=(0,), depth_key=None),
    "llama-tied": Model("llama", {"tie_word_embeddings": True}, (0,), depth_key=None),
    "llama-biased": Model("llama", {"attention_bias": True, "mlp_bias": True}, (0,), depth_key=None),
    "qwen2": Model("qwen2", depths=(0,), depth_key=None),
    "qwen2-mha": Model("qwen2", {"num_key_value_heads": 4}, (0,), depth_key=None),
    "qwen3": Model("qwen3", depths=(0,), depth_key=None),
    "mimo": Model("qwen2", {}, (1, 3), mimo_depths, keys={"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}),
    "deepseek_v3": Model("deepseek_v3", {**EXPERTS, **LATENT}, (1, 3), deepseek_depths(), keys=ROUTER),
    "deepseek_v3-lean": Model("deepseek_v3", {**EXPERTS, **LATENT, "q_lora_rank": None}, (1,), deepseek_depths(False)),
    "kimi_k2": Model(
        "deepseek_v3", {**EXPERTS, **LATENT}, (1,), deepseek_depths(), keys={**ROUTER, "model_type": "kimi_k2"}
    ),
    "glm4_moe": Model("glm4_moe", {**EXPERTS, "use_qk_norm": True, "attention_bias": True}, (1, 3), deepseek_depths()),
    "glm4_moe-lean": Model("glm4_moe", {**EXPERTS, "use_qk_norm": False}, (1,), deepseek_depths(False)),
    "bailing_moe": Model(
        "glm4_moe",
        {**EXPERTS, "use_qk_norm": True},
        (1, 3),
        deepseek_depths(False),
        keys={"model_type": "bailing_moe", "num_experts": 6, "num_shared_experts": 2},
        named=bailing_names,
    ),
    "sarvam_moe": Model(
        "glm4_moe",
        {**EXPERTS, "use_qk_norm": True, "partial_rotary_factor": 1.0},
        (0, 1),
        deepseek_depths(False),
        keys={"model_type": "sarvam_moe", "num_experts": 6, "num_shared_experts": 2},
        named=bailing_names,
    ),
    "sarvam_mla": Model(
        "deepseek_v3",
        {**EXPERTS, **LATENT, "q_lora_rank": None},
        (0, 1),
        deepseek_depths(False),
        keys={**ROUTER, "model_type": "sarvam_mla", "num_experts": 6, "num_shared_experts": 2},
    ),
    "glm4v_moe": Model(
        "glm4v_moe",
        {**EXPERTS, "model_type": "glm4v_moe_text", "attention_bias": True, "rope_parameters": TURNED_BY_PARTS},
        (0, 1),
        glm_ocr_depths,
        depth_key=None,
        around={"vision_config": {"model_type": "glm4v_moe_vision", **DEEP_EYES}},
    ),
    "intern_s2_preview": Model(
        "qwen3_5_moe",
        {**LINEAR, **QWEN_EXPERTS, "mtp_num_hidden_layers": 1},
        (1,),
        under_mtp,
        depth_key=None,
        around={"vision_config": QWEN_EYES},
        keys={"model_type": "intern_s2_preview"},
        named=lambda tensors: tensors | {"model.time_series.proj.weight": torch.randn(4, 4)},
    ),
    "nemotron_h_omni": Model(
        "nemotron_h",
        NEMOTRON,
        (1,),
        nemotron_depths,
        keys={"mtp_hybrid_override_pattern": "*E"},
        named=lambda tensors: {f"language_model.{name}": one for name, one in tensors.items()} | EYE,
        inside=("nemotron_h_omni", "llm_config"),
    ),
    "nemo_speechlm": Model(
        "nemotron_h",
        NEMOTRON,
        (1,),
        nemotron_depths,
        named=lambda tensors: {spoken(name): one for name, one in tensors.items()} | EAR,
        inside=("nemo_speechlm", "text_config"),
    ),
    "glm4_moe_lite": Model("glm4_moe_lite", {**EXPERTS, **LATENT}, (0, 1, 3), deepseek_depths()),
    "hy_v3": Model(
        "hy_v3",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "router_scaling_factor": 1.5,
        },
        (0, 1, 3),
        deepseek_depths(False),
        named=hunyuan_names,
    ),
    "qwen3_next": Model("qwen3_next", {**LINEAR, **QWEN_EXPERTS}, (0, 1), under_mtp, depth_key=None),
    "qwen3_5_text": Model("qwen3_5_text", LINEAR, (1,), under_mtp, depth_key="mtp_num_hidden_layers"),
    "qwen3_5": Model(
        "qwen3_5", {**LINEAR, "mtp_num_hidden_layers": 1}, (1,), under_mtp, None, around={"vision_config": QWEN_EYES}
    ),
    "qwen3_5_moe_text": Model("qwen3_5_moe_text", {**LINEAR, **QWEN_EXPERTS}, (1,), under_mtp, depth_key=None),
    "qwen3_5_moe_text-packed": Model(
        "qwen3_5_moe_text", {**LINEAR, **QWEN_EXPERTS}, (1,), packed_under_mtp, depth_key=None
    ),
    "exaone_moe": Model(
        "exaone_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 1},
        (0, 1),
        under_mtp,
    ),
    "exaone4_5": Model(
        "exaone4_5",
        {"model_type": "exaone4", "sliding_window": 6},
        (0, 1),
        under_mtp,
        around={"vision_config": {"model_type": "exaone4_5_vision", **DEEP_EYES}},
    ),
    "glm_ocr": Model(
        "glm_ocr",
        {
            "model_type": "glm_ocr_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        (0, 1, 3),
        glm_ocr_depths,
        depth_key=None,
        around={"vision_config": {"model_type": "glm_ocr_vision", **DEEP_EYES}},
    ),
    "ernie4_5_moe": Model(
        "ernie4_5_moe",
        {
            "moe_intermediate_size": 24,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "head_dim": 12,
        },
        (1, 3),
        ernie_depths,
    ),
    "mimo_v2_flash": Model("mimo_v2_flash", {**EXPERTS, "v_head_dim": 12}, (1, 3), mimo_v2_depths, depth_key=None),
    "longcat_flash": Model(
        "longcat_flash",
        {
            **LATENT,
            "num_hidden_layers": 4,
            "num_layers": 2,
            "ffn_hidden_size": 56,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
        (1,),
        longcat_depths,
        depth_key=None,
        named=without_idle_experts,
    ),
    "nemotron_h": Model("nemotron_h", NEMOTRON, (1, 3), nemotron_depths, keys={"mtp_hybrid_override_pattern": "*E"}),
    "nemotron_h-latent": Model("nemotron_h", {**NEMOTRON, "moe_latent_size": 16}, (1,), nemotron_depths),
    "step3p7": Model("step3p7", STEP, (1, 3), step_depths, depth_key=None, around={"vision_config": EYES}),
    "step3p5": Model(
        "step3p7", STEP, (1, 3), step_depths, depth_key=None, around={"vision_config": EYES}, text_alone=True
    ),
}

CASES = [(name, depths) for name, model in MODELS.items() for depths in model.depths]


def make(
    folder: Path,
    name: str | Model,
    depths: int,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    changes: dict[str, Any] | None = None,
    seed: int = 7,
) -> Path:
    """Write the folder of a model with random weights; norms are around 1, and nothing is 0.

    Args:
        name: a key of MODELS, or a model of another table.
        changes: config keys that differ from the table.
    """
    model = MODELS[name] if isinstance(name, str) else name
    model = replace(model, config={**model.config, **(changes or {})})
    torch.manual_seed(seed)
    trunk = trunk_of(model, depths)
    trunk.save_pretrained(folder, max_shard_size="100KB" if shards else "5GB")
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {key: filled(key, tensor, dtype) for key, tensor in tensors.items()}
    added = model.add_depths(tensors, depths) if depths else {}
    tensors |= {key: added[key] if key.endswith(COPIES) else filled(key, added[key], dtype) for key in added}
    tensors = model.named(tensors)
    keys = json.loads((folder / "config.json").read_text())
    if model.text_alone:
        tensors = {key: tensor for key, tensor in tensors.items() if key.startswith(("model.", "lm_head."))}
        keys = keys["text_config"]
    write(folder, tensors, files=3 if shards else 1)
    keys |= {"dtype": str(dtype).removeprefix("torch."), **model.keys}
    if model.depth_key is not None:
        keys[model.depth_key] = depths
    if model.inside is not None:
        keys = {"model_type": model.inside[0], "dtype": keys["dtype"], model.inside[1]: keys}
    (folder / "config.json").write_text(json.dumps(keys))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def trunk_of(model: Model, depths: int) -> Any:
    """Return the model that transformers creates."""
    text = {**SIZES, **model.config}
    if model.around is None:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model.model_type, **text))
    text["num_nextn_predict_layers"] = depths
    config = AutoConfig.for_model(model.model_type, text_config=text, **model.around)
    return AutoModelForImageTextToText.from_config(config)


COPIES = ("embed_tokens.weight", "shared_head.head.weight")
WIDE = ("e_score_correction_bias", "A_log", "dt_bias")


def filled(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return random numbers in the tensor's shape."""
    noise = torch.randn(tensor.shape)
    if "norm" in name and tensor.dim() == 1:
        value = 1 + 0.2 * noise
    elif "embed" in name:
        value = noise
    else:
        value = 0.2 * noise
    return value if name.endswith(WIDE) else value.to(dtype)


def write(folder: Path, tensors: Tensors, files: int = 1) -> None:
    """Write one file, or several with an index."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weights: dict[str, str] = {}
    for index in range(files):
        file = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
        own = dict(list(tensors.items())[index::files])
        save_file(own, folder / file)
        weights |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def read(folder: Path) -> Tensors:
    """Read all tensors of a folder."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def differing_keys(one: Path, other: Path) -> dict[str, tuple[Any, Any]]:
    """Return keys whose values differ between two folders' configs: nested ones as `outer.inner`, missing ones as
    "absent".
    """
    ours, theirs = (_flat(json.loads((folder / "config.json").read_text())) for folder in (one, other))
    both = {key: (ours.get(key, "absent"), theirs.get(key, "absent")) for key in {**ours, **theirs}}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _flat(keys: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in keys.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
