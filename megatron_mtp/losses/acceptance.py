"""Acceptance of drafts: what a verifier would do with them, counted in training and evaluation.

At position i, depth d drafts t_{i+d+1}, which the trunk predicts at position i + d. Greedy: a draft is accepted if
both argmaxes agree and all earlier depths were accepted at this position. Sampled: a draft from q is accepted with
probability sum_v min(p, q), where p is the trunk's distribution (Leviathan et al., arXiv:2211.17192, section 3.2).

With a draft vocabulary, q covers its tokens and p covers all tokens.

Logits are computed in chunks of positions, as in the losses, so they are never all in memory. A chunk of positions
0 1 2 with two depths needs the trunk's logits at 1 2 3 4, computed once for both depths.

Letters in names: D depths, S sequence, B batch, H hidden, T positions of this rank and copies from other ranks, V this
rank's slice of the vocabulary, C positions of a chunk, L the later positions that they need, K rows that draft, X
hidden states and what their bias reads, P positions of all rows.
"""

import torch
from torch import Tensor

from megatron_mtp.data.batch import LaterPositions, to_device
from megatron_mtp.losses.head_objective import Documents
from megatron_mtp.losses.linear_cross_entropy import chunks
from megatron_mtp.losses.selector import chosen_logits_
from megatron_mtp.model.head import Head
from megatron_mtp.model.stage_output import Drafted


def measured(hidden_SBH: Tensor, drafted: Drafted, later: LaterPositions) -> tuple[Tensor, Documents | None]:
    """Count acceptance [4, D] of a head's drafts, and of each document if the batch has documents."""
    batch = drafted.batch
    counts_4DSB = accepted_positions(hidden_SBH, drafted.hidden, drafted.head, batch.loss_mask_DBS, later)
    documents = None if batch.document_BS is None else sums_of_documents(counts_4DSB, batch.document_BS)
    return counts_4DSB.sum((2, 3)), documents


@torch.no_grad()
def accepted_positions(
    hidden_SBH: Tensor, depth_hidden: list[Tensor], head: Head, loss_mask_DBS: Tensor, later: LaterPositions
) -> Tensor:
    """Return what each position adds to the acceptance counts, [4, D, S, B], float.

    The four rows: position is unmasked; all previous depths were accepted; this depth was accepted too; sum_v min(p,
    q). A position that is masked at one depth does not count for later ones.
    """
    trunk_TBH = later.lookup(head.whole(hidden_SBH))
    depths = [head.whole_drafts(state_SBH) for state_SBH in depth_hidden]
    weight_KX = _draft_weight(head)
    where_DS = torch.stack([later.where(depth) for depth in range(1, len(depths) + 1)])
    positions, rows, _ = depths[0].shape
    judged = []
    for chunk in chunks(positions, rows * len(head.weight), trunk_TBH.is_cuda):
        pair = where_DS[:, chunk].unique(return_inverse=True)
        looked_L, where_DC = (to_device(rows, trunk_TBH.device) for rows in pair)
        drafts = [state_SBX[chunk] for state_SBX in depths]
        judged.append(_judge(trunk_TBH[looked_L], where_DC, drafts, head, weight_KX))
    agree_DSB, overlap_DSB = (torch.cat(parts, dim=1) for parts in zip(*judged, strict=True))
    valid_DSB = loss_mask_DBS.transpose(1, 2) > 0
    accepted_DSB = (valid_DSB & agree_DSB).cumprod(dim=0) > 0
    reached_DSB = valid_DSB.clone()
    reached_DSB[1:] &= accepted_DSB[:-1]
    return torch.stack([valid_DSB.float(), reached_DSB.float(), accepted_DSB.float(), overlap_DSB * valid_DSB])


def sums_of_documents(counts_4DSB: Tensor, document_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers [N] of documents and their counts summed over positions, [N, 4, D]."""
    numbers_N, place_SB = document_BS.t().unique(return_inverse=True)
    sums_4DN = counts_4DSB.new_zeros(*counts_4DSB.shape[:2], len(numbers_N))
    sums_4DN.index_add_(2, place_SB.flatten(), counts_4DSB.flatten(2))
    return numbers_N, sums_4DN.permute(2, 0, 1)


def _judge(
    trunk_LBH: Tensor, where_DC: Tensor, depths: list[Tensor], head: Head, weight_KX: Tensor
) -> tuple[Tensor, Tensor]:
    """Return whether the argmaxes agree at a chunk's positions, and the distributions' overlap, both [D, C, B]."""
    vocabulary = head.vocabulary()
    target_LBV = vocabulary.mask_padding_(_logits(trunk_LBH, head, head.weight))
    targets_LB = vocabulary.argmax(target_LBV)
    p_LBV, _ = vocabulary.softmax_(target_LBV)
    agree, overlap = [], []
    for state_CBX, where_C in zip(depths, where_DC, strict=True):
        draft_CBV = vocabulary.mask_padding_(_draft_logits(state_CBX, head, weight_KX))
        agree.append(vocabulary.argmax(draft_CBV) == targets_LB[where_C])
        q_CBV, _ = vocabulary.softmax_(draft_CBV)
        overlap.append(vocabulary.sum(torch.minimum(p_LBV[where_C], q_CBV, out=q_CBV)).squeeze(-1))
    return torch.stack(agree), torch.stack(overlap)


def _logits(states_NBH: Tensor, head: Head, weight_VH: Tensor) -> Tensor:
    """This rank's slice of the logits, in new memory and in float32.

    The states are flattened, since torch multiplies strided ones [N, B, H] row by row, with N copies of the weight.
    """
    product_PV = states_NBH.flatten(0, 1).to(weight_VH.dtype) @ weight_VH.t()
    return product_PV.mul_(head.logit_scale).float().unflatten(0, states_NBH.shape[:2])


def _draft_weight(head: Head) -> Tensor:
    """Return the weight of the first logits of drafts; candidates get their bias after it."""
    if head.candidates is not None:
        return head.weight
    return head.draft_weight if head.bias_rows is None else torch.cat([head.draft_weight, head.bias_rows], dim=1)


def _draft_logits(states_NBX: Tensor, head: Head, weight_KX: Tensor) -> Tensor:
    """Return logits of drafts, whose states may have a part for a bias.

    Tokens outside the draft vocabulary are excluded.
    """
    if head.candidates is not None:
        unary_NBV = _logits(states_NBX[..., : weight_KX.size(1)], head, weight_KX)
        return chosen_logits_(unary_NBV.flatten(0, 1), states_NBX.flatten(0, 1), head).view_as(unary_NBV)
    drafted_NBK = _logits(states_NBX, head, weight_KX)
    if head.draft_vocabulary is None:
        return drafted_NBK
    logits_NBV = drafted_NBK.new_full((*drafted_NBK.shape[:-1], len(head.weight)), -torch.inf)
    return logits_NBV.index_copy_(-1, head.draft_vocabulary.rows_K, drafted_NBK)
