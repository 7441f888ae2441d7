"""Acceptance of drafts, measured on a teacher-forced pass: what a verifier would do with them.

At slot i depth d drafts t_{i+d+1}; the trunk's word on the same token stands at slot i + d. Greedy: the draft is
accepted if both argmaxes agree, given that the depths before it were accepted at this slot. Sampled: a draft from q is
accepted with probability sum_v min(p, q) (Leviathan et al., arXiv:2211.17192, section 3.2).

With a draft vocabulary the drafts are of its tokens alone, and the trunk's word is of all.

Letters in names: D depths, S sequence, B batch, V this rank's slice of the vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import DepthBatch
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
        length: expected accepted length, 1 + sum_d prod_{k<=d} conditional_k: tokens per target forward.
    """

    conditional: list[float]
    overlap: list[float]
    length: float


@torch.no_grad()
def count_acceptance(
    hidden_SBH: Tensor, depth_hidden: list[Tensor], head: Head, batch: DepthBatch, cp_group: ProcessGroup
) -> AcceptanceCounts:
    """Counts of this rank's slots; the same on every tensor-parallel rank."""
    later = LaterSlots(batch.slots_S, len(depth_hidden), cp_group)
    target_SBV = head.project(hidden_SBH).float()
    targets = later.lookup(_argmax(target_SBV, head.tp_group))
    probabilities = later.lookup(_softmax_(target_SBV, head.tp_group))
    so_far_SB = torch.ones_like(targets[: len(batch.slots_S)], dtype=torch.bool)
    counts: list[list[Tensor]] = []
    for depth, (state_SBH, mask_BS) in enumerate(zip(depth_hidden, batch.loss_mask_DBS, strict=True), start=1):
        draft_SBV = head.draft_logits(state_SBH).float()
        valid_SB = mask_BS.transpose(0, 1) > 0
        reached_SB = so_far_SB & valid_SB
        where_S = later.where(depth)
        so_far_SB = reached_SB & (_argmax(draft_SBV, head.tp_group) == targets[where_S])
        overlap_SB = _overlap(probabilities[where_S], _softmax_(draft_SBV, head.tp_group), head)
        overlap = (overlap_SB * valid_SB).sum()
        counts.append([valid_SB.sum().float(), reached_SB.sum().float(), so_far_SB.sum().float(), overlap])
    return AcceptanceCounts(*torch.stack([torch.stack(row) for row in counts], dim=1))


def acceptance_rates(stacked_4D: Tensor) -> AcceptanceRates:
    """Rates from summed counts (`AcceptanceCounts.stacked`); a depth that was never reached has rate 0."""
    valid, reached, accepted, overlap = stacked_4D.tolist()
    conditional = [a / r if r else 0.0 for a, r in zip(accepted, reached, strict=True)]
    length, product = 1.0, 1.0
    for rate in conditional:
        product *= rate
        length += product
    return AcceptanceRates(conditional, [o / v if v else 0.0 for o, v in zip(overlap, valid, strict=True)], length)


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


def _softmax_(logits_SBV: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Probabilities over all slices, in the memory of the logits."""
    largest_SB1 = logits_SBV.amax(dim=-1, keepdim=True)
    torch.distributed.all_reduce(largest_SB1, op=torch.distributed.ReduceOp.MAX, group=tp_group)
    weights_SBV = logits_SBV.sub_(largest_SB1).exp_()
    total_SB1 = weights_SBV.sum(dim=-1, keepdim=True)
    torch.distributed.all_reduce(total_SB1, group=tp_group)
    return weights_SBV.div_(total_SB1)


def _overlap(p_SBV: Tensor, q_SBV: Tensor, head: Head) -> Tensor:
    overlap_SB = torch.minimum(p_SBV, q_SBV).sum(dim=-1)
    torch.distributed.all_reduce(overlap_SB, group=head.tp_group)
    return overlap_SB
