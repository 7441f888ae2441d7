"""What every verifier is: a rule with its facts; and one pass over the nodes of a draft, as most rules find their path.

A node stands after its parent. So one pass tries the candidates of the row that the path has reached, moves on to the
accepted one, and finds the candidates of that one further right.

Letters in names: B batch, N drafted nodes, R = N + 1 rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtp.decoding.config import Settings
from megatron_mtp.decoding.types import Draft, Round, Verdict

Rule = Callable[[Tensor, Draft, Round], Verdict]
"""From the target's logits [B, R, V] to a verdict; pure, its random numbers are the round's."""


@dataclass(frozen=True)
class Verifier:
    """A rule with its facts; is called as the rule is.

    Attributes:
        line: the rule in a line, for tables.
        lossless: whether it keeps the target's distribution; one that does not runs only where a user names it.
        judges_trees: whether it can judge more than chains.
        needs_samples: whether the candidates of a row must be independent samples of one q.
        greedy_only: whether it is for temperature 0.
        takes_path_probs: whether it reads q as the score of a path, and not as what the path was sampled from.
        recordable: whether it reads nothing back to the host (`graphs.py`).
        settings_kind: the class of its own settings.
    """

    rule: Rule
    line: str
    lossless: bool = True
    judges_trees: bool = True
    needs_samples: bool = False
    greedy_only: bool = False
    takes_path_probs: bool = False
    recordable: bool = False
    settings_kind: type[Settings] = Settings

    def __call__(self, logits_BRV: Tensor, draft: Draft, round: Round) -> Verdict:
        """The verdict on a draft, from the target's logits [B, R, V] of its rows."""
        return self.rule(logits_BRV, draft, round)


def walk(draft: Draft, accepts: Callable[[int, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The rows on the accepted path [B, R], and the last of them [B].

    Args:
        accepts: called for every node in turn with its number, the row that each sequence has reached and whether the
            node is a candidate there; returns where it is accepted, and is ignored where it is no candidate.
    """
    parents_BN, valid_BN = draft.parents(), draft.valid()
    here_B = torch.zeros_like(parents_BN[:, 0]) if draft.nodes else parents_BN.new_zeros(parents_BN.size(0))
    kept = [torch.ones_like(here_B, dtype=torch.bool)]
    for node in range(draft.nodes):
        tried_B = (parents_BN[:, node] == here_B) & valid_BN[:, node]
        accepted_B = accepts(node, here_B, tried_B) & tried_B
        here_B = torch.where(accepted_B, node + 1, here_B)
        kept.append(accepted_B)
    return torch.stack(kept, dim=1), here_B


def row_of(values_BRV: Tensor, row_B: Tensor) -> Tensor:
    """[B, V]: one row of every sequence."""
    return values_BRV.gather(1, row_B.view(-1, 1, 1).expand(-1, 1, values_BRV.size(-1))).squeeze(1)


def chosen(values_BV: Tensor, token_B: Tensor) -> Tensor:
    """[B]: the value of one token of every sequence."""
    return values_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)
