"""Acceptance of drafts, measured on a teacher-forced pass: what a verifier would do with them.

At slot i depth d drafts t_{i+d+1}; the trunk's word on the same token stands at slot i + d. Greedy: the draft is
accepted if both argmaxes agree, given that the depths before it were accepted at this slot. Sampled: a draft from q is
accepted with probability sum_v min(p, q) (Leviathan et al., arXiv:2211.17192, section 3.2).

With a draft vocabulary the drafts are of its tokens alone, and the trunk's word is of all.

Slots are taken in chunks, as by the losses, so that no [S, B, V] logits are ever there. Of a chunk of slots 0 1 2 and
two depths, the trunk's words at 1 2 3 4 are looked up: one product for slots that several depths share.

Letters in names: D depths, S sequence, B batch, H hidden, V this rank's slice of the vocabulary, C slots of a chunk, L
later slots that they look at, T slots of this rank and copies of others'.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.losses.linear_cross_entropy import CHUNK_BYTES, CHUNK_BYTES_CUDA
from megatron_mtp.losses.vocabulary import Vocabulary
from megatron_mtp.model.sharing import Head
from megatron_mtp.training.later_slots import LaterSlots


@dataclass(frozen=True)
class AcceptanceCounts:
    """Sums over slots, each [D], float; add them over microbatches and ranks before asking for rates.

    Attributes:
        valid: slots that are not masked at depth d; one that is never reaches the depths after it.
        reached: of these, the ones where depths 1 .. d-1 were accepted.
        accepted: of these, the ones where depth d is accepted too.
        overlap: sum over valid slots of sum_v min(p, q).
    """

    valid: Tensor
    reached: Tensor
    accepted: Tensor
    overlap: Tensor

    def stacked(self) -> Tensor:
        """[4, D]"""
        return torch.stack([self.valid, self.reached, self.accepted, self.overlap])


@dataclass(frozen=True)
class AcceptanceRates:
    """Rates by depth, depth 1 first.

    Attributes:
        conditional: accepted at depth d, given that the depths before were.
        overlap: expected acceptance of a sampled draft at temperature 1.
    """

    conditional: list[float]
    overlap: list[float]

    @property
    def from_start(self) -> list[float]:
        """Depths 1 .. d are all accepted: prod_{k<=d} conditional_k."""
        return list(accumulate(self.conditional, mul))

    @property
    def length(self) -> float:
        """Expected accepted length, 1 + sum_d from_start_d: tokens per target forward."""
        return 1.0 + sum(self.from_start)


@torch.no_grad()
def count_acceptance(
    hidden_SBH: Tensor, depth_hidden: list[Tensor], head: Head, batch: DepthBatch, cp_group: ProcessGroup
) -> AcceptanceCounts:
    """Counts of this rank's slots; the same on every tensor-parallel rank."""
    later = LaterSlots(batch.slots_S, len(depth_hidden), cp_group)
    trunk_TBH = later.lookup(head.whole(hidden_SBH))
    depths = [head.whole(state_SBH) for state_SBH in depth_hidden]
    where_DS = torch.stack([later.where(depth) for depth in range(1, len(depths) + 1)])
    judged = []
    for chunk in _chunks(depths[0], head):
        looked_L, where_DC = where_DS[:, chunk].unique(return_inverse=True)
        judged.append(_judge(trunk_TBH[looked_L], where_DC, [state_SBH[chunk] for state_SBH in depths], head))
    agree_DSB, overlap_DSB = (torch.cat(parts, dim=1) for parts in zip(*judged, strict=True))
    valid_DSB = batch.loss_mask_DBS.transpose(1, 2) > 0
    accepted_DSB = (valid_DSB & agree_DSB).cumprod(dim=0) > 0
    reached_DSB = valid_DSB.clone()
    reached_DSB[1:] &= accepted_DSB[:-1]
    counted = (valid_DSB, reached_DSB, accepted_DSB, overlap_DSB * valid_DSB)
    return AcceptanceCounts(*(each_DSB.sum(dim=(1, 2)).float() for each_DSB in counted))


def acceptance_rates(stacked_4D: Tensor) -> AcceptanceRates:
    """Rates from summed counts (`AcceptanceCounts.stacked`); a depth that was never reached has rate 0."""
    valid, reached, accepted, overlap = stacked_4D.tolist()
    conditional = [a / r if r else 0.0 for a, r in zip(accepted, reached, strict=True)]
    return AcceptanceRates(conditional, [o / v if v else 0.0 for o, v in zip(overlap, valid, strict=True)])


def _chunks(state_SBH: Tensor, head: Head) -> Iterator[slice]:
    """So many slots at once that their logits in float32 are as large as a chunk of the losses."""
    slots, rows, _ = state_SBH.shape
    at_once = max(1, (CHUNK_BYTES_CUDA if state_SBH.is_cuda else CHUNK_BYTES) // (4 * rows * len(head.weight)))
    for start in range(0, slots, at_once):
        yield slice(start, start + at_once)


def _judge(trunk_LBH: Tensor, where_DC: Tensor, depths: list[Tensor], head: Head) -> tuple[Tensor, Tensor]:
    """Of a chunk's slots, whether the argmaxes agree and how far the distributions overlap, both [D, C, B]."""
    vocabulary = Vocabulary(len(head.weight), head.tp_group, tokens=head.vocab_size)
    target_LBV = vocabulary.mask_padding_(_logits(trunk_LBH, head))
    words_LB = _argmax(target_LBV, head.tp_group)
    p_LBV, _ = vocabulary.softmax_(target_LBV)
    agree, overlap = [], []
    for state_CBH, where_C in zip(depths, where_DC, strict=True):
        draft_CBV = vocabulary.mask_padding_(_logits(state_CBH, head))
        if head.drafts is not None:
            draft_CBV.masked_fill_(~head.drafts.drafted_W, -torch.inf)
        agree.append(_argmax(draft_CBV, head.tp_group) == words_LB[where_C])
        q_CBV, _ = vocabulary.softmax_(draft_CBV)
        overlap.append(vocabulary.sum(torch.minimum(p_LBV[where_C], q_CBV, out=q_CBV)).squeeze(-1))
    return torch.stack(agree), torch.stack(overlap)


def _logits(states_NBH: Tensor, head: Head) -> Tensor:
    """This rank's slice of them, new and in float32."""
    product_NBV = states_NBH.to(head.weight.dtype) @ head.weight.t()
    return product_NBV.mul_(head.logit_scale).float()


def _argmax(logits_SBV: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Token of the largest logit over all slices, [S, B]; the lowest token among equals."""
    best_SB, token_SB = logits_SBV.max(dim=-1)
    if tp_group.size() == 1:
        return token_SB
    token_SB = token_SB + tp_group.rank() * logits_SBV.size(-1)
    best = [torch.empty_like(best_SB) for _ in range(tp_group.size())]
    tokens = [torch.empty_like(token_SB) for _ in range(tp_group.size())]
    torch.distributed.all_gather(best, best_SB, group=tp_group)
    torch.distributed.all_gather(tokens, token_SB, group=tp_group)
    winner_SB = torch.stack(best).argmax(dim=0, keepdim=True)
    return torch.stack(tokens).gather(0, winner_SB).squeeze(0)
