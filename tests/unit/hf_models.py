"""Small random models of every family in Hugging Face form, made by transformers' own classes where it has them.

The MTP tensors that transformers never holds are added here by the names that serving engines load, written out from
the families' published folders and not taken from the rules that they test.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

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
        model_type: of the class in transformers that makes the trunk.
        config: changes to `SIZES`.
        depths: those to try.
        add_depths: the MTP tensors of so many depths, given those of the trunk.
        depth_key: config key that counts them, where there is one.
        keys: keys put into `config.json` beside what transformers writes.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    depths: tuple[int, ...] = (1, 3)
    add_depths: Callable[[Tensors, int], Tensors] = lambda trunk, depths: {}
    depth_key: str | None = "num_nextn_predict_layers"
    keys: dict[str, Any] = field(default_factory=dict)


def layer_of(trunk: Tensors, prefix: str) -> Tensors:
    """New tensors in the form of a trunk layer, by their names without the prefix."""
    return {name.removeprefix(prefix): torch.randn_like(t) for name, t in trunk.items() if name.startswith(prefix)}


def frame(**names: str) -> Tensors:
    """Two norms, the projection of both halves and a final norm under these names."""
    shapes = {"embedding": (HIDDEN,), "hidden": (HIDDEN,), "projection": (HIDDEN, 2 * HIDDEN), "final": (HIDDEN,)}
    return {name: torch.randn(shapes[part]) for part, name in names.items()}


def deepseek_depths(copies: bool = True) -> Callable[[Tensors, int], Tensors]:
    def add(trunk: Tensors, depths: int) -> Tensors:
        out: Tensors = {}
        for k in range(depths):
            hf = f"model.layers.{SIZES['num_hidden_layers'] + k}."
            out |= {hf + name: tensor for name, tensor in layer_of(trunk, "model.layers.2.").items()}
            out |= frame(
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
    for k in range(depths):
        hf = f"model.mtp_layers.{k}."
        out |= {hf + name: tensor for name, tensor in layer_of(trunk, "model.layers.2.").items()}
        out |= frame(
            embedding=f"{hf}token_layernorm.weight",
            hidden=f"{hf}hidden_layernorm.weight",
            projection=f"{hf}input_proj.weight",
            final=f"{hf}final_layernorm.weight",
        )
    return out


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
}

CASES = [(name, depths) for name, model in MODELS.items() for depths in model.depths]


def make(folder: Path, name: str, depths: int, dtype: torch.dtype = torch.float32, shards: bool = False) -> Path:
    """Write the folder of a model with random weights; norms lie around 1, and nothing is 0."""
    model = MODELS[name]
    torch.manual_seed(7)
    config = AutoConfig.for_model(model.model_type, **{**SIZES, **model.config})
    trunk = AutoModelForCausalLM.from_config(config)
    trunk.save_pretrained(folder, max_shard_size="100KB" if shards else "5GB")
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {key: filled(key, tensor, dtype) for key, tensor in tensors.items()}
    added = model.add_depths(tensors, depths)
    tensors |= {key: added[key] if key.endswith(COPIES) else filled(key, added[key], dtype) for key in added}
    write(folder, tensors, files=3 if shards else 1)
    keys = json.loads((folder / "config.json").read_text())
    keys |= {"dtype": str(dtype).removeprefix("torch."), **model.keys}
    if model.depth_key is not None:
        keys[model.depth_key] = depths
    (folder / "config.json").write_text(json.dumps(keys))
    (folder / "tokenizer.json").write_text("{}")
    return folder


COPIES = ("embed_tokens.weight", "shared_head.head.weight")
WIDE = ("e_score_correction_bias", "A_log", "dt_bias")


def filled(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Random numbers in the tensor's shape."""
    noise = torch.randn(tensor.shape)
    if "norm" in name and tensor.dim() == 1:
        value = 1 + 0.2 * noise
    elif "embed" in name:
        value = noise
    else:
        value = 0.2 * noise
    return value if name.endswith(WIDE) else value.to(dtype)


def write(folder: Path, tensors: Tensors, files: int = 1) -> None:
    """As one file, or as several with an index."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weights = {}
    for index in range(files):
        file = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
        own = dict(list(tensors.items())[index::files])
        save_file(own, folder / file)
        weights |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def read(folder: Path) -> Tensors:
    """All tensors of a folder."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
