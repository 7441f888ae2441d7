"""N-grams as drafts: those that the sequence has (`Ngram`), or that the target comes up with (`Lookahead`).

Prompt lookup (Saxena, 2023) drafts what followed the longest suffix of the sequence when it stood there before; the
draft is deterministic, and empty where no suffix was seen before.

Lookahead decoding (arXiv:2402.02057) verifies n-grams that the target itself comes up with, in the same forward.
Beside the sequence the target runs a window of W columns and N - 1 levels. Column c of level 0 guesses the token at m +
c; each level above guesses one further. The target's token after the last level completes an n-gram of N tokens, which
goes to a pool under its first token. The pool's n-grams after t_m are the draft, G of them merged to a tree.

    W = 2, N = 3          row     t_m    a1  a2 | b1  b2 | guesses         a: level 0, b: level 1
                          parent   -    t_m  a1 | a1  a2 |                 n-grams: (a1, b1, target's after b1), ...
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.decoding.config import Settings, setting
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.proposer import Proposer

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences


@dataclass(frozen=True)
class NgramSettings(Settings):
    """Lengths of the suffixes."""

    ngram_min: int = setting(1, "shortest suffix that is looked up", 1, 64)
    ngram_max: int = setting(4, "longest suffix that is looked up", 1, 64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"speculative config: ngram_min is {self.ngram_min}, above ngram_max, {self.ngram_max}; swap them."
            )


class Ngram(Proposer):
    """The suffix has `ngram_min` to `ngram_max` tokens; of its earlier places the latest one counts."""

    line = "what followed the longest suffix when it was seen before"
    settings_kind = NgramSettings
    settings: NgramSettings
    recordable = True

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        shortest, longest = self.settings.ngram_min, self.settings.ngram_max
        tokens_BW = sequences.tokens_BT[:, : sequences.window(0)]
        drafted_BN, valid_BN = continuation(tokens_BW, sequences.length_B, shortest, longest, count)
        return Draft(drafted_BN, valid_BN=valid_BN & sequences.live_B.unsqueeze(1))


def continuation(tokens_BW: Tensor, length_B: Tensor, shortest: int, longest: int, count: int) -> tuple[Tensor, Tensor]:
    """Up to `count` tokens that followed the latest earlier place of the longest suffix seen before, and which are any.

    An earlier place ends at slot e, at most m - 1. Going back from e and from m = `length_B` - 1, so many tokens agree:

        slot      0  1  2  3  4  5          m = 5; the suffix 1, 2 ends at e = 1 and at e = 3 too,
        token     1  2  1  2  1  2          where 4 tokens agree, so that e = 3 counts
        agree     0  2  0  4  0             drafted: what follows e = 3, which is 1, 2
    """
    newest_B1 = length_B.clamp(max=tokens_BW.size(1)).unsqueeze(1) - 1  # a sequence that has ended may be longer
    end_W = torch.arange(tokens_BW.size(1), device=tokens_BW.device)
    longest = min(longest, end_W.numel())
    suffix_BL = tokens_BW.gather(1, (newest_B1 - end_W[:longest].flip(0)).clamp(min=0))
    ending_BWL = pad(tokens_BW, (longest - 1, 0), value=-1).unfold(1, longest, 1)  # the tokens up to slot e
    agree_BWL = (ending_BWL == suffix_BL.unsqueeze(1)) & (end_W < newest_B1).unsqueeze(2)
    agreed_BW = agree_BWL.flip(2).cumprod(dim=2).sum(dim=2)
    end_B1 = (agreed_BW * end_W.numel() + end_W).argmax(dim=1, keepdim=True)  # the longest, and then the latest
    place_BN = end_B1 + 1 + torch.arange(count, device=tokens_BW.device)
    valid_BN = (place_BN <= newest_B1) & (agreed_BW.gather(1, end_B1) >= shortest)
    return tokens_BW.gather(1, place_BN.clamp(max=end_W.numel() - 1)) * valid_BN, valid_BN


@dataclass(frozen=True)
class LookaheadSettings(Settings):
    """The paper's W, N and G."""

    window: int = setting(5, "W, columns of the window", 1, 32)
    ngram_size: int = setting(4, "N, tokens of an n-gram", 2, 16)
    guesses: int = setting(3, "G, n-grams that are verified in a step", 1, 32)


@dataclass
class JacobiWindow:
    """A sequence's guesses.

    Attributes:
        levels: columns of each.
        pool: the n-grams found, by their first token, newest first.
        found: how many tokens the sequence had in its last step, and the target's tokens after the last level.
    """

    levels: list[list[int]]
    pool: dict[int, deque[tuple[int, ...]]] = field(default_factory=dict)
    found: tuple[int, list[int]] | None = None

    def learn(self, length: int, guesses: int) -> None:
        """Take what the last step found, which completes the n-grams, unless an error makes it run again."""
        before, found = self.found or (length, [])
        self.found = None
        if before == length:
            return
        for first, *rest in zip(*self.levels, found, strict=True):
            grams = self.pool.setdefault(first, deque(maxlen=guesses))
            if tuple(rest) in grams:
                grams.remove(tuple(rest))
            grams.appendleft(tuple(rest))
        self.levels = [*self.levels[1:], found]


class Lookahead(Proposer):
    """Deterministic; K is at most N - 1."""

    line = "n-grams of a Jacobi window that the same forward runs"
    settings_kind = LookaheadSettings
    settings: LookaheadSettings
    drafts_trees = True
    observes = True
    limit = "the n-grams less their first token"
    remedy = "give a larger ngram_size"

    @property
    @override
    def most(self) -> int:
        return self.settings.ngram_size - 1

    @property
    def _in_window(self) -> int:
        return self.settings.window * self.most

    @override
    def nodes(self, count: int) -> int:
        return self._in_window + self.settings.guesses * self.most

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        tokens, parents, valid = [], [], []
        for ids, window in zip(sequences.token_ids, self._windows(sequences), strict=True):
            window.learn(len(ids), self.settings.guesses)
            grams = [gram[:count] for gram in window.pool.get(ids[-1], ())]
            guessed, below = _trie(grams, self._in_window)
            spare = self.nodes(count) - self._in_window - len(guessed)
            tokens.append([token for level in window.levels for token in level] + guessed + [0] * spare)
            parents.append(_window_parents(self.settings.window, len(window.levels)) + below + [0] * spare)
            valid.append([False] * self._in_window + [True] * len(guessed) + [False] * spare)
        device = sequences.length_B.device
        tokens_BN, parents_BN, valid_BN = (torch.tensor(rows, device=device) for rows in (tokens, parents, valid))
        return Draft(tokens_BN, None, parents_BN, valid_BN)

    def observe(self, sequences: "Sequences", draft: Draft, logits_BRV: Tensor) -> None:
        """Rows 1 .. W * (N - 1) are the window; the tokens after its last level complete the n-grams."""
        if not draft.nodes:
            return
        last = slice(1 + self._in_window - self.settings.window, 1 + self._in_window)
        after = logits_BRV[:, last].argmax(dim=-1).tolist()
        for ids, window, found in zip(sequences.token_ids, self._windows(sequences), after, strict=True):
            window.found = len(ids), found

    def _windows(self, sequences: "Sequences") -> list[JacobiWindow]:
        """Windows of every sequence."""
        for ids, one in zip(sequences.token_ids, sequences.progress, strict=True):
            one.guesses = one.guesses or self._first(ids)
        return [one.guesses for one in sequences.progress]

    def _first(self, ids: list[int]) -> JacobiWindow:
        """The first window repeats the sequence's last tokens."""
        levels, columns = self.most, self.settings.window
        tail = (ids * (levels + columns))[-(levels + columns) :]
        return JacobiWindow([tail[level : level + columns] for level in range(levels)])


def _window_parents(columns: int, levels: int) -> list[int]:
    """Rows that the window's nodes continue: level 0 its left neighbor, further levels the one below."""
    return [*range(columns), *range(1, 1 + columns * (levels - 1))]


def _trie(grams: list[tuple[int, ...]], before: int) -> tuple[list[int], list[int]]:
    """N-grams merged by their beginnings: tokens and parent rows, with `before` nodes in front of them."""
    rows: dict[tuple[int, ...], int] = {(): 0}
    tokens, parents = [], []
    for gram in grams:
        for end in range(1, len(gram) + 1):
            if gram[:end] not in rows:
                tokens.append(gram[end - 1])
                parents.append(rows[gram[: end - 1]])
                rows[gram[:end]] = before + len(tokens)
    return tokens, parents
