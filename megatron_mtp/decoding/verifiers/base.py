"""What every verifier is: a rule, and what has to be known about it to choose it."""

from collections.abc import Callable
from dataclasses import dataclass

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
