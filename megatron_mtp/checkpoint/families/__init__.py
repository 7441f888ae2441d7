"""The model families that convert, by the `model_type` of their `config.json`.

Each family is a row of a table that declares everything about it; `FILES` lists the file of each row. Other packages
add one with an entry point of the group `megatron_mtp.families`. A file is imported when one of its families is looked
up, and torch and transformers' classes when a tensor is converted or defaults are needed, so `--help` lists the
families quickly.

rules.py         a rule between tensors of both sides, read in both directions
family.py        Family, Depths and Layout: the declaration of a family
naming.py        tensors with wrong names, and how to rename them
blocks.py        rules of attention, MLPs, experts and MTP layers
trunk.py         sizes from a config.json; rules around the layers
trained.py       Megatron's arguments as a config.json: the form of a model that Megatron trained
flags.py         a config.json as Megatron's flags
decoder.py       facts of a class as rules and flags
mla.py           latent attention: DeepSeek, GLM-4.7-Flash, Youtu
dense.py         dense decoders: MiMo, Llama, Qwen, Mistral, ...
moe.py           decoders with experts: GLM-4.5, Ling, Qwen3-MoE, ...
hybrid.py        recurrent layers combined with attention: Qwen3-Next, Qwen3.5, Nemotron-H
depths_only.py   trunks that Megatron cannot run, and the MTP layers of some: ERNIE-4.5, EXAONE, Gemma, OLMo, ...
described.py     families that do not convert: contents of their folders
inside.py        DSpark drafters inside a model's folder
wrapped.py       models around a text model of a known family
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, override

from megatron_mtp.checkpoint.families.described import described
from megatron_mtp.checkpoint.families.family import CARRIED, Family, Layout
from megatron_mtp.checkpoint.families.inside import InnerDrafter
from megatron_mtp.checkpoint.families.trained import TrainedForm
from megatron_mtp.checkpoint.families.wrapped import TEXTS, WRAPPERS, wrapped
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.spec.registry import Imported, Registry

FILES = {
    "mla:LATENT": "deepseek_v3 kimi_k2 kimi_k25 glm4_moe_lite deepseek_v2 sarvam_mla youtu",
    "moe:MOE": (
        "glm4_moe bailing_moe bailing_moe_v2 sarvam_moe glm4v_moe_text hy_v3 qwen3_moe qwen2_moe mixtral dots1 "
        "solar_open gpt_oss granitemoe granitemoeshared"
    ),
    "dense:DENSE": (
        "mimo llama qwen2 qwen3 mistral ministral smollm3 seed_oss jais2 phi3 glm helium ernie4_5 cwm internlm3 "
        "iquestcoder arcee nemotron stablelm granite granite_swa"
    ),
    "hybrid:HYBRID": "qwen3_next qwen3_5_moe qwen3_5_moe_text qwen3_5 qwen3_5_text intern_s2_preview nemotron_h",
    "depths_only:DEPTHS_ONLY": (
        "exaone_moe ernie4_5_moe mimo_v2_flash mimo_v2 longcat_flash step3p5 step3p7 exaone4 glm_ocr_text "
        "deepseek_v32 glm_moe_dsa nemotron_h_puzzle mellum"
    ),
}
"""File and rows of every `model_type` of this package, in the order of tables."""


class _Rows(Imported[Family]):
    """Rows of tables by `model_type`; what is imported is the table."""

    @override
    def _loaded(self, name: str) -> Family:
        table: Any = super()._loaded(name)
        return next(row for row in table if name in row.model_types)


_OWN = _Rows({model_type: f"{__name__}.{file}" for file, types in FILES.items() for model_type in types.split()})
"""The families of this package by `model_type`; the first that fits is the form of a trained model."""

FAMILIES: Registry[Family] = Registry("megatron_mtp.families", _OWN)
"""Families by `model_type`, with those that other packages register."""


def family_of(config: HFConfig) -> Family:
    """Return the family of a config; for an unknown model around a text model, the text model's.

    Raises:
        ValueError: no family has its `model_type`.
    """
    family = FAMILIES.get(config.model_type)
    text = config.text_type or TEXTS.get(config.model_type)
    inner = None if text is None else FAMILIES.get(text)
    if inner is not None and config.model_type in (*WRAPPERS, *TEXTS):
        return wrapped(inner, config.model_type)
    if family is None:
        raise ValueError(f"{config.source}: {_unknown(config)}.")
    return family


def _unknown(config: HFConfig) -> str:
    """Explain why a model does not convert, the nearest type that does, and what can be done."""
    row, inner = described(config.model_type, config.text_type), InnerDrafter.of(config.keys, ())
    drafts = f", and its '{inner.keys[0]}' is of {inner.says} inside of the model, not of MTP layers" if inner else ""
    audited = "megatron-mtp audit describes the folder"
    if row is not None:
        return f"{row.title} ('{config.model_type:.60}') does not convert: {row.reason}{drafts}; {audited}"
    nearest = get_close_matches(config.model_type, FAMILIES, 1, 0.3)
    known = f"; the nearest that converts is '{nearest[0]}'" if nearest else ""
    return (
        f"the model_type '{config.model_type:.60}' is unknown here{known}{drafts}; {audited}, and "
        "docs/develop/extending.md how to add a family"
    )


def all_families() -> list[Family]:
    """Return every family once: built-in ones, then those of other packages."""
    return _once(FAMILIES)


def own_families() -> list[Family]:
    """Return every family of this package once."""
    return _once(_OWN)


def _once(families: Mapping[str, Family]) -> list[Family]:
    return list({id(family): family for family in families.values()}.values())


def trained_forms() -> dict[str, TrainedForm]:
    """Return the forms that a trained model can take, by the `model_type` that an export writes."""
    return {family.model_types[0]: family.trained for family in all_families() if family.trained is not None}


__all__ = ["CARRIED", "FAMILIES", "Family", "Layout", "all_families", "family_of", "own_families", "trained_forms"]
