"""The model families that convert, by the `model_type` of their `config.json`: a new one is a file and a row.

rules.py         a rule between tensors of both sides, read in both directions
family.py        Family and Layout
blocks.py        rules of attention, MLPs, experts and depths, of which families are made
trunk.py         rules of a trunk
numbered.py      depths stored as further numbered layers
flags.py         a config.json as Megatron's flags
depth_flags.py   flags of depths behind a trunk that Megatron cannot run
llama.py         Llama, Qwen2, Qwen3
qwen3_next.py    Qwen3-Next, Qwen3.5
deepseek.py      DeepSeek-V3, Kimi-K2
glm.py           GLM-4.5
mimo.py          MiMo
mimo_v2.py       MiMo-V2
ernie.py         ERNIE-4.5
longcat.py       LongCat-Flash
step.py          Step-3.5
bailing.py       Ling, Ring
exaone.py        EXAONE
nemotron.py      Nemotron-H
"""

from megatron_mtp.checkpoint.families.bailing import BAILING
from megatron_mtp.checkpoint.families.deepseek import DEEPSEEK_V3
from megatron_mtp.checkpoint.families.ernie import ERNIE
from megatron_mtp.checkpoint.families.exaone import EXAONE_MOE
from megatron_mtp.checkpoint.families.family import CARRIED, Family, Layout
from megatron_mtp.checkpoint.families.glm import GLM4_MOE
from megatron_mtp.checkpoint.families.llama import LLAMA, QWEN2, QWEN3
from megatron_mtp.checkpoint.families.longcat import LONGCAT
from megatron_mtp.checkpoint.families.mimo import MIMO
from megatron_mtp.checkpoint.families.mimo_v2 import MIMO_V2
from megatron_mtp.checkpoint.families.nemotron import NEMOTRON
from megatron_mtp.checkpoint.families.qwen3_next import QWEN3_5, QWEN3_NEXT
from megatron_mtp.checkpoint.families.step import STEP
from megatron_mtp.checkpoint.hf.config import HFConfig

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mimo": MIMO,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "kimi_k25": DEEPSEEK_V3,
    "glm4_moe": GLM4_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_NEXT,
    "mimo_v2_flash": MIMO_V2,
    "ernie4_5_moe": ERNIE,
    "longcat_flash": LONGCAT,
    "step3p5": STEP,
    "step3p7": STEP,
    "bailing_moe": BAILING,
    "bailing_moe_v2": BAILING,
    "exaone_moe": EXAONE_MOE,
    "nemotron_h": NEMOTRON,
}


def family_of(config: HFConfig) -> Family:
    """The family of a config.

    Raises:
        ValueError: there is none of this `model_type`.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"{config.source}: the model_type '{config.model_type:.60}' is unknown here; known are "
            f"{', '.join(sorted(FAMILIES))}."
        )
    return family


__all__ = ["CARRIED", "FAMILIES", "Family", "Layout", "family_of"]
