"""Loss of a draft head: from the hidden states of the trunk and the head to one scalar.

Masks, weights and normalizers are applied only here.

Letters in names: D depths, S sequence, B batch, H hidden, T rows of [S, B], or positions of this rank and copies from
other ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import binary_cross_entropy_with_logits

from megatron_mtp.data.batch import DepthBatch, LaterPositions, to_device, with_ages, with_blocks
from megatron_mtp.losses.linear_cross_entropy import Targets, Teacher, linear_loss
from megatron_mtp.losses.selector import selector_loss
from megatron_mtp.losses.token_loss import CrossEntropy, TokenLoss
from megatron_mtp.model.draft_vocabulary import NOT_DRAFTED
from megatron_mtp.model.head import Head
from megatron_mtp.model.stage_output import Drafted

if TYPE_CHECKING:
    from megatron_mtp.spec.config import MTPConfig

Documents = tuple[Tensor, Tensor]
"""Numbers [N] of documents in the corpus, and their acceptance counts [N, 4, D]."""

Measure = Callable[[Tensor, Drafted, LaterPositions], tuple[Tensor, Documents | None]]
"""Function from the trunk's states, a head's output and later positions to acceptance counts [4, D], and those of
documents if the batch has them (`acceptance.py`).
"""


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
        acceptance: acceptance counts [4, D], if measured.
        documents: those of documents, if the batch has them.
    """

    loss: Tensor
    depths: list[LossSum]
    acceptance: Tensor | None = None
    documents: Documents | None = None


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
        measure: counts acceptance; None to leave it out.
        base_share: loss weight of the logits without the bias by previous tokens; the logits with it get the rest.
    """

    depth_weights: Sequence[float]
    cp_group: ProcessGroup
    depth_loss: TokenLoss = field(default_factory=CrossEntropy)
    per_token: bool = False
    beside_main: bool = False
    kept_positions: Callable[[int], Tensor | None] = lambda _: None
    measure: Measure | None = None
    base_share: float = 0.0

    def __call__(self, hidden_SBH: Tensor, drafted: Drafted) -> HeadOutput:
        """Compute the loss of this head, its loss sums, and acceptance; `hidden_SBH` are the trunk's states."""
        later = self.later_positions(drafted.batch.positions_S, len(drafted.hidden), drafted.batch.blocks_A)
        drafted = replace(drafted, batch=drafted.batch.of_blocks())
        loss, depths = self.of_depths(hidden_SBH.detach(), drafted, later)
        if self.measure is None:
            return HeadOutput(loss, depths)
        assert later is not None
        return HeadOutput(loss, depths, *self.measure(hidden_SBH, drafted, later))

    def later_positions(
        self, positions_S: Tensor, depths: int, chosen_A: Tensor | None = None
    ) -> LaterPositions | None:
        """Return the indices of the trunk's states at later positions; None if no loss compares with them."""
        if self.measure is None and not self.depth_loss.needs_teacher:
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
        kept_S, share, positions = None, 1.0, batch.positions_S.numel() * self.cp_group.size()  # on the CPU
        if (kept := self.kept_positions(positions)) is not None:  # the same positions on all ranks
            kept_S = torch.isin(batch.positions_S, kept).nonzero()[:, 0]
            share = kept.numel() / positions
        teacher = self._teacher(trunk_SBH, head, later)
        labels_DBS, mask_DBS = _chosen(batch.labels_DBS, kept_S), _chosen(batch.loss_mask_DBS, kept_S).float() / share
        taught_DBS = None
        if teacher is not None and later is not None:
            where_DS = torch.stack([later.where(depth) for depth in range(1, len(depth_hidden) + 1)])
            rows_B1 = torch.arange(labels_DBS.size(1)).unsqueeze(1)
            taught_DBS = len(rows_B1) * _chosen(where_DS, kept_S).unsqueeze(1) + rows_B1  # rows of the flattened [S, B]
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


# --- one scalar from the losses of trunk and MTP layers --------------------------------------------------------------
#
# By default Megatron's schedule divides this scalar by the microbatch's token count. With `--calculate-per-token-loss`
# it divides every gradient by the token count of the global batch. So the scalar is
#
#     default     sum_main + sum_d w_d T sum_d / T_d     then divided by T
#     per token   sum_main + sum_d w_d sum_d             then divided by the global T
#
# where w_d = lambda / D (times the weight of depth d), T counts the main tokens, and T_d counts those of depth d. The
# second is the paper's normalization (arXiv:2412.19437, eq. 24 divides every depth by T); it does not depend on how the
# global batch is split into microbatches. Under context parallelism each rank holds partial sums, while T and T_d count
# the whole microbatch, so the ranks' scalars add up to the microbatch's. An empty mask gives loss 0 and gradient 0.


def depth_scales(whole_tokens: Tensor, weights: Sequence[float], per_token: bool) -> Tensor:
    """Return the factors [D] of the masked sums of the depths in the scalar for Megatron's schedule.

    Args:
        whole_tokens: [1 + D], number of unmasked tokens of the trunk and of each depth in the whole microbatch.
        weights: w_1 .. w_D.
        per_token: whether `--calculate-per-token-loss` is on.
    """
    weight_D = whole_tokens.new_empty(len(weights))
    for weight_1, weight in zip(weight_D, weights, strict=True):
        weight_1.fill_(weight)  # filling from a Python number avoids a copy from the host, which would synchronize
    return weight_D if per_token else weight_D * whole_tokens[0].int() / whole_tokens[1:].clamp(min=1)


# --- weights and draws of a step --------------------------------------------------------------------------------------


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
