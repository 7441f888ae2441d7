"""Drafting with MTP layers exactly as trained (`mtp`), and with other feeding rules.

With t_m the newest token, depth d drafts t_{m+d} at row m - 1, from the embedding of t_{m-1+d} (drafted by the previous
depth) and h_{d-1} of that row. Row i of depth d is final once t_{i+d} is known. So its last d - 1 rows were computed
from drafts and are recomputed in the next round:

    D = 2, known t_0 .. t_5 (m = 5)     depth 1, rows .. 4: embeds t_1 .. t_5              drafts x_1 = t_6
                                        depth 2, rows .. 3: embeds t_2 .. t_5, final
                                                 row  4:    embeds x_1, provisional        drafts x_2 = t_7

Letters in names: S rows of a forward pass, B batch, H hidden, K draft tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, override

import torch
from torch import Tensor

from megatron_mtp.decoding.backend import MTPRows, Pass, in_tensors
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.proposer import HeadKind, Proposer
from megatron_mtp.decoding.rows import CHUNK
from megatron_mtp.decoding.sampling import DRAFT, draw

if TYPE_CHECKING:
    from megatron_mtp.decoding.runner import Runner
    from megatron_mtp.decoding.sequences import Sequences


class OneCache(Proposer):
    """A drafter with a single cache, which may fall behind the sequences.

    Attributes:
        own: number of its cache.
    """

    own: ClassVar[int] = 0

    @override
    def caches(self, count: int) -> tuple[int, ...]:
        return (self.own,) if count else ()


class Vanilla(Proposer):
    """The exact recursion of training: D MTP layers in sequence, one cache each."""

    line = "the D modules in turn, exactly as trained; K is at most D"
    depths: ClassVar[HeadKind] = "sequential"
    limit = "one with each of the checkpoint's MTP layers"
    remedy = "choose mtp_eagle, which reuses a module"
    keeps_states = True
    recordable = True
    runner: "Runner"

    @property
    @override
    def most(self) -> int:
        return 1 if self.runner.shares_kv else self.runner.depths

    @override
    def caches(self, count: int) -> tuple[int, ...]:
        return tuple(range(count))

    @override
    def passes(self, sequences: "Sequences", count: int) -> list[Pass] | None:
        width = self._width(sequences, self._run(count)) if count else 0
        return self._over(-width, width, self._run(count)) if width <= CHUNK else None

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        draft, run = None, self._run(count)
        for first, rows, is_last in windows(sequences, self._width(sequences, run)):
            draft = in_turn(self.runner, sequences, self._over(first, rows, run), round, count if is_last else 0)
        assert draft is not None
        self.mark_seen(sequences, run)
        return draft

    def _run(self, count: int) -> int:
        """Return how many depths run in a draft: all, if they have states, because skipped rows cannot be rerun."""
        return self.runner.depths if count and self.runner.recurrent_depths else count

    def _width(self, sequences: "Sequences", run: int) -> int:
        """Return how many rows each of the first depths runs."""
        return max(sequences.growth_since(depth) + depth for depth in range(run))

    def _over(self, first: int, rows: int, run: int) -> list[Pass]:
        """Run the first depths over these rows."""
        trunk = [depth == 1 or not self.runner.sequential for depth in range(1, run + 1)]
        return [Pass(depth, first, rows, depth, one) for depth, one in enumerate(trunk, start=1)]


class ParallelHeads(Vanilla):
    """Heads that all read the trunk's state (Gloeckle et al., arXiv:2404.19737), run like the layers of `Vanilla`."""

    line = "the heads of `--mtp-architecture parallel`"
    depths = "parallel"


class OneLayer(OneCache):
    """One MTP layer or drafter, which first runs the rows with new trunk states and then drafts."""

    runner: "Runner"
    depths: ClassVar[HeadKind | None] = "sequential"
    recordable = True

    def new_rows(self, sequences: "Sequences") -> Pass:
        """Run the rows with new trunk states, and return the last chunk of them."""
        width = sequences.growth_since(self.own)
        sequences.mark_seen(self.own)
        for first, rows, is_last in windows(sequences, width):
            chunk = Pass(1, first, rows, 1, True)
            if not is_last:
                (before,), _ = in_tensors(sequences, [chunk])
                run(self.runner, before)
        return chunk


class ReusedLayer(OneLayer):
    """Reuses the first MTP layer for any K: its last state and the token just drafted form the next row.

    Provisional rows are overwritten in the next round by rows with the trunk's states. Rows of a layer that was trained
    without a chain (`--mtp-repeated-layer-first-pass-kv`) are not kept and do not attend to each other.
    """

    line = "the first module reused on its own states, any K"
    keeps_states = True

    @override
    def passes(self, sequences: "Sequences", count: int) -> list[Pass] | None:
        width = sequences.growth_since(self.own) if count else 0
        return self._after(Pass(1, -width, width, 1, True), count) if width <= CHUNK else None

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        draft = in_turn(self.runner, sequences, self._after(self.new_rows(sequences), count), round, count)
        assert draft is not None
        return draft

    def _after(self, new: Pass, count: int) -> list[Pass]:
        """Run the pass over new rows, and the passes that draft further tokens."""
        later = [Pass(1, place, 1, 1, False, self.runner.has_chain) for place in range(count - 1)]
        return [new, *later][:count]


def in_turn(runner: "Runner", sequences: "Sequences", passes: list[Pass], round: Round, count: int) -> Draft | None:
    """Run MTP layers in sequence; the first `count` of them draft after their last row. Return None if none drafts."""
    if count and round.sampling.greedy and (at_once_BN := runner.backend.draft(sequences, passes)) is not None:
        return Draft(at_once_BN if count == len(passes) else at_once_BN[:, :count])
    picked, states_SBH = [], None
    in_order, drafted_BN = in_tensors(sequences, passes)
    for place, one in enumerate(in_order):
        states_SBH = run(runner, one, states_SBH)
        if place < count:
            picked.append(pick(runner.draft_logits(states_SBH[-1:])[:, 0], round, place))
            drafted_BN[:, place] = picked[-1][0]
    return chain_of(picked) if picked else None


def run(runner: "Runner", one: MTPRows, before_SBH: Tensor | None = None) -> Tensor:
    """Return states [S, B, H] of the rows; `before_SBH` are those of the previous pass."""
    given_SBH = one.given_SBH
    if given_SBH is None:
        assert before_SBH is not None
        given_SBH = before_SBH[-one.tokens_BR.size(1) :]
    return runner.depth(one.depth, given_SBH, one.tokens_BR, one.rows, one.cache)


def windows(sequences: "Sequences", width: int, end: int = 0) -> Iterator[tuple[int, int, bool]]:
    """Split the `width` rows before row m + `end` into chunks: first row minus m, number of rows, whether it is last.

    Rows before row 0 are padding. In several chunks they are left out where no sequence has a row: the first chunk
    could be padding alone, of a new prompt of 513 tokens for example, and a module cannot run 0 rows.
    """
    before = width if width <= CHUNK else min(width, sequences.longest - 1 + end)
    while before > 0:
        rows = min(CHUNK, before) if before <= CHUNK or before >= 2 * CHUNK else before - CHUNK
        yield end - before, rows, rows == before
        before -= rows


def chain_of(picked: list[tuple[Tensor, Tensor | None]]) -> Draft:
    """Return a chain of tokens [B] with, if they were sampled, their q [B, V]."""
    tokens_BN = torch.stack([token_B for token_B, _ in picked], dim=1)
    probs = [q_BV for _, q_BV in picked if q_BV is not None]
    return Draft(tokens_BN, torch.stack(probs, dim=1) if probs else None)


def chain_at_once(logits_BKV: Tensor, round: Round) -> Draft:
    """Return a chain whose tokens do not depend on each other, each from its own logits."""
    return chain_of([pick(logits_BKV[:, place], round, place) for place in range(logits_BKV.size(1))])


def pick(logits_BV: Tensor, round: Round, position: int) -> tuple[Tensor, Tensor | None]:
    """Choose the draft token [B] at a position, and return the q [B, V] that it was sampled from; None if greedy."""
    if round.sampling.greedy:
        return logits_BV.argmax(dim=-1), None
    q_BV = round.sampling.probabilities(logits_BV)
    token_B = draw(q_BV, round.noise.uniform(DRAFT, position + 1)[:, position])
    return token_B, q_BV if round.config.use_draft_probs else None
