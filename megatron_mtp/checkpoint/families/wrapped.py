"""Models that see around a text model of a known family: the text model converts, the rest is carried.

In:  a `config.json` of one of `WRAPPERS` with a `text_config` of a known family.
Out: that family, with the text model's names under the prefix that the folder uses, and all other tensors unchanged. If
     the text model's family has no names for depths, attached ones have those of `ATTACHED`.
"""

from collections.abc import Callable
from dataclasses import replace

from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.rules import Piece, Rule
from megatron_mtp.checkpoint.families.trunk import depth_frames, depth_places, layers
from megatron_mtp.checkpoint.hf.config import HFConfig

ATTACHED = Depths(
    r"^mtp\.layers\.(\d+)\.eh_proj\.weight$", "mtp.layers.{k}.", ("enorm", "hnorm", "eh_proj", "final_layernorm")
)
"""Depths that `attach-mtp` made, where the text model's family has no names for any: each is a layer like the trunk's
last, by the names of that one. transformers ignores these tensors, and the depths convert back."""

WRAPPERS = (
    "aya_vision exaone4_5 gemma3 glm_ocr got_ocr2 idefics3 internvl lighton_ocr llava llava_onevision mistral3 smolvlm "
    "video_llava vipllava"
).split()
"""Types whose class runs a text alone as the text model's own class does, seen with small random models."""
PREFIXES = {
    "text under model.language_model": {"model.": "model.language_model."},
    "text under model.text_model": {"model.": "model.text_model."},
    "text under language_model": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
}
"""Forms of a folder: beginnings of the text model's names alone, and inside of the larger model."""


def wrapped(family: Family, model_type: str) -> Family:
    """The family of models of this type around a text model of `family`."""
    attaches = family.depths is None and family.flags is not None
    depths = ATTACHED if attaches else family.depths

    def rules(config: HFConfig, layout: Layout) -> list[Rule]:
        form = next((prefixes for name, prefixes in PREFIXES.items() if layout.has(name)), {})
        own = family.rules(_tied(config, layout), layout)
        own += _attached_rules(own, config, layout) if attaches else []
        return [_inside(rule, form) for rule in own]

    forms = {name: f"^{next(iter(prefixes.values()))}".replace(".", r"\.") for name, prefixes in PREFIXES.items()}
    return replace(
        family,
        title=f"{family.title} inside of {model_type}",
        model_types=(model_type,),
        config_class=family.config_class or family.model_types[0],
        rules=rules,
        features={**family.features, **forms},
        carried=(r".",),
        depths=depths and replace(depths, flags=_of_whole(depths.flags)),
        flags=_of_whole(family.flags),
        trained=None,
    )


Flags = Callable[[HFConfig, Layout], list[str]]


def _of_whole(flags: Flags | None) -> Flags | None:
    """The same flags from a config whose head is that of the folder."""
    return None if flags is None else lambda config, layout: flags(_tied(config, layout), layout)


def _tied(config: HFConfig, layout: Layout) -> HFConfig:
    """The config with a head of its own if the folder stores one: the text model's key says nothing of the whole."""
    return replace(config, keys={**config.keys, "tie_word_embeddings": not layout.has("head")})


def _inside(rule: Rule, prefixes: dict[str, str]) -> Rule:
    return replace(rule, hf=tuple(replace(tensor, name=_renamed(tensor.name, prefixes)) for tensor in rule.hf))


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    for alone, inside in prefixes.items():
        if name.startswith(alone):
            return inside + name.removeprefix(alone)
    return name


def _attached_rules(trunk: list[Rule], config: HFConfig, layout: Layout) -> list[Rule]:
    """Rules of the depths, from those of the trunk.

    Args:
        trunk: rules of the text model, by its own names.
        config: its config.
        layout: counts the depths.
    """
    last = layers(config) - 1
    hf, mcore = f"model.layers.{last}.", f"decoder.layers.{last}."
    layer = [rule for rule in trunk if rule.hf[0].name.startswith(hf)]
    rules: list[Rule] = []
    places = depth_places(ATTACHED, config, layout)
    for place, frame in zip(places, depth_frames(ATTACHED, config, places), strict=True):
        rules += [*frame, *(_moved(rule, (hf, place.hf), (mcore, place.mcore)) for rule in layer)]
    return rules


def _moved(rule: Rule, hf: tuple[str, str], mcore: tuple[str, str]) -> Rule:
    """The rule for another layer; each pair is the prefix of the one and of the other."""
    tensors = tuple(replace(tensor, name=tensor.name.replace(*hf, 1)) for tensor in rule.hf)
    return replace(rule, hf=tensors, mcore=tuple(_piece(piece, mcore) for piece in rule.mcore))


def _piece(piece: Piece, mcore: tuple[str, str]) -> Piece:
    key, *aliases = (key.replace(*mcore, 1) for key in (piece.key, *piece.aliases))
    return replace(piece, key=key, aliases=tuple(aliases))
