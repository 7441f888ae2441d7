"""The tensors of two sides: pairs that are equal bit by bit cost a read each; of the others it is said how they differ.

Each worker has two tensors in memory at a time. Differences of the same kind are one finding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit.contents import AGAIN, LOST
from megatron_mtp.checkpoint.audit.finding import ERROR, NOTE, WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.numbers import Ranges
from megatron_mtp.checkpoint.audit.pairing import Pair, Pairing
from megatron_mtp.checkpoint.audit.quantization import is_quantized
from megatron_mtp.checkpoint.audit.side import PIECE, Entry, HFSide, Parts, Side, equal_bits, largest
from megatron_mtp.checkpoint.convert.plan import unnumbered
from megatron_mtp.files import default_workers

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron's tensors that have rows of padding, by the layout of the run."""
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
CLOSE = 0.1
"""Largest difference of a quantized weight from its original, as a part of the original's norm."""
REMAKE = "convert it again, or correct the names and maps of the program that wrote it"
ADVICE: dict[str, str] = {
    "type": "load both in the same type; convert --dtype writes another one",
    "rounded": "export in the type of side A, if side B is to have the same numbers",
    "padding": "compare vocab_size: rows behind the tokenizer's are padding",
    "other numbers": "check that both are the same model and the same step",
    "not finite": "take these tensors from an earlier save",
    "tied copy": "store the head, and set tie_word_embeddings to false",
    "zeros": "take these tensors from the other side",
}
"""What to do; REMAKE for what is not here."""
Kind = tuple[str, str]
"""A difference: out of `finding.GUESSES`, and the end of a sentence that begins with the tensor on side B."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Attributes:
        pair: the tensor on both sides.
        kind: how it differs.
        figure: the largest difference of its numbers; None for other shapes.
    """

    pair: Pair
    kind: Kind
    figure: float | None


@dataclass
class Compared:
    """What a comparison found.

    Attributes:
        equal: number of tensors that are equal bit by bit.
        findings: what differs.
    """

    equal: int = 0
    findings: list[Finding] = field(default_factory=list)


def compare(
    a: Side, b: Side, paired: Pairing, ranges: tuple[Ranges, Ranges], step: Callable[[int], object]
) -> Compared:
    """Compare all tensors of two sides.

    Args:
        a, b: the sides.
        paired: their tensors.
        ranges: of both sides, which are filled on the way.
        step: called after every pair with the bytes that were read.
    """
    done, differences = Compared(findings=list(paired.findings)), []
    read = [pair for pair in paired.pairs if pair.a.read is not None and pair.b.read is not None]
    if unread := [pair.name for pair in paired.pairs if pair.a.read is None or pair.b.read is None]:
        says = f"{counted(len(unread), 'weight')} in forms that are not read were not compared: {listed(unread)}."
        done.findings.append(Finding("not compared", says, severity=NOTE, names=tuple(unread)))
    with ThreadPoolExecutor(default_workers()) as pool:
        for pair, found in zip(read, pool.map(_streamed, read), strict=True):
            if not found:
                one = _one(pair, ranges, done)
                differences += [] if one is None else [one]
                done.equal += one is None and not pair.copy
            else:
                ranges[0].keep(pair.name, *found)
                ranges[1].keep(pair.other or pair.name, *found)
                done.equal += not pair.copy
            step(pair.a.bytes + pair.b.bytes)
    done.findings += _differing(differences)
    parts = (a if isinstance(a, HFSide) else b).parts
    shared = [pair.name for pair in paired.pairs if not pair.copy]
    for only, lacks, letter in ((paired.only_a, b, "B"), (paired.only_b, a, "A")):
        done.findings += _one_sided(parts, lacks, [*shared, *only], only, letter)
    return done


def _streamed(pair: Pair) -> list[float | None]:
    """The largest number of two stored tensors that are equal bit by bit; empty if they are not, or cannot be read."""
    if (pair.a.shape, pair.a.dtype) != (pair.b.shape, pair.b.dtype):
        return []
    try:
        left = pair.a.tensor()
        return [largest(left)] if equal_bits(left, pair.b.tensor()) else []
    except (ValueError, OSError, RuntimeError):
        return []  # reading it again says why


def _one(pair: Pair, ranges: tuple[Ranges, Ranges], done: Compared) -> Difference | None:
    """The difference of a pair; None if there is none, or one side cannot be read."""
    try:
        left, right = pair.a.tensor(), pair.b.tensor()
    except (ValueError, OSError, RuntimeError) as error:
        says = f"'{pair.name}' cannot be read: {error}"
        done.findings.append(Finding("damaged file", says, "fetch the file again", names=(pair.name,)))
        return None
    ranges[0].keep(pair.name, largest(left))
    ranges[1].keep(pair.other or pair.name, largest(right))
    if equal_bits(left, right) or (pair.name in PADDED and left.shape != right.shape and _same_rows(left, right)):
        return None
    kind = explain(left, right)
    if kind[0] == "other numbers" and (is_quantized(pair.a) or is_quantized(pair.b)) and _is_close(left, right):
        side, entry = ("B", pair.b) if is_quantized(pair.b) else ("A", pair.a)
        kind = "rounded", f"differs by rounding: side {side} is {entry.dtype} with scales"
    if pair.copy and kind[0] not in ("rounded", "type"):
        kind = "tied copy", f"is left out on one side as a copy of '{pair.copy}', whose numbers are others"
    return Difference(pair, kind, difference(left, right))


def explain(a: Tensor, b: Tensor) -> Kind:
    """Say how two tensors that are not equal differ: the first explanation that fits every number."""
    if a.shape != b.shape:
        return _of_shapes(a, b)
    if a.dtype != b.dtype:
        name = str(b.dtype).removeprefix("torch.")
        kinds = f"is of type {name}, not {str(a.dtype).removeprefix('torch.')}"
        if equal_bits(a.double(), b.double()):
            return "type", f"{kinds}, with the same numbers"
        if equal_bits(a.to(b.dtype), b) or equal_bits(b.to(a.dtype), a):
            return "rounded", f"{kinds}: one side was rounded"
        b = b.to(a.dtype)
    for one, side in ((a, "A"), (b, "B")):
        if not math.isfinite(largest(one) or 0.0):
            return "not finite", f"has numbers that are NaN or infinite on side {side}"
        if not one.any():
            return "zeros", f"is zero on side {side}"
    for one, other, side in ((a, b, "B"), (b, a, "A")):
        for narrow in NARROW:
            if narrow.itemsize < one.element_size() and equal_bits(one.to(narrow).to(one.dtype), other):
                name = str(narrow).removeprefix("torch.")
                return "rounded", f"differs by rounding: side {side} went through {name}"
    for dim in range(min(a.dim(), 2))[::-1]:
        if a.size(dim) % 2 == 0 and all(map(torch.equal, a.chunk(2, dim)[::-1], b.chunk(2, dim))):
            return "halves swapped", f"has its two halves of {'columns' if dim else 'rows'} swapped"
    if a.dim() == 2 and a.size(0) == a.size(1) and torch.equal(a.T, b):
        return "transposed", "is transposed"
    if a.dim() <= 1 and a.is_floating_point():
        tolerance = 2 * torch.finfo(a.dtype).eps * max(1.0, largest(a) or 0.0, largest(b) or 0.0)
        for step, sign in ((1.0, "plus"), (-1.0, "minus")):
            if (b.float() - a.float() - step).abs().max() <= tolerance:
                return "norm plus 1", f"is side A's {sign} 1: one side stores w, the other w - 1"
    return "other numbers", "has other numbers"


def _of_shapes(a: Tensor, b: Tensor) -> Kind:
    if a.dim() == b.dim() == 2 and a.shape == b.shape[::-1] and equal_bits(a, b.to(a.dtype).T.contiguous()):
        return "transposed", f"is transposed: {list(b.shape)}, not {list(a.shape)}"
    if a.dim() == b.dim() == 2 and a.dtype == b.dtype and _same_rows(a, b):
        rows, more = min(a.size(0), b.size(0)), "more" if b.size(0) > a.size(0) else "fewer"
        count = abs(a.size(0) - b.size(0))
        return "padding", f"has {count} {more} rows, and the same numbers in the first {rows}"
    return "shape", f"has the shape {list(b.shape)}, not {list(a.shape)}"


def _same_rows(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices are equal as far as both have rows."""
    rows = min(a.size(0), b.size(0))
    return a.shape[1:] == b.shape[1:] and equal_bits(a[:rows], b[:rows])


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a.float() - b.float()).norm() <= CLOSE * a.float().norm())


def difference(a: Tensor, b: Tensor) -> float | None:
    """The largest difference of two tensors of one shape, a part at a time so that little is copied; None of others."""
    if a.shape != b.shape or a.numel() == 0:
        return None
    pieces = zip(a.flatten().split(PIECE), b.flatten().split(PIECE), strict=True)
    found = [(one.double() - other.double()).abs().max().item() for one, other in pieces]
    return math.nan if any(map(math.isnan, found)) else max(found)


def _differing(differences: list[Difference]) -> Iterator[Finding]:
    groups: dict[Kind, list[Difference]] = defaultdict(list)
    for one in differences:
        guess, says = one.kind
        groups[guess, "" if guess == "shape" else says].append(one)
    for (guess, _), members in groups.items():
        names, figures = [one.pair.name for one in members], [one.figure for one in members if one.figure is not None]
        figure = max(figures, default=None)
        by = f" (largest difference {figure:.3g})" if figure is not None else ""
        kinds = unnumbered(names)
        says = f"{counted(len(members), 'tensor')}, {kinds if len(kinds) < 200 else listed(names)}: side B's"
        says += f" {members[0].kind[1]}{by}."
        mild = guess in ("type", "padding")
        yield Finding(guess, says, ADVICE.get(guess, REMAKE), WARNING if mild else ERROR, tuple(names), figure=figure)


def _one_sided(parts: Parts, lacks: Side, every: list[str], only: dict[str, Entry], letter: str) -> Iterator[Finding]:
    """Tensors that one side has alone, by part; what another finding accounts for is left out."""
    if isinstance(lacks, HFSide) and lacks.partial:
        return
    explained = set(lacks.hidden) | lacks.unread if isinstance(lacks, HFSide) else set()
    lost = [name for name in only if name not in explained]
    wanted, gone = parts.depths(every), parts.depths(lost)
    whole = [depth for depth, names in gone.items() if len(names) == len(wanted[depth])]
    if whole:
        names = tuple(name for depth in whole for name in gone[depth])
        which = "all depths" if len(whole) == len(wanted) else f"depth {', '.join(str(depth + 1) for depth in whole)}"
        says = f"Side {letter} lacks {which} of {len(wanted)} ({counted(len(names), 'tensor')})."
        yield Finding("MTP dropped" if len(whole) == len(wanted) else "depth missing", says, LOST, names=names)
    for depth, own in gone.items():
        if depth not in whole:
            says = f"Side {letter}: depth {depth + 1} lacks {counted(len(own), 'tensor')}: {listed(own)}."
            yield Finding("depth incomplete", says, AGAIN, names=tuple(own))
    wanted, trunk = parts.trunk(every), parts.trunk(lost)
    layers = {index: names for index, names in trunk.items() if len(names) == len(wanted[index])}
    if layers:
        names = tuple(name for own in layers.values() for name in own)
        which = ", ".join(map(str, layers))
        says = (
            f"Side {letter} lacks whole layers of the trunk: {which} (counted from 0), {counted(len(names), 'tensor')}."
        )
        yield Finding("layers missing", says, AGAIN, names=names)
    told = {name for names in (*gone.values(), *layers.values()) for name in names}
    rest = [name for name in lost if name not in told]
    if rest:
        says = f"Side {letter} lacks {counted(len(rest), 'tensor')} of the other side: {listed(rest)}."
        yield Finding("tensor missing", says, AGAIN, names=tuple(rest))
