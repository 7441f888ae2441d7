"""The model families that convert, by the `model_type` of their `config.json`.

Each family is a row of a table that declares everything about it. Other packages add one with an entry point of the
group `megatron_mtp.families`. torch and transformers' classes are imported only when a tensor is converted or defaults
are needed, so `--help` lists the families quickly.

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

from difflib import get_close_matches

from megatron_mtp.checkpoint.families.dense import DENSE
from megatron_mtp.checkpoint.families.depths_only import DEPTHS_ONLY
from megatron_mtp.checkpoint.families.described import described
from megatron_mtp.checkpoint.families.family import CARRIED, Family, Layout
from megatron_mtp.checkpoint.families.hybrid import HYBRID
from megatron_mtp.checkpoint.families.inside import InnerDrafter
from megatron_mtp.checkpoint.families.mla import LATENT
from megatron_mtp.checkpoint.families.moe import MOE
from megatron_mtp.checkpoint.families.trained import TrainedForm
from megatron_mtp.checkpoint.families.wrapped import TEXTS, WRAPPERS, wrapped
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.spec.registry import Registry

OWN: tuple[Family, ...] = (*LATENT, *MOE, *DENSE, *HYBRID, *DEPTHS_ONLY)
"""The families of this package, in the order of tables; the first that fits is the form of a trained model."""

FAMILIES: Registry[Family] = Registry(
    "megatron_mtp.families", {model_type: family for family in OWN for model_type in family.model_types}
)
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
    return list({id(family): family for family in FAMILIES.values()}.values())


def trained_forms() -> dict[str, TrainedForm]:
    """Return the forms that a trained model can take, by the `model_type` that an export writes."""
    return {family.model_types[0]: family.trained for family in all_families() if family.trained is not None}


__all__ = ["CARRIED", "FAMILIES", "OWN", "Family", "Layout", "all_families", "family_of", "trained_forms"]
