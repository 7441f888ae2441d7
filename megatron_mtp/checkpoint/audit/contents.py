"""Does a side hold what its config says? Names, shapes and types are compared; no numbers are read.

A folder is compared with the plan of its conversion, and a trunk that the plan carries with transformers' class.
Without a family, and in checkpoints, depths and layers are counted by their names.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from megatron_mtp.checkpoint.audit.finding import WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.quantization import is_quantized
from megatron_mtp.checkpoint.audit.side import DEPTH, TRUNK, HFSide, MegatronSide, Side
from megatron_mtp.checkpoint.convert.plan import lost_of_class, thin_depths, unnumbered
from megatron_mtp.checkpoint.families import CARRIED
from megatron_mtp.checkpoint.families.rules import Rule, Shape
from megatron_mtp.checkpoint.mcore.iterations import HF_FILES

LOST = "export the depths as well, or set the number of depths in the config to what the files hold"
AGAIN = "export or fetch the tensors again"
FRAME = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
"""What a depth of Megatron has around its layer; parallel heads have the last alone, ERNIE's depths the others."""
LOSSY = {"float32": ("bfloat16", "float16"), "bfloat16": ("float16",), "float16": ("bfloat16",)}
"""A stored type, and the types that cannot hold its numbers."""


def contents(side: Side) -> list[Finding]:
    """What a side lacks, or has too many of, measured by its own config."""
    if not side.tensors:
        return []
    if isinstance(side, MegatronSide):
        plan: list[str] = []
        own = [
            *_heads(side),
            *(_lost_of_class(side) if side.kept and not side.runs else _odd_layers(side)),
            *_thin_depths(side),
        ]
    else:
        plan = [tensor.name for rule in side.plan or () for tensor in rule.hf]
        own = [*_missing(side, plan), *_left_over(side, plan), *_shapes(side, side.plan or []), *_types(side)]
        own += _thin_depths(side) if side.family is not None and side.family.untrainable else []
    return [*_counted_depths(side, plan), *_counted_layers(side, plan), *own]


def _explained(side: Side) -> set[str]:
    """Names that are not there since another finding says so: their file is missing, damaged or not opened."""
    return side.unread | set(side.hidden) if isinstance(side, HFSide) else set()


def _counted_depths(side: Side, plan: list[str]) -> Iterator[Finding]:
    """Compare the number of depths in the config with the names of the tensors."""
    if isinstance(side, HFSide) and side.partial:
        return
    held, said = side.parts.depths([*side.tensors, *_explained(side)]), side.said_depths
    depths = side.family.depths if isinstance(side, HFSide) and side.family is not None else None
    gone = [depth for depth in range(said or 0) if depth not in held]
    if gone:
        names = tuple(name for name in plan if side.parts.of(name).kind == DEPTH and side.parts.of(name).index in gone)
        yield _lost_depths(side, said or 0, len(held), gone, names)
    elif said is not None and len(held) > said:
        says = f"The config says {counted(said, 'depth')}, the files hold {len(held)}"
        yield _uncounted(side, f"{says}: engines do not load what is not counted.", len(held))
    elif said is None and held and isinstance(side, HFSide) and depths is not None and depths.default is not None:
        says = f"No key of the config counts the {counted(len(held), 'depth')} of the files ('{depths.keys[0]}')"
        yield _uncounted(side, f"{says}: engines do not load what is not counted.", len(held))
    elif said is None and depths is not None and len(held) < depths.published:
        says = (
            f"Models of this family are published with {counted(depths.published, 'depth')}, and no key of the config "
        )
        says += f"counts others; the files hold {len(held)}."
        advice = (
            f'fetch the depths, or put "{depths.keys[0]}": {len(held)} into the config if they were dropped on purpose'
        )
        yield Finding("depth missing" if held else "MTP dropped", says, advice, WARNING, (depths.keys[0],))


def _lost_depths(side: Side, said: int, held: int, gone: list[int], names: tuple[str, ...]) -> Finding:
    """Depths that the config counts and the files do not hold."""
    says = f"The config says {counted(said, 'depth')}, the files hold {held}"
    if isinstance(side, HFSide) and side.family is not None and side.family.depths is None and side.family.flags:
        says += f": models of '{side.family.model_types[0]}' have none"
        return Finding("depth count", f"{says}.", "remove the count from the config")
    if not held:
        return Finding("MTP dropped", f"{says}: all tensors of MTP were dropped.", LOST, names=names)
    which = ", ".join(str(depth + 1) for depth in gone)
    return Finding("depth missing", f"{says}: depth {which} is missing.", LOST, names=names)


def _uncounted(side: Side, says: str, held: int) -> Finding:
    names = [name for name in side.tensors if side.parts.of(name).kind == DEPTH]
    return Finding("depth count", says, f"put {held} into the config", names=tuple(names))


def _counted_layers(side: Side, plan: list[str]) -> Iterator[Finding]:
    """Find layers whose number is left out."""
    there = side.parts.trunk([*side.tensors, *_explained(side)])
    known = side.layers is not None and not (isinstance(side, MegatronSide) and not there)
    count = side.layers if known and side.layers is not None else max(there, default=-1) + 1
    gone = [index for index in range(count) if index not in there]
    if not gone or (isinstance(side, HFSide) and side.partial):
        return
    names = tuple(name for name in plan if side.parts.of(name).kind == TRUNK and side.parts.of(name).index in gone)
    says = f"Whole layers of the trunk are missing: {', '.join(map(str, gone))} (counted from 0) of {count}."
    yield Finding("layers missing", says, AGAIN, names=names)


def _missing(side: HFSide, plan: list[str]) -> Iterator[Finding]:
    """Tensors that the folder lacks of layers and depths that are there."""
    if side.partial:
        return
    parts, explained = side.parts, _explained(side)
    if side.family is not None and side.family.untrainable:
        plan = list(dict.fromkeys([*plan, *lost_of_class(side.path, side.tensors)]))
    lost = [name for name in plan if name not in side.tensors and name not in explained]
    for depth, names in parts.depths(lost).items():
        if depth in parts.depths(side.tensors):
            says = f"Depth {depth + 1} lacks {counted(len(names), 'tensor')}: {listed(names)}."
            yield Finding("depth incomplete", says, AGAIN, names=tuple(names))
    there = parts.trunk([*side.tensors, *explained])
    single = [
        n for n in lost if parts.of(n).kind != DEPTH and (parts.of(n).index is None or parts.of(n).index in there)
    ]
    if single:
        says = f"The files lack {counted(len(single), 'tensor')} that the config calls for: {listed(single)}."
        yield Finding("tensor missing", says, AGAIN, names=tuple(single))


def _left_over(side: HFSide, plan: list[str]) -> Iterator[Finding]:
    left = [name for name in side.tensors if name not in set(plan)] if plan else []
    if left and side.config is not None:
        says = f"{counted(len(left), 'tensor')} of the files are no part of a '{side.config.model_type}' model as its "
        says += f"config says: {listed(left)}."
        advice = "correct the config, or remove them: loaders ignore them or refuse the folder"
        yield Finding("tensor left over", says, advice, names=tuple(left))


def _shapes(side: HFSide, rules: list[Rule]) -> Iterator[Finding]:
    wanted = {tensor.name: tensor.shape for rule in rules for tensor in rule.hf if tensor.shape is not None}
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, shape in wanted.items():
        stored = side.tensors[name].shape if name in side.tensors else shape
        if stored is not None and stored != shape:
            by_reason[_of_shapes(stored, shape), unnumbered([name])].append(name)
    for (guess, _), names in by_reason.items():
        stored, shape = side.tensors[names[0]].shape or (), wanted[names[0]]
        says = f"{listed(names)}: stored as {list(stored)}, but the config makes it {list(shape)}."
        yield Finding(guess, says, "correct the config or the tensor, whichever is wrong", names=tuple(names))


def _of_shapes(stored: Shape, wanted: Shape) -> str:
    return "transposed" if len(wanted) > 1 and stored == wanted[::-1] else "shape"


def _types(side: HFSide) -> Iterator[Finding]:
    """Weights whose type differs from that of the same weight in most other layers; a whole folder in another type."""
    types = {name: entry.dtype for name, entry in side.tensors.items() if not is_quantized(entry)}
    explained = {name for found in side.findings if found.guess == "quantization" for name in found.names}
    integers = [n for n in types if n.endswith(".weight") and not types[n].startswith(("float", "bfloat"))]
    if wrong := [name for name in integers if name not in explained]:
        says = f"{listed(wrong)}: of type '{types[wrong[0]]}', but weights are floating-point numbers."
        yield Finding("type", says, "export them again in the type of the model", names=tuple(wrong))
    odd = odd_ones({name: kind for name, kind in types.items() if name not in integers})
    if odd:
        says = f"{listed(odd)}: of type '{types[odd[0]]}', unlike the same weights of other layers."
        advice = "export them again in the type of the model: they were rounded, or loaders round them"
        yield Finding("type", says, advice, WARNING, tuple(odd))
    said = side.keys.get("dtype") or side.keys.get("torch_dtype")
    sizes: Counter[str] = Counter()
    for name, kind in types.items():
        sizes[kind] += side.tensors[name].bytes
    most = sizes.most_common(1)[0][0] if sizes else ""
    if isinstance(said, str) and said in LOSSY.get(most, ()) and len(types) == len(side.tensors):
        says = f"The config says '{said}', most tensors are '{most}': loaders that follow the config round them."
        advice = f"put '{most}' into the config, or store the tensors as '{said}'"
        yield Finding("type", says, advice, WARNING, ("dtype",))


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
        yield Finding("tensor missing", f"There is no '{wanted[0]}'.", AGAIN, names=wanted[:1])
    if not any(key in side.tensors for key in wanted[1:]):
        yield Finding("tensor missing", "There is no final norm of the trunk.", AGAIN, names=wanted[1:2])


def _lost_of_class(side: MegatronSide) -> Iterator[Finding]:
    """Tensors that a checkpoint lacks of a trunk that Megatron cannot run."""
    assert side.reader is not None
    lost = lost_of_class(side.reader.folder.parent / HF_FILES, {key.removeprefix(CARRIED) for key in side.tensors})
    there = side.parts.trunk(side.tensors)
    single = [name for name in lost if side.parts.of(name).index in there]
    if single:
        says = f"The checkpoint lacks {counted(len(single), 'tensor')} of the trunk's layers: {listed(single)}."
        yield Finding("tensor missing", says, AGAIN, names=tuple(single))


def _odd_layers(side: MegatronSide) -> Iterator[Finding]:
    """Depths and layers of a checkpoint that lack what the others have."""
    for kind, groups in ((DEPTH, side.parts.depths(side.tensors)), (TRUNK, side.parts.trunk(side.tensors))):
        own = {index: frozenset(_rest(name, index) for name in names) for index, names in groups.items()}
        sets = Counter(own.values())
        for index, names in own.items():
            larger = [other for other in sets if names < other]
            nearest = min(larger, key=len, default=names)
            if sets[names] > 1 or nearest == names or len(nearest - names) > len(names):
                continue
            lost = sorted(rest.replace("*", str(index), 1) for rest in nearest - names)
            what = f"Depth {index + 1}" if kind == DEPTH else f"Layer {index}"
            guess = "depth incomplete" if kind == DEPTH else "tensor missing"
            yield Finding(guess, f"{what} lacks what the others have: {listed(lost)}.", AGAIN, names=tuple(lost))


def _thin_depths(side: Side) -> Iterator[Finding]:
    """Depths without a norm or projection of their input, or whose layer is a part of the trunk's layers."""
    depths = side.parts.depths(side.tensors)
    lost = thin_depths(depths, side.parts.trunk(side.tensors))
    for depth, names in depths.items():
        prefix = f"mtp.layers.{depth}."
        rests = {name.removeprefix(prefix) for name in names}
        if isinstance(side, MegatronSide) and rests & set(FRAME[:3]):
            frame = FRAME if side.runs else FRAME[:3]
            lost[depth] = [prefix + name for name in frame if name not in rests] + lost.get(depth, [])
    for depth, names in lost.items():
        if names:
            says = f"Depth {depth + 1} lacks {counted(len(names), 'tensor')}: {listed(names)}."
            yield Finding("depth incomplete", says, AGAIN, names=tuple(names))


def _rest(name: str, index: int) -> str:
    """A name with `*` for the number of its layer."""
    return name.replace(f".{index}.", ".*.", 1)
