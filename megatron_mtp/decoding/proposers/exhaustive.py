"""Drafts every sequence of K tokens, for tiny vocabularies: the reference for joint decoding.

Letters in names: B batch, N drafted nodes, K tokens of a sequence, V vocabulary.
"""

from typing import TYPE_CHECKING, override

import torch

from megatron_mtp.decoding.config import MOST_DRAFTED
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.proposer import Proposer
from megatron_mtp.decoding.proposers.tree import MOST_NODES

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences


class Exhaustive(Proposer):
    """A tree of V + V^2 + .. + V^K nodes, level by level; V = 2, K = 2: a b, then aa ab ba bb.

    Raises:
        ValueError: the vocabulary has more tokens than a tree may have nodes.
    """

    line = "every sequence of K tokens, of a vocabulary of a few"
    drafts_trees = True
    recordable = True
    limit = f"as a tree of all sequences may have {MOST_NODES} nodes"
    remedy = "choose mtp_tree or draft_model_tree, which draft likely ones"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        if self.most == 0:
            raise ValueError(
                f"'exhaustive' drafts every token, and the vocabulary has {self.runner.vocab_size}; with more than "
                f"{MOST_NODES} {self.remedy}."
            )

    @property
    @override
    def most(self) -> int:
        return max(count for count in range(MOST_DRAFTED + 1) if self.nodes(count) <= MOST_NODES)

    @property
    @override
    def draws_siblings(self) -> bool:
        return False

    @override
    def nodes(self, count: int) -> int:
        return sum(self.runner.vocab_size**level for level in range(1, count + 1))

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        tokens, inner, batch = self.runner.vocab_size, 1 + self.nodes(count - 1), len(sequences.token_ids)
        device = sequences.length_B.device
        tokens_N = torch.arange(tokens, device=device).repeat(inner)
        parents_N = torch.arange(inner, device=device).repeat_interleave(tokens)
        return Draft(tokens_N.repeat(batch, 1), None, parents_N.repeat(batch, 1))
