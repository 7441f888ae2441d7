"""Decoders whose layers Megatron cannot run: embedding, final norm and head have rules, all else is carried.

A row is a class of transformers with the reason. The names of the tensors outside of the layers are Llama's, or stand
in the row. Depths that such a folder holds are carried too.
"""

from collections.abc import Mapping
from typing import Any

from megatron_mtp.checkpoint.families.family import Family, Layout
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, frame
from megatron_mtp.checkpoint.hf.config import HFConfig

AFTER = "norms after attention and MLP"
WHOLE = "norms of whole queries and keys, not of each head"
BESIDE = "attention and MLP side by side"
TURNED = "norms of queries and keys after their rotation"
SPARSE = "a sparse indexer of keys"
TIED = {"tie_word_embeddings": True}
FINAL = "final_layernorm.weight"


def _family(
    title: str,
    published: str,
    model_type: str,
    reason: str,
    defaults: Mapping[str, Any] | None = None,
    **names: Any,
) -> Family:
    """A family whose layers are carried; `names` are arguments of `frame`."""

    def rules(config: HFConfig, layout: Layout) -> list[Rule]:
        return frame(config, layout, **names)

    return Family(
        title,
        published,
        (model_type,),
        rules,
        features=STORED_HEAD,
        carried=(r"(model|lm_head)\.",),
        untrainable=reason,
        defaults=defaults or {},
    )


CARRIED_TRUNKS: tuple[Family, ...] = (
    _family("Gemma", "Gemma", "gemma", "a gated MLP with GELU", TIED),
    _family("Gemma 2", "Gemma 2", "gemma2", f"softcapped scores and logits, and {AFTER}", TIED),
    _family("Gemma 3", "Gemma 3, text", "gemma3_text", f"{AFTER}, and rotary positions that differ by layer", TIED),
    _family("VaultGemma", "VaultGemma", "vaultgemma", "softcapped scores and logits, and a gated MLP with GELU", TIED),
    _family("OLMo 2", "OLMo 2", "olmo2", f"{AFTER}, and {WHOLE}"),
    _family("OLMo 3", "OLMo 3", "olmo3", f"{AFTER}, and {WHOLE}"),
    _family("OLMoE", "OLMoE", "olmoe", WHOLE),
    _family("FlexOlmo", "FlexOlmo", "flex_olmo", f"{AFTER}, and {WHOLE}"),
    _family("GLM-4, second form", "GLM-4-0414", "glm4", AFTER),
    _family("HunYuan, dense", "HunYuan 0.5B to 7B", "hunyuan_v1_dense", TURNED),
    _family("HunYuan, experts", "HunYuan A13B", "hunyuan_v1_moe", TURNED),
    _family("Cohere", "Command R", "cohere", BESIDE, TIED),
    _family("Cohere 2", "Command R7B, Command A", "cohere2", BESIDE, TIED),
    _family("Phi", "Phi-1, 1.5, 2", "phi", BESIDE, norm=FINAL),
    _family("Persimmon", "Persimmon", "persimmon", "norms of queries and keys with biases", norm=FINAL),
    _family("StarCoder 2", "StarCoder 2", "starcoder2", "GELU by tanh, which Megatron only has fused", TIED),
    _family("Ministral 3", "Ministral 3", "ministral3", "queries scaled by their position"),
    _family("MiniMax-M2", "MiniMax-M2", "minimax_m2", WHOLE),
    _family("Apertus", "Apertus", "apertus", "the activation xIELU"),
    _family("DiffLlama", "DiffLlama", "diffllama", "differences of two attentions"),
    _family("BitNet", "BitNet b1.58", "bitnet", "norms inside of attention and MLP"),
    _family("HyperCLOVA X", "HyperCLOVA X SEED Think", "hyperclovax", AFTER),
    _family("Phi-MoE", "Phi-3.5-MoE", "phimoe", "a router that masks near scores"),
    _family("A.X K1", "A.X K1", "axk1", AFTER),
    _family("MiniCPM3", "MiniCPM3", "minicpm3", "factors of embedding, logits and residual beside latent attention"),
    _family("AFMoE", "Trinity", "afmoe", AFTER),
    _family("Kimi Linear", "Kimi Linear", "kimi_linear", "Kimi's delta attention"),
    _family("DeepSeek-V3.2", "DeepSeek-V3.2", "deepseek_v32", SPARSE),
    _family("GLM-5", "GLM-5", "glm_moe_dsa", SPARSE),
    _family("Mellum", "Mellum 2", "mellum", "rotary positions that differ by layer"),
    _family("Laguna", "Laguna", "laguna", "gated attention whose heads and positions differ by layer"),
    _family("Llama 4, text", "Llama 4, text", "llama4_text", "attention in chunks, and scores on the experts' input"),
)
"""Only equal bits and equal names prove the layers: transformers computes both sides."""
