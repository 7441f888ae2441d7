"""Does a side hold what its config says? Names, shapes and types are compared; no numbers are read.

With a family of this package, its rules name every tensor. Without one, depths and layers are counted by their names.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from megatron_mtp.checkpoint.audit.finding import WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.parts import DEPTH, PROJECTION, TRUNK, Parts
from megatron_mtp.checkpoint.audit.side import HFSide, MegatronSide, Side
from megatron_mtp.checkpoint.convert.plan import unnumbered
from megatron_mtp.checkpoint.families.rules import Rule, Shape

LOST = "export the depths as well, or set the number of depths in the config to what the files hold"
AGAIN = "export or fetch the tensors again"


def contents(side: Side) -> list[Finding]:
    """What a side lacks, or has too many of, measured by its own config."""
    if not side.tensors:
        return []
    if isinstance(side, MegatronSide):
        return [*_counted_depths(side), *_counted_layers(side), *_heads(side), *_odd_layers_of(side), *_frames(side)]
    rules = rules_of(side)
    if rules is None:
        return [*_counted_depths(side), *_counted_layers(side), *_odd_types(side)]
    return [*_missing(side, rules), *_left_over(side, rules), *_shapes(side, rules), *_odd_types(side)]


def rules_of(side: HFSide) -> list[Rule] | None:
    """The rules of all tensors that the config calls for; None as for `HFSide.rules`."""
    there = Parts.of_side(side).depths(side.tensors)
    said = side.said_depths
    stored = max(there, default=-1) + 1
    layout = side.layout(max(said or 0, stored))
    return None if layout is None else side.rules(layout)


def _missing(side: HFSide, rules: list[Rule]) -> Iterator[Finding]:
    """Tensors that the rules name and the folder lacks, by part."""
    if side.partial:
        return
    parts, expected = Parts.of_side(side), [tensor.name for rule in rules for tensor in rule.hf]
    absent = [name for name in expected if name not in side.tensors]
    explained = side.unread | set(side.hidden)
    lost = [name for name in absent if name not in explained]
    yield from _missing_depths(side, parts, expected, lost)
    yield from missing_layers(parts.trunk(expected), parts.trunk(lost))
    whole = {name for names in _whole(parts.trunk(expected), parts.trunk(lost)).values() for name in names}
    single = [name for name in lost if parts.of(name).kind != DEPTH and name not in whole]
    if single:
        says = f"The files lack {counted(len(single), 'tensor')} that the config calls for: {listed(single)}."
        yield Finding("tensor missing", says, AGAIN, names=tuple(single))
    said, there = side.said_depths, len(parts.depths(side.tensors))
    if said is not None and there > said:
        yield _more(side, said, there)


def _missing_depths(side: HFSide, parts: Parts, expected: list[str], lost: list[str]) -> Iterator[Finding]:
    wanted, gone = parts.depths(expected), parts.depths(lost)
    whole = _whole(wanted, gone)
    said = side.said_depths if side.said_depths is not None else len(wanted)
    if whole:
        all_names = tuple(name for names in whole.values() for name in names)
        yield _lost_depths(said, len(wanted) - len(whole), sorted(whole), all_names)
    for depth, names in gone.items():
        if depth not in whole:
            yield _incomplete(depth, names)


def _lost_depths(said: int, held: int, lost: list[int], names: tuple[str, ...] = ()) -> Finding:
    """Depths that the config counts and the files do not hold."""
    says = f"The config says {counted(said, 'depth')}, the files hold {held}"
    if not held:
        return Finding("MTP dropped", f"{says}: all tensors of MTP were dropped.", LOST, names=names)
    which = ", ".join(str(depth + 1) for depth in lost)
    return Finding("depth missing", f"{says}: depth {which} is missing.", LOST, names=names)


def _incomplete(depth: int, names: list[str]) -> Finding:
    says = f"Depth {depth + 1} lacks {counted(len(names), 'tensor')}: {listed(names)}."
    return Finding("depth incomplete", says, AGAIN, names=tuple(names))


def _more(side: Side, said: int, held: int) -> Finding:
    names = [name for name in side.tensors if Parts.of_side(side).of(name).kind == DEPTH]
    says = f"The config says {counted(said, 'depth')}, the files hold {held}: engines do not load what is not counted."
    return Finding("depth count", says, f"put {held} into the config", names=tuple(names))


def _whole(wanted: dict[int, list[str]], gone: dict[int, list[str]]) -> dict[int, list[str]]:
    """The layers or depths without a single tensor left."""
    return {index: names for index, names in gone.items() if len(names) == len(wanted.get(index, names))}


def missing_layers(wanted: dict[int, list[str]], gone: dict[int, list[str]]) -> Iterator[Finding]:
    """A finding if whole layers of the trunk are missing."""
    whole = _whole(wanted, gone)
    if whole:
        which = ", ".join(map(str, sorted(whole)))
        names = tuple(name for names in whole.values() for name in names)
        says = f"Whole layers of the trunk are missing: {which} (counted from 0), {counted(len(names), 'tensor')}."
        yield Finding("layers missing", says, AGAIN, names=names)


def _left_over(side: HFSide, rules: list[Rule]) -> Iterator[Finding]:
    expected = {tensor.name for rule in rules for tensor in rule.hf}
    left = [name for name in side.tensors if name not in expected and side.scaled(name) is None]
    if left:
        of = f"a '{side.config.model_type}' model" if side.config is not None else "the model"
        says = f"{counted(len(left), 'tensor')} of the files are no part of {of} as its config says: {listed(left)}."
        advice = "correct the config, or remove them: loaders ignore them or refuse the folder"
        yield Finding("tensor left over", says, advice, names=tuple(left))


def _shapes(side: HFSide, rules: list[Rule]) -> Iterator[Finding]:
    wanted = {tensor.name: tensor.shape for rule in rules for tensor in rule.hf if tensor.shape is not None}
    wrong = [name for name, shape in wanted.items() if name in side.tensors and side.tensors[name].shape != shape]
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in wrong:
        shape = wanted[name]
        assert shape is not None
        by_reason[_of_shapes(side.tensors[name].shape, shape), unnumbered([name])].append(name)
    for (guess, _), names in by_reason.items():
        stored, shape = side.tensors[names[0]].shape, wanted[names[0]]
        says = f"{listed(names)}: stored as {list(stored)}, but the config makes it {list(shape or ())}."
        yield Finding(guess, says, "correct the config or the tensor, whichever is wrong", names=tuple(names))


def _of_shapes(stored: Shape, wanted: Shape) -> str:
    return "transposed" if len(wanted) > 1 and stored == wanted[::-1] else "shape"


def _odd_types(side: HFSide) -> Iterator[Finding]:
    """Weights whose type differs from that of the same weight in most other layers; a whole folder in another type."""
    quantised = any(found.guess == "quantization" for found in side.findings)
    integers = [n for n, e in side.tensors.items() if n.endswith(".weight") and not _floats(e.dtype)]
    if integers and not quantised:
        says = (
            f"{listed(integers)}: of type '{side.tensors[integers[0]].dtype}', but weights are floating-point numbers."
        )
        yield Finding("type", says, "export them again in the type of the model", names=tuple(integers))
    types = {name: entry.dtype for name, entry in side.tensors.items() if name not in integers}
    odd = odd_ones(types)
    if odd:
        says = f"{listed(odd)}: of type '{side.tensors[odd[0]].dtype}', unlike the same weights of other layers."
        advice = "export them again in the type of the model: they were rounded, or loaders round them"
        yield Finding("type", says, advice, WARNING, tuple(odd))
    yield from _said_type(side, quantised)


def _floats(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "F"))


def odd_ones(types: dict[str, str]) -> list[str]:
    """Names whose type only few of the same weights of other layers have."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in types:
        groups[unnumbered([name])].append(name)
    odd = []
    for names in groups.values():
        (most, count), *_ = Counter(types[name] for name in names).most_common()
        if 2 * count > len(names):
            odd += [name for name in names if types[name] != most]
    return odd


def _said_type(side: HFSide, quantised: bool) -> Iterator[Finding]:
    """The config's type is the one in which transformers loads the tensors."""
    said = side.keys.get("dtype") or side.keys.get("torch_dtype")
    sizes: Counter[str] = Counter()
    for entry in side.tensors.values():
        sizes[entry.dtype] += entry.bytes
    ((most, _),) = sizes.most_common(1)
    if isinstance(said, str) and said in LOSSY.get(most, ()) and not quantised:
        says = f"The config says '{said}', most tensors are '{most}': loaders that follow the config round them."
        advice = f"put '{most}' into the config, or store the tensors as '{said}'"
        yield Finding("type", says, advice, WARNING, ("dtype",))


LOSSY = {"float32": ("bfloat16", "float16"), "bfloat16": ("float16",), "float16": ("bfloat16",)}
"""A stored type, and the types that cannot hold its numbers."""


def _counted_depths(side: Side) -> Iterator[Finding]:
    """Compare the number of depths in the config with the names of the tensors."""
    there, said = Parts.of_side(side).depths(side.tensors), side.said_depths
    if said is not None and said > len(there):
        yield _lost_depths(said, len(there), [k for k in range(said) if k not in there])
    elif said is not None and len(there) > said:
        yield _more(side, said, len(there))
    for depth, names in there.items() if isinstance(side, HFSide) else ():
        if not any(PROJECTION.search(name) for name in names):
            says = f"Depth {depth + 1} has no projection of embedding and hidden state (eh_proj) under a known name."
            yield Finding("depth incomplete", says, AGAIN, names=tuple(names))


def _counted_layers(side: Side) -> Iterator[Finding]:
    """Layers whose number is left out."""
    there = Parts.of_side(side).trunk(side.tensors)
    count = side.layers
    if count is None or (isinstance(side, MegatronSide) and not there):
        count = max(there, default=-1) + 1
    gone = [index for index in range(count) if index not in there]
    if gone and there and not (isinstance(side, HFSide) and side.partial):
        says = f"The config says {counted(count, 'layer')}, but the files hold no tensor of {listed(gone)} (from 0)."
        yield Finding("layers missing", says, AGAIN)


def _heads(side: MegatronSide) -> Iterator[Finding]:
    held = "output_layer.weight" in side.tensors
    if side.untied and not held:
        says = "The arguments have a head of its own, but there is no 'output_layer.weight'."
        yield Finding("tensor missing", says, AGAIN, names=("output_layer.weight",))
    if side.args is not None and side.tied and held:
        says = (
            "The arguments tie the head to the embedding, but there is an 'output_layer.weight', which is not loaded."
        )
        advice = "set --untie-embeddings-and-output-weights if the model was trained so"
        yield Finding("stale copy", says, advice, WARNING, ("output_layer.weight",))
    wanted = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "decoder.final_norm.weight")
    if wanted[0] not in side.tensors:
        says = f"There is no '{wanted[0]}'."
        yield Finding("tensor missing", says, AGAIN, names=wanted[:1])
    if not any(key in side.tensors for key in wanted[1:]):
        yield Finding("tensor missing", "There is no final norm of the trunk.", AGAIN, names=wanted[1:2])


def _odd_layers_of(side: MegatronSide) -> Iterator[Finding]:
    """Depths and layers that lack what the others have."""
    parts = Parts.of_side(side)
    for kind, groups in ((DEPTH, parts.depths(side.tensors)), (TRUNK, parts.trunk(side.tensors))):
        for index, names in _odd_layers(groups):
            what = f"Depth {index + 1}" if kind == DEPTH else f"Layer {index}"
            says = f"{what} lacks what the others have: {listed(names)}."
            guess = "depth incomplete" if kind == DEPTH else "tensor missing"
            yield Finding(guess, says, AGAIN, names=tuple(names))


FRAME = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
"""What a depth of Megatron has around its layer; parallel heads have the last alone, ERNIE's depths the others."""
INNER = "transformer_layer."


def _frames(side: MegatronSide) -> Iterator[Finding]:
    """Depths without a norm or projection of their input, or whose layer is a part of the trunk's layers."""
    parts = Parts.of_side(side)
    layers = [{_rest(name) for name in names} for names in parts.trunk(side.tensors).values()]
    for depth, names in parts.depths(side.tensors).items():
        rests, prefix = {_rest(name) for name in names}, f"mtp.layers.{depth}."
        frame = FRAME if side.runs else FRAME[:3]
        lost = [prefix + name for name in frame if name not in rests] if rests & set(FRAME[:3]) else []
        inner = {rest.removeprefix(INNER) for rest in rests if rest.startswith(INNER)}
        if inner and inner not in layers and (larger := [layer for layer in layers if inner < layer]):
            lost += sorted(prefix + INNER + name for name in min(larger, key=len) - inner)
        if lost:
            yield _incomplete(depth, lost)


def _rest(key: str) -> str:
    """A key without its layer: `mtp.layers.0.enorm.weight` becomes `enorm.weight`."""
    return key.split(".", 3)[3] if key.count(".") > 2 else key


def _odd_layers(groups: dict[int, list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Layers whose tensors are a part of what at least one other layer has, and what they lack."""
    own = {index: {_unlayered(name, index) for name in names} for index, names in groups.items()}
    sets = Counter(frozenset(names) for names in own.values())
    for index, names in own.items():
        larger = [other for other in sets if names < other]
        if larger and sets[frozenset(names)] == 1:
            nearest = min(larger, key=len)
            first = next(other for other, held in own.items() if held == nearest)
            if len(nearest - names) <= len(names):
                yield index, sorted(_layered(groups[first], first, index, nearest - names))


def _unlayered(name: str, index: int) -> str:
    return name.replace(f".{index}.", ".*.", 1)


def _layered(names: Iterable[str], first: int, index: int, wanted: set[str] | frozenset[str]) -> list[str]:
    return [name.replace(f".{first}.", f".{index}.", 1) for name in names if _unlayered(name, first) in wanted]
