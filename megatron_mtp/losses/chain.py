"""e2e_tv: the accepted length that is expected of all depths at a position, as a loss (arXiv:2606.12370, eq. 13).

With a_i = sum_v min(p_i, q_i) of depth i, the drafts of depth 1 .. j are all accepted with the probability A_j, and

    loss      sum_j w_j (1 - A_j),   A_j = a_1 a_2 .. a_j,   the weights w_j add to 1
    gradient  sum_{j>=i} w_j A_j  by -log a_i, of which overlap.py has the gradient

so that no a_i divides another: sum_{j>=i} w_j A_j / a_i, the derivative by a_i itself, is not needed.

Letters in names: N positions, D depths.
"""

from dataclasses import dataclass
from typing import override

from torch import Tensor

from megatron_mtp.losses.overlap import NegativeLogOverlap
from megatron_mtp.losses.token_loss import Joined


@dataclass(frozen=True)
class AcceptedLength(NegativeLogOverlap):
    """Sampled drafts up to every depth that are not all accepted; a depth's own number in logs is that of tv."""

    line = "the expected accepted length of all depths together, where drafts are sampled"
    couples_depths = True

    @override
    def joined(self, losses_ND: Tensor, weights_ND: Tensor) -> Joined:
        logs_ND = -losses_ND.cumsum(1)
        slopes_ND = (weights_ND * logs_ND.exp()).flip(1).cumsum(1).flip(1)
        return Joined(-(weights_ND * logs_ND.expm1()).sum(1), slopes_ND, -(-losses_ND).expm1())
