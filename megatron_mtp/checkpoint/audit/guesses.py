"""How the numbers of one tensor became those of another: each guess is tried, and the first that fits exactly is taken.

    same numbers    in another type, rounded, negated, scaled, plus 1
    same rows       halves swapped, transposed, heads or experts in another order, rotary dimensions interleaved
    a part of them  rows of padding, a few numbers that differ
    none of these   nearly the same (trained further), or unrelated

Letters: R rows of a matrix, C columns.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_mtp.checkpoint.audit.entry import equal_bits, largest

FEW = 0.01
"""Largest part of a tensor's numbers that counts as few."""
RELATED = 0.5
"""Correlation above which numbers are taken for the same weights at another step."""
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
PART = 2**20
"""Numbers that are widened at a time."""
SAMPLE = 2**22
"""Numbers at most from which a factor or a correlation is computed."""
MOST_ROWS = 2**18
"""Tensors with more rows are not searched for permutations."""


@dataclass(frozen=True)
class Heads:
    """What a config says of the sizes of heads.

    Attributes:
        widths: numbers of rows that a head may have.
    """

    widths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Guess:
    """An explanation.

    Attributes:
        guess: out of `finding.GUESSES`.
        says: the end of a sentence that begins with the tensor on side B.
        exact: whether it accounts for every bit.
    """

    guess: str
    says: str
    exact: bool = True


def explain(a: Tensor, b: Tensor, name: str, heads: Heads) -> Guess:
    """The first guess that fits two tensors that differ.

    Args:
        a, b: the tensor on both sides.
        name: its name, which tells heads and experts.
        heads: sizes of heads in the config.
    """
    if a.shape != b.shape:
        return _of_shapes(a, b)
    if a.dtype != b.dtype:
        found = _of_types(a, b)
        if found is not None:
            return found
        b = b.to(a.dtype)
        if equal_bits(a, b):
            return Guess("type", "has another type")
    for attempt in ATTEMPTS:
        found = attempt(a, b)
        if found is not None:
            return _heads_of_two(found, a, name, heads)
    return permuted(a, b, name, heads) or _few(a, b) or _related(a, b)


def _heads_of_two(found: Guess, a: Tensor, name: str, heads: Heads) -> Guess:
    """Swapped halves of rows are the two heads of an attention that has no more."""
    if found.guess == "halves swapped" and "rows" in found.says and _ATTENTION.search(name):
        width = a.size(0) // 2
        if width in heads.widths:
            return Guess("heads permuted", f"has its heads (of {width} rows) in another order")
    return found


def _of_shapes(a: Tensor, b: Tensor) -> Guess:
    b_like = b.to(a.dtype)
    if a.dim() == b.dim() == 2 and a.shape == b.shape[::-1] and equal_bits(a, b_like.T.contiguous()):
        return Guess("transposed", f"is transposed: {list(b.shape)}, not {list(a.shape)}")
    if a.numel() == b.numel() and equal_bits(a.flatten(), b_like.flatten()):
        return Guess("reshaped", f"has another shape with the same numbers: {list(b.shape)}, not {list(a.shape)}")
    rows = min(a.size(0), b.size(0)) if a.dim() and b.dim() else 0
    if rows and a.shape[1:] == b.shape[1:] and equal_bits(a[:rows], b_like[:rows]):
        more = "more" if b.size(0) > a.size(0) else "fewer"
        return Guess(
            "padding", f"has {abs(a.size(0) - b.size(0))} {more} rows, and the same numbers in the first {rows}"
        )
    return Guess("shape", f"has the shape {list(b.shape)}, not {list(a.shape)}", exact=False)


def _of_types(a: Tensor, b: Tensor) -> Guess | None:
    """The same numbers in another type, or rounded to it."""
    kinds = f"is of type {_name(b.dtype)}, not {_name(a.dtype)}"
    if _holds(a, b, lambda x, y: equal_bits(x.double(), y.double())):
        return Guess("type", f"{kinds}, with the same numbers")
    if _holds(a, b, lambda x, y: equal_bits(x.to(y.dtype), y)):
        return Guess("rounded", f"{kinds}: rounded to it")
    if _holds(a, b, lambda x, y: equal_bits(y.to(x.dtype), x)):
        return Guess("rounded", f"{kinds}, and side A was rounded")
    return None


def _holds(a: Tensor, b: Tensor, test: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether a test holds for all parts of two tensors of one shape; the first that fails ends it."""
    return all(map(test, a.flatten().split(PART), b.flatten().split(PART)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rounded(a: Tensor, b: Tensor) -> Guess | None:
    for one, other, side in ((a, b, "B"), (b, a, "A")):
        for narrow in NARROW:
            if not one.is_floating_point() or narrow.itemsize >= one.element_size():
                continue
            if _holds(one, other, _through(narrow)) or (narrow == torch.bfloat16 and _holds(one, other, _is_cut)):
                return Guess("rounded", f"differs by rounding: side {side} went through {_name(narrow)}")
    return None


def _through(narrow: torch.dtype) -> Callable[[Tensor, Tensor], bool]:
    """A test whether the second tensor is the first one, rounded to a type and back."""
    return lambda one, other: equal_bits(one.to(narrow).to(one.dtype), other)


def _is_cut(one: Tensor, other: Tensor) -> bool:
    return equal_bits(_cut(one), other)


def _cut(tensor: Tensor) -> Tensor:
    """A float32 tensor whose lower bits are cut off, as a careless cast to bfloat16 does."""
    return (tensor.view(torch.int32) & -65536).view(torch.float32) if tensor.dtype == torch.float32 else tensor


def _halves(a: Tensor, b: Tensor) -> Guess | None:
    for dim in range(min(a.dim(), 2))[::-1]:
        if a.size(dim) % 2 == 0 and all(map(torch.equal, a.chunk(2, dim)[::-1], b.chunk(2, dim))):
            where = "columns" if dim else "rows"
            return Guess("halves swapped", f"has its two halves of {where} swapped")
    return None


def _transposed(a: Tensor, b: Tensor) -> Guess | None:
    if a.dim() == 2 and a.size(0) == a.size(1) and torch.equal(a.T, b):
        return Guess("transposed", "is transposed")
    return None


def _plus_one(a: Tensor, b: Tensor) -> Guess | None:
    if not a.is_floating_point() or a.dim() > 1:
        return None
    tolerance = 2 * torch.finfo(a.dtype).eps * max(1.0, _largest(a), _largest(b))
    for one, sign in ((1.0, "plus"), (-1.0, "minus")):
        if ((b.float() - a.float()) - one).abs().max() <= tolerance:
            return Guess("norm plus 1", f"is side A's {sign} 1: one side stores w, the other w - 1")
    return None


def _scaled(a: Tensor, b: Tensor) -> Guess | None:
    if not a.is_floating_point():
        return None
    x, y = _sample(a), _sample(b)
    square = x.dot(x).item()
    ratio = y.dot(x).item() / square if square else 0.0
    eps = torch.finfo(a.dtype).eps
    if not math.isfinite(ratio) or abs(ratio) < 1e-6 or abs(ratio - 1) <= 8 * eps or x.numel() < 2:
        return None
    if (y - ratio * x).abs().max().item() > 2 * eps * y.abs().max().item():
        return None
    if abs(ratio + 1) <= eps:
        return Guess("negated", "has the opposite sign")
    return Guess("scaled", f"is side A's times {ratio:.6g}")


def _sample(tensor: Tensor) -> Tensor:
    """All numbers of a tensor, or some at equal distances, in float64."""
    return tensor.flatten()[:: max(1, tensor.numel() // SAMPLE)].double()


def _largest(tensor: Tensor) -> float:
    return max(abs(end.item()) for end in tensor.aminmax()) if tensor.numel() else 0.0


def _constant(a: Tensor, b: Tensor) -> Guess | None:
    for one, side in ((b, "B"), (a, "A")):
        low, high = (end.item() for end in one.aminmax()) if one.numel() else (1, 0)
        if low == high == 0:
            return Guess("zeros", f"is zero on side {side}")
        if low == high == 1 and one.numel() > 1:
            return Guess("ones", f"is 1 everywhere on side {side}, as a new norm")
    return None


def _not_finite(a: Tensor, b: Tensor) -> Guess | None:
    bad = [side for one, side in ((a, "A"), (b, "B")) if not math.isfinite(largest(one) or 0.0)]
    return Guess("not finite", f"has numbers that are NaN or infinite on side {bad[0]}") if bad else None


ATTEMPTS: tuple[Callable[[Tensor, Tensor], Guess | None], ...] = (
    _not_finite, _constant, _rounded, _halves, _transposed, _plus_one, _scaled,
)  # fmt: skip
"""Guesses that need two tensors of one shape and type, in the order in which they are tried."""


def permuted(a: Tensor, b: Tensor, name: str, heads: Heads) -> Guess | None:
    """The same rows or columns in another order."""
    for dim in range(min(a.dim(), 3)):
        order = order_of(a, b, dim)
        if order is not None:
            return _of_order(order, dim, a.dim(), name, heads)
    return None


def order_of(a: Tensor, b: Tensor, dim: int) -> list[int] | None:
    """For every slice of `b` along a dimension, the index of the same slice of `a`; None if one is not there."""
    if a.size(dim) > MOST_ROWS or a.size(dim) < 2:
        return None
    places: dict[int, list[int]] = defaultdict(list)
    for index, known in enumerate(checksums(a, dim).tolist()):
        places[known].append(index)
    order = []
    for known in checksums(b, dim).tolist():
        if not places.get(known):
            return None
        order.append(places[known].pop(0))
    return order


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types by which numbers of so many bytes are read as integers."""


def checksums(tensor: Tensor, dim: int) -> Tensor:
    """A number for each slice along a dimension: the sum of its bits by random weights, modulo 2^64."""
    before, after = math.prod(tensor.shape[:dim]), math.prod(tensor.shape[dim + 1 :])
    grid = tensor.contiguous().view(INTEGERS[tensor.element_size()]).reshape(before, tensor.size(dim), after)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (before, 1, after), generator=generator)
    sums = torch.zeros(tensor.size(dim), dtype=torch.int64)
    slices = max(1, PART // max(1, after))
    for index in range(0, before, step := max(1, slices // tensor.size(dim))):
        part, own = grid[index : index + step], weights[index : index + step]
        for start in range(0, tensor.size(dim), slices):
            rows = part[:, start : start + slices]
            sums[start : start + slices] += (rows.long() * own).sum((0, 2))
    return sums


_EXPERTS = re.compile(r"experts|router|(^|\.)gate\.|expert_bias|e_score_correction_bias")
_ATTENTION = re.compile(r"attn|attention|mixer|qkv|[qkvo]_proj")


def _of_order(order: list[int], dim: int, dims: int, name: str, heads: Heads) -> Guess:
    """What an order of rows (or columns) means."""
    what, block = "columns" if dim else "rows", block_of(order)
    experts = _EXPERTS.search(name) and dim == 0 and (dims == 3 or ("shared" not in name and ".experts." not in name))
    if experts:
        return Guess("experts permuted", "has its experts in another order")
    width = next((width for width in heads.widths if block % width == 0 and block < len(order)), None)
    if _ATTENTION.search(name) and width is not None:
        return Guess("heads permuted", f"has its heads (of {width} {what}) in another order")
    within = next((width for width in heads.widths if is_rotary(order, width)), None)
    if within is not None:
        return Guess(
            "rotary order", f"has the rotary {what} of each head interleaved on one side, in halves on the other"
        )
    return Guess(
        "columns permuted" if dim else "rows permuted", f"has its {what} in another order, in blocks of {block}"
    )


def block_of(order: list[int]) -> int:
    """The largest number of rows that stay together: 2 for the order 2 3 0 1 6 7 4 5."""
    starts = [0, *(place + 1 for place, (one, other) in enumerate(pairwise(order)) if other != one + 1)]
    return math.gcd(len(order), *starts, *(order[start] for start in starts))


def is_rotary(order: list[int], width: int) -> bool:
    """Whether each head of so many rows is interleaved (0 4 1 5 2 6 3 7) or taken apart (0 2 4 6 1 3 5 7)."""
    if len(order) % width or width % 2:
        return False
    half = width // 2
    apart = [*range(0, width, 2), *range(1, width, 2)]
    together = [row // 2 + half * (row % 2) for row in range(width)]
    for start in range(0, len(order), width):
        own = [row - start for row in order[start : start + width]]
        if own not in (apart, together):
            return False
    return True


def _few(a: Tensor, b: Tensor) -> Guess | None:
    differing = sum(int((x != y).sum()) for x, y in zip(a.flatten().split(PART), b.flatten().split(PART), strict=True))
    if differing <= max(1, int(FEW * a.numel())) and a.numel() > 1:
        return Guess("few numbers differ", f"differs in {differing} of {a.numel()} numbers: damage, or an edit")
    return None


def _related(a: Tensor, b: Tensor) -> Guess:
    """By correlation, whether these are the same weights at another step."""
    x, y = _sample(a), _sample(b)
    x, y = (x - x.mean(), y - y.mean()) if x.numel() > 1 else (x, y)
    scale = (x.norm() * y.norm()).item()
    likeness = x.dot(y).item() / scale if scale else 0.0
    if likeness > RELATED:
        return Guess("trained further", f"has nearly the same numbers (correlation {likeness:.4f})", exact=False)
    return Guess("other numbers", f"has unrelated numbers (correlation {likeness:.2f})", exact=False)


def difference(a: Tensor, b: Tensor) -> float | None:
    """The largest difference of two tensors of one shape, a part at a time so that little is copied; None of others."""
    if a.shape != b.shape or a.numel() == 0:
        return None
    largest = 0.0
    for one, other in zip(a.flatten().split(PART), b.flatten().split(PART), strict=True):
        found = (one.double() - other.double()).abs().max().item()
        largest = found if not found <= largest else largest
    return largest
