"""The tensors of two sides: pairs that are equal bit by bit cost a read each; for the others an explanation is sought.

Each worker has two tensors in memory at a time. Differences with the same explanation are one finding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from megatron_mtp.checkpoint.audit.contents import LOST, missing_layers
from megatron_mtp.checkpoint.audit.entry import Entry, equal_bits, largest
from megatron_mtp.checkpoint.audit.finding import ERROR, WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.guesses import Guess, Heads, difference, explain
from megatron_mtp.checkpoint.audit.moves import Move, moves
from megatron_mtp.checkpoint.audit.pairing import Pair, Pairing
from megatron_mtp.checkpoint.audit.parts import Parts
from megatron_mtp.checkpoint.audit.side import MXFP4, HFSide, Side
from megatron_mtp.checkpoint.audit.values import Ranges
from megatron_mtp.checkpoint.convert.plan import unnumbered
from megatron_mtp.files import default_workers

MILD = ("type", "trained further", "padding")
"""Guesses after which both sides may still be meant to be the same model."""
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron's tensors that have rows of padding, by the layout of the run."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Attributes:
        pair: the tensor on both sides.
        guess: its explanation.
        figure: the largest difference of its numbers.
    """

    pair: Pair
    guess: Guess
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
    done, differences, heads = Compared(findings=list(paired.findings)), [], heads_of(a, b)
    with ThreadPoolExecutor(default_workers()) as pool:
        for pair, found in zip(paired.pairs, pool.map(_streamed, paired.pairs), strict=True):
            if not found:
                one = _one(pair, heads, ranges, done)
                differences += [] if one is None else [one]
                done.equal += one is None and not pair.copy
            else:
                ranges[0].keep(pair.name, *found)
                ranges[1].keep(_name_in_b(pair), *found)
                done.equal += not pair.copy
            step(pair.a.bytes + pair.b.bytes)
    moved = _moves(a, b, differences, paired)
    done.findings += _moved(moved)
    gone = {move.name for move in moved}
    done.findings += _differing([one for one in differences if _name_in_b(one.pair) not in gone or one.guess.exact])
    origins = {move.origin for move in moved}
    names = Parts.of_side(a if isinstance(a, HFSide) else b)
    shared = [pair.name for pair in paired.pairs if not pair.copy]
    done.findings += _one_sided(names, b, [*shared, *paired.only_a], paired.only_a, "B", origins)
    done.findings += _one_sided(names, a, [*shared, *paired.only_b], paired.only_b, "A", gone)
    return done


def _name_in_b(pair: Pair) -> str:
    return pair.other or pair.name


def _one(pair: Pair, heads: Heads, ranges: tuple[Ranges, Ranges], done: Compared) -> Difference | None:
    """The difference of a pair; None if there is none, or one side cannot be read."""
    try:
        return _difference(pair, heads, ranges)
    except (ValueError, OSError, RuntimeError) as error:
        says = f"'{pair.name}' cannot be read: {error}"
        done.findings.append(Finding("damaged file", says, "fetch the file again", names=(pair.name,)))
        return None


def _streamed(pair: Pair) -> list[float | None]:
    """The largest number of two stored tensors that are equal bit by bit; empty if they are not, or cannot be read."""
    if (pair.a.shape, pair.a.dtype) != (pair.b.shape, pair.b.dtype):
        return []
    try:
        left = pair.a.read()
        return [largest(left)] if equal_bits(left, pair.b.read()) else []
    except (ValueError, OSError, RuntimeError):
        return []  # reading it again says why


def _difference(pair: Pair, heads: Heads, ranges: tuple[Ranges, Ranges]) -> Difference | None:
    left, right = pair.a.read(), pair.b.read()
    ranges[0].keep(pair.name, largest(left))
    ranges[1].keep(_name_in_b(pair), largest(right))
    if equal_bits(left, right) or (_is_padding(pair, left.shape, right.shape) and _same_rows(left, right)):
        return None
    guess = explain(left, right, pair.name, heads)
    if guess.guess == "trained further":
        guess = _quantised(pair) or guess
    if pair.copy and guess.guess not in ("rounded", "type"):
        guess = Guess("tied copy", f"is left out on one side as a copy of '{pair.copy}', whose numbers are others")
    return Difference(pair, guess, difference(left, right))


def _quantised(pair: Pair) -> Guess | None:
    """Numbers that are nearly the same since one side is FP8 or MXFP4."""
    for entry, side in ((pair.b, "B"), (pair.a, "A")):
        if entry.dtype.startswith("float8") or entry.dtype == MXFP4:
            return Guess("rounded", f"differs by rounding: side {side} is {entry.dtype} with scales")
    return None


def _is_padding(pair: Pair, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return pair.name in PADDED and len(one) == len(other) == 2 and one[1] == other[1] and one[0] != other[0]


def _same_rows(left: Tensor, right: Tensor) -> bool:
    rows = min(left.size(0), right.size(0))
    return equal_bits(left[:rows], right[:rows])


def heads_of(*sides: Side) -> Heads:
    """The sizes of heads that the configs of both sides name."""
    widths: set[int] = set()
    for side in sides:
        keys = (
            ({} if side.config is None else side.config.keys) if isinstance(side, HFSide) else vars(side.args or object)
        )
        names = ("head_dim", "v_head_dim", "kv_channels", "qk_head_dim", "linear_value_head_dim", "mamba_head_dim")
        widths |= {keys[name] for name in names if isinstance(keys.get(name), int)}
        parts = [keys.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
        parts += [keys.get(name) for name in ("qk_head_dim", "qk_pos_emb_head_dim")] if not any(parts) else []
        widths |= {sum(parts[:2])} if all(isinstance(part, int) for part in parts[:2]) else set()  # type: ignore[arg-type]
        hidden, heads = (keys.get(name) for name in ("hidden_size", "num_attention_heads"))
        if isinstance(hidden, int) and isinstance(heads, int) and heads and not widths:
            widths.add(hidden // heads)
    return Heads(tuple(sorted((width for width in widths if width > 0), reverse=True)))


def _moves(a: Side, b: Side, differences: list[Difference], paired: Pairing) -> list[Move]:
    unexplained = [one for one in differences if not one.guess.exact and not one.pair.copy]
    wanted = {_name_in_b(one.pair): one.pair.b for one in unexplained} | paired.only_b
    if not wanted:
        return []
    given = a.tensors | {pair.name: pair.a for pair in paired.pairs} | paired.only_a
    first = [one.pair.name for one in unexplained] + list(paired.only_a)
    return moves(wanted, given, first, Parts.of_side(a if isinstance(a, HFSide) else b))


def _moved(found: list[Move]) -> Iterator[Finding]:
    groups: dict[str, list[Move]] = defaultdict(list)
    for move in found:
        groups[move.guess.guess].append(move)
    for guess, members in groups.items():
        says = f"{counted(len(members), 'tensor')}: '{members[0].name}' of side B {members[0].guess.says}"
        more = f"; also {listed(move.name for move in members[1:])}" if len(members) > 1 else ""
        yield Finding(guess, f"{says}{more}.", ADVICE[guess], names=tuple(move.name for move in members))


def _differing(differences: list[Difference]) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for one in differences:
        groups[one.guess.guess, one.guess.says if one.guess.exact else ""].append(one)
    for (guess, _), members in groups.items():
        names = [one.pair.name for one in members]
        figures = [one.figure for one in members if one.figure is not None]
        largest = max(figures, default=None)
        by = f" (largest difference {largest:.3g})" if largest is not None else ""
        kinds = unnumbered(names)
        says = f"{counted(len(members), 'tensor')}, {kinds if len(kinds) < 200 else listed(names)}: side B's"
        says += f" {members[0].guess.says}{by}."
        yield Finding(guess, says, ADVICE[guess], _severity(guess, members), tuple(names), figure=largest)


def _severity(guess: str, members: list[Difference]) -> str:
    if guess == "type" and all(one.guess.says.endswith("same numbers") for one in members):
        return WARNING
    return WARNING if guess in MILD else ERROR


AGAIN = "convert it again, or correct the names and maps of the program that wrote it"
ADVICE: dict[str, str] = defaultdict(
    lambda: AGAIN,
    {
        "type": "load both in the same type; convert --dtype writes another one",
        "rounded": "export in the type of side A, if side B is to have the same numbers",
        "padding": "compare vocab_size: rows behind the tokenizer's are padding",
        "trained further": "audit the two saves of the same step; check that no layer was frozen or trained by mistake",
        "other numbers": "check that both are the same model: the tensor may be new or of another run",
        "few numbers differ": "fetch or export the file again",
        "not finite": "take these tensors from an earlier save",
        "tied copy": "store the head, and set tie_word_embeddings to false",
        "renamed": "rename the tensor as its family's loaders expect it",
        "zeros": "take these tensors from the other side",
        "ones": "take these tensors from the other side: a norm was left at its initial value",
    },
)


def _one_sided(
    names: Parts, lacks: Side, every: list[str], only: dict[str, Entry], lacking: str, moved: set[str]
) -> list[Finding]:
    """Tensors that one side has alone, by part; what another finding accounts for is left out."""
    explained = moved | (set(lacks.hidden) | lacks.unread if isinstance(lacks, HFSide) else set())
    lost = [name for name in only if name not in explained]
    if isinstance(lacks, HFSide) and lacks.partial:
        return []
    found = [*_lost_depths(names, every, lost, lacking), *missing_layers(names.trunk(every), names.trunk(lost))]
    explained = {name for one in found for name in one.names}
    rest = [name for name in lost if name not in explained]
    if rest:
        says = f"Side {lacking} lacks {counted(len(rest), 'tensor')} of the other side: {listed(rest)}."
        found.append(Finding("tensor missing", says, AGAIN, names=tuple(rest)))
    return [_on(one, lacking) for one in found]


def _on(found: Finding, lacking: str) -> Finding:
    says = found.says if found.says.startswith("Side") else f"Side {lacking}: {found.says}"
    return Finding(found.guess, says, found.advice, found.severity, found.names)


def _lost_depths(parts: Parts, every: list[str], lost: list[str], lacking: str) -> Iterator[Finding]:
    all_depths, gone = parts.depths(every), parts.depths(lost)
    whole = [depth for depth, names in gone.items() if len(names) == len(all_depths[depth])]
    names = tuple(name for depth in whole for name in gone[depth])
    if whole and len(whole) == len(all_depths):
        says = f"Side {lacking} has lost all {counted(len(whole), 'depth')} of MTP ({counted(len(names), 'tensor')})."
        yield Finding("MTP dropped", says, LOST, names=names)
    elif whole:
        which = ", ".join(str(depth + 1) for depth in whole)
        says = f"Side {lacking} lacks depth {which} of {len(all_depths)} ({counted(len(names), 'tensor')})."
        yield Finding("depth missing", says, LOST, names=names)
    for depth, own in gone.items():
        if depth not in whole:
            says = f"Side {lacking}: depth {depth + 1} lacks {counted(len(own), 'tensor')}: {listed(own)}."
            yield Finding("depth incomplete", says, AGAIN, names=tuple(own))
