"""Carried tensors, which no rule describes: missing, unexpected or misshapen ones, according to transformers' class.

A conversion rejects what is found here (`check_carried`), and an audit reports it. MTP layers, which the class does not
have, are compared with the trunk's layers.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_mtp.checkpoint.families import Family, Layout
from megatron_mtp.checkpoint.families.family import TRUNK_ALONE, class_tensors
from megatron_mtp.checkpoint.hf import Shape, by
from megatron_mtp.checkpoint.hf.config import HFConfig

REMEDY = "fetch the folder again, or correct the config"
IN_LAYER = re.compile(r"(.*?\b(?:layers|mtp_block)\.(\d+)\.)(.+)")
"""A tensor's layer, its number, and the name in it."""
AROUND = re.compile(r"(enorm|hnorm|eh_proj|(transformer\.)?shared_head|embed_tokens|final_layernorm)\b")
"""Parts of an MTP layer around the inner layer."""
INNER = "transformer_layer."
"""Megatron's module of the layer inside an MTP layer."""
FEW = 2
"""Maximum number of names by which a layer may differ from its form; with more, it has another form."""


@dataclass(frozen=True)
class CarriedFaults:
    """Faults of carried tensors.

    Attributes:
        lost: names that the model has and the folder lacks.
        left: names that the folder has and the model does not.
        shapes: correct shapes of tensors with a wrong one.
    """

    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)


def check_carried(path: Path, config: HFConfig, family: Family, layout: Layout, shapes: Mapping[str, Shape]) -> None:
    """Check the tensors of a folder whose layers have no rules.

    Raises:
        ValueError: they differ from those of transformers' class or of the model's other layers, or belong to MTP
            layers without a projection, which are not counted.
    """
    of_class, depths = class_tensors(path), {} if family.depths is None else family.depths.by_depth(config, shapes)
    if family.depths is not None and (uncounted := [depth for depth in depths if depth >= layout.depths]):
        others = depths[uncounted[0]]
        raise ValueError(
            f"{path} lacks the projection ({family.depths.names[2]}) of depth {uncounted[0] + 1}, and holds "
            f"{len(others)} tensor(s) of it, such as '{min(others)}'; {REMEDY}, or convert the trunk alone "
            f"({TRUNK_ALONE})."
        )
    faults = carried_faults(of_class, shapes, depths, {} if family.depths is None else family.depths.inner)
    class_of = f"transformers' class of '{config.model_type}'"
    for name, wanted in faults.shapes.items():
        raise ValueError(f"'{name}' in {path} is {by(shapes[name])}, but {class_of} has it as {by(wanted)}; {REMEDY}.")
    layers = {int(match.group(2)) for name in shapes if (match := IN_LAYER.match(name))}
    count = config.keys.get("num_hidden_layers") or 0
    whole = [f"model.layers.{index}" for index in range(count) if index not in layers]
    if lost := [*whole, *faults.lost]:
        beside = f" and has '{faults.left[0]}', which they do not have" if faults.left else ""
        raise ValueError(f"{path} lacks '{lost[0]}', which other layers or {class_of} have{beside}; {REMEDY}.")
    if faults.left:
        raise ValueError(
            f"'{faults.left[0]}' in {path} is not a tensor of other layers or of {class_of}, and nothing is dropped "
            "silently; correct the config, or the name."
        )


def carried_faults(
    of_class: Mapping[str, Shape],
    shapes: Mapping[str, Shape | None],
    depths: Mapping[int, Collection[str]],
    inner: Mapping[str, str],
) -> CarriedFaults:
    """Compare the tensors of a model with those of its class, or with each other if it has none.

    Args:
        of_class: result of `class_tensors`; empty without a class.
        shapes: shapes of all tensors; None where unknown.
        depths: names of the tensors of each MTP layer.
        inner: field of `Depths`.
    """
    of_depths = {name for names in depths.values() for name in names}
    of_class = {name: shape for name, shape in of_class.items() if name not in of_depths}
    trunk = [name for name in shapes if name not in of_depths]
    layers: dict[str, list[str]] = defaultdict(list)
    for name in of_class or trunk:
        if match := IN_LAYER.match(name):
            layers[match.group(1)].append(name)
    if not of_class:
        numbered = {int(re.findall(r"\d+", prefix)[-1]): names for prefix, names in layers.items()}
        lost = [*lost_of_other_layers(numbered), *thin_depths(depths, numbered)]
        return CarriedFaults(tuple(lost))
    wrong = {
        name: one for name, one in of_class.items() if name not in of_depths and shapes.get(name) not in (None, one)
    }
    lost, left = _of_trunk(of_class, trunk)
    lost_inside, left_inside, wrong_inside = _of_depths(of_class, layers, shapes, depths, inner)
    return CarriedFaults((*lost, *lost_inside), (*left, *left_inside), wrong | wrong_inside)


def _of_trunk(of_class: Iterable[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return lost names and leftover names in the layers and modules of the class.

    A layer whose names differ from those of the class, not only by more experts, may be of another form; it is if no
    layer of its kind is as in the class. A module of which nothing is there may be none of the folder's.
    """
    wanted, held = _by_place(of_class), _by_place(names)
    if not any(_is_layer(place) and place in held for place in wanted):
        return [], []
    known = {_of_any_expert(name) for name in of_class}
    strange = {
        place: [
            rest for rest in rests if rest not in wanted.get(place, ()) and _of_any_expert(place + rest) not in known
        ]
        for place, rests in held.items()
    }
    missing = {place: [rest for rest in rests if rest not in held.get(place, ())] for place, rests in wanted.items()}
    forms = {place: frozenset(map(_of_any_expert, rests)) for place, rests in wanted.items()}
    right = {forms[place] for place in wanted if place in held and not missing[place] and not strange[place]}
    lost, left = list[str](), list[str]()
    for place, rests in missing.items():
        other = strange.get(place, [])
        few = len(rests) <= FEW and len(other) <= FEW
        if (place in held or _is_layer(place)) and (not other or few or forms[place] in right):
            lost += [place + rest for rest in rests]
            left += [place + rest for rest in other]
    return lost, left


def _of_depths(
    of_class: Mapping[str, Shape],
    layers: Mapping[str, list[str]],
    shapes: Mapping[str, Shape | None],
    depths: Mapping[int, Collection[str]],
    inner: Mapping[str, str],
) -> tuple[list[str], list[str], dict[str, Shape]]:
    """Return lost, leftover and misshapen tensors inside MTP layers, each of which is like a trunk layer."""
    sizes: dict[str, list[Shape]] = defaultdict(list)
    forms = list[frozenset[str]]()
    for prefix, every in layers.items():
        rests = [name.removeprefix(prefix) for name in every]
        forms.append(frozenset(rest for rest in rests if not inner or rest.startswith(tuple(inner.values()))))
        for rest, name in zip(rests, every, strict=True):
            sizes[rest].append(of_class[name])
    inside: dict[int, dict[str, str]] = {}
    places: dict[int, str] = {}
    for depth, names in depths.items():
        matches = [match for name in names if (match := IN_LAYER.match(name)) and not AROUND.match(match.group(3))]
        inside[depth] = {_as_in_trunk(match.group(3), inner): match.group(0) for match in matches}
        places[depth] = next((match.group(1) for match in matches), "")
    lost, left, wrong = list[str](), list[str](), dict[str, Shape]()
    for depth, own in inside.items():
        if not own:
            continue
        others = [frozenset(one) for other, one in inside.items() if other != depth]
        nearest = min(forms, key=lambda form: len(form ^ own.keys()), default=frozenset())
        if own.keys() not in others:  # MTP layers have the same tensors
            nearest = min((one for one in others if own.keys() < one), key=len, default=nearest)
        elsewhere = frozenset[str]().union(*others)
        other = [rest for rest in own if rest not in sizes and rest not in elsewhere]
        less = sorted(nearest - own.keys())
        if len(other) <= FEW and len(less) <= len(own):
            lost += [places[depth] + _as_in_depth(rest, inner) for rest in less]
            left += [own[rest] for rest in other]
        for rest, name in own.items():
            if rest in sizes and shapes.get(name) not in (None, *sizes[rest]):
                wrong[name] = Counter(sizes[rest]).most_common(1)[0][0]
    return lost, left, wrong


def _as_in_trunk(rest: str, inner: Mapping[str, str]) -> str:
    """Return the trunk layers' name for a name inside an MTP layer."""
    start = next((start for start in inner if rest.startswith(start)), "")
    return inner.get(start, "") + rest.removeprefix(start)


def _as_in_depth(rest: str, inner: Mapping[str, str]) -> str:
    start, of_trunk = next(((one, other) for one, other in inner.items() if rest.startswith(other)), ("", ""))
    return start + rest.removeprefix(of_trunk)


def _by_place(names: Iterable[str]) -> dict[str, set[str]]:
    """Group names by layer, or by module outside layers."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        match = IN_LAYER.match(name)
        place = match.group(1) if match else name.rpartition(".")[0] + "."
        found[place].add(name.removeprefix(place))
    return found


def _is_layer(place: str) -> bool:
    return IN_LAYER.match(f"{place}_") is not None


def _of_any_expert(name: str) -> str:
    return re.sub(r"(^|\.)experts\.\d+\.", r"\1experts.*.", name)


def lost_of_other_layers(layers: Mapping[int, Collection[str]]) -> Iterator[str]:
    """Return tensors that a layer lacks and the nearest layer of the same kind has."""
    own = {index: frozenset(name.replace(f".{index}.", ".*.", 1) for name in names) for index, names in layers.items()}
    sets = Counter(own.values())
    for index, names in own.items():
        nearest = min((other for other in sets if names < other), key=len, default=names)
        if sets[names] == 1 and len(nearest - names) <= len(names):
            yield from sorted(rest.replace("*", str(index), 1) for rest in nearest - names)


def thin_depths(depths: Mapping[int, Collection[str]], layers: Mapping[int, Collection[str]]) -> Iterator[str]:
    """Return tensors missing from MTP layers whose inner layer has only part of another layer's tensors."""
    own = [{match.group(3) for name in names if (match := IN_LAYER.match(name))} for names in layers.values()]
    inside: dict[int, dict[str, str]] = {}
    for depth, names in depths.items():
        places = {match.group(3): match.group(1) for name in names if (match := IN_LAYER.match(name))}
        inner = {rest: layer for rest, layer in places.items() if not AROUND.match(rest)}
        if any(rest.startswith(INNER) for rest in places):
            inner = {n.removeprefix(INNER): layer + INNER for n, layer in places.items() if n.startswith(INNER)}
        inside[depth] = inner
    for depth, inner in inside.items():
        others = [*own, *(set(other) for index, other in inside.items() if index != depth)]
        larger = [layer for layer in others if inner.keys() < layer]
        if inner and larger and inner.keys() not in own:
            prefix = next(iter(inner.values()))
            yield from sorted(prefix + rest for rest in min(larger, key=len) - inner.keys())
