"""Block manager: which blocks are free, which sequences use them, and which hold a prefix that sequences can share.

A full block is identified by the previous block, its tokens and the next `ahead` tokens, because rows of depth d are
computed from tokens that far ahead. A sequence with the same prefix uses the block as it is. The contents of a known
block never change, because all its rows are final.

    size 4, ahead 1, tokens 7 8 9 1  2 3 4 5  6 7        known: (start, 7 8 9 1 2) and (that one, 2 3 4 5 6)

A known block that no sequence uses keeps its rows and counts as free. The block that was released first is reused
first.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

START = 0
"""Predecessor of a sequence's first block."""


@dataclass
class Known:
    """A block whose rows other sequences may use.

    Attributes:
        number: by which the block behind it knows it; never given twice.
        caches: drafters' caches whose rows are complete in it too.
    """

    block: int
    number: int
    key: tuple[int, tuple[int, ...]]
    caches: set[int] = field(default_factory=set)


@dataclass
class BlockTable:
    """The blocks of a sequence.

    Attributes:
        blocks: in the order of its slots.
        known: the first of these, as others know them; the block itself may be another with the same rows.
    """

    blocks: list[int] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of the last known block."""
        return self.known[-1].number if self.known else START


class BlockManager:
    """Manages `count` blocks.

    Args:
        size: slots per block.
        ahead: number of tokens after a block that its rows depend on.
        first: number of the first block.
    """

    def __init__(self, count: int, size: int, ahead: int, first: int = 1) -> None:
        self.count, self.size, self.ahead = count, size, ahead
        self._unused = list(range(first, first + count))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._uses = [0] * (count + 1)
        self._were_used: set[int] = set()
        self._known: dict[tuple[int, tuple[int, ...]], Known] = {}
        self._known_block: dict[int, Known] = {}
        self._last = START

    @property
    def free(self) -> int:
        """Number of blocks that no sequence uses."""
        return len(self._unused) + len(self._kept)

    @property
    def used(self) -> int:
        """Number of blocks that sequences use."""
        return self.count - self.free

    def blocks_for(self, slots: int) -> int:
        """Return the number of blocks that hold this many slots."""
        return -(-slots // self.size)

    def extend(self, held: BlockTable, slots: int) -> list[int] | None:
        """Allocate this many slots for a sequence; None, and nothing is allocated, if too few blocks are free.

        Returns:
            The blocks that other sequences have used before.
        """
        missing = self.blocks_for(slots) - len(held.blocks)
        if missing > self.free:
            return None
        given = [self._take() for _ in range(missing)]
        held.blocks += given
        used = [block for block in given if block in self._were_used]
        self._were_used.update(given)
        return used

    def give_back(self, held: BlockTable) -> None:
        """Release the blocks of a sequence that has ended or is preempted.

        Known blocks keep their rows as long as possible.
        """
        for block in reversed(held.blocks):  # forget a sequence from its end
            self._uses[block] -= 1
            if self._uses[block] == 0 and block in self._known_block:
                self._kept[block] = None
            elif self._uses[block] == 0:
                heappush(self._unused, block)
        held.blocks, held.known = [], []

    def find(self, tokens: list[int]) -> BlockTable:
        """Find the longest known prefix of a sequence whose last token has not run, and mark its blocks as used."""
        held = BlockTable()
        for key_tokens in self._keys(tokens):
            known = self._known.get((held.number, key_tokens))
            if known is None:
                break
            held.known.append(known)
            held.blocks.append(known.block)
            self._kept.pop(known.block, None)
            self._uses[known.block] += 1
        return held

    def learn(self, held: BlockTable, tokens: list[int], seen: dict[int, int]) -> None:
        """Register the full blocks of a sequence for reuse.

        Args:
            tokens: tokens of the sequence; all but the last have run.
            seen: number of tokens when each cache of a drafter last ran (`sequences.Progress`).
        """
        for key_tokens in self._keys(tokens, len(held.known)):
            key, block = (held.number, key_tokens), held.blocks[len(held.known)]
            if key not in self._known:
                self._last += 1
                self._known[key] = self._known_block[block] = Known(block, self._last, key)
            held.known.append(self._known[key])
        for cache, then in seen.items():
            complete = (then - 1 - max(cache, 0)) // self.size
            for block, known in reversed([*zip(held.blocks, held.known, strict=False)][: max(complete, 0)]):
                if cache in known.caches:
                    break
                if block == known.block:  # otherwise another sequence owns the block and may not have run these rows
                    known.caches.add(cache)

    def seen_of(self, held: BlockTable) -> dict[int, int]:
        """Return the value of `seen` for a sequence that begins with known blocks."""
        made: dict[int, int] = {}
        for cache in held.known[0].caches if held.known else ():
            complete = next((n for n, one in enumerate(held.known) if cache not in one.caches), len(held.known))
            made[cache] = complete * self.size + 1 + max(cache, 0)
        return made

    def forget(self) -> None:
        """Forget all known prefixes; blocks that no sequence uses are free."""
        for block in self._kept:
            heappush(self._unused, block)
        for known in (self._kept, self._known, self._known_block):
            known.clear()

    def _keys(self, tokens: list[int], first: int = 0) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of every full block from one on, with later tokens that it depends on."""
        last = len(tokens) - max(self.ahead, 1)
        for end in range((first + 1) * self.size, last + 1, self.size):
            yield tuple(tokens[end - self.size : end + self.ahead])

    def _take(self) -> int:
        if self._unused:
            block = heappop(self._unused)  # the lowest number: sequences that arrive together get adjacent blocks
        else:
            block, _ = self._kept.popitem(last=False)
            del self._known[self._known_block.pop(block).key]
        self._uses[block] = 1
        return block
