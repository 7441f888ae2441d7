"""The sequences of a batch while they grow: tokens, trunk states, cache, and the progress of each.

`tokens` holds t_0 .. t_m and, after t_m, what a drafter writes there while it drafts. t_m, the newest token, is known
but has not been through the trunk, so a sequence of m + 1 tokens has m final rows. A step reads tensors on the device;
lists on the host with the same facts are updated between steps.

Letters in names: B batch, R rows of a forward pass, P rows of a path, T slots, H hidden.
"""

import copy
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.decoding.block_tables import BlockTables, read_rows, write_rows
from megatron_mtp.decoding.draft import Draft, StepOutput, Verdict
from megatron_mtp.decoding.kv_cache import Memory
from megatron_mtp.decoding.rows import Rows, ancestors_of, rounded
from megatron_mtp.decoding.sampling import Noise

HOST = ("token_ids", "live", "progress")
DEVICE = ("tokens_BT", "length_B", "live_B", "seed_B")
"""What `Sequences` has of every sequence, in lists and in the rows of tensors."""


MAX_KEPT_BATCHES = 32
"""Maximum number of kinds and sizes of batches whose tensors and steps are kept; the least recently used one is
dropped.
"""


def wants_few_shapes(device: torch.device) -> bool:
    """Return whether few shapes are preferred: on a GPU, where kernels and graphs depend on the shape."""
    return device.type == "cuda"


@dataclass(frozen=True)
class BatchShapes:
    """Shapes of the forward passes of a batch.

    Attributes:
        few: whether to prefer few shapes over small ones; see `wants_few_shapes`.
        growth: minimum number of missed rows that a drafter runs at once. Where few shapes are preferred, this is the
            maximum number of tokens that a step may add, so shapes do not depend on acceptance.
        reach: minimum number of slots after the newest token in the window. Where few shapes are preferred, this covers
            every forward pass of a step, so they all have the same window.
        fixed: whether a step must be valid for any set of ended sequences, not only the current one.
        packs: whether forward passes of many rows leave out padding, which requires reading the real rows back to the
            host.
    """

    few: bool = False
    growth: int = 1
    reach: int = 0
    fixed: bool = False
    packs: bool = False


@dataclass
class Progress:
    """Progress of drafters with a sequence.

    Attributes:
        seen: number of tokens when rows of a drafter's cache last ran, by cache number.
        guesses: state of a proposer without a cache.
    """

    seen: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    guesses: Any = None


class Sequences:
    """A batch of sequences.

    Attributes:
        memory, tables: memory of the engine, and block tables of the sequences.
        capacity: number of slots of a sequence.
        token_ids, live, progress: on the host, for each sequence: its tokens, whether it continues, and the state of
            proposers.
        shapes: shapes of its forward passes.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        memory: Memory,
        tables: BlockTables,
        shapes: BatchShapes | None = None,
    ) -> None:
        device, batch = tables.table_BL.device, len(prompts)
        self.memory, self.tables, self.capacity = memory, tables, tables.capacity
        self.shapes = shapes or BatchShapes()
        self.token_ids = [list(prompt) for prompt in prompts]
        self.live = [True] * batch
        self.progress = [Progress() for _ in prompts]
        tokens_BT = torch.zeros(batch, self.capacity + 1, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
        self.tokens_BT = tokens_BT.to(device)
        self.length_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.live_B = torch.ones(batch, dtype=torch.bool, device=device)
        self.seed_B = torch.tensor(seeds, device=device)

    def join(self, other: "Sequences") -> None:
        """Append sequences whose slots are in the same memory."""
        for name in HOST:
            getattr(self, name).extend(getattr(other, name))
        for name in DEVICE:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        mine, theirs = self.tables, other.tables
        table_BL, firsts = torch.cat([mine.table_BL, theirs.table_BL]), mine.firsts + theirs.firsts
        self.tables = replace(mine, table_BL=table_BL, entries=mine.entries + theirs.entries, firsts=firsts)

    def select(self, rows: list[int]) -> None:
        """Keep only these sequences, in this order; the others must have ended or continue elsewhere."""
        for name in HOST:
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        index_B = torch.tensor(rows, dtype=torch.long, device=self.length_B.device)
        for name in DEVICE:
            setattr(self, name, getattr(self, name)[index_B])
        old = self.tables
        entries, firsts = (tuple(known[row] for row in rows) if known else () for known in (old.entries, old.firsts))
        self.tables = replace(old, table_BL=old.table_BL[index_B], entries=entries, firsts=firsts)

    def only(self, rows: list[int], shapes: BatchShapes | None = None) -> "Sequences":
        """Return some of the sequences, in this order, as a separate batch, optionally with other shapes."""
        made = copy.copy(self)
        made.shapes = shapes or self.shapes
        made.select(rows)
        return made

    @property
    def newest_B(self) -> Tensor:
        """m: position of the newest token."""
        return self.length_B - 1

    @property
    def noise(self) -> Noise:
        """Random numbers by seed and position, for the next token of every sequence."""
        return Noise(self.seed_B, self.length_B)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a live sequence."""
        return max((len(ids) for ids, live in zip(self.token_ids, self.live, strict=True) if live), default=1)

    def growth_since(self, cache: int) -> int:
        """Return the maximum number of tokens gained since a drafter's cache last ran, at least `shapes.growth`."""
        behind = [
            len(ids) - one.seen[cache]
            for ids, one, live in zip(self.token_ids, self.progress, self.live, strict=True)
            if live
        ]
        return max([self.shapes.growth, *behind])

    def mark_seen(self, *caches: int) -> None:
        """Record that these caches of drafters have run the rows of all tokens so far."""
        for ids, one in zip(self.token_ids, self.progress, strict=True):
            one.seen.update(dict.fromkeys(caches, len(ids)))

    def window(self, beyond: int) -> int:
        """Return the window of a forward pass whose last row is `beyond` rows after the newest token; `rounded`."""
        beyond = max(beyond, self.shapes.growth, self.shapes.reach)
        return min(rounded(self.longest + beyond, self.shapes.few), self.capacity)

    def chain(self, first_B: Tensor, rows: int, beyond: int, inside: bool = False, keeps: bool = True) -> Rows:
        """Return rows from slot `first_B` on; rows of ended sequences are discarded.

        Args:
            inside: whether none of them is before slot 0.
            keeps: whether their keys and values are kept; if not, they attend only to the rows before t_m's.
        """
        live_BR = None if self.all_live else self.live_B.unsqueeze(1).expand(-1, rows)
        where = self.window(beyond), self.tables, live_BR, self.shapes.packs
        return Rows(first_B, rows, *where, inside=inside, end_B=None if keeps else self.newest_B)

    def tokens_at(self, first_B: Tensor, count: int) -> Tensor:
        """Return `count` tokens from position `first_B` on, [B, count]."""
        return self.tokens_BT.gather(1, self._places(first_B, count).clamp(0, self.capacity))

    def states_at(self, first_B: Tensor, count: int) -> Tensor:
        """Return h_0 of `count` rows from `first_B` on, [S, B, H]."""
        place_BR = self._places(first_B, count).clamp(min=0)
        return read_rows(self.memory.states_N1SH, self.tables.places(place_BR))[:, 0].transpose(0, 1)

    def put_tokens(self, first_B: Tensor, tokens_BN: Tensor) -> None:
        """Write tokens from position `first_B` on; ended sequences keep their own."""
        place_BN = self._places(first_B, tokens_BN.size(1)).clamp(max=self.capacity)
        if not self.all_live:
            place_BN = torch.where(self.live_B.unsqueeze(1), place_BN, self.capacity)
        self.tokens_BT.scatter_(1, place_BN, tokens_BN)

    def rows_of(self, draft: Draft) -> Rows:
        """Return the newest token's row and those of the draft's nodes."""
        if draft.is_chain:
            return self.chain(self.newest_B, draft.nodes + 1, draft.nodes, inside=True)
        ancestors_BRR, depth_BR = ancestors_of(draft.parents())
        return self.tree(depth_BR, ancestors_BRR)

    def tree(self, depth_BR: Tensor, ancestors_BRA: Tensor, start: int = 0, keeps: bool = True) -> Rows:
        """Return rows of a tree whose slots begin at t_m's. Each attends to all earlier slots and to its own ancestors.

        Rows whose keys and values are not kept attend only to the slots before t_m's.
        """
        window, live_BR = self.window(ancestors_BRA.size(2)), self.live_B.unsqueeze(1).expand_as(depth_BR)
        tree = depth_BR, ancestors_BRA, start
        where, end_B = (window, self.tables, live_BR, False), None if keeps else self.newest_B
        return Rows(self.newest_B, depth_BR.size(1), *where, *tree, end_B=end_B)

    def accept(self, draft: Draft, verdict: Verdict) -> StepOutput:
        """Append the accepted path and the token after it; cache and states keep only the rows of the path."""
        token_B1 = verdict.token_B.unsqueeze(1)
        if draft.nodes == 0:
            self.put_tokens(self.length_B, token_B1)
            one_B = torch.ones_like(verdict.token_B)
            self._grow(one_B)
            return StepOutput(draft, token_B1, one_B)
        tokens_BN, accepted_B = draft.tokens_BN, verdict.accepted_B
        if not draft.is_chain:  # move the rows of the accepted path together
            path_BR = verdict.kept_BR.int().argsort(dim=1, descending=True, stable=True)
            tokens_BN = tokens_BN.gather(1, (path_BR[:, 1:] - 1).clamp(min=0))
            newest_B1, live_B1 = self.newest_B.unsqueeze(1), self.live_B.unsqueeze(1)
            slots = newest_B1 + path_BR, self._places(self.newest_B, path_BR.size(1))
            source, target = (self.tables.places(torch.where(live_B1, one, self.capacity)) for one in slots)
            self.memory.cache.keep(source, target)
            write_rows(self.memory.states_N1SH, read_rows(self.memory.states_N1SH, source), target)
        gained_BR = torch.cat([tokens_BN, token_B1], dim=1).scatter_(1, accepted_B.unsqueeze(1), token_B1)
        self.put_tokens(self.length_B, gained_BR)
        count_B = accepted_B + 1
        self._grow(count_B)
        return StepOutput(draft, gained_BR, count_B)

    def settle(self, row: int, gained: list[int], ended: bool) -> None:
        """Append the new tokens of a sequence that are kept.

        An ended sequence's length on the device is cropped to them.
        """
        self.token_ids[row] += gained
        if ended:
            self.end(row)

    def end(self, row: int) -> None:
        """End a sequence."""
        self.live[row] = False
        self.live_B[row] = False
        self.length_B[row] = len(self.token_ids[row])

    @property
    def all_live(self) -> bool:
        """Whether the host knows that no sequence has ended; a fixed step must be valid for any."""
        return not self.shapes.fixed and all(self.live)

    def _places(self, first_B: Tensor, count: int) -> Tensor:
        """Return `count` consecutive indices from `first_B` on, [B, count]."""
        first_B1 = first_B.unsqueeze(1)
        return first_B1 if count == 1 else first_B1 + self.memory.count_T[:count]

    def _grow(self, gained_B: Tensor) -> None:
        self.length_B += gained_B if self.all_live else gained_B * self.live_B


class KeptTensors:
    """Tensors that captured steps read and write, together with these steps, by kind and size of batches.

    Attributes:
        failed: whether a step could not be captured; then no other is.
    """

    def __init__(self) -> None:
        self.failed = False
        self._kept: dict[Hashable, tuple[dict[str, Tensor], Tensor, dict[Hashable, Any]]] = {}

    def move(self, sequences: Sequences, kind: Hashable) -> dict[Hashable, Any]:
        """Move a batch to the tensors of its kind and size. Return the steps that were captured there."""
        own, tables = {name: getattr(sequences, name) for name in DEVICE}, sequences.tables
        key = kind, len(sequences.token_ids)
        if key not in self._kept:
            self._kept[key] = {name: tensor.clone() for name, tensor in own.items()}, tables.table_BL.clone(), {}
        kept, table_BL, graphs = self._kept[key] = self._kept.pop(key)  # keeps the dict in order of last use
        for unused in list(self._kept)[:-MAX_KEPT_BATCHES]:
            del self._kept[unused]
        for name, tensor in kept.items():
            tensor.copy_(own[name])
            setattr(sequences, name, tensor)
        table_BL.copy_(tables.table_BL)
        sequences.tables = replace(tables, table_BL=table_BL)
        return graphs
