"""The model families that convert, by the `model_type` of their `config.json`.

Each family is a file that states everything about it, and an entry in `OWN`; a package outside adds one with an entry
point of the group `megatron_mtp.families`. Nothing here imports torch before a tensor is moved, so `--help` lists the
families at once.

rules.py         a rule between tensors of both sides, read in both directions
family.py        Family, Depths and Layout: what a family states
blocks.py        rules of attention, MLPs, experts and depths
recurrent.py     rules of Gated DeltaNet and Mamba-2
trunk.py         rules of a trunk
wrapped.py       models around a text model of a known family
attached.py      depths that were attached where a family has no names for them
numbered.py      depths stored as further numbered layers
flags.py         a config.json as Megatron's flags
depth_flags.py   flags of depths behind a trunk that Megatron cannot run
trained.py       Megatron's arguments as a config.json: the form of a model that Megatron trained
table.py         the families as tables, for docs/conversion.md
llama.py         Llama, Qwen2, Qwen3
carried.py       decoders whose layers Megatron cannot run: Gemma, OLMo 2, ...
decoder.py       facts of a class as rules and flags
dense.py         dense decoders without depths: Mistral, SmolLM3, Phi-3, ...
routed.py        decoders of experts without depths: Qwen3-MoE, Mixtral, ...
gpt_oss.py       gpt-oss
granite.py       Granite
qwen3_next.py    Qwen3-Next, Qwen3.5
deepseek.py      DeepSeek-V3, Kimi-K2, GLM-4.7-Flash
glm.py           GLM-4.5, GLM-OCR
deepseek_v2.py   DeepSeek-V2, Youtu
mimo.py          MiMo
mimo_v2.py       MiMo-V2
ernie.py         ERNIE-4.5
longcat.py       LongCat-Flash
step.py          Step-3.5
bailing.py       Ling, Ring
exaone.py        EXAONE
hunyuan.py       Hunyuan 3
nemotron.py      Nemotron-H, Nemotron 3
"""

from megatron_mtp.checkpoint.families.bailing import BAILING
from megatron_mtp.checkpoint.families.carried import CARRIED_TRUNKS
from megatron_mtp.checkpoint.families.deepseek import DEEPSEEK_V3, GLM4_MOE_LITE
from megatron_mtp.checkpoint.families.deepseek_v2 import DEEPSEEK_V2, YOUTU
from megatron_mtp.checkpoint.families.dense import DENSE
from megatron_mtp.checkpoint.families.ernie import ERNIE
from megatron_mtp.checkpoint.families.exaone import EXAONE_4, EXAONE_MOE
from megatron_mtp.checkpoint.families.family import CARRIED, Family, Layout
from megatron_mtp.checkpoint.families.glm import GLM4_MOE, GLM_OCR
from megatron_mtp.checkpoint.families.gpt_oss import GPT_OSS
from megatron_mtp.checkpoint.families.granite import GRANITE
from megatron_mtp.checkpoint.families.hunyuan import HUNYUAN
from megatron_mtp.checkpoint.families.llama import LLAMA, QWEN2, QWEN3
from megatron_mtp.checkpoint.families.longcat import LONGCAT
from megatron_mtp.checkpoint.families.mimo import MIMO
from megatron_mtp.checkpoint.families.mimo_v2 import MIMO_V2
from megatron_mtp.checkpoint.families.nemotron import NEMOTRON
from megatron_mtp.checkpoint.families.qwen3_next import QWEN3_5, QWEN3_NEXT
from megatron_mtp.checkpoint.families.routed import ROUTED
from megatron_mtp.checkpoint.families.step import STEP
from megatron_mtp.checkpoint.families.trained import TrainedForm
from megatron_mtp.checkpoint.families.wrapped import WRAPPERS, wrapped
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.registry import Registry

OWN: tuple[Family, ...] = (
    DEEPSEEK_V3,
    GLM4_MOE,
    MIMO,
    LLAMA,
    QWEN2,
    QWEN3,
    BAILING,
    QWEN3_NEXT,
    QWEN3_5,
    EXAONE_MOE,
    ERNIE,
    MIMO_V2,
    LONGCAT,
    STEP,
    NEMOTRON,
    GLM4_MOE_LITE,
    HUNYUAN,
    EXAONE_4,
    GLM_OCR,
    DEEPSEEK_V2,
    YOUTU,
    *DENSE,
    *GRANITE,
    *ROUTED,
    GPT_OSS,
    *CARRIED_TRUNKS,
)
"""The families of this package, in the order of tables; the first that fits is the form of a trained model."""

FAMILIES: Registry[Family] = Registry(
    "megatron_mtp.families", {model_type: family for family in OWN for model_type in family.model_types}
)
"""Families by `model_type`, with those that other packages register."""


def family_of(config: HFConfig) -> Family:
    """The family of a config; of an unknown model around a text model, the text model's.

    Raises:
        ValueError: no family has its `model_type`.
    """
    family = FAMILIES.get(config.model_type)
    inner = FAMILIES.get(config.text_type) if config.text_type is not None else None
    if inner is not None and config.model_type in WRAPPERS:
        return wrapped(inner, config.model_type)
    if family is None:
        raise ValueError(
            f"{config.source}: the model_type '{config.model_type:.60}' is unknown here; known are "
            f"{', '.join(sorted(FAMILIES))}."
        )
    return family


def known_types() -> set[str]:
    """Every `model_type` that may convert: those of families, and of models around a text model."""
    return {*FAMILIES, *WRAPPERS}


def all_families() -> list[Family]:
    """Every family once: ours, then those of other packages."""
    return list({id(family): family for family in FAMILIES.values()}.values())


def trained_forms() -> dict[str, TrainedForm]:
    """The forms that a trained model can take, by the `model_type` that an export writes."""
    return {family.model_types[0]: family.trained for family in all_families() if family.trained is not None}


__all__ = [
    "CARRIED",
    "FAMILIES",
    "OWN",
    "Family",
    "Layout",
    "all_families",
    "family_of",
    "known_types",
    "trained_forms",
]
