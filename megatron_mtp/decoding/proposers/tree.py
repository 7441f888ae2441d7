"""Draft trees and beams, grown with the first MTP layer, reused as in `ReusedLayer`, or with a small model.

Level 1 consists of candidates for the token after t_m, from row m - 1 of the MTP layer or row m of a small model. A
node that is continued becomes a row: its token and, for an MTP layer, the state of the row that drafted it. All rows of
a level run in one forward pass, in slots after the committed ones, and attend to the committed rows and their own
ancestors. Where few shapes are preferred, levels with fewer rows than the largest one are padded:

    slot      ..  m-1   m    m+1   m+2          two nodes of level 1 at slots m and m + 1, and at m + 2 a child of the
    sees           -    -     -    m            first, which does not see the second; a small model's are one slot later

Letters in names: B batch, F rows of a level, C candidates of a row, N drafted nodes, A rows that may run, V vocabulary.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, override

import torch
from torch import Tensor

from megatron_mtp.decoding.backend import in_tensors
from megatron_mtp.decoding.config import MOST_DRAFTED, VERIFIERS, Settings, setting
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.mtp import OneLayer, run
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.sampling import DRAFT, draw

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences

DEFAULT_TREE = (4, 2)
"""4 + 8 nodes: 13 rows with t_m's."""

MOST_NODES = 255
"""Maximum number of nodes of a tree; the work of every step grows with their square."""


@dataclass(frozen=True)
class BeamSettings(Settings):
    """Width of the beam."""

    beam_width: int = setting(4, "W, chains that are extended in parallel", 1, 64)


@dataclass(frozen=True)
class TreeSettings(BeamSettings):
    """Shape of a static tree, or size of a dynamic one."""

    tree: tuple[int, ...] | None = setting(None, "candidates a row, level by level; [4, 2] if left out")
    tree_nodes: int | None = setting(
        None, "instead of a fixed tree: number of likeliest nodes, chosen in every step", 1, 63
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        tree = DEFAULT_TREE if self.tree is None else self.tree
        if not tree or min(tree) < 1:
            raise ValueError(f"speculative config: tree is {list(tree)}; give candidates per level, like [4, 2].")
        nodes = sum(prod(tree[:level]) for level in range(1, len(tree) + 1))
        if len(tree) > MOST_DRAFTED or nodes > MOST_NODES:
            raise ValueError(
                f"speculative config: tree is {list(tree)}, of {len(tree)} levels and {nodes} nodes; give at most "
                f"{MOST_DRAFTED} levels and {MOST_NODES} nodes."
            )


@dataclass(frozen=True)
class Level:
    """The F * C candidates of one level; those of one row are adjacent.

    Attributes:
        tokens_BN: candidate tokens.
        scores_BN: sum of log q along the path, float64; -inf for a duplicate of a sibling.
        rows_BN: row of the previous level that each candidate continues.
        probs_BFV: q of the rows of the previous level.
        taken_BF: which candidates of the previous level these rows are; None for level 1, whose row is t_m's.
    """

    tokens_BN: Tensor
    scores_BN: Tensor
    rows_BN: Tensor
    probs_BFV: Tensor
    taken_BF: Tensor | None


class Grower(OneLayer):
    """Grows a tree level by level: run rows, choose their candidates, choose which of these to continue.

    Attributes:
        past: number of rows from t_m on that the drafter has run: 0 for an MTP layer, whose row m belongs to level 1.
    """

    settings: BeamSettings
    past: ClassVar[int] = 0

    @property
    def drafted(self) -> int:
        """Number of tokens that may be drafted."""
        return self.runner.drafted

    @property
    def keeps_rows(self) -> bool:
        """Whether rows attend to those of their ancestors, which are kept."""
        return self.runner.has_chain

    @property
    def beam(self) -> int:
        """`beam_width`, limited to the number of tokens that may be drafted."""
        return min(self.settings.beam_width, self.drafted)

    def newest(self, sequences: "Sequences") -> Tensor:
        """Run the missing committed rows; return the state [1, B, H] of the last one, which drafts level 1."""
        (newest,), _ = in_tensors(sequences, [self.new_rows(sequences)])
        return run(self.runner, newest)[-1:]

    def level(self, sequences: "Sequences", given_SBH: Tensor, tokens_BF: Tensor, where: Rows) -> Tensor:
        """Return states [F, B, H] of a level's rows, from the states of the rows that drafted their tokens."""
        return self.runner.depth(1, given_SBH, tokens_BF, where, sequences.memory.depths[0])

    def logits(self, states_SBH: Tensor) -> Tensor:
        """Return logits [B, F, V] of the next token."""
        return self.runner.draft_logits(states_SBH)

    def grow(
        self, sequences: "Sequences", round: Round, widths: list[int], most: int | None, drawn: bool
    ) -> list[Level]:
        """Grow levels with `widths[i]` candidates per row.

        Args:
            most: number of best candidates per level to continue; None for all.
            drawn: whether candidates are sampled from q instead of its most likely tokens.
        """
        states_SBH = self.newest(sequences)
        levels = [self._candidates(states_SBH, round, widths[0], [], None, drawn)]
        shape, started = (len(sequences.token_ids), 1, self.past + self._rows_run(widths, most)), self.past
        least = max(_level_rows(widths[:-1], most), default=0) if sequences.shapes.few else 0
        ancestors_BFA = torch.zeros(shape, dtype=torch.bool, device=states_SBH.device)
        ancestors_BFA[:, :, : self.past].fill_(True)
        for depth, width in enumerate(widths[1:]):
            level = levels[-1]
            count = level.tokens_BN.size(1)
            if most is None or count <= most:
                taken_BF = torch.arange(count, device=level.tokens_BN.device).expand_as(level.tokens_BN)
            else:
                taken_BF = level.scores_BN.topk(most, dim=1).indices
            # pad with copies of the last row; their output is not used
            run_BF = torch.cat([taken_BF, taken_BF[:, -1:].expand(-1, max(0, least - taken_BF.size(1)))], dim=1)
            above_BF, rows = level.rows_BN.gather(1, run_BF), slice(started, started + run_BF.size(1))
            own_FA = torch.eye(ancestors_BFA.size(2), device=states_SBH.device).bool()[rows]
            ancestors_BFA = _rows_of(ancestors_BFA, above_BF) | own_FA
            tree = torch.full_like(run_BF, depth + self.past), ancestors_BFA, started
            where = sequences.tree(*tree, keeps=self.keeps_rows)
            given_SBH = states_SBH.gather(0, above_BF.T.unsqueeze(2).expand(-1, -1, states_SBH.size(2)))
            states_SBH = self.level(sequences, given_SBH, level.tokens_BN.gather(1, run_BF), where)
            states_SBH = states_SBH[: taken_BF.size(1)]
            levels.append(self._candidates(states_SBH, round, width, levels, taken_BF, drawn))
            started += run_BF.size(1)
        return levels

    def _rows_run(self, widths: list[int], most: int | None) -> int:
        """Return how many rows run beyond the committed ones; at least 1, so that a mask has a column."""
        levels = _level_rows(widths[:-1], most)
        return max([1, *levels]) * max(len(levels), 1)

    def _candidates(
        self,
        states_SBH: Tensor,
        round: Round,
        width: int,
        above: list[Level],
        taken_BF: Tensor | None,
        drawn: bool,
    ) -> Level:
        """Return candidates of rows that continue `taken_BF` of the last level above."""
        probs_BFV = self._probabilities(states_SBH, round)
        batch, rows, _ = probs_BFV.shape
        if drawn:  # sample independently in every row
            uniform_BN = _unused(round, above, rows * width)
            tokens_BFC = draw(probs_BFV.unsqueeze(2).expand(-1, -1, width, -1), uniform_BN.view(batch, rows, width))
        else:
            tokens_BFC = probs_BFV.topk(width, dim=2).indices
        scores_BFC = probs_BFV.gather(2, tokens_BFC).double().log()
        if taken_BF is not None:
            scores_BFC = scores_BFC + above[-1].scores_BN.gather(1, taken_BF).unsqueeze(2)
        repeats_BFC = (tokens_BFC.unsqueeze(3) == tokens_BFC.unsqueeze(2)).tril(-1).any(dim=3)
        scores_BN = scores_BFC.masked_fill(repeats_BFC, -torch.inf).flatten(1)
        row_FC = torch.arange(rows, device=tokens_BFC.device).unsqueeze(1).expand(-1, width)
        return Level(tokens_BFC.flatten(1), scores_BN, row_FC.flatten().expand(batch, -1), probs_BFV, taken_BF)

    def _probabilities(self, states_SBH: Tensor, round: Round) -> Tensor:
        """Return probabilities [B, F, V]; at temperature 0 a beam is ordered by the model's own distribution."""
        logits_BFV = self.logits(states_SBH)
        return logits_BFV.softmax(-1) if round.sampling.greedy else round.sampling.probabilities(logits_BFV)


def _unused(round: Round, above: list[Level], count: int) -> Tensor:
    """Return random numbers [B, count] that earlier levels have not used."""
    before = sum(level.tokens_BN.size(1) for level in above)
    return round.noise.uniform(DRAFT, before + count)[:, before:]


def _level_rows(widths: list[int], most: int | None) -> list[int]:
    """Return how many candidates of every level are continued."""
    rows = [1]
    for width in widths:
        rows.append(rows[-1] * width if most is None else min(rows[-1] * width, most))
    return rows[1:]


class Tree(Grower):
    """Static tree with `tree` candidates per row at each level, or the `tree_nodes` most likely nodes of a larger tree.

    A static tree above temperature 0 is sampled with independent siblings, so `specinfer` and `spectr` can verify it. A
    dynamic tree (EAGLE-2, arXiv:2406.16858) is deterministic.
    """

    line = "a tree grown with the first module"
    settings_kind: ClassVar[type[Settings]] = TreeSettings
    settings: TreeSettings
    drafts_trees = True
    limit = "one with each level of 'tree'"
    remedy = "give a deeper tree, or tree_nodes"

    @property
    @override
    def most(self) -> int | None:
        return len(self.settings.tree or DEFAULT_TREE) if self.settings.tree_nodes is None else None

    @property
    @override
    def draws_siblings(self) -> bool:
        return self.settings.tree_nodes is None and self.config.use_draft_probs

    @override
    def nodes(self, count: int) -> int:
        widths, most = self._widths(count)
        run = self.past + self._rows_run(widths, most)
        return max(run, self.settings.tree_nodes or sum(_level_rows(widths, None)))

    def _widths(self, count: int) -> tuple[list[int], int | None]:
        """Return candidates per row of every level, and the largest number of continued rows of a level."""
        if self.settings.tree_nodes is not None:
            return [self.beam] * count, self.beam
        return [min(width, self.drafted) for width in self.settings.tree or DEFAULT_TREE][:count], None

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        drawn = self.draws_siblings and not round.sampling.greedy
        levels = self.grow(sequences, round, *self._widths(count), drawn)
        tokens_BN, parents_BN, scores_BN = _flattened(levels)
        if self.settings.tree_nodes is not None:
            return _likeliest(tokens_BN, parents_BN, scores_BN, self.settings.tree_nodes)
        if not drawn:
            return Draft(tokens_BN, None, parents_BN)
        probs = [_rows_of(level.probs_BFV, level.rows_BN) for level in levels]
        return Draft(tokens_BN, torch.cat(probs, dim=1), parents_BN)


class Beam(Grower):
    """The most likely of W chains that grow together (beam sampling of MTAD, arXiv:2407.09722).

    Of the W V continuations of W chains, the W most likely are kept. Above temperature 0 they are W samples, without
    replacement, from the joint distribution of these continuations. The best of several samples is not a sample of q,
    so a lossless rule treats it as a deterministic draft; only a rule that uses q as a score gets the path's q.
    """

    line = "the likeliest of W chains, grown with the first module"
    settings_kind: ClassVar[type[Settings]] = BeamSettings

    @override
    def nodes(self, count: int) -> int:
        return max(count, self.past + self._rows_run([self.beam] * count, self.beam))

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        width = self.beam
        levels = self.grow(sequences, round, [width] * count, width, drawn=not round.sampling.greedy)
        best_B1 = levels[-1].scores_BN.argmax(dim=1, keepdim=True)
        tokens, probs = [], []
        for level in reversed(levels):
            row_B1 = level.rows_BN.gather(1, best_B1)
            tokens.append(level.tokens_BN.gather(1, best_B1))
            probs.append(_rows_of(level.probs_BFV, row_B1))
            best_B1 = row_B1 if level.taken_BF is None else level.taken_BF.gather(1, row_B1)
        verifier = round.config.verifier
        takes_path_probs = verifier is not None and VERIFIERS[verifier].takes_path_probs
        probs_BNV = torch.cat(probs[::-1], dim=1) if takes_path_probs else None
        return Draft(torch.cat(tokens[::-1], dim=1), probs_BNV)

    @override
    def _candidates(
        self,
        states_SBH: Tensor,
        round: Round,
        width: int,
        above: list[Level],
        taken_BF: Tensor | None,
        drawn: bool,
    ) -> Level:
        """Return the `width` best continuations of all rows together."""
        probs_BFV = self._probabilities(states_SBH, round)
        scores_BFV = probs_BFV.double().log()
        if taken_BF is not None:
            scores_BFV = scores_BFV + above[-1].scores_BN.gather(1, taken_BF).unsqueeze(2)
        scores_BX = scores_BFV.flatten(1)
        if drawn:
            index_BN = _without_replacement(scores_BX, _unused(round, above, width))
        else:
            index_BN = scores_BX.topk(width, dim=1).indices
        repeats_BN = (index_BN.unsqueeze(2) == index_BN.unsqueeze(1)).tril(-1).any(dim=2)  # if too few are possible
        vocabulary, scores_BN = probs_BFV.size(2), scores_BX.gather(1, index_BN).masked_fill(repeats_BN, -torch.inf)
        return Level(index_BN % vocabulary, scores_BN, index_BN // vocabulary, probs_BFV, taken_BF)


def _without_replacement(scores_BX: Tensor, uniform_BN: Tensor) -> Tensor:
    """Draw N samples [B, N] without replacement, from the logarithms of weights."""
    weights_BX, drawn = (scores_BX - scores_BX.amax(dim=1, keepdim=True)).exp(), []
    for uniform_B in uniform_BN.unbind(1):
        drawn.append(draw(weights_BX, uniform_B).unsqueeze(1))
        weights_BX = weights_BX.scatter(1, drawn[-1], 0.0)
    return torch.cat(drawn, dim=1)


def _rows_of(values_BFV: Tensor, rows_BN: Tensor) -> Tensor:
    return values_BFV.gather(1, rows_BN.unsqueeze(2).expand(-1, -1, values_BFV.size(2)))


def _flattened(levels: list[Level]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, parents (as rows of a draft) and scores of all levels' candidates, each [B, N]."""
    parents, before, above = [torch.zeros_like(levels[0].tokens_BN)], 0, 0
    for level in levels[1:]:
        assert level.taken_BF is not None
        above, before = before, before + parents[-1].size(1)
        parents.append(level.taken_BF.gather(1, level.rows_BN) + above + 1)
    tokens_BN = torch.cat([level.tokens_BN for level in levels], dim=1)
    return tokens_BN, torch.cat(parents, dim=1), torch.cat([level.scores_BN for level in levels], dim=1)


def _likeliest(tokens_BN: Tensor, parents_BN: Tensor, scores_BN: Tensor, count: int) -> Draft:
    """Return the `count` nodes with the highest scores, which include all their parents, in their old order."""
    nodes = tokens_BN.size(1)
    # A child never scores higher than its parent; the stable sort keeps parents first among equals.
    order_BN = scores_BN.argsort(dim=1, descending=True, stable=True)[:, : min(count, nodes)]
    kept_BN = order_BN.sort(dim=1).values
    place_BR = torch.zeros(tokens_BN.size(0), nodes + 1, dtype=torch.long, device=tokens_BN.device)
    new_BN = torch.arange(1, kept_BN.size(1) + 1, device=tokens_BN.device).expand_as(kept_BN)
    place_BR.scatter_(1, kept_BN + 1, new_BN)
    parents_BN = place_BR.gather(1, parents_BN.gather(1, kept_BN))
    return Draft(tokens_BN.gather(1, kept_BN), None, parents_BN)
