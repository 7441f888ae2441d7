"""Drafting with the modules as trained (`mtp`), and with two other ways to feed them.

With t_m the newest token, depth d drafts t_{m+d} at row m - 1, from the embedding of t_{m-1+d} (which the depth before
drafted) and h_{d-1} of that row. Row i of depth d is final once t_{i+d} is known, so that its last d - 1 rows were made
from drafts and are run again in the next round:

    D = 2, known t_0 .. t_5 (m = 5)     depth 1, rows .. 4: embeds t_1 .. t_5              drafts x_1 = t_6
                                        depth 2, rows .. 3: embeds t_2 .. t_5, final
                                                 row  4:    embeds x_1, provisional        drafts x_2 = t_7

Letters in names: S rows of a forward, B batch, H hidden, K drafted tokens, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.kv_cache import KVCache, Rows
from megatron_mtp.drafting.proposers.base import Proposer, pick
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import Draft, Round

CHUNK = 512
"""Rows that a module catches up on at once."""


class Vanilla(Proposer):
    """The exact recursion of training: D modules in turn, one cache each."""

    limit = "one with each of the checkpoint's depths"
    remedy = "choose mtp_eagle, which reuses a module"

    def __init__(self, runner: Runner, config: SpeculativeConfig) -> None:
        super().__init__(runner, config)
        self.most = runner.depths

    def start(self, sequences: Sequences) -> None:
        batch = len(sequences.texts)
        self.caches = [KVCache(1, batch, sequences.capacity) for _ in range(self.runner.depths)]
        self._seen = [[0] * batch for _ in range(self.runner.depths)]

    @torch.inference_mode()
    def propose(self, sequences: Sequences, scene: Round, count: int) -> Draft:
        picked = []
        for first_B, width, is_last in self._windows(sequences, count):
            rows = sequences.chain(first_B, width, 0)
            states_SBH = trunk_SBH = sequences.states_at(first_B, width)
            for depth in range(1, count + 1):
                given_SBH = states_SBH if self.runner.chained else trunk_SBH
                tokens_BR = sequences.tokens_at(first_B + depth, width)
                states_SBH = self.runner.depth(depth, given_SBH, tokens_BR, rows, self.caches[depth - 1])
                if is_last:
                    picked.append(pick(self.runner.logits(states_SBH[-1:])[:, 0], scene, depth - 1))
                    sequences.put_tokens(sequences.newest_B + depth, picked[-1][0].unsqueeze(1))
        return chain_of(picked)

    def _windows(self, sequences: Sequences, count: int) -> Iterator[tuple[Tensor, int, bool]]:
        """First row, number of rows and whether they are the last, of what depths 1 .. `count` have to run."""
        width = max(sequences.growth_since(self._seen[depth]) + depth for depth in range(count))
        yield from windows(sequences, width)
        for depth in range(count):
            self._seen[depth] = sequences.lengths()


class ParallelHeads(Vanilla):
    """Heads that all read the trunk's state (Gloeckle et al., arXiv:2404.19737); `Vanilla` with nothing to chain."""


class TrunkStates(Vanilla):
    """Every module fed with the trunk's states and the next token, as TensorRT-LLM's MTP does; not as trained from
    depth 2 on.

    Only the rows of drafts have another state, the module's before; module d drafts at row m + d - 2.
    """

    @torch.inference_mode()
    def propose(self, sequences: Sequences, scene: Round, count: int) -> Draft:
        picked: list[tuple[Tensor, Tensor | None]] = []
        for first_B, width, is_last in self._windows(sequences, count):
            states_SBH = sequences.states_at(first_B, width)
            for depth in range(1, count + 1):
                wide = states_SBH.size(0)
                rows = sequences.chain(first_B, wide, count)
                tokens_BR = sequences.tokens_at(first_B + 1, wide)
                out_SBH = self.runner.depth(depth, states_SBH, tokens_BR, rows, self.caches[depth - 1])
                if is_last:
                    picked.append(pick(self.runner.logits(out_SBH[-1:])[:, 0], scene, depth - 1))
                    sequences.put_tokens(sequences.newest_B + depth, picked[-1][0].unsqueeze(1))
                    states_SBH = torch.cat([states_SBH, out_SBH[-1:]])
        return chain_of(picked)


class Eagle(Proposer):
    """The first module reused for any K: its own last state and the token just drafted make its next row.

    Provisional rows are overwritten in the next round, by rows with the trunk's states.
    """

    def start(self, sequences: Sequences) -> None:
        self.cache = KVCache(1, len(sequences.texts), sequences.capacity)
        self._seen = [0] * len(sequences.texts)

    @torch.inference_mode()
    def propose(self, sequences: Sequences, scene: Round, count: int) -> Draft:
        state_SBH = self.catch_up(sequences)
        picked = [pick(self.runner.logits(state_SBH)[:, 0], scene, 0)]
        for position in range(1, count):
            token_B1 = picked[-1][0].unsqueeze(1)
            rows = sequences.chain(sequences.newest_B - 1 + position, 1, count)
            state_SBH = self.runner.depth(1, state_SBH, token_B1, rows, self.cache)
            picked.append(pick(self.runner.logits(state_SBH)[:, 0], scene, position))
        return chain_of(picked)

    def catch_up(self, sequences: Sequences) -> Tensor:
        """Run the rows whose trunk states are new; the module's state at row m - 1, [1, B, H]."""
        width = sequences.growth_since(self._seen)
        self._seen = sequences.lengths()
        for first_B, rows, _ in windows(sequences, width):
            where: Rows = sequences.chain(first_B, rows, 0)
            tokens_BR = sequences.tokens_at(first_B + 1, rows)
            state_SBH = self.runner.depth(1, sequences.states_at(first_B, rows), tokens_BR, where, self.cache)
        return state_SBH[-1:]


def windows(sequences: Sequences, width: int) -> Iterator[tuple[Tensor, int, bool]]:
    """The `width` rows up to row m - 1 in chunks: first row [B], number of rows, and whether they are the last."""
    before = width
    while before > 0:
        rows = min(CHUNK, before) if before <= CHUNK or before >= 2 * CHUNK else before - CHUNK
        yield sequences.newest_B - before, rows, rows == before
        before -= rows


def chain_of(picked: list[tuple[Tensor, Tensor | None]]) -> Draft:
    """A chain of tokens [B] with, if they were sampled, their q [B, V]."""
    tokens_BN = torch.stack([token_B for token_B, _ in picked], dim=1)
    probs = [q_BV for _, q_BV in picked if q_BV is not None]
    return Draft(tokens_BN, torch.stack(probs, dim=1) if probs else None)
