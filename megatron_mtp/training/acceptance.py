"""Acceptance of drafts, measured on a teacher-forced pass: what a verifier would do with them.

At position i depth d drafts t_{i+d+1}, which the trunk predicts at position i + d. Greedy: a draft is accepted if both
argmaxes agree and the earlier depths were accepted at this position. Sampled: a draft from q is accepted with
probability sum_v min(p, q), with p the trunk's distribution (Leviathan et al., arXiv:2211.17192, section 3.2).

With a draft vocabulary q is over its tokens, and p over all.

Positions are taken in chunks, as in the losses, so that all logits are never in memory at once. A chunk of positions
0 1 2 and two depths needs the trunk's logits at 1 2 3 4, which are computed once for both depths.

Letters in names: D depths, S sequence, B batch, H hidden, V this rank's slice of the vocabulary, C positions of a
chunk, L the later positions that they need, T positions of this rank and copies from other ranks.
"""

import torch
from torch import Tensor

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.data.batch import LaterPositions
from megatron_mtp.losses.chunks import chunks
from megatron_mtp.losses.vocabulary import vocabulary_of
from megatron_mtp.model.sharing import Head

MTP, DRAFTER = "mtp", "drafter"
"""What figures are called by: what drafts, and a drafter beside MTP layers."""


@torch.no_grad()
def count_acceptance(
    hidden_SBH: Tensor, depth_hidden: list[Tensor], head: Head, loss_mask_DBS: Tensor, later: LaterPositions
) -> Tensor:
    """Counts [4, D], float, over this rank's positions, the same on every tensor-parallel rank; `stats_of` reads them.

    A row each: positions that are not masked, those of them where the depths before were accepted, those where this
    depth is accepted too, and the sum of sum_v min(p, q). A position that is masked at a depth is not reached by later
    ones. Add counts over microbatches and ranks before asking for rates.
    """
    trunk_TBH = later.lookup(head.whole(hidden_SBH))
    depths = [head.whole_drafts(state_SBH) for state_SBH in depth_hidden]
    where_DS = torch.stack([later.where(depth) for depth in range(1, len(depths) + 1)])
    positions, rows, _ = depths[0].shape
    judged = []
    for chunk in chunks(positions, rows * len(head.weight), trunk_TBH.is_cuda):
        looked_L, where_DC = where_DS[:, chunk].unique(return_inverse=True)
        judged.append(_judge(trunk_TBH[looked_L], where_DC, [state_SBH[chunk] for state_SBH in depths], head))
    agree_DSB, overlap_DSB = (torch.cat(parts, dim=1) for parts in zip(*judged, strict=True))
    valid_DSB = loss_mask_DBS.transpose(1, 2) > 0
    accepted_DSB = (valid_DSB & agree_DSB).cumprod(dim=0) > 0
    reached_DSB = valid_DSB.clone()
    reached_DSB[1:] &= accepted_DSB[:-1]
    counted = (valid_DSB, reached_DSB, accepted_DSB, overlap_DSB * valid_DSB)
    return torch.stack([each_DSB.sum(dim=(1, 2)).float() for each_DSB in counted])


def stats_of(counts_4D: Tensor) -> AcceptanceStats:
    """The counts that drafting has too, of `count_acceptance`'s."""
    offered, reached, accepted = ([int(count) for count in counts] for counts in counts_4D[:3].tolist())
    return AcceptanceStats(
        offered_at=offered, reached_at=reached, accepted_at=accepted, overlap_at=counts_4D[3].tolist()
    )


def named(stats: AcceptanceStats, what: str = MTP) -> dict[str, float]:
    """Every figure by the name that it has in logs, metrics.jsonl, TensorBoard, W&B and reports."""
    lists = {
        "acceptance": stats.acceptance,
        "conditional acceptance": stats.conditional_acceptance,
        "overlap": stats.overlap,
    }
    figures = {f"{what}_{depth} {name}": rate for name, of in lists.items() for depth, rate in enumerate(of, start=1)}
    return {**figures, expected_length_of(what): stats.expected_length}


def expected_length_of(what: str) -> str:
    """The name of the expected accepted length; what drafts without another beside it needs no name there."""
    return "expected accepted length" if what == MTP else f"{what} expected accepted length"


def _judge(trunk_LBH: Tensor, where_DC: Tensor, depths: list[Tensor], head: Head) -> tuple[Tensor, Tensor]:
    """Return whether the argmaxes agree at a chunk's positions, and the distributions' overlap, both [D, C, B]."""
    vocabulary = vocabulary_of(head)
    target_LBV = vocabulary.mask_padding_(_logits(trunk_LBH, head))
    targets_LB = vocabulary.argmax(target_LBV)
    p_LBV, _ = vocabulary.softmax_(target_LBV)
    agree, overlap = [], []
    for state_CBH, where_C in zip(depths, where_DC, strict=True):
        draft_CBV = vocabulary.mask_padding_(_draft_logits(state_CBH, head))
        agree.append(vocabulary.argmax(draft_CBV) == targets_LB[where_C])
        q_CBV, _ = vocabulary.softmax_(draft_CBV)
        overlap.append(vocabulary.sum(torch.minimum(p_LBV[where_C], q_CBV, out=q_CBV)).squeeze(-1))
    return torch.stack(agree), torch.stack(overlap)


def _logits(states_NBH: Tensor, head: Head, weight_VH: Tensor | None = None) -> Tensor:
    """This rank's slice of the logits, in new memory and in float32."""
    weight_VH = head.weight if weight_VH is None else weight_VH
    product_NBV = states_NBH.to(weight_VH.dtype) @ weight_VH.t()
    return product_NBV.mul_(head.logit_scale).float()


def _draft_logits(states_NBH: Tensor, head: Head) -> Tensor:
    """The same of drafts, whose states may have a part for a bias; tokens that are not drafted have no probability."""
    weight_KX = head.draft_weight if head.bias_rows is None else torch.cat([head.draft_weight, head.bias_rows], dim=1)
    drafted_NBK = _logits(states_NBH, head, weight_KX)
    if head.draft_vocabulary is None:
        return drafted_NBK
    logits_NBV = drafted_NBK.new_full((*drafted_NBK.shape[:-1], len(head.weight)), -torch.inf)
    return logits_NBV.index_copy_(-1, head.draft_vocabulary.rows_K, drafted_NBK)
