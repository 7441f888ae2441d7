"""Choice of a draft token among the likeliest candidates: candidate logits, and their loss (heads/dflash2/).

    S_n(b) = s <h_n, w_b> + <x_n, v_b>          for candidates b of row n, s the factor of all logits

with w_b the row of the output layer, which this loss does not train, and v_b the row of the bias. The loss of a row is
the cross-entropy of S over its candidates. A label that is not among them replaces the last candidate, which has the
smallest logit:

    candidates 7 2 5, label 2     7 2 5, the label is the second        label 4     7 2 4, the label is the third

The bias logits are never computed over the whole vocabulary: a row reads only 16 rows of it. Under tensor parallelism,
each rank scores the candidates of its vocabulary slice, and all ranks get the sum.

Letters in names: N rows, C candidates, H hidden, R rank of the bias, X both side by side, V this rank's slice of the
vocabulary, D depths.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_mtp.losses.linear_cross_entropy import Targets
from megatron_mtp.model.head import Head

ROWS_AT_ONCE = 256
"""Rows whose candidates' weights are in memory at once: with 16 candidates and a hidden size of 5,120, 84 MB."""


def selector_loss(states: Sequence[Tensor], targets: Targets, head: Head) -> Tensor:
    """Compute the weighted sum over depths of the choice's cross-entropy.

    Args:
        states: states of each depth, [N, H + R].
        targets: targets with the candidates that the loss of the logits without bias has written.
        head: output layer with its bias.
    """
    assert targets.likeliest_DNC is not None
    labels_N1 = targets.labels_DN.reshape(-1, 1)
    tokens_NC = targets.likeliest_DNC.flatten(0, -2)
    lacks_N1 = (tokens_NC != labels_N1).all(dim=1, keepdim=True)
    tokens_NC = torch.cat([tokens_NC[:, :-1], torch.where(lacks_N1, labels_N1, tokens_NC[:, -1:])], dim=1)
    scores_NC = candidate_logits(torch.stack(list(states)).flatten(0, -2), tokens_NC, head)
    label_N = (tokens_NC == labels_N1).int().argmax(dim=1)
    losses_DN = cross_entropy(scores_NC, label_N, reduction="none").view_as(targets.mask_DN)
    return ((losses_DN * targets.mask_DN).flatten(1).sum(1) * targets.scale_D).sum()


def candidate_logits(states_NX: Tensor, tokens_NC: Tensor, head: Head) -> Tensor:
    """Compute S [N, C] in float32 or better, the same on every tensor-parallel rank."""
    assert head.bias_rows is not None
    hidden = head.weight.size(1)
    local_NC, is_own_NC = _own(tokens_NC, head)
    scores: Callable[..., Tensor] = _Scores.apply  # torch annotates it since 2.15
    unary_NC = scores(states_NX[:, :hidden], head.weight, local_NC) * head.logit_scale
    bias_NC = scores(states_NX[:, hidden:], head.bias_rows, local_NC)
    own_NC = (unary_NC + bias_NC).masked_fill(~is_own_NC, 0)
    summed_NC: Tensor = reduce_from_tensor_model_parallel_region(own_NC, group=head.tp_group)
    return summed_NC


def chosen_logits_(unary_NV: Tensor, states_NX: Tensor, head: Head) -> Tensor:
    """Write S of the candidates to this rank's vocabulary slice. All other tokens get probability 0.

    Args:
        unary_NV: logits without the bias; overwritten.
        states_NX: states of these logits.
        head: output layer with its bias and the number of candidates.
    """
    assert head.candidates is not None
    vocabulary = head.vocabulary()
    tokens_NC = vocabulary.largest(unary_NV, min(head.candidates, vocabulary.size))
    (local_NC, is_own_NC), never = _own(tokens_NC, head), max(torch.finfo(unary_NV.dtype).min, -1e30)
    scores_NC = candidate_logits(states_NX, tokens_NC, head).to(unary_NV).masked_fill(~is_own_NC, never)
    return unary_NV.fill_(never).scatter_reduce_(1, local_NC, scores_NC, "amax")


def _own(tokens_NC: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return rows of tokens in this rank's slice (0 for other ranks' tokens), and whether this rank has them."""
    local, is_own = head.vocabulary().own(tokens_NC.flatten())
    return local.view_as(tokens_NC), is_own.view_as(tokens_NC)


class _Scores(torch.autograd.Function):
    """Autograd products [N, C] of states [N, H] with chosen rows of a weight [V, H], in pieces in both directions."""

    @staticmethod
    def forward(ctx: Any, states_NH: Tensor, weight_VH: Tensor, rows_NC: Tensor) -> Tensor:
        ctx.save_for_backward(states_NH, weight_VH, rows_NC)
        exact = torch.promote_types(weight_VH.dtype, torch.float32)
        scores_NC = states_NH.new_empty(rows_NC.shape, dtype=exact)
        for these in _slices(len(rows_NC)):
            chosen_NCH = weight_VH[rows_NC[these]].to(exact)
            scores_NC[these] = (chosen_NCH @ states_NH[these].to(exact).unsqueeze(-1)).squeeze(-1)
        return scores_NC

    @staticmethod
    def backward(ctx: Any, gradient_NC: Tensor) -> tuple[Tensor | None, ...]:
        states_NH, weight_VH, rows_NC = ctx.saved_tensors
        trains_states, trains_weight, _ = ctx.needs_input_grad
        states_grad_NH = torch.empty_like(states_NH) if trains_states else None
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=gradient_NC.dtype) if trains_weight else None
        for these in _slices(len(rows_NC)):
            rows, gradient = rows_NC[these], gradient_NC[these]
            if states_grad_NH is not None:
                chosen_NCH = weight_VH[rows].to(gradient)
                states_grad_NH[these] = (gradient.unsqueeze(1) @ chosen_NCH).squeeze(1).to(states_grad_NH)
            if weight_grad_VH is not None:
                parts_NCH = gradient.unsqueeze(-1) * states_NH[these].to(gradient).unsqueeze(1)
                weight_grad_VH.index_add_(0, rows.flatten(), parts_NCH.flatten(0, 1))
        return states_grad_NH, None if weight_grad_VH is None else weight_grad_VH.to(weight_VH), None


def _slices(rows: int) -> list[slice]:
    return [slice(first, first + ROWS_AT_ONCE) for first in range(0, rows, ROWS_AT_ONCE)]
