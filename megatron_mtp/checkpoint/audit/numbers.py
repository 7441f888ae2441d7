"""Findings from the values of one side, after each tensor was read: damage, and weights that no training produces.

Zero biases, norms of ones, copies of embedding and output layer, and MTP layers that the config repeats are expected.
Tensors of drafters and vision towers are only checked for NaN, because some of them are initialized with zeros.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from megatron_mtp.checkpoint.audit import NOTE, WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.looks import Bits, Look
from megatron_mtp.checkpoint.audit.quantization import is_quantized
from megatron_mtp.checkpoint.audit.saved import MegatronSide, Side
from megatron_mtp.checkpoint.audit.side import (
    BESIDE,
    DEPTH,
    EMBEDDING,
    HEAD,
    OF_EMBEDDING,
    OF_HEAD,
    STAGE,
    TRUNK,
    HFSide,
)
from megatron_mtp.checkpoint.convert.plan import unnumbered
from megatron_mtp.checkpoint.hf.config import CHOSEN, EXPERTS, HFConfig, first_count

GUESS = "implausible numbers"
EARLIER = "take these tensors from an earlier save"
RELEASE = "take them from the release or from an earlier save, or train them"
HUGE, TINY = 65504.0, 1e-12
"""No trained weight has values above float16's largest, or only values this close to 0."""
CENTERED = ("gemma", "intern_s2", "nemotron", "qwen3_5", "qwen3_next", "recurrent_gemma", "step3", "vaultgemma")
"""Prefixes of the `model_type`s whose norms multiply by 1 + w, so that a new norm is 0."""
ROWS = 2**12
"""Rows of a matrix that are compared at a time."""
MERGE = "mergekit_config.yml"
"""A file of merges, which may repeat layers."""
SHARDS = 8
"""The smallest fraction of a matrix that is checked as a lost shard is 1 over this number."""
FIRST_PROJECTION = "eh_proj.weight"
"""Its value in new MTP layers is [0 | I]."""
_NORM = re.compile(r"norm\w*\.(m\.)?weight$")
_ROUTER = re.compile(r"\b(gate|router|router\.\w+)\.weight$")
_INPUT = re.compile(r"(enorm|hnorm)\.weight$")
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)\.")


def check_numbers(side: Side, ties: bool = False) -> Iterator[Finding]:
    """Find NaN and infinities, unreadable tensors, copies, and weights that no training produces.

    Args:
        side: a side whose tensors were read.
        ties: whether the model is known to be tied, so that the output layer may repeat the embedding.
    """
    if side.errors:
        says = f"{counted(len(side.errors), 'tensor')} cannot be read: {listed(side.errors)}. "
        says += next(iter(side.errors.values()))
        yield Finding("damaged file", says, "fetch the file again", names=tuple(side.errors))
    looks = {name: side.looks[name] for name in side.tensors if name in side.looks}
    if wild := tuple(name for name, look in looks.items() if not look.is_finite and name not in side.scales):
        yield Finding("not finite", f"{listed(wild)}: some numbers are NaN or infinite.", EARLIER, names=wild)
    stale = tuple(name for name, base in side.copies.items() if differ(side, name, base))
    same = tuple(name for name, base in side.copies.items() if {name, base} <= looks.keys() and name not in stale)
    wider = tuple(name for name in same if looks[name].dtype != looks[side.copies[name]].dtype)
    for names, equal in (
        (tuple(name for name in same if name not in wider), "bits"),
        (wider, "numbers in another type"),
    ):
        if names:
            says = f"{counted(len(names), 'tensor')} repeat embedding or head, with the same {equal}: {listed(names)}."
            yield Finding("tied copy", says, severity=NOTE, names=names)
    if stale:
        says = f"{listed(stale)} should repeat embedding or head, but the numbers differ: engines load either of both."
        yield Finding("stale copy", says, "store the one that was trained in both places", names=stale)
    parts = side.parts
    looks = {
        name: look for name, look in looks.items() if look.is_finite and parts.of(name).kind not in (BESIDE, STAGE)
    }
    yield from _sizes(side, looks)
    yield from _parts(side, {name: look for name, look in looks.items() if not look.is_constant})
    yield from _zero_tokens(side, looks)
    bits = {name: look.bits for name, look in looks.items() if not look.is_constant and look.bits is not None}
    yield from _repeats(side, bits, ties)


def differ(side: Side, name: str, base: str) -> bool:
    """Return whether two tensors were read and have different values; tensors with different dtypes are read again."""
    if name not in side.looks or base not in side.looks or side.looks[name].bits == side.looks[base].bits:
        return False
    one, other = side.looks[name], side.looks[base]
    if one.dtype == other.dtype or one.shape != other.shape:
        return True
    rows = zip(side.read(name).split(ROWS), side.read(base).split(ROWS), strict=True)
    return not all(torch.equal(these.double(), those.double()) for these, those in rows)


def _sizes(side: Side, looks: Mapping[str, Look]) -> Iterator[Finding]:
    """Report weights whose numbers are all the same, too large, or too small."""
    found: dict[str, list[str]] = defaultdict(list)
    config = side.kept if isinstance(side, MegatronSide) else side.config
    keys = config.keys if isinstance(config, HFConfig) else config or {}
    chooses_all = (
        first_count(keys, CHOSEN)[1] == first_count(keys, EXPERTS)[1]
    )  # a dense model in a family of mixture-of-experts models
    for name, look in looks.items():
        if look.low is None or look.high is None:
            continue
        largest, is_matrix = max(-look.low, look.high), len(look.shape) > 1 and max(look.shape) > 1
        is_dead_norm = largest == 0 and bool(_NORM.search(name)) and not _is_centered(side)
        if largest > HUGE:
            found[f"values go up to {largest:.2g}: no training produces such weights, and logits overflow"].append(name)
        elif largest == 0 and chooses_all and _ROUTER.search(name):
            continue
        elif look.is_constant and (is_matrix or is_dead_norm):
            found[f"all numbers are {look.low + 0:.3g}, as in a weight that was never loaded or trained"].append(name)
        elif is_matrix and largest < TINY and not is_quantized(side.tensors[name]):
            found[f"no number is larger than {largest:.2g}: they compute as zeros"].append(name)
    severity = _severity(side)
    for says, names in found.items():
        yield Finding(GUESS, f"{_named(names)}: {says}.", RELEASE, severity, tuple(names))


def _severity(side: Side) -> str:
    """Return NOTE for a model of an unknown family, whose training may leave such weights; else WARNING."""
    return NOTE if isinstance(side, HFSide) and side.family is None else WARNING


def _is_centered(side: Side) -> bool:
    if isinstance(side, MegatronSide):
        return bool(side.argument("apply_layernorm_1p", "layernorm_zero_centered_gamma"))
    return side.config is None or side.config.model_type.startswith(CENTERED) or bool(side.keys.get("use_gemma_norm"))


def _named(names: list[str]) -> str:
    """Return names in quotes, or as one pattern if that is short."""
    return listed(names) if len(names) < 3 else f"{counted(len(names), 'tensor')}, {unnumbered(names):.200}"


def _parts(side: Side, looks: Mapping[str, Look]) -> Iterator[Finding]:
    """Report matrices with a part that is zeros or repeats another part: a shard is missing, or was taken twice.

    Rows of embedding and head are tokens (`_zero_tokens`), and a stack of experts may have some of zeros.
    """
    found: dict[str, list[str]] = defaultdict(list)
    new = isinstance(side, MegatronSide) and side.iteration == 0
    for name, look in looks.items():
        if len(look.shape) < 2 or name in side.scales or (new and name.endswith(FIRST_PROJECTION)):
            continue
        rows, columns = max(look.shape[-2], look.shape[0] if look.shape[-2] == 1 else 0), look.shape[-1]
        for kind, runs, size in (("rows", look.zero_rows, rows), ("columns", look.zero_columns, columns)):
            runs = () if kind == "rows" and _is_end(side, name) else runs
            if long := [f"{first} to {last - 1}" for first, last in runs if (last - first) * SHARDS >= size]:
                says = f"{kind} {', '.join(long)} of {size} are zeros, as if a shard of the tensor were missing"
                found[says].append(name)
        if look.twice is not None:
            kind, (first, last), (other, end) = look.twice
            says = (
                f"{kind} {other} to {end - 1} repeat {kind} {first} to {last - 1} bit by bit, as where a shard of the "
            )
            found[f"{says}tensor was taken twice"].append(name)
    severity = _severity(side)
    for says, names in found.items():
        yield Finding(GUESS, f"{_named(names)}: {says}.", RELEASE, severity, tuple(names))


def _zero_tokens(side: Side, looks: Mapping[str, Look]) -> Iterator[Finding]:
    """Report zero rows of the embedding and head that belong to tokens and are not padding.

    Without a tokenizer, rows at the end are padding if they are fewer than half, or behind the vocabulary that a
    training was given; a single row may be a special token's.
    """
    said = (value for key, value in side.kept_keys.items() if key.endswith(("_token_id", "_token_ids")))
    listed_ids = (one for value in said for one in (value if isinstance(value, list) else [value]))
    special = {one for one in listed_ids if isinstance(one, int)}
    for name, look in looks.items():
        if not _is_end(side, name) or not look.zero_rows or name in side.copies or name in side.scales:
            continue
        rows = [row for first, last in look.zero_rows for row in range(first, last)]
        if isinstance(side, HFSide) and side.words:
            lost = [f"{side.words[row]} ({row})" for row in rows if row in side.words]
            named = f": {listed(lost)}"
        else:
            first, last = look.zero_rows[-1]
            padding = range(first, last) if last == look.shape[0] and 2 * (last - first) < last else range(0)
            if isinstance(side, MegatronSide) and (given := side.argument("vocab_size")) is not None:
                padding = range(given + 1, look.shape[0])  # NullTokenizer adds an end-of-document token
            lost = [str(row) for row in rows if row not in padding and row not in special]
            lost, named = (lost, f": {listed(lost)}") if len(lost) > 1 else ([], "")
        if lost:
            says = f"'{name}': the rows of {counted(len(lost), 'token')} are zeros{named}, and only padding should be."
            yield Finding(GUESS, says, RELEASE, _severity(side), (name,))


# --- the same bits under two names ------------------------------------------------------------------------------------


def _repeats(side: Side, bits: Mapping[str, Bits], ties: bool) -> Iterator[Finding]:
    """Report weights that repeat others without a reason in the config; a tensor is reported once."""
    matrices = {name: own for name, own in bits.items() if len(own[1]) > 1}
    told: set[str] = set()
    for find in (_depths, _layers, _norms, _experts) if ties else (_head, _depths, _layers, _norms, _experts):
        for found in find(side, bits if find is _norms else matrices):
            told |= set(found.names)
            yield found
    first: dict[Bits, str] = {}
    rest = {name: one for name, own in matrices.items() if (one := first.setdefault(own, name)) != name}
    rest = {name: one for name, one in rest.items() if not {name, one} & told}
    rest = {name: one for name, one in rest.items() if side.copies.get(name) is None and not _is_end(side, name)}
    if rest:
        says = f"{counted(len(rest), 'tensor')} repeat another one bit by bit: "
        says += ", ".join(f"'{name}' is '{one}'" for name, one in list(rest.items())[:2])
        says += f" and {len(rest) - 2} more." if len(rest) > 2 else "."
        yield Finding(GUESS, says, severity=NOTE, names=tuple(rest))


def _is_end(side: Side, name: str) -> bool:
    """Return whether a tensor is an embedding or head, or an MTP layer's copy of one."""
    return side.parts.of(name).kind in (EMBEDDING, HEAD) or name.endswith(OF_EMBEDDING + OF_HEAD)


def _head(side: Side, bits: Mapping[str, Bits]) -> Iterator[Finding]:
    """Report a head that equals the embedding, although the config does not tie them."""
    embedding, head = (
        next((name for name in bits if side.parts.of(name).kind == kind), None) for kind in (EMBEDDING, HEAD)
    )
    if embedding is not None and head is not None and bits[embedding] == bits[head] and side.unties:
        says = f"'{head}' is '{embedding}' bit by bit, but the config says that head and embedding are apart "
        says += "('tie_word_embeddings' is false): the head was lost, or the model is tied."
        advice = "take the head from the release, or set tie_word_embeddings to true if the model was trained tied"
        yield Finding(GUESS, says, advice, WARNING, (head,))


def _depths(side: Side, bits: Mapping[str, Bits]) -> Iterator[Finding]:
    """Report MTP layers that are copies of other MTP layers, or of a trunk layer."""
    inner = [name for name in bits if not _is_end(side, name)]
    depths, layers = (side.parts.numbered(kind, inner) for kind in (DEPTH, TRUNK))
    new = isinstance(side, MegatronSide) and side.iteration == 0
    for depth, names in depths.items():
        own = {bits[name] for name in names}
        twin = next(
            (other for other in depths if other < depth and {bits[name] for name in depths[other]} == own), None
        )
        if twin is not None and not side.repeats:
            says = f"Depth {depth + 1} is a copy of depth {twin + 1} bit by bit ({counted(len(names), 'tensor')}): "
            says += "one was written in the other's place, or they were not trained."
            yield Finding(GUESS, says, *_asked(new), tuple(names))
            continue
        for layer, others in layers.items():
            theirs = {bits[name] for name in others}
            if theirs <= own:
                says = f"The layer of depth {depth + 1} is the trunk's layer {layer} (counted from 0) bit by bit "
                says += f"({counted(len(others), 'tensor')}): it was not trained to draft."
                copies = tuple(name for name in names if bits[name] in theirs)
                yield Finding(GUESS, says, *_asked(new), copies)
                break


def _layers(side: Side, bits: Mapping[str, Bits]) -> Iterator[Finding]:
    """Report trunk layers, or single weights of them, that equal an earlier layer's."""
    layers = side.parts.numbered(TRUNK, bits)
    homes: dict[tuple[str, Bits], int] = {}
    same: dict[tuple[int, int], list[str]] = defaultdict(list)
    for layer, names in layers.items():
        for name in names:
            home = homes.setdefault((unnumbered([name]), bits[name]), layer)
            if home != layer:
                same[home, layer].append(name)
    merged = (side.path / MERGE).is_file()
    for (home, layer), names in same.items():
        whole = len(names) == len(layers[layer])
        says = (
            f"The trunk's layer {layer} is layer {home} (counted from 0) bit by bit"
            if whole
            else (f"{_named(names)}: as in the trunk's layer {home}, bit by bit")
        )
        says += f" ({counted(len(names), 'matrix')}): " if whole else ": "
        says += f"'{MERGE}' shows that layers were merged." if merged else "one was written in the other's place."
        yield Finding(GUESS, says, "" if merged else RELEASE, NOTE if merged else _severity(side), tuple(names))


def _asked(new: bool) -> tuple[str, str]:
    """Return advice and severity; MTP layers that attach-mtp has just made start as copies."""
    return (
        ("", NOTE) if new else ("take the depth from the release or from the run that trained it, or train it", WARNING)
    )


def _norms(side: Side, bits: Mapping[str, Bits]) -> Iterator[Finding]:
    """Report equal norms in a layer or in an MTP layer's input; Megatron stores other norms under two names."""
    pattern = _INPUT if isinstance(side, MegatronSide) else _NORM
    vectors = [name for name, own in bits.items() if len(own[1]) == 1 and pattern.search(name)]
    for kind in (DEPTH, TRUNK):
        for names in side.parts.numbered(kind, vectors).values():
            first: dict[Bits, str] = {}
            for name in names:
                if (other := first.setdefault(bits[name], name)) != name:
                    says = f"'{other}' and '{name}' are equal bit by bit: one was written in the other's place."
                    yield Finding(GUESS, says, RELEASE, WARNING, (other, name))


def _experts(side: Side, bits: Mapping[str, Bits]) -> Iterator[Finding]:
    """Report single experts of a layer that are copies of others; if all are, the layer was made that way."""
    groups: dict[str, dict[str, dict[str, Bits]]] = defaultdict(lambda: defaultdict(dict))
    for name, own in bits.items():
        if match := _EXPERT.match(name):
            groups[match.group(1)][match.group(2)][name.removeprefix(match.group(0))] = own
    for layer, experts in groups.items():
        same: dict[tuple[tuple[str, Bits], ...], list[str]] = defaultdict(list)
        for index, held in experts.items():
            same[tuple(sorted(held.items(), key=lambda one: one[0]))].append(index)
        for indices in (each for each in same.values() if len(same) > 1 and len(each) > 1):
            says = f"Experts {', '.join(indices[:4])}{' ...' if len(indices) > 4 else ''} of '{layer[:-1]}' are equal "
            says += "bit by bit: one was written in the other's place."
            names = tuple(f"{layer}{index}.{rest}" for index in indices for rest in experts[index])
            yield Finding(GUESS, says, RELEASE, WARNING, names)
