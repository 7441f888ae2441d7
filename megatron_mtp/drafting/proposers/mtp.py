"""Drafting with the modules as trained (`mtp`), and with other ways to feed them.

With t_m the newest token, depth d drafts t_{m+d} at row m - 1, from the embedding of t_{m-1+d} (which the depth before
drafted) and h_{d-1} of that row. Row i of depth d is final once t_{i+d} is known. So its last d - 1 rows were made
from drafts, and are run again in the next round:

    D = 2, known t_0 .. t_5 (m = 5)     depth 1, rows .. 4: embeds t_1 .. t_5              drafts x_1 = t_6
                                        depth 2, rows .. 3: embeds t_2 .. t_5, final
                                                 row  4:    embeds x_1, provisional        drafts x_2 = t_7

Letters in names: S rows of a forward, B batch, H hidden, K drafted tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, override

import torch
from torch import Tensor

from megatron_mtp.drafting.few_rows import DepthPass
from megatron_mtp.drafting.kv_cache import KVCache, Rows
from megatron_mtp.drafting.proposers.base import Kind, OneCache, Proposer, pick
from megatron_mtp.drafting.types import Draft, Round

if TYPE_CHECKING:
    from megatron_mtp.drafting.sequences import Sequences

CHUNK = 512
"""The most rows that a module runs at once when it catches up."""


class Vanilla(Proposer):
    """The exact recursion of training: D modules in turn, one cache each."""

    line = "the D modules in turn, exactly as trained; K is at most D"
    depths: ClassVar[Kind] = "sequential"
    limit = "one with each of the checkpoint's depths"
    remedy = "choose mtp_eagle, which reuses a module"
    keeps_states = True
    recordable = True

    @property
    @override
    def most(self) -> int:
        return 1 if self.runner.shares_kv else self.runner.depths

    @override
    def missed(self, sequences: "Sequences", count: int) -> int:
        return max((sequences.growth_since(depth) for depth in range(count)), default=0)

    @override
    def mark_seen(self, sequences: "Sequences", count: int) -> None:
        sequences.mark_seen(*range(count))

    @torch.inference_mode()
    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        draft, run = None, self._depths_run(count)
        caches = sequences.depth_caches(self.runner.depths)
        for first_B, width, is_last in self._windows(sequences, run):
            rows = sequences.chain(first_B, width, 0)
            trunk_SBH = sequences.states_at(first_B, width)
            tokens_BT = sequences.tokens_at(first_B + 1, width + run)
            if is_last and round.sampling.greedy and self.runner.drafts_at_once(tokens_BT.size(0) * width):
                draft = self._at_once(trunk_SBH, tokens_BT, rows, caches, count)
            else:
                draft = self._by_depth(trunk_SBH, tokens_BT, rows, caches, round, count if is_last else 0)
        assert draft is not None
        return draft

    def _by_depth(
        self, trunk_SBH: Tensor, tokens_BT: Tensor, rows: Rows, caches: list[KVCache], round: Round, count: int
    ) -> Draft | None:
        """Drafts of the first `count` depths; the others run, and with a count of 0 nothing is drafted."""
        picked, states_SBH, width = [], trunk_SBH, trunk_SBH.size(0)
        for depth in range(1, tokens_BT.size(1) - width + 1):
            given_SBH = states_SBH if self.runner.sequential else trunk_SBH
            tokens_BR = tokens_BT[:, depth - 1 : depth - 1 + width]
            states_SBH = self.runner.depth(depth, given_SBH, tokens_BR, rows, caches[depth - 1])
            if depth <= count:
                picked.append(pick(self.runner.draft_logits(states_SBH[-1:])[:, 0], round, depth - 1))
                tokens_BT[:, width + depth - 1] = picked[-1][0]
        return chain_of(picked) if picked else None

    def _at_once(self, trunk_SBH: Tensor, tokens_BT: Tensor, rows: Rows, caches: list[KVCache], count: int) -> Draft:
        """The same in one call; the others draft too."""
        width = trunk_SBH.size(0)
        passes = [
            DepthPass(
                depth,
                trunk_SBH if depth == 1 or not self.runner.sequential else None,
                tokens_BT[:, depth - 1 : depth - 1 + width],
                rows,
                caches[depth - 1],
            )
            for depth in range(1, tokens_BT.size(1) - width + 1)
        ]
        self.runner.draft_greedily(passes, tokens_BT[:, width:])
        return Draft(tokens_BT[:, width : width + count])

    def _depths_run(self, count: int) -> int:
        """All depths where they have states: one that falls behind would need rows that the others cannot run anew."""
        return self.runner.depths if self.runner.recurrent_depths else count

    def _windows(self, sequences: "Sequences", count: int) -> Iterator[tuple[Tensor, int, bool]]:
        """First row, number of rows and whether they are the last, of what depths 1 .. `count` have to run."""
        yield from windows(sequences, self._width(sequences, count))
        self.mark_seen(sequences, count)

    def _width(self, sequences: "Sequences", count: int) -> int:
        return max(sequences.growth_since(depth) + depth for depth in range(count))


class ParallelHeads(Vanilla):
    """Heads that all read the trunk's state (Gloeckle et al., arXiv:2404.19737); run as `Vanilla` runs its modules."""

    line = "the heads of `--mtp-architecture parallel`"
    depths = "parallel"


class TrunkStates(Vanilla):
    """What TensorRT-LLM's vanilla MTP worker does (its `MTPWorker`), which is not what was trained.

    Module d gets the trunk's states of d - 1 rows further on; only rows of drafts get the state of the module before.
    A round runs the last K accepted tokens alone. Where K drafts were accepted and the bonus token followed, the first
    of these K + 1 rows never runs, and its keys and values stay zero.

        K = 2, t_0 .. t_5 known, t_3 .. t_5 of the last round (m = 5); h_0 the trunk's states, g_1 module 1's
        module 1    rows 3, 4: (h_0[3], t_4) (h_0[4], t_5)      row 2, which would be (h_0[2], t_3), was left out
        module 2    rows 3, 4: (h_0[4], t_5) (g_1[4], x_1)

    So the rows of a text follow from its tokens and from where its rounds began, which is kept of every text.
    """

    line = "the D modules fed with the trunk's states, as TensorRT-LLM does: not as trained"
    keeps_states = False
    leaves_rows_out = True
    recordable = False

    @override
    def missed(self, sequences: "Sequences", count: int) -> int:
        """Those of texts that have not begun; what others miss stays out."""
        each = zip(sequences.texts, sequences.progress, strict=True)
        return max((len(text) for text, one in each if not one.seen[0]), default=0)

    @torch.inference_mode()
    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        for text, one, live in zip(sequences.texts, sequences.progress, sequences.live, strict=True):
            if live:
                one.rounds.append((len(text), count))
        return chain_of(self._run(sequences, round, count))

    @torch.inference_mode()
    @override
    def catch_up(self, sequences: "Sequences", round: Round, count: int) -> None:
        """Repeat the rounds of one text, with its tokens in the place of drafts; without any, run its prompt."""
        (text,), (one,) = sequences.texts, sequences.progress
        for length, drafted in one.rounds or [(len(text), count)]:
            self._run(sequences.as_of(length), None, drafted)

    def _run(self, sequences: "Sequences", round: Round | None, count: int) -> list[tuple[Tensor, Tensor | None]]:
        """What each depth picks; without `round` nothing, and the next one reads what the text has there."""
        picked: list[tuple[Tensor, Tensor | None]] = []
        caches = sequences.depth_caches(self.runner.depths)
        for first_B, width, is_last in self._windows(sequences, count):
            rows = sequences.chain(first_B, width, 0)
            tokens_BT = sequences.tokens_at(first_B + 1, width + count)
            drafted: list[Tensor] = []
            for depth in range(1, count + 1):
                trunk_SBH = sequences.states_at(first_B + depth - 1, width - len(drafted))
                tokens_BR = tokens_BT[:, depth - 1 : depth - 1 + width]
                given_SBH = torch.cat([trunk_SBH, *drafted])
                states_SBH = self.runner.depth(depth, given_SBH, tokens_BR, rows, caches[depth - 1])
                if not is_last:
                    continue
                drafted.append(states_SBH[-1:])
                if round is not None:
                    picked.append(pick(self.runner.draft_logits(states_SBH[-1:])[:, 0], round, depth - 1))
                    tokens_BT[:, width + depth - 1] = picked[-1][0]
        return picked

    def _width(self, sequences: "Sequences", count: int) -> int:
        prompts_are_run = any(one.seen[0] for one in sequences.progress)
        return count if prompts_are_run else max(sequences.growth_since(0), count)


class Eagle(OneCache):
    """The first module reused for any K: its own last state and the token just drafted make its next row.

    Provisional rows are overwritten in the next round, by rows with the trunk's states.
    """

    line = "the first module reused on its own states, any K"
    depths = "sequential"
    keeps_states = True
    recordable = True

    @torch.inference_mode()
    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        width = sequences.growth_since(self.own)
        if round.sampling.greedy and self.runner.drafts_at_once(len(sequences.texts) * width):
            return self._at_once(sequences, width, count)
        (cache,) = sequences.depth_caches(1)
        state_SBH = self.run_new(sequences)
        picked = [pick(self.runner.draft_logits(state_SBH)[:, 0], round, 0)]
        for position in range(1, count):
            token_B1 = picked[-1][0].unsqueeze(1)
            rows = sequences.chain(sequences.newest_B - 1 + position, 1, count)
            state_SBH = self.runner.depth(1, state_SBH, token_B1, rows, cache)
            picked.append(pick(self.runner.draft_logits(state_SBH)[:, 0], round, position))
        return chain_of(picked)

    def _at_once(self, sequences: "Sequences", width: int, count: int) -> Draft:
        """Catching up and all drafts in one call."""
        first_B, newest_B = sequences.newest_B - width, sequences.newest_B
        (cache,) = sequences.depth_caches(1)
        tokens_BT = sequences.tokens_at(first_B + 1, width + count)
        given_SBH, rows = sequences.states_at(first_B, width), sequences.chain(first_B, width, 0)
        passes = [DepthPass(1, given_SBH, tokens_BT[:, :width], rows, cache)]
        for place in range(width, width + count - 1):
            rows = sequences.chain(newest_B + (place - width), 1, count)
            passes.append(DepthPass(1, None, tokens_BT[:, place : place + 1], rows, cache))
        self.runner.draft_greedily(passes, tokens_BT[:, width:])
        sequences.mark_seen(self.own)
        return Draft(tokens_BT[:, width:])

    def run_new(self, sequences: "Sequences") -> Tensor:
        """Run the rows whose trunk states are new; the module's state at row m - 1, [1, B, H]."""
        width = sequences.growth_since(self.own)
        sequences.mark_seen(self.own)
        (cache,) = sequences.depth_caches(1)
        for first_B, rows, _ in windows(sequences, width):
            where: Rows = sequences.chain(first_B, rows, 0)
            tokens_BR = sequences.tokens_at(first_B + 1, rows)
            state_SBH = self.runner.depth(1, sequences.states_at(first_B, rows), tokens_BR, where, cache)
        return state_SBH[-1:]


def windows(sequences: "Sequences", width: int, end: int = 0) -> Iterator[tuple[Tensor, int, bool]]:
    """The `width` rows before row m + `end` in chunks: first row [B], number of rows, and whether they are the last.

    Rows before row 0 are padding. In several chunks they are left out where no text has a row: the first chunk could
    be padding alone, of a new prompt of 513 tokens for example, and a module cannot run 0 rows.
    """
    before = width if width <= CHUNK else min(width, sequences.longest - 1 + end)
    while before > 0:
        rows = min(CHUNK, before) if before <= CHUNK or before >= 2 * CHUNK else before - CHUNK
        yield sequences.newest_B + end - before, rows, rows == before
        before -= rows


def chain_of(picked: list[tuple[Tensor, Tensor | None]]) -> Draft:
    """A chain of tokens [B] with, if they were sampled, their q [B, V]."""
    tokens_BN = torch.stack([token_B for token_B, _ in picked], dim=1)
    probs = [q_BV for _, q_BV in picked if q_BV is not None]
    return Draft(tokens_BN, torch.stack(probs, dim=1) if probs else None)
