"""Training objective: computes one scalar loss, and acceptance, from the hidden states of the trunk and MTP layers.

Masks, lambda, weights and normalizers are applied only here.

Letters in names: D depths, S sequence, B batch, H hidden, T rows of [S, B], or positions of this rank and copies from
other ranks; where acceptance is counted, V this rank's slice of the vocabulary, C positions of a chunk, L the later
positions that they need.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import binary_cross_entropy_with_logits

from megatron_mtp.data.batch import DepthBatch, LaterPositions, to_device, with_ages, with_blocks
from megatron_mtp.losses.linear_cross_entropy import Targets, Teacher, chunks, linear_loss
from megatron_mtp.losses.selector import chosen_logits_, selector_loss
from megatron_mtp.losses.token_loss import CrossEntropy, TokenLoss
from megatron_mtp.model.draft_vocabulary import NOT_DRAFTED
from megatron_mtp.model.head import Head
from megatron_mtp.model.stage_output import Drafted, StageOutput

if TYPE_CHECKING:
    from megatron_mtp.spec.config import MTPConfig


@dataclass(frozen=True)
class LossSum:
    """A masked loss sum, as scalars on the device.

    Attributes:
        total: masked sum of losses.
        tokens: number of unmasked tokens.
        whole_tokens: tokens of the whole microbatch; `tokens` may be a context-parallel rank's part of them.
    """

    total: Tensor
    tokens: Tensor
    whole_tokens: Tensor

    def report(self) -> Tensor:
        """Return total and tokens, [2], float. Megatron's logging sums them over microbatches and ranks, then divides.

        A tiny number replaces a count of 0, so that a depth without tokens logs 0 and not NaN; the metrics
        name such a depth.
        """
        return torch.stack([self.total.detach().float(), self.tokens.float().clamp(min=1e-20)])


@dataclass(frozen=True)
class HeadOutput:
    """Result of the objective for the MTP layers or a drafter.

    Attributes:
        loss: its part of the scalar that Megatron's schedule gets.
        depths: loss sums of depths 1 .. D.
        acceptance: counts [4, D] from `count_acceptance`, if requested.
        documents: numbers [N] of the documents in the corpus and their counts [N, 4, D], if the batch has them.
    """

    loss: Tensor
    depths: list[LossSum]
    acceptance: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class ObjectiveOutput:
    """Output of the model on the last pipeline stage.

    Attributes:
        loss: the scalar for Megatron's schedule, before division by the number of tokens.
        main: loss sum of the trunk.
        heads: results of the MTP layers and drafters.
    """

    loss: Tensor
    main: LossSum
    heads: list[HeadOutput]


@dataclass(frozen=True)
class NextTokensObjective:
    """Cross-entropy of the trunk plus the objectives of MTP layers and drafters.

    Attributes:
        heads: objectives, in the order of the model's heads.
        linear_main: whether the trunk's loss is computed in chunks, as for the MTP layers.
        trains_trunk: whether the trunk's loss is part of the total.
        known_main: function that returns the cached trunk loss of a microbatch, or computes it; None to always compute
            it.
    """

    heads: Sequence["HeadObjective"] = ()
    linear_main: bool = False
    trains_trunk: bool = True
    known_main: Callable[[DepthBatch, Callable[[], LossSum]], LossSum] | None = None

    def __call__(self, stage: StageOutput) -> ObjectiveOutput:
        """Compute the loss. The model calls this with the microbatch of every head."""
        assert stage.batches is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_trunk):
            batch, computed = stage.batches[0], partial(self._main, stage.hidden_SBH, stage.head, stage.batches[0])
            main = computed() if self.known_main is None else self.known_main(batch, computed)
        made = [head(stage.hidden_SBH, drafted) for head, drafted in zip(self.heads, stage.drafted, strict=True)]
        return ObjectiveOutput(sum((each.loss for each in made), main.total), main, made)

    def _main(self, hidden_SBH: Tensor, head: Head, batch: DepthBatch) -> LossSum:
        mask_BS, whole_tokens = batch.loss_mask_BS, batch.whole_tokens[0]
        if not self.linear_main:
            losses_BS = head.cross_entropy(batch.labels_BS, head.project(hidden_SBH))
            return sum_losses(losses_BS, mask_BS, whole_tokens)
        targets = Targets(batch.labels_BS.t()[None], mask_BS.t()[None], torch.ones_like(whole_tokens)[None])
        total, _ = linear_loss(CrossEntropy(), [head.whole(hidden_SBH)], targets, head.weight, head.vocabulary())
        return LossSum(total, mask_BS.float().sum(), whole_tokens)


@dataclass(frozen=True)
class HeadObjective:
    """Loss of every depth of the MTP layers or a drafter, and acceptance if it is measured.

    Attributes:
        depth_weights: loss weights of depths 1 .. D: lambda / D times the weight of the depth.
        cp_group: context-parallel ranks that share every sequence.
        depth_loss: the loss of every depth.
        per_token: whether `--calculate-per-token-loss` is on.
        beside_main: whether the trunk's loss trains the output layer in the same backward pass through autograd.
        kept_positions: function that selects the positions of a whole sequence to train on; None for all.
        measures_acceptance: whether to count acceptance.
        base_share: loss weight of the logits without the bias by previous tokens; the logits with it get the rest.
    """

    depth_weights: Sequence[float]
    cp_group: ProcessGroup
    depth_loss: TokenLoss = field(default_factory=CrossEntropy)
    per_token: bool = False
    beside_main: bool = False
    kept_positions: Callable[[int], Tensor | None] = lambda _: None
    measures_acceptance: bool = False
    base_share: float = 0.0

    def __call__(self, hidden_SBH: Tensor, drafted: Drafted) -> HeadOutput:
        """Compute the loss of this head, its loss sums, and acceptance; `hidden_SBH` are the trunk's states."""
        later = self.later_positions(drafted.batch.positions_S, len(drafted.hidden), drafted.batch.blocks_A)
        drafted = replace(drafted, batch=drafted.batch.of_blocks())
        loss, depths = self.of_depths(hidden_SBH.detach(), drafted, later)
        if not self.measures_acceptance:
            return HeadOutput(loss, depths)
        assert later is not None
        batch = drafted.batch
        counts_4DSB = accepted_positions(hidden_SBH, drafted.hidden, drafted.head, batch.loss_mask_DBS, later)
        documents = None if batch.document_BS is None else sums_of_documents(counts_4DSB, batch.document_BS)
        return HeadOutput(loss, depths, counts_4DSB.sum((2, 3)), documents)

    def later_positions(
        self, positions_S: Tensor, depths: int, chosen_A: Tensor | None = None
    ) -> LaterPositions | None:
        """Return the indices of the trunk's states at later positions; None if no loss compares with them."""
        if not (self.measures_acceptance or self.depth_loss.needs_teacher):
            return None
        return LaterPositions(positions_S, depths, self.cp_group, chosen_A)

    def of_depths(
        self, trunk_SBH: Tensor, drafted: Drafted, later: LaterPositions | None
    ) -> tuple[Tensor, list[LossSum]]:
        """Compute the loss part of all depths and each depth's sum for logging; `trunk_SBH` are the teacher's states.

        A drafter's confidence learns the acceptance rate of its sampled drafts, and a selector learns to choose the
        label among the likeliest tokens. The logs do not include these losses, nor the loss of the logits without bias.
        """
        head, depth_hidden, confidence_DSB = drafted.head, drafted.hidden, drafted.confidence_DSB
        batch = self._counted(head, drafted.batch)
        kept_S, share, positions = None, 1.0, batch.positions_S.numel() * self.cp_group.size()  # kept: on the host
        if (kept := self.kept_positions(positions)) is not None:  # of all ranks
            kept_S = torch.isin(batch.positions_S, kept).nonzero()[:, 0]
            share = kept.numel() / positions
        teacher = self._teacher(trunk_SBH, head, later)
        labels_DBS, mask_DBS = _chosen(batch.labels_DBS, kept_S), _chosen(batch.loss_mask_DBS, kept_S).float() / share
        taught_DBS = None
        if teacher is not None and later is not None:
            where_DS = torch.stack([later.where(depth) for depth in range(1, len(depth_hidden) + 1)])
            rows_B1 = torch.arange(labels_DBS.size(1)).unsqueeze(1)
            taught_DBS = len(rows_B1) * _chosen(where_DS, kept_S).unsqueeze(1) + rows_B1  # in the rows of [S, B]
        scale_D = depth_scales(batch.whole_tokens, self.depth_weights, self.per_token)
        overlap_DBS = None if confidence_DSB is None else torch.zeros_like(mask_DBS)
        rows, vocabulary, biased = head.draft_weight, head.vocabulary(drafts=True), head.bias_rows
        states = [_chosen(head.whole_drafts(state_SBH).transpose(0, 1), kept_S, 1) for state_SBH in depth_hidden]
        likeliest_DBSC, unary = None, states
        if head.candidates is not None:
            count = min(head.candidates, vocabulary.size)
            likeliest_DBSC = labels_DBS.new_zeros(*labels_DBS.shape, count)  # some positions do not count
            biased, unary = None, [state_BSX[..., : rows.size(1)] for state_BSX in states]
        targets = Targets(labels_DBS, mask_DBS, scale_D, taught_DBS, overlap_DBS, likeliest_DBSC)
        total, sums_D = linear_loss(
            self.depth_loss, unary, targets, rows, vocabulary, teacher, self.beside_main, biased
        )
        if likeliest_DBSC is not None:
            total = total + selector_loss(states, targets, head)
        if self.base_share and biased is not None:
            plain = [state_BSX[..., : rows.size(1)] for state_BSX in states]
            base, _ = linear_loss(self.depth_loss, plain, targets, rows, vocabulary, teacher, self.beside_main)
            total = (1 - self.base_share) * total + self.base_share * base
        if confidence_DSB is not None and overlap_DBS is not None:
            total = total + _confidence_loss(confidence_DSB.transpose(1, 2), targets, overlap_DBS)
        sums = [LossSum(*each) for each in zip(sums_D, mask_DBS.sum((1, 2)), batch.whole_tokens[1:], strict=True)]
        return total, sums

    def _counted(self, head: Head, batch: DepthBatch) -> DepthBatch:
        """Convert labels to draft vocabulary indices, and compute the masks of counted positions.

        Labels outside of it count nowhere, unless there is a teacher. Where the loss couples depths, a position counts
        only if every depth does: no chain leaves its document.
        """
        mask_DBS = batch.loss_mask_DBS
        if head.draft_vocabulary is not None:
            labels_DBS = head.draft_vocabulary.index_V[batch.labels_DBS]
            batch = replace(batch, labels_DBS=labels_DBS)
            if not self.depth_loss.needs_teacher:
                batch = self._masked(batch, mask_DBS * (labels_DBS != NOT_DRAFTED))
        if not self.depth_loss.couples_depths:
            return batch
        return self._masked(batch, batch.loss_mask_DBS.float().amin(0).expand_as(mask_DBS))

    def _masked(self, batch: DepthBatch, mask_DBS: Tensor) -> DepthBatch:
        """Replace the masks of the depths, counted over the whole microbatch."""
        tokens_D = mask_DBS.float().sum((1, 2))
        torch.distributed.all_reduce(tokens_D, group=self.cp_group)
        whole_tokens = torch.cat([batch.whole_tokens[:1], tokens_D])
        return replace(batch, loss_mask_DBS=mask_DBS, whole_tokens=whole_tokens)

    @torch.no_grad()
    def _teacher(self, trunk_SBH: Tensor, head: Head, later: LaterPositions | None) -> Teacher | None:
        """Return the trunk's states, of this rank and of other ranks as needed, row by row of [S, B]."""
        if later is None or not self.depth_loss.needs_teacher:
            return None
        states_TH = later.lookup(head.whole(trunk_SBH)).flatten(0, 1)
        if self.depth_loss.needs_whole_teacher:
            return Teacher(states_TH, head.weight)
        return Teacher(states_TH, None if head.own_rows is None else head.taught_weight)


def _confidence_loss(confidence_DBS: Tensor, targets: Targets, overlap_DBS: Tensor) -> Tensor:
    """Return binary cross-entropy between logits of acceptance and the actual acceptance rates of drafts."""
    errors_DBS = binary_cross_entropy_with_logits(confidence_DBS.to(overlap_DBS), overlap_DBS, reduction="none")
    return ((errors_DBS * targets.mask_DN).sum((1, 2)) * targets.scale_D).sum()


def _chosen(values: Tensor, kept_S: Tensor | None, dim: int = -1) -> Tensor:
    return values if kept_S is None else values.index_select(dim, to_device(kept_S, values.device))


# --- one scalar from the trunk's and the depths' sums of losses ------------------------------------------------------
#
# By default Megatron's schedule divides this scalar by the microbatch's count of tokens. With
# `--calculate-per-token-loss` it divides every gradient by the count of the global batch. So the scalar is
#
#     default     sum_main + sum_d w_d T sum_d / T_d     then divided by T
#     per token   sum_main + sum_d w_d sum_d             then divided by the global T
#
# with w_d = lambda / D (times the depth's own weight), T the main tokens and T_d those of depth d. The second is the
# paper's normalizer (arXiv:2412.19437, eq. 24 divides every depth by T), and does not depend on how a global batch is
# cut. Under context parallelism every rank has a part of the sums, and T and T_d are counts of the whole microbatch, so
# the ranks' scalars add up to that of the microbatch. An empty mask gives loss 0 and gradient 0.


def sum_losses(losses_BS: Tensor, mask_BS: Tensor, whole_tokens: Tensor) -> LossSum:
    """Sum losses over unmasked positions. Masked positions are ignored even if their loss is not finite."""
    mask_BS = mask_BS.float()
    counted_BS = losses_BS.float().masked_fill(mask_BS == 0, 0) * mask_BS
    return LossSum(counted_BS.sum(), mask_BS.sum(), whole_tokens)


def depth_scales(whole_tokens: Tensor, weights: Sequence[float], per_token: bool) -> Tensor:
    """Return the factors [D] of the masked sums of the depths in the scalar for Megatron's schedule.

    Args:
        whole_tokens: [1 + D], number of unmasked tokens of the trunk and of each depth in the whole microbatch.
        weights: w_1 .. w_D.
        per_token: whether `--calculate-per-token-loss` is on.
    """
    weight_D = whole_tokens.new_empty(len(weights))
    for weight_1, weight in zip(weight_D, weights, strict=True):
        weight_1.fill_(weight)  # a copy from the host would wait for the GPU
    return weight_D if per_token else weight_D * whole_tokens[0].int() / whole_tokens[1:].clamp(min=1)


# --- lambda and weights, step by step --------------------------------------------------------------------------------


def scaling_factor(args: Namespace, settings: "MTPConfig", step: int) -> float:
    """Return lambda of this step, scheduled from `--mtp-loss-scaling-factor` to `--mtp-loss-final-factor`."""
    first: float = args.mtp_loss_scaling_factor
    if settings.mtp_loss_schedule == "constant":
        return first
    given = settings.mtp_loss_schedule_steps
    progress = min(step / (given if given >= 1 else given * args.train_iters), 1)
    return settings.lambda_at(first, progress)


def depth_weights(
    settings: "MTPConfig", depths: int, factor: float, loss: TokenLoss | type[TokenLoss] = CrossEntropy
) -> list[float]:
    """Return the loss weights of depths 1 .. D: lambda / D times `--mtp-loss-weights`; `factor` is lambda.

    A drafter's loss is the sum over its steps, without the division by D. For a loss that couples depths, these are the
    terms of one mean, so they add up to lambda.
    """
    is_even = loss.weighs_depths and settings.mtp_loss_weights is None
    weights = [1.0] * depths if is_even else settings.loss_weights(depths)
    terms = sum(weights) if loss.couples_depths else depths if settings.drafter is None else 1
    return [factor / terms * weight for weight in weights]


def base_share(settings: "MTPConfig", progress: float) -> float:
    """Return the loss weight of the logits without the bias after this fraction of the run; 0 in evaluation."""
    if settings.kind is None or settings.kind.base_share is None or not torch.is_grad_enabled():
        return 0.0
    return settings.kind.base_share(progress)


def with_draws(batch: DepthBatch, settings: "MTPConfig", seed: tuple[int, int], positions: int) -> DepthBatch:
    """Return a rank's part of a batch together with the random draws of this step.

    The draws are the blocks that a block drafter is trained on and, in training with --mtp-hidden-state-mixing, the
    states that the MTP layers continue from.

    Args:
        seed: (run, step).
        positions: positions of a whole sequence.
    """
    if settings.kind is not None and (blocks := settings.kind.blocks(vars(settings))) is not None:
        batch = with_blocks(batch, blocks, seed, positions)
    if settings.mtp_hidden_state_mixing and torch.is_grad_enabled():
        batch = with_ages(batch, seed, positions)
    return batch


def kept_positions(fraction: float, seed: tuple[int, int], positions: int) -> Tensor | None:
    """Select the positions of whole sequences to train on; None for all.

    The selection depends only on `seed`, which is (run, step), so every rank draws the same, even after a resume.
    """
    if fraction == 1:
        return None
    generator = torch.Generator(device="cpu").manual_seed(hash(seed) % 2**63)
    return torch.randperm(positions, generator=generator, device="cpu")[: math.ceil(fraction * positions)]


# --- acceptance of drafts: what a verifier would do with them --------------------------------------------------------
#
# At position i depth d drafts t_{i+d+1}, which the trunk predicts at position i + d. Greedy: a draft is accepted if
# both argmaxes agree and the earlier depths were accepted at this position. Sampled: a draft from q is accepted with
# probability sum_v min(p, q), with p the trunk's distribution (Leviathan et al., arXiv:2211.17192, section 3.2).
#
# With a draft vocabulary q is over its tokens, and p over all.
#
# Positions are taken in chunks, as in the losses, so that all logits are never in memory at once. A chunk of positions
# 0 1 2 and two depths needs the trunk's logits at 1 2 3 4, which are computed once for both depths.


@torch.no_grad()
def count_acceptance(
    hidden_SBH: Tensor, depth_hidden: list[Tensor], head: Head, loss_mask_DBS: Tensor, later: LaterPositions
) -> Tensor:
    """Count acceptance [4, D], float, over this rank's positions; the same on every tensor-parallel rank.

    They are sums of `accepted_positions`. Add counts over microbatches and ranks before asking for rates.
    """
    return accepted_positions(hidden_SBH, depth_hidden, head, loss_mask_DBS, later).sum((2, 3))


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
    where_DS = torch.stack([later.where(depth) for depth in range(1, len(depths) + 1)])
    positions, rows, _ = depths[0].shape
    judged = []
    for chunk in chunks(positions, rows * len(head.weight), trunk_TBH.is_cuda):
        pair = where_DS[:, chunk].unique(return_inverse=True)
        looked_L, where_DC = (to_device(rows, trunk_TBH.device) for rows in pair)
        judged.append(_judge(trunk_TBH[looked_L], where_DC, [state_SBH[chunk] for state_SBH in depths], head))
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


def _judge(trunk_LBH: Tensor, where_DC: Tensor, depths: list[Tensor], head: Head) -> tuple[Tensor, Tensor]:
    """Return whether the argmaxes agree at a chunk's positions, and the distributions' overlap, both [D, C, B]."""
    vocabulary = head.vocabulary()
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
    """Return logits of drafts, whose states may have a part for a bias.

    Tokens outside the draft vocabulary are excluded.
    """
    if head.candidates is not None:
        unary_NBV = _logits(states_NBH[..., : head.weight.size(1)], head)
        return chosen_logits_(unary_NBV.flatten(0, 1), states_NBH.flatten(0, 1), head).view_as(unary_NBV)
    weight_KX = head.draft_weight if head.bias_rows is None else torch.cat([head.draft_weight, head.bias_rows], dim=1)
    drafted_NBK = _logits(states_NBH, head, weight_KX)
    if head.draft_vocabulary is None:
        return drafted_NBK
    logits_NBV = drafted_NBK.new_full((*drafted_NBK.shape[:-1], len(head.weight)), -torch.inf)
    return logits_NBV.index_copy_(-1, head.draft_vocabulary.rows_K, drafted_NBK)
