"""Check whether a side has what its config specifies: names, shapes and dtypes. Values are not read.

A folder is compared with the plan of its conversion, and a carried trunk with transformers' class. For a checkpoint,
and without a family, MTP layers and layers are counted by their names and compared with each other.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from megatron_mtp.checkpoint.audit import ERROR, NOTE, SHOWN, WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.quantization import is_quantized
from megatron_mtp.checkpoint.audit.saved import MegatronSide, Side
from megatron_mtp.checkpoint.audit.side import DEPTH, HEAD, STAGE, TRUNK, HFSide, Parts
from megatron_mtp.checkpoint.convert.carried import (
    IN_LAYER,
    CarriedFaults,
    carried_faults,
    lost_of_other_layers,
    thin_depths,
)
from megatron_mtp.checkpoint.convert.plan import unnumbered
from megatron_mtp.checkpoint.families import CARRIED, FAMILIES
from megatron_mtp.checkpoint.families.family import TRUNK_ALONE, class_tensors
from megatron_mtp.checkpoint.families.inside import HEADS_OF_STAGES, METHOD, TITLE
from megatron_mtp.checkpoint.families.naming import renaming
from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import INDEX_SHARE, INDEXER, text_key
from megatron_mtp.megatron.checkpoint import EMBEDDING, HF_FILES, OUTPUT

GRAFT = "graft those of the model that it was made from (megatron-mtp convert graft)"
LOST, FETCH = f"export the MTP layers as well, or {GRAFT}", f"fetch the MTP layers, or {GRAFT}"
AGAIN = "export or fetch the tensors again"
FRAME = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
"""Parts of Megatron's MTP layers around the inner layer; parallel heads have only the last, ERNIE's the others."""
LOSSY = {"float32": ("bfloat16", "float16"), "bfloat16": ("float16",), "float16": ("bfloat16",)}
"""A stored dtype, and the dtypes that cannot represent its values."""


def contents(side: Side) -> list[Finding]:
    """Return findings about what a side lacks or has in excess, according to its own config."""
    if not side.tensors:
        return []
    wrong = side.misnamed if isinstance(side, HFSide) else {}
    parts, held, said = side.parts, {*side.tensors, *side.unread, *wrong.values()} - wrong.keys(), side.said_depths
    there = parts.numbered(TRUNK, held)
    found, known = list[Finding](), side.layers
    faults = _of_carried(side)
    if isinstance(side, MegatronSide):
        plan, known = _called_for(side, faults.lost), known if there else None
        found += [*_unknown(side, faults.left), *_shapes(side, faults.shapes)]
    else:
        plan = [tensor.name for rule in side.plan for tensor in rule.hf]
        found += [*_left_over(side, plan, faults.left), *_shapes(side, faults.shapes), *_types(side)]
        ends = (name for name in side.of_class if _is_end(side, name) and side.family is None)
        plan = list(dict.fromkeys([*plan, *ends, *faults.lost]))
        if side.described is not None and side.inside is None:
            plan = [*side.described.lost(held, side.layers), *thin_depths(side.depths, side.trunk_layers)]
    layers = range(max(there, default=-1) + 1 if known is None else known)
    missing = lacking(parts, range(said or 0), layers, plan, held)
    every = [*missing, *_uncounted(side, len(parts.numbered(DEPTH, held))), *found, *_of_drafter_inside(side)]
    every += _of_shared_index(side)
    return list(map(_with_trunk_alone, every)) if _is_only_of_heads(side, every) else every


OF_HEADS = ("MTP dropped", "depth missing", "depth incomplete", "depth count", "tensor left over")
"""Findings that may concern only MTP layers."""


def _is_only_of_heads(side: Side, found: list[Finding]) -> bool:
    """Return whether the trunk would convert: its family supports it, and all problems concern MTP layers."""
    errors = [one for one in found if one.severity == ERROR]
    parts = {side.parts.of(name).kind for one in errors if one.guess == "tensor left over" for name in one.names}
    converts = isinstance(side, HFSide) and side.family is not None
    return converts and all(one.guess in OF_HEADS for one in errors) and parts <= {DEPTH}


def _with_trunk_alone(found: Finding) -> Finding:
    """Add the remaining option to a finding about MTP layers that are lost, damaged or unknown."""
    if found.severity != ERROR or found.guess == "depth count":
        return found
    return replace(found, advice=f"{found.advice}, or convert the trunk alone ({TRUNK_ALONE})")


def lacking(
    parts: Parts,
    depths: Collection[int],
    layers: Collection[int],
    plan: Iterable[str],
    held: Collection[str],
    where: str = "",
    counts: str = "The config says {}, the files hold {}",
    lacks: str = "The files lack {} that the config calls for",
) -> Iterator[Finding]:
    """Compare existing with expected tensors: findings for MTP layers, the trunk, and the rest.

    Args:
        parts: how names are read.
        depths, layers: expected indices.
        plan: expected names, as far as they are known.
        held: names that exist or are covered by another finding.
        where: the side, for messages: " on side B".
        counts: sentence about the expected and existing numbers of MTP layers.
        lacks: sentence about single tensors.
    """
    lost = [name for name in plan if name not in held]
    lost_depths, there = parts.numbered(DEPTH, lost), parts.numbered(DEPTH, held)
    if gone := [depth for depth in depths if depth not in there]:
        which = ", ".join(str(depth + 1) for depth in gone)
        says = counts.format(counted(len(depths), "depth"), len(there))
        says += f": depth {which} is missing." if there else ": all tensors of MTP were dropped."
        names = tuple(name for depth in gone for name in lost_depths.get(depth, ()))
        yield Finding("depth missing" if there else "MTP dropped", says, LOST, names=names)
    for depth, names_of in lost_depths.items():
        if depth in there:
            says = f"Depth {depth + 1} lacks {counted(len(names_of), 'tensor')}{where}: {listed(names_of)}."
            yield Finding("depth incomplete", says, AGAIN, names=tuple(names_of))
    lost_layers, there = parts.numbered(TRUNK, lost), parts.numbered(TRUNK, held)
    if gone := [layer for layer in layers if layer not in there]:
        says = f"Whole layers of the trunk are missing{where}: {', '.join(map(str, gone))} (counted from 0) of "
        names = tuple(name for layer in gone for name in lost_layers.get(layer, ()))
        yield Finding("layers missing", f"{says}{len(layers)}.", AGAIN, names=names)
    told = {name for names in lost_depths.values() for name in names}
    told |= {name for layer in gone for name in lost_layers.get(layer, ())}
    if rest := [name for name in lost if name not in told]:
        says = lacks.format(counted(len(rest), "tensor"))
        yield Finding("tensor missing", f"{says}: {listed(rest)}.", AGAIN, names=tuple(rest))


def _uncounted(side: Side, held: int) -> Iterator[Finding]:
    """Report MTP layers in the files that the config does not count, and published layers that neither has."""
    said, says = side.said_depths, ""
    known = side.family.depths if isinstance(side, HFSide) and side.family is not None else None
    if said is not None and held > said:
        says = f"The config says {counted(said, 'depth')}, the files hold {held}"
    elif said is None and held and known is not None and known.default is not None:
        says = f"No key of the config counts the {counted(held, 'depth')} of the files ('{known.keys[0]}')"
    elif said is None and known is not None and held < known.published:
        published = f"Models of this family are published with {counted(known.published, 'depth')}, and no key of the "
        advice = f"{FETCH}; a folder that is meant to have fewer MTP layers sets '{known.keys[0]}'"
        guess = "depth missing" if held else "MTP dropped"
        yield Finding(
            guess, f"{published}config counts others; the files hold {held}.", advice, WARNING, known.keys[:1]
        )
    if says:
        names = tuple(name for name in side.tensors if side.parts.of(name).kind == DEPTH)
        says += ": engines do not load what is not counted."
        yield Finding("depth count", says, f"put {held} into the config", names=names)


def _of_drafter_inside(side: Side) -> Iterator[Finding]:
    """Report a drafter inside the model and what it lacks; its tensors and keys must match."""
    inner = side.inside
    if inner is None:
        return
    if not inner.names:
        says = f"The config has {listed(inner.keys)}, but the files hold no tensor of a {TITLE} drafter."
        yield Finding("drafter dropped", says, "fetch or export the drafter's tensors as well", names=inner.keys)
        return
    bodies = side.parts.numbered(STAGE, (name for name in inner.names if not HEADS_OF_STAGES.match(name)))
    if lost := [*inner.lost(), *(f"'{name}'" for name in lost_of_other_layers(bodies))]:
        says = f"The {TITLE} drafter inside of the model lacks {', '.join(lost[:SHOWN])}"
        says += f" and {len(lost) - SHOWN} more." if len(lost) > SHOWN else "."
        yield Finding("drafter incomplete", says, AGAIN, names=tuple(sorted(inner.names)))
    if lost := inner.lost_keys():
        says = f"The files hold {inner.says}, but the config lacks {listed(lost)}, so engines do not load it."
        yield Finding("drafter incomplete", says, "take the config of the release", names=tuple(lost))
    says = f"The files hold {inner.says}: no MTP layers. Engines load it by the method '{METHOD}'; 'mtp' half-loads it."
    yield Finding("drafter inside", says, severity=NOTE)


def _of_shared_index(side: Side) -> Iterator[Finding]:
    """Report a config in which later drafts reuse the keys of the first, if no MTP layer chooses keys."""
    shares = side.kept_keys.get(INDEX_SHARE) is True
    if side.depths and shares and not any(INDEXER in name for own in side.depths.values() for name in own):
        says = (
            f"'{INDEX_SHARE}' is true, but the MTP layer has no indexer that chooses keys: engines draft with a chain."
        )
        advice = "fetch the indexer's tensors, or leave the key out and train the layer with a chain"
        yield Finding("index share", says, f"{advice} (--mtp-repeated-layer-shares-kv)", WARNING, (INDEX_SHARE,))


def _of_carried(side: Side) -> CarriedFaults:
    """Report faults of tensors without a rule; none if the side has rules for all tensors or an unknown class."""
    if isinstance(side, HFSide):
        of_class, family = side.of_class, side.family
        if family is None or family.untrainable is None:
            # layers of an unknown family may have other tensors
            return replace(_carried_faults(side, of_class, {}), left=()) if of_class else CarriedFaults()
    elif side.runs or not side.kept or side.reader is None:
        return CarriedFaults()
    else:
        of_class = class_tensors(side.reader.home / HF_FILES)
        family = FAMILIES.get(str(side.kept.get("model_type")))
    stored = None if family is None else family.depths
    return _carried_faults(side, of_class, {} if stored is None else stored.inner)


def _carried_faults(side: Side, of_class: Mapping[str, Shape], inner: Mapping[str, str]) -> CarriedFaults:
    if isinstance(side, HFSide):
        stored = {side.misnamed.get(name, name): name for name in side.tensors}
    else:
        stored = {key.removeprefix(CARRIED): key for key in side.tensors if key.startswith(CARRIED)}
    shapes: dict[str, Shape | None] = {name: side.tensors[key].shape for name, key in stored.items()}
    shapes |= dict.fromkeys(side.unread)
    faults = carried_faults(of_class, shapes, side.parts.numbered(DEPTH, shapes), inner)
    if isinstance(side, HFSide):
        return faults
    wrong = {stored[name]: shape for name, shape in faults.shapes.items()}
    return CarriedFaults(faults.lost, tuple(stored[name] for name in faults.left), wrong)


def _left_over(side: HFSide, plan: list[str], carried: Collection[str]) -> Iterator[Finding]:
    if side.misnamed and side.family is not None:
        says = f"The files have {renaming(side.misnamed, side.family.title)}."
        advice = "rename them in the files and in the index: loaders look for the family's names alone"
        yield Finding("tensor misnamed", says, advice, names=tuple(side.misnamed))
    wanted = {*plan, *side.misnamed} - {*carried}
    yield from _unknown(side, [name for name in side.tensors if name not in wanted] if plan else [])


def _unknown(side: Side, names: Collection[str]) -> Iterator[Finding]:
    """Report tensors that the model does not have."""
    kind = side.kept.get("model_type") if isinstance(side, MegatronSide) else side.config and side.config.model_type
    if names and kind is not None:
        count = counted(len(names), "tensor")
        says = f"{count} of the files are not part of a '{kind}' model as its config describes it: "
        advice = "correct the config or the names: loaders ignore such tensors or refuse the folder"
        yield Finding("tensor left over", f"{says}{listed(names)}.", advice, names=tuple(names))


def _shapes(side: Side, carried: Mapping[str, Shape]) -> Iterator[Finding]:
    wanted = {name: shape for name, shape in carried.items() if name in side.tensors}
    ruled = [tensor for rule in side.plan for tensor in rule.hf if tensor.name in side.tensors]
    wanted |= {tensor.name: tensor.shape for tensor in ruled if tensor.shape is not None}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, shape in wanted.items():
        stored = side.tensors[name].shape
        if shape is not None and stored not in (None, shape):
            groups[unnumbered([name])].append(name)
    for names in groups.values():
        both = (list(one or ()) for one in (side.tensors[names[0]].shape, wanted[names[0]]))
        says = "{}: stored as {}, but the config makes it {}.".format(listed(names), *both)
        yield Finding("shape", says, "correct the config or the tensor, whichever is wrong", names=tuple(names))


def _is_end(side: HFSide, name: str) -> bool:
    """Return whether a tensor is at the ends of a text model: embedding, final norm, or an untied head."""
    if text_key(side.keys) is not None or IN_LAYER.match(name):
        return False
    return side.parts.of(name).kind != HEAD or side.unties


def _types(side: HFSide) -> Iterator[Finding]:
    """Report integer weights, weights whose type differs from other layers', and a whole folder in another type."""
    types = {name: entry.dtype for name, entry in side.tensors.items() if not is_quantized(entry)}
    integers = {n for n, kind in types.items() if n.endswith(".weight") and not kind.startswith(("float", "bfloat"))}
    layers: dict[str, list[str]] = defaultdict(list)
    sizes: Counter[str] = Counter()
    for name, kind in types.items():
        sizes[kind] += side.tensors[name].bytes
        if name not in integers:
            layers[unnumbered([name])].append(name)
    odd: list[str] = []
    for names in layers.values():
        ((usual, count),) = Counter(types[name] for name in names).most_common(1)
        odd += [name for name in names if types[name] != usual and 2 * count > len(names)]
    again = "export them again in the type of the model"
    for names, says, more, severity in (
        ([name for name in types if name in integers], "but weights are floating-point numbers", "", ERROR),
        (odd, "unlike the same weights of other layers", ": they were rounded, or loaders round them", WARNING),
    ):
        if names:
            says = f"{listed(names)}: of type '{types[names[0]]}', {says}."
            yield Finding("type", says, again + more, severity, tuple(names))
    said = side.keys.get("dtype") or side.keys.get("torch_dtype")
    most = max(sizes, key=lambda kind: sizes[kind], default="")
    if isinstance(said, str) and said in LOSSY.get(most, ()) and len(types) == len(side.tensors):
        says = f"The config says '{said}', most tensors are '{most}': loaders that follow the config round them."
        advice = f"put '{most}' into the config, or store the tensors as '{said}'"
        yield Finding("type", says, advice, WARNING, ("dtype",))


def _called_for(side: MegatronSide, lost: Collection[str]) -> list[str]:
    """Return the tensors that a checkpoint must have: ends of the model, frames of MTP layers, what other layers have.

    Of a trunk that is carried, those are `lost` that are in a layer of which something is there.
    """
    final = [f"decoder.{norm}.weight" for norm in ("final_layernorm", "final_norm")]
    names = [EMBEDDING, next((key for key in final if key in side.tensors), final[0])]
    names += [OUTPUT] * (side.tied is False)
    if side.kept and not side.runs and side.reader is not None:
        there = {TRUNK: side.trunk_layers, DEPTH: side.depths}
        parts = ((name, side.parts.of(name)) for name in lost)
        names += [name for name, part in parts if part.index in there.get(part.kind, ())]
    else:
        for layers in (side.depths, side.trunk_layers):
            names += lost_of_other_layers(layers)
    for depth, own in side.depths.items():
        frame = [f"mtp.layers.{depth}.{part}" for part in FRAME]
        if not set(own).isdisjoint(frame[:3]):
            names += frame if side.runs else frame[:3]
    return list(dict.fromkeys([*names, *thin_depths(side.depths, side.trunk_layers), *_of_drafter(side)]))


def _of_drafter(side: MegatronSide) -> Iterator[str]:
    """Return the keys of the drafter that the arguments name."""
    from megatron_mtp.checkpoint.convert.drafter_form import head_key

    if side.reader is not None and (form := side.drafter) is not None:
        for piece in (piece for rule in form.rules(head_key(side.reader)) for piece in rule.mcore):
            yield next((key for key in (piece.key, *piece.aliases) if key in side.tensors), piece.key)
