"""Output layer and loss together, in chunks of tokens: the logits of all tokens are never in memory at once.

In:  hidden states, the output layer's weight, and the targets of every position.
Out: one weighted sum of losses. On a CPU, positions that count at no depth, such as prompts and padding, cost
nothing if they are an eighth or more.

The weights of all positions are known in the forward pass, and the sum enters the total loss with one factor, the
upstream gradient. So the forward pass computes the gradients while a chunk's logits are in memory, and the backward
pass scales them. A chunk costs three matrix products, the same as an output layer with all logits. Memory:

    one chunk of logits + hidden gradients [N, H] + the smaller one of [V, H] in float32 and [N, V]

The last term is kept for the weight gradient (weight_gradient.py). A frozen output layer needs neither, and one product
less. An output layer with all logits holds both at once.

All depths form one sequence of rows, ordered by position, then by depth, and a chunk has whole positions. So a loss can
couple the depths of a position, and the trunk's logits are computed once for all depths: depth d at position i learns
from the trunk's state at i + d, as does depth d - 1 at i + 1.

    D = 3, a chunk of the positions 4 and 5       row of depth     1  2  3  1  2  3
                                                  the trunk's at   5  6  7  6  7  8     four rows of logits for six

Letters in names: N rows (positions times depths; positions of one depth in the arguments of `linear_loss`), H hidden, V
this rank's slice of the vocabulary, D depths, T states of the trunk. Positions may have several dimensions, as [B, S].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.data.batch import to_device
from megatron_mtp.losses.token_loss import Chunk, TokenLoss
from megatron_mtp.losses.weight_gradient import (
    Factors,
    Sum,
    add_product,
    deliver,
    keeps_factors,
    positions_beside_sum,
    scaled,
)
from megatron_mtp.model.vocabulary import Vocabulary
from megatron_mtp.spec.registry import Imported

KERNELS: Imported[Any] = Imported({"cuda": "megatron_mtp.losses.triton_chunk"})
"""Modules with kernels that compute losses and gradients of a chunk, by the type of their device."""

FLOAT16_GRADIENT = 2.0**8
"""Target size of the largest gradient of a float16 logit in the forward pass, before Megatron's loss scale applies:
unscaled gradients of unlikely tokens would be smaller than float16's smallest number. Hidden gradients, which are sums
over V, need the range above.
"""

ENTRIES = 512
"""Logits of a position that one product computes on a CPU. The library first copies the weight into its own layout, and
the copy then stays in a core's cache. With 64 to 128 positions that takes a seventh less time.
"""

MOST_COUNTED = 0.875
"""Share of positions that count up to which the others get no logits."""


@dataclass(frozen=True)
class Targets:
    """Targets of all depths.

    Attributes:
        labels_DN: tokens; with a draft vocabulary, their indices in it.
        mask_DN: float weight of each position in the sum of its depth; 0 leaves it out.
        scale_D: weight of each depth's sum in the total.
        taught_DN: index of the teacher state with the soft labels of each row, if the loss needs a teacher; preferably
            on the host.
        overlap_DN: output: acceptance rate of sampled drafts; only for losses that compute it.
        likeliest_DNC: output: the tokens with the largest logits, largest first.
    """

    labels_DN: Tensor
    mask_DN: Tensor
    scale_D: Tensor
    taught_DN: Tensor | None = None
    overlap_DN: Tensor | None = None
    likeliest_DNC: Tensor | None = None

    def at(self, places: tuple[Tensor, ...]) -> "Targets":
        """Return the targets of some positions, given an index for each of their dimensions."""
        index: tuple[slice | Tensor, ...] = (slice(None), *places)
        of_depths = {name: value for name, value in vars(self).items() if name != "scale_D" and value is not None}
        return replace(self, **{name: value[index] for name, value in of_depths.items()})

    def take(self, found: "Targets", places: tuple[Tensor, ...]) -> None:
        """Copy the outputs of some positions, whose targets are `found`."""
        index: tuple[slice | Tensor, ...] = (slice(None), *places)
        for own, of_places in ((self.overlap_DN, found.overlap_DN), (self.likeliest_DNC, found.likeliest_DNC)):
            if own is not None and of_places is not None:
                own[index] = of_places


@dataclass(frozen=True)
class Teacher:
    """Trunk states whose logits are the soft labels, and their output layer; None for the MTP layers' own."""

    states_TH: Tensor
    weight_VH: Tensor | None = None


def linear_loss(
    token_loss: TokenLoss,
    hidden: Sequence[Tensor],
    targets: Targets,
    weight_VH: Tensor,
    vocabulary: Vocabulary,
    teacher: Teacher | None = None,
    main_grad: bool = False,
    bias_VR: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute sum_d scale_d sum_d, to train on, and the masked sum [D] of each depth, to log.

    A loss that couples depths computes its own total from the scales and the depths at a position (`TokenLoss.joined`).

    Args:
        token_loss: the loss to compute for every chunk.
        hidden: hidden states of each depth, [N, H]. Every tensor-parallel rank has all positions and computes the part
            of their gradients that comes from its vocabulary slice (Megatron's copy or gather into the tensor-parallel
            region adds the parts).
        targets: targets of the same positions. If the loss couples depths, all depths must have the same mask.
            Consecutive positions share most of the trunk's logits, so keep those of a sequence together.
        weight_VH: this rank's slice of the output layer.
        vocabulary: meaning of the rows of `weight_VH`.
        teacher: required if the loss needs a teacher.
        main_grad: add the weight gradient to Megatron's `main_grad` and give autograd none. Another loss of the same
            backward pass must then provide a gradient: with `--overlap-grad-reduce`, DDP waits for it.
        bias_VR: additional columns of the weight, for states of [N, H + R]. The teacher's states do not have them.
    """
    places = _counted(targets.mask_DN)
    counted = targets if places is None else targets.at(places)
    states = [(each if places is None else each[places]).to(weight_VH.dtype) for each in hidden]
    dims = states[0].dim() - 1
    stacked = torch.stack(states, dims) if len(states) > 1 else states[0].unsqueeze(dims)  # stacking one would copy it
    states_NH = stacked.flatten(0, dims)
    del states, stacked  # copies of the states, if some positions do not count
    if not torch.is_grad_enabled():  # a custom autograd function still saves tensors under no_grad, so detach here
        weight_VH, states_NH = weight_VH.detach(), states_NH.detach()
        bias_VR = None if bias_VR is None else bias_VR.detach()
    if teacher is not None:
        taught_by_VH = weight_VH if teacher.weight_VH is None else teacher.weight_VH
        teacher = Teacher(teacher.states_TH.detach(), taught_by_VH.detach())
    arguments = token_loss, counted, vocabulary, teacher, main_grad, weight_VH, states_NH, bias_VR
    apply: Callable[..., tuple[Tensor, Tensor]] = _LinearLoss.apply  # torch annotates it since 2.15
    total, sums_D = apply(*arguments)
    if places is not None:
        targets.take(counted, places)
    return total, sums_D


def _counted(mask_DN: Tensor) -> tuple[Tensor, ...] | None:
    """Return the positions that count at any depth, an index for each of their dimensions; None to compute all.

    All are computed if most count, because the states of those that count have to be copied, and on a GPU, because the
    host would wait for their number.
    """
    if mask_DN.is_cuda:
        return None
    counts_N = mask_DN.ne(0).any(0)
    most = MOST_COUNTED * counts_N.numel()
    return counts_N.nonzero(as_tuple=True) if 0 < int(counts_N.sum()) <= most else None


class _LinearLoss(torch.autograd.Function):
    """Autograd function. Forward: losses, and the gradients of their sum.

    Backward: these, times the upstream gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token_loss: TokenLoss,
        targets: Targets,
        vocabulary: Vocabulary,
        teacher: Teacher | None,
        main_grad: bool,
        weight_VH: Tensor,
        states_NH: Tensor,
        bias_VR: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        trains_weight, trains_states, trains_bias = ctx.needs_input_grad[5:]
        exact = torch.promote_types(weight_VH.dtype, torch.float32)
        factors = trains_weight and keeps_factors(len(states_NH), weight_VH)
        sum_VH = torch.zeros_like(weight_VH, dtype=exact) if trains_weight and not factors else None
        most = None if sum_VH is None else positions_beside_sum(len(states_NH), weight_VH)
        lift = _lift(targets.scale_D, vocabulary, weight_VH.dtype)
        states_grad_NH = torch.empty_like(states_NH) if trains_states else None
        gradient_NV = states_NH.new_empty(len(states_NH), len(weight_VH)) if factors else None
        bias_sum_VR = torch.zeros_like(bias_VR, dtype=exact) if bias_VR is not None and trains_bias else None
        head = _Head(token_loss, vocabulary, weight_VH, sum_VH, most, lift, bias_VR, bias_sum_VR)
        total, sums_D = head.run(states_NH, targets, teacher, states_grad_NH, gradient_NV)
        ctx.main_grad, ctx.lift, ctx.factors = main_grad, lift, factors
        kept = (gradient_NV, states_NH[:, : weight_VH.size(1)]) if factors else (sum_VH,)
        ctx.save_for_backward(weight_VH, states_grad_NH, bias_sum_VR, *kept)
        ctx.mark_non_differentiable(sums_D)
        return total, sums_D

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        weight_VH, states_grad_NH, bias_sum_VR, *kept = ctx.saved_tensors
        upstream = upstream / ctx.lift
        weight_grad_VH = None
        if kept[0] is not None:
            gradient = Factors(*kept) if ctx.factors else Sum(kept[0])
            weight_grad_VH = deliver(gradient, weight_VH, upstream, ctx, ctx.main_grad)
        if states_grad_NH is not None:
            states_grad_NH = scaled(states_grad_NH, upstream, states_grad_NH.dtype)
        bias_grad_VR = None if bias_sum_VR is None else scaled(bias_sum_VR, upstream, weight_VH.dtype)
        return None, None, None, None, None, weight_grad_VH, states_grad_NH, bias_grad_VR


@dataclass(frozen=True)
class _Head:
    """Common data of all chunks; their weight gradients are added to `sum_VH` and `bias_sum_VR`, if there are any."""

    token_loss: TokenLoss
    vocabulary: Vocabulary
    weight_VH: Tensor
    sum_VH: Tensor | None
    most: int | None
    lift: Tensor | float
    bias_VR: Tensor | None = None
    bias_sum_VR: Tensor | None = None

    def run(
        self,
        states_NH: Tensor,
        targets: Targets,
        teacher: Teacher | None,
        states_grad_NH: Tensor | None,
        gradient_NV: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the total, and the masked sums of the depths [D].

        Gradients of the total, times `lift`, are written to those that are given.

        Args:
            gradient_NV: by the logits.
        """
        weight_VH, depths = self.weight_VH, targets.scale_D.numel()
        hidden = weight_VH.size(1)
        labels_N, mask_N = _in_turn(targets.labels_DN), _in_turn(targets.mask_DN)
        exact = torch.promote_types(weight_VH.dtype, torch.float32)
        mask_N, scale_D = mask_N.to(exact), targets.scale_D.to(exact)
        sums = torch.zeros(1 + depths, dtype=exact, device=weight_VH.device)
        logits, taught = _Products(weight_VH, gradient_NV), None if teacher is None else _Taught(teacher, targets)
        entries = max(self.vocabulary.widest, 0 if taught is None else taught.entries)
        overlap_N = None if targets.overlap_DN is None else torch.zeros_like(mask_N)
        likeliest = list[Tensor]()
        kernels = kernels_of(self.token_loss, weight_VH, self.vocabulary) if overlap_N is None else None
        cut = list(chunks(len(states_NH), entries, weight_VH.is_cuda, self.most, depths))
        for chunk, soft in zip(cut, repeat(None) if taught is None else taught.labels(cut), strict=False):
            of_weight_NH, of_bias_NR = states_NH[chunk, :hidden], states_NH[chunk, hidden:]
            logits_NV = logits.of(of_weight_NH, chunk)
            if self.bias_VR is not None:
                logits_NV.addmm_(of_bias_NR.to(logits_NV.dtype), self.bias_VR.t())
            into_N = None if overlap_N is None else overlap_N[chunk]
            if targets.likeliest_DNC is not None:
                likeliest.append(self.vocabulary.largest(logits_NV, targets.likeliest_DNC.size(-1)))
            sums += self._sums_(logits_NV, soft, labels_N[chunk], mask_N[chunk], scale_D, into_N, kernels)
            if states_grad_NH is not None and self.bias_VR is None:
                torch.mm(logits_NV, weight_VH, out=states_grad_NH[chunk])
            elif states_grad_NH is not None and self.bias_VR is not None:
                states_grad_NH[chunk, :hidden] = logits_NV @ weight_VH
                states_grad_NH[chunk, hidden:] = logits_NV @ self.bias_VR
            if self.sum_VH is not None:
                add_product(self.sum_VH, logits_NV.t(), of_weight_NH)
            if self.bias_sum_VR is not None:
                add_product(self.bias_sum_VR, logits_NV.t(), of_bias_NR)
        if kernels is not None and kernels.leaves_parts(self.token_loss):
            self.vocabulary.added(sums)
        if overlap_N is not None and targets.overlap_DN is not None:
            targets.overlap_DN.copy_(overlap_N.view(-1, depths).t().reshape(targets.overlap_DN.shape))
        if targets.likeliest_DNC is not None:
            of_depths = torch.cat(likeliest).unflatten(0, (-1, depths)).transpose(0, 1)
            targets.likeliest_DNC.copy_(of_depths.reshape(targets.likeliest_DNC.shape))
        return sums[0], sums[1:]

    def _sums_(
        self,
        product_NV: Tensor,
        soft: "_SoftLabels | None",
        labels_N: Tensor,
        mask_N: Tensor,
        scale_D: Tensor,
        overlap_N: Tensor | None,
        kernels: Any | None,
    ) -> Tensor:
        """Return a chunk's part of the total and its masked sums, [1 + D]; overwrite the product with the gradient."""
        if kernels is not None:
            given = kernels.Products(
                product_NV,
                labels_N,
                mask_N,
                scale_D * self.lift,
                None if soft is None else soft.product_TV,
                None if soft is None else soft.row_N,
                self.vocabulary,
            )
            losses_N = kernels.losses_(self.token_loss, given)
        else:
            losses_N = self._losses_(product_NV, soft, labels_N, mask_N, scale_D, overlap_N)
        mask_ND = mask_N.view(-1, len(scale_D))
        losses_ND = losses_N.view_as(mask_ND).masked_fill(mask_ND == 0, 0)  # masked losses may be NaN or inf
        joined = self.token_loss.joined(losses_ND, mask_ND * scale_D)
        return torch.cat([joined.value_N.sum(0, keepdim=True), (mask_ND * joined.shown_ND).sum(0)])

    def _losses_(
        self,
        product_NV: Tensor,
        soft: "_SoftLabels | None",
        labels_N: Tensor,
        mask_N: Tensor,
        scale_D: Tensor,
        overlap_N: Tensor | None,
    ) -> Tensor:
        """Return losses of a chunk, block by block; overwrite the product with the gradient."""
        vocabulary, depths, losses = self.vocabulary, len(scale_D), []
        positions, entries = product_NV.shape
        as_one = product_NV.is_cuda or vocabulary.ranks > 1
        for rows in blocks(positions, entries, as_one, depths):
            teacher_NV = None if soft is None else _logits(soft.of(rows), vocabulary)
            logits_NV = _logits(product_NV[rows], vocabulary)
            into_N = None if overlap_N is None else overlap_N[rows]
            loss_N, gradient_NV = self.token_loss(Chunk(logits_NV, labels_N[rows], teacher_NV, vocabulary, into_N))
            weights_ND = mask_N[rows].view(-1, depths) * scale_D
            slopes_N = self.token_loss.joined(loss_N.view_as(weights_ND), weights_ND).slopes_ND.flatten()
            slopes_N *= vocabulary.logit_scale * self.lift
            product_NV[rows] = gradient_NV.mul_(slopes_N.unsqueeze(1))
            losses.append(loss_N)
        return torch.cat(losses)


def kernels_of(token_loss: TokenLoss, weight_VH: Tensor, vocabulary: Vocabulary) -> Any | None:
    """Return the module whose kernels compute the loss on every rank; None if there is none."""
    kernels = KERNELS.get(weight_VH.device.type)
    return kernels if kernels is not None and kernels.has_kernel(token_loss, weight_VH.dtype, vocabulary) else None


def _lift(scale_D: Tensor, vocabulary: Vocabulary, dtype: torch.dtype) -> Tensor | float:
    """Return the factor of gradients in the forward pass; the backward pass divides by it in float32."""
    if dtype != torch.float16:
        return 1.0
    return FLOAT16_GRADIENT / (scale_D.max() * vocabulary.logit_scale).clamp(min=1e-30)


def _in_turn(values_DN: Tensor) -> Tensor:
    """Return [N * D]: the depths of a position are consecutive."""
    return values_DN.movedim(0, -1).flatten()


class _Products:
    """Products of a head with chunks of states, in the rows of `kept_NV`, or all in the same memory.

    Newly allocated memory is mapped page by page, which took a CPU a tenth of the loss's time.
    """

    def __init__(self, weight_VH: Tensor, kept_NV: Tensor | None = None) -> None:
        self.weight_VH, self.kept_NV = weight_VH, kept_NV
        self._memory_NV = weight_VH.new_empty(0, len(weight_VH))

    def of(self, states_NH: Tensor, chunk: slice) -> Tensor:
        """Return the product [N, V] of the chunk's states."""
        states_NH, weight_VH = states_NH.to(self.weight_VH.dtype), self.weight_VH
        if self.kept_NV is None and len(self._memory_NV) < len(states_NH):
            self._memory_NV = weight_VH.new_empty(len(states_NH), len(weight_VH))
        out_NV = self._memory_NV[: len(states_NH)] if self.kept_NV is None else self.kept_NV[chunk]
        entries = len(weight_VH) if weight_VH.is_cuda else ENTRIES
        for start in range(0, len(weight_VH), entries):
            these = slice(start, start + entries)
            torch.matmul(states_NH, weight_VH[these].t(), out=out_NV[:, these])
        return out_NV


@dataclass(frozen=True)
class _SoftLabels:
    """Products of the trunk that serve as soft labels of a chunk's rows, each once, and the index of each row."""

    product_TV: Tensor
    row_N: Tensor

    def of(self, rows: slice) -> Tensor:
        """Return soft labels [N, V] of these rows, which may be overwritten."""
        return self.product_TV[self.row_N[rows]]


class _Taught:
    """Soft labels of all chunks."""

    def __init__(self, teacher: Teacher, targets: Targets) -> None:
        assert targets.taught_DN is not None
        assert teacher.weight_VH is not None
        self.entries = len(teacher.weight_VH)
        self._states_TH, self._products = teacher.states_TH, _Products(teacher.weight_VH)
        self._taught_N = _in_turn(targets.taught_DN).cpu()

    def labels(self, cut: list[slice]) -> Iterator[_SoftLabels]:
        """Yield soft labels of the rows, one chunk after the other.

        What is read of the states is found on the host for all chunks, and copied at once.
        """
        pairs = [self._taught_N[chunk].unique(return_inverse=True) for chunk in cut]
        parts = [part for pair in pairs for part in pair]
        numbers = to_device(torch.cat(parts), self._states_TH.device)
        of_chunks = iter(numbers.split([len(part) for part in parts]))
        for chunk, state_T, row_N in zip(cut, of_chunks, of_chunks, strict=True):
            yield _SoftLabels(self._products.of(self._states_TH[state_T], chunk), row_N)


def _logits(product_NV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return logits in at least float32, in the product's memory if it has that type; padding gets no probability."""
    logits_NV = product_NV.to(torch.promote_types(product_NV.dtype, torch.float32))
    if vocabulary.logit_scale != 1:
        logits_NV.mul_(vocabulary.logit_scale)
    return vocabulary.mask_padding_(logits_NV)


# --- chunk sizes of the logits -------------------------------------------------------------------------------------

CHUNK_BYTES = 64 * 2**20
"""Bytes of float32 logits of one chunk on a CPU; a larger chunk is not faster."""

CHUNK_BYTES_CUDA = 2**30
"""Bytes of float32 logits of one chunk on a GPU, where a product must be large enough to fill the card. With half as
much, `ce` of 131,072 entries takes an H200 a seventh more time and no less memory: the gradient of the head needs more.
"""

LEAST_POSITIONS = 256
"""Fewest positions of a chunk, however much memory their logits need: with half as many, products are a tenth slower.
"""

BLOCK_BYTES = 2**20
"""Part of a chunk that a CPU hands to the loss at once. Its passes over the logits then stay in a core's own cache, 3
to 6 times as fast as over the whole chunk. Not used if several ranks share the vocabulary: every block has collectives.
"""


def chunks(positions: int, entries: int, is_cuda: bool, most: int | None = None, together: int = 1) -> Iterator[slice]:
    """Cut all positions into slices, each with at most one chunk of float32 logits, but at least `LEAST_POSITIONS`.

    Args:
        positions: number of positions.
        entries: logits per position.
        is_cuda: whether the logits are on a GPU.
        most: maximum number of positions per slice, whatever the size of their logits.
        together: group size that must not be split.
    """
    at_once = max((CHUNK_BYTES_CUDA if is_cuda else CHUNK_BYTES) // (4 * entries), LEAST_POSITIONS)
    return _slices(positions, at_once if most is None else min(at_once, most), together)


def blocks(positions: int, entries: int, as_one: bool, together: int = 1) -> Iterator[slice]:
    """Cut the positions of a chunk into blocks; with `as_one`, keep them whole."""
    return _slices(positions, positions if as_one else BLOCK_BYTES // (4 * entries), together)


def _slices(positions: int, at_once: int, together: int) -> Iterator[slice]:
    """Return slices of at least one position each, or of as many as belong together."""
    at_once = max(1, at_once // together) * together
    for start in range(0, positions, at_once):
        yield slice(start, min(start + at_once, positions))
