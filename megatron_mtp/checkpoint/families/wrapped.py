"""Multimodal models around a text model of a known family: the text model converts, the rest is carried.

In:  a `config.json` of one of `WRAPPERS` with a `text_config` of a known family.
Out: that family, with the text model's names under the folder's prefix, and all other tensors unchanged. If the text
     model's family has no names for MTP layers, attached ones use those of `ATTACHED`.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from megatron_mtp.checkpoint.families.family import ATTACHED, Family, Layout
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf.config import HFConfig

WRAPPERS = (
    "exaone4_5 glm_ocr got_ocr2 idefics3 internvl lighton_ocr llava llava_onevision mistral3 smolvlm "
    "video_llava vipllava"
).split()
"""Types whose class runs text alone like the text model's own class, tested with small random models."""
TEXTS = {
    "glm4v_moe": "glm4v_moe_text",
    **dict.fromkeys(("nemotron_h_omni", "nemo_speechlm", "nemotron3_5_transcribe"), "nemotron_h"),
}
"""Types around a single text model whose type their configs may omit."""
PREFIXES = {
    "hybrid text under language_model": {
        "backbone.": "language_model.backbone.",
        "lm_head.": "language_model.lm_head.",
        "mtp.": "language_model.mtp.",
    },
    "hybrid text under llm": {
        "backbone.embeddings.": "llm.model.embed_tokens.",
        "backbone.norm_f.": "llm.model.norm.",
        "backbone.": "llm.model.",
        "lm_head.": "llm.lm_head.",
        "mtp.": "llm.mtp.",
    },
    "text under model.language_model": {"model.": "model.language_model."},
    "text under model.text_model": {"model.": "model.text_model."},
    "text under language_model": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
}
"""Forms of a folder: prefixes of the text model's names alone, and inside the larger model."""


def wrapped(family: Family, model_type: str) -> Family:
    """Return the family of models of this type around a text model of `family`."""
    depths = family.depths or (ATTACHED if family.attached else None)
    anywhere = "" if depths is None else re.sub(r"^\^mtp", r"(?:^|\\.)mtp", depths.pattern)

    def rules(config: HFConfig, layout: Layout) -> list[Rule]:
        form = next((prefixes for name, prefixes in PREFIXES.items() if layout.has(name)), {})
        of_text = family.attached or family.rules
        return [_inside(rule, form) for rule in of_text(_tied(config, layout), layout)]

    forms = {name: f"^{next(iter(prefixes.values()))}".replace(".", r"\.") for name, prefixes in PREFIXES.items()}
    return replace(
        family,
        title=f"{family.title} inside of {model_type}",
        model_types=(model_type,),
        config_class=family.config_class or family.model_types[0],
        rules=rules,
        features={**family.features, **forms},
        carried=(r".",),
        depths=depths and replace(depths, pattern=anywhere),
        flags=_of_whole(family.flags),
        trained=None,
    )


Flags = Callable[[HFConfig, Layout], list[str]]


def _of_whole(flags: Flags | None) -> Flags | None:
    """Return flags of a text model, from a config that includes the head of the whole folder."""
    return None if flags is None else lambda config, layout: flags(_tied(config, layout), layout)


def _tied(config: HFConfig, layout: Layout) -> HFConfig:
    """Return the config with an untied head if the folder stores one.

    The text model's key does not cover the folder.
    """
    return replace(config, keys={**config.keys, "tie_word_embeddings": not layout.has("head")})


def _inside(rule: Rule, prefixes: dict[str, str]) -> Rule:
    return replace(rule, hf=tuple(replace(tensor, name=_renamed(tensor.name, prefixes)) for tensor in rule.hf))


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    for alone, inside in prefixes.items():
        if name.startswith(alone):
            return inside + name.removeprefix(alone)
    return name
