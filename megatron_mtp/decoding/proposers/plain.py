"""Plain decoding: nothing is drafted, and every forward of the trunk gives one token."""

from typing import TYPE_CHECKING, override

from megatron_mtp.decoding.proposers.base import Proposer
from megatron_mtp.decoding.types import Draft, Round

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences


class Plain(Proposer):
    """What all methods are compared with."""

    line = "nothing: one token a forward"
    limit = "since it is plain decoding"
    remedy = "choose another method"
    recordable = True

    @property
    @override
    def most(self) -> int:
        return 0

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        return Draft(sequences.tokens_BT[:, :0])
