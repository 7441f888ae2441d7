"""Configs of models that Megatron cannot train."""

from typing import Any

from hf_models import EXPERTS, LATENT, SIZES

from megatron_mtp.checkpoint.families import FAMILIES, Layout
from megatron_mtp.checkpoint.hf.config import HFConfig

Keys = dict[str, Any]


CONFIGS: dict[str, Keys] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "deepseek_v3": {**SIZES, **EXPERTS, **LATENT, "n_group": 1, "topk_group": 1},
    "glm4_moe": {**SIZES, **EXPERTS, "n_group": 1, "topk_group": 1},
    "bailing_moe": {**SIZES, **EXPERTS, "n_group": 1, "topk_group": 1},
}


def flags(kind: str, **changes: Any) -> list[str]:
    family = FAMILIES[kind]
    assert family.flags is not None
    config = family.complete(HFConfig.from_keys({**CONFIGS[kind], **changes, "model_type": kind}))
    return family.flags(config, Layout(0))
