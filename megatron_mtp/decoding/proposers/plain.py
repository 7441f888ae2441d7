"""Plain decoding: a proposer that drafts nothing."""

from typing import override

from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.proposer import Proposer, Sequences


class Plain(Proposer):
    """Plain decoding: every forward pass of the trunk gives one token."""

    line = "nothing: one token a forward"
    limit = "since it is plain decoding"
    remedy = "choose another method"
    recordable = True

    @property
    @override
    def most(self) -> int:
        return 0

    @override
    def propose(self, sequences: Sequences, round: Round, count: int) -> Draft:
        return Draft(sequences.tokens_BT[:, :0])
