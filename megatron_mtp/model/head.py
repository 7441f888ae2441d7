"""The output head and the input embedding, which the MTP stage shares with the rest of the model, and the head's rows.

The block sits on the last pipeline stage. With more than one stage that stage owns a *copy* of the input embedding:
initialized equal, gradients summed over the embedding group, written to checkpoints once. A tied head uses the copy and
owns no weight; an untied one owns its weight, which MTP shares with the trunk. Megatron's `LanguageModule` copies, sums
and writes once, by the attributes that `attach_embedding` sets.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from megatron.core.distributed import distributed_data_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_mtp.data.batch import DepthBatch

NOT_DRAFTED = -1
"""The index of a token outside of the draft vocabulary."""


def attach_embedding(model: LanguageModule) -> None:
    """Give a stage without an input embedding its copy; a tied head then uses the copy alone."""
    if model.pre_process:
        return
    model.embedding = LanguageModelEmbedding(
        config=model.config,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        position_embedding_type="none",
        tp_group=model.pg_collection.tp,
    )
    if model.post_process and model.share_embeddings_and_output_weights:
        model.output_layer.weight = None


def embedding_ranks(pipeline_ranks: list[int], config: TransformerConfig, tied: bool) -> list[int]:
    """Ranks of a pipeline that hold the word embedding: the first, the MTP stage's, and with a tied head the last."""
    ranks = {pipeline_ranks[0], *get_mtp_ranks(pipeline_ranks, config)}
    if tied:
        ranks.add(pipeline_ranks[-1])
    return sorted(ranks)


@dataclass(frozen=True)
class Head:
    """The output head shared by the trunk and every depth, over this rank's slice of the vocabulary.

    Attributes:
        project: hidden states [S, B, H] to logits [S, B, V / TP], new ones that the caller may overwrite.
        cross_entropy: labels [B, S] and logits [S, B, V / TP] to losses [B, S]; rows that pad the vocabulary have no
            probability, and the logits are overwritten.
        tp_group: ranks that hold the other slices.
        weight: [V / TP, H], detached where the caller must not train it.
        whole: hidden states as the tensor-parallel region takes them: all positions, with gradients summed over ranks.
        logit_scale: by which all logits are multiplied.
        draft_vocabulary: the tokens that the MTP layers may draft; None for all.
        vocab_size: tokens of all slices; the rows after them only pad the slices. None if every row is a token.
        own_rows: a drafter's own rows of the drafted tokens of this slice; None where it drafts with the trunk's.
        bias_rows: [V / TP, R] or fewer, further columns of the rows that draft; states then are [S, B, H + R].
        takes_slices: whether drafts' states are cut by sequence parallelism as the trunk's are.
        candidates: tokens with the largest logits without the bias, from which a draft is chosen by the logits with it;
            None where it is chosen from all.
    """

    project: Callable[[Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    tp_group: ProcessGroup
    weight: Tensor
    whole: Callable[[Tensor], Tensor]
    logit_scale: float = 1.0
    draft_vocabulary: "DraftVocabulary | None" = None
    vocab_size: int | None = None
    own_rows: Tensor | None = None
    bias_rows: Tensor | None = None
    takes_slices: bool = True
    candidates: int | None = None

    def whole_drafts(self, hidden_SBX: Tensor) -> Tensor:
        """Like `whole`, of the states that draft."""
        return (
            self.whole(hidden_SBX)
            if self.takes_slices
            else copy_to_tensor_model_parallel_region(hidden_SBX, group=self.tp_group)
        )

    @property
    def draft_weight(self) -> Tensor:
        """The rows that the MTP layers draft with, [V / TP, H] or fewer."""
        return self.taught_weight if self.own_rows is None else self.own_rows

    @property
    def taught_weight(self) -> Tensor:
        """The trunk's rows of the tokens that are drafted."""
        drafted = self.draft_vocabulary
        return self.weight if drafted is None else self.weight.index_select(0, drafted.rows_K)

    def vocabulary(self, drafts: bool = False) -> "Vocabulary":
        """The vocabulary that the rows stand for; with `drafts`, that of the rows that the MTP layers draft with."""
        drafted = self.draft_vocabulary if drafts else None
        rows = len(self.weight) if drafted is None else drafted.rows_K.numel()
        return Vocabulary(rows, self.tp_group, self.logit_scale, drafted, self.vocab_size)


def is_embedding(model: LanguageModule) -> bool:
    """Return whether the head is the weight of this stage's embedding, and not of its output layer."""
    return model.share_embeddings_and_output_weights and bool(model.pre_process or model.mtp_process)


def head_of(
    model: LanguageModule,
    owner: Any,
    gathers: bool | None = None,
    detached: bool = False,
    draft_vocabulary: "DraftVocabulary | None" = None,
    vocab_size: int | None = None,
) -> Head:
    """The output head of a model on its last stage, as a loss needs it.

    Args:
        model: Megatron's, or a class on top of it.
        owner: the module whose weight is the head's.
        gathers: whether `project` gathers the slices of the vocabulary; None for the model's own choice.
        detached: whether the head is not trained.
        draft_vocabulary, vocab_size: see `Head`.
    """
    _await_gathered(owner)
    loss_of_rows = model.compute_language_model_loss
    weight, group = owner.weight.detach() if detached else owner.weight, model.pg_collection.tp

    def scaled(logits: Tensor) -> Tensor:
        made: Tensor = model._scale_logits(logits) if hasattr(model, "_scale_logits") else logits  # 0.16 has no muP
        return made

    def project(hidden_SBH: Tensor) -> Tensor:
        logits_SBV, _ = model.output_layer(hidden_SBH, weight=weight, runtime_gather_output=gathers)
        return scaled(logits_SBV)

    def cross_entropy(labels_BS: Tensor, logits_SBV: Tensor) -> Tensor:
        tokens = tokens_of_slice(vocab_size, logits_SBV.size(-1), group.rank())
        losses_BS: Tensor = loss_of_rows(labels_BS, mask_padding_(logits_SBV, tokens))
        return losses_BS

    def whole(hidden_SBH: Tensor) -> Tensor:
        spread = (
            gather_from_sequence_parallel_region
            if model.config.sequence_parallel
            else copy_to_tensor_model_parallel_region
        )
        whole_SBH: Tensor = spread(hidden_SBH, group=group)
        return whole_SBH

    return Head(
        project=project,
        cross_entropy=cross_entropy,
        tp_group=group,
        weight=weight,
        whole=whole,
        logit_scale=scaled(torch.ones(())).item(),
        draft_vocabulary=draft_vocabulary,
        vocab_size=vocab_size,
    )


def _await_gathered(module: torch.nn.Module) -> None:
    """Wait for the module's weights, as DDP does before its forward with `--overlap-param-gather`.

    The losses in chunks read the head's weight without a forward of the module that owns it.
    """
    for hook in module._forward_pre_hooks.values():
        if inspect.getmodule(hook) is distributed_data_parallel:
            hook(module, ())


@dataclass(frozen=True)
class Drafted:
    """Output of a draft head.

    Attributes:
        hidden: states of depth 1 .. D.
        head: the output head as it drafts with it, detached where it must not train it.
        batch: its depths.
        confidence_DSB: logits that the drafts of a depth are accepted, of a drafter that has them; else None.
    """

    hidden: list[Tensor]
    head: Head
    batch: DepthBatch
    confidence_DSB: Tensor | None = None


@dataclass(frozen=True)
class StageOutput:
    """Output of the last stage.

    Attributes:
        hidden_SBH: the trunk's hidden states after its final norm.
        head: the output head.
        drafted: of every draft head; empty where the call had no batches.
        batches: the call's `output_processor_context`: one for every draft head, and one without MTP layers for a trunk
            alone. All have the trunk's labels.
    """

    hidden_SBH: Tensor
    head: Head
    drafted: Sequence[Drafted] = ()
    batches: Sequence[DepthBatch] | None = None


# --- rows that stand for no token ------------------------------------------------------------------------------------
#
# Megatron appends rows to the embedding and the head, so that ranks have slices of one size.
#
#     331 tokens in 512 rows, over two ranks      rank 0: 256 tokens      rank 1: 75 tokens and 181 rows of padding
#
# Their number depends on the layout. They must have no probability, or the losses would depend on the layout too.


def tokens_of_slice(vocab_size: int | None, rows: int, rank: int) -> int:
    """The number of a rank's `rows` that are tokens; they are the first ones.

    Args:
        vocab_size: tokens of the whole vocabulary; None if every row is one.
        rows: of one rank's slice.
        rank: the owner of the slice.
    """
    return rows if vocab_size is None else min(max(vocab_size - rank * rows, 0), rows)


@torch.no_grad()
def mask_padding_(logits: Tensor, tokens: int) -> Tensor:
    """Give the entries [..., tokens:] probability 0, in place.

    The value is finite, so that a rank with a slice of padding alone computes no inf - inf. Where the probability of a
    softmax is 0, so is its gradient: autograd need not record this.
    """
    if tokens < logits.size(-1):
        logits[..., tokens:] = max(torch.finfo(logits.dtype).min, -1e30)
    return logits


# --- the draft vocabulary: the N tokens that MTP layers may draft ----------------------------------------------------
#
# A draft costs the head's rows of these tokens alone.
#
# Each tensor-parallel rank uses the drafted rows of its own slice of the head; ranks may have different numbers of
# them. Draft indices follow ascending tokens: those of a rank's slice are consecutive, beginning with `first`.
#
#     vocabulary 0 .. 7 over two ranks, drafted 1 2 6      rank 0: rows 1 2, first 0      rank 1: row 2, first 2
#
# Letters in names: N drafted tokens, K those of this rank's slice, V the whole vocabulary, W this rank's slice of it.


class DraftVocabulary(nn.Module):
    """The drafted rows of this rank; its tensors move with the model and are not saved in checkpoints.

    Attributes:
        rows_K: within this rank's slice of the head.
        drafted_W: whether each token of the slice is drafted.
        index_V: of every token among the drafted ones; `NOT_DRAFTED` for the others.
        first: index of the first of `rows_K`.
        size: N.

    Raises:
        ValueError: the tokens do not ascend.
    """

    rows_K: Tensor
    drafted_W: Tensor
    index_V: Tensor

    def __init__(self, tokens_N: Tensor, slice_size: int, ranks: int = 1, rank: int = 0) -> None:
        super().__init__()
        if (tokens_N.diff() <= 0).any():
            raise ValueError("the ids of the draft vocabulary do not ascend; sort them, each once.")
        start = rank * slice_size
        index_V = torch.full((slice_size * ranks,), NOT_DRAFTED, device=tokens_N.device)
        index_V[tokens_N] = torch.arange(tokens_N.numel(), device=tokens_N.device)
        drafted_W = index_V[start : start + slice_size] != NOT_DRAFTED
        self.register_buffer("rows_K", drafted_W.nonzero()[:, 0], persistent=False)
        self.register_buffer("drafted_W", drafted_W, persistent=False)
        self.register_buffer("index_V", index_V, persistent=False)
        self.first = int((tokens_N < start).sum())
        self.size = tokens_N.numel()


def tokens_of_file(path: Path, vocab_size: int, what: str = "--mtp-draft-vocab-file") -> list[int]:
    """The ids in a text file with one id per line, or in a token map of FR-Spec and SGLang (.pt), in ascending order.

    Args:
        path: the file; its ids may have any order, such as the most frequent first.
        vocab_size: number of the tokenizer's ids.
        what: how messages call the file.

    Raises:
        ValueError: the file cannot be read or is empty, or a line is no id, repeats one, or is outside the vocabulary.
    """
    try:
        ids = _ids_in(path)
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{what} is {path}, which is no list of token ids, in text or of torch: {reason}.") from None
    if not ids:
        raise ValueError(f"{what} is {path}, which is empty; write a token id on every line.")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"{what} is {path}, which has the id {outside}, and ids are 0 to {vocab_size - 1}; take it out."
        )
    ids.sort()
    twice = next((token for token, following in pairwise(ids) if token == following), None)
    if twice is not None:
        raise ValueError(f"{what} is {path}, which has the id {twice} twice; give every token once.")
    return ids


def _ids_in(path: Path) -> list[int]:
    if path.suffix != ".pt":
        return [int(word) for word in path.read_text(encoding="utf-8").split()]
    ids = torch.as_tensor(torch.load(path, map_location="cpu", weights_only=True))
    if ids.is_floating_point() or ids.dim() != 1:
        raise ValueError(f"it holds {ids.dtype} of shape {tuple(ids.shape)}")
    return [int(one) for one in ids]


# --- softmax, argmax and sums over a vocabulary that is cut over tensor-parallel ranks, in plain torch ---------------
#
# Letters in names: N positions, in one dimension or several, V this rank's slice of the vocabulary (of the drafted
# tokens where there is a draft vocabulary), W this rank's slice of all tokens.


@dataclass(frozen=True)
class Vocabulary:
    """This rank's slice of the vocabulary.

    Attributes:
        slice_size: entries that this rank holds: the same number on every rank, except in a draft vocabulary.
        group: the ranks that hold the slices; None if one rank holds all.
        logit_scale: the factor of all logits.
        draft_vocabulary: the entries, where these are not all tokens.
        tokens: size of the whole vocabulary; rows after it only pad the slices. None if every row is a token.
    """

    slice_size: int
    group: ProcessGroup | None = None
    logit_scale: float = 1.0
    draft_vocabulary: DraftVocabulary | None = None
    tokens: int | None = None

    @property
    def ranks(self) -> int:
        """R, ranks that hold slices."""
        return 1 if self.group is None else self.group.size()

    @property
    def size(self) -> int:
        """Entries of all slices, without padding."""
        if self.draft_vocabulary is not None:
            return self.draft_vocabulary.size
        return self.slice_size * self.ranks if self.tokens is None else self.tokens

    @property
    def widest(self) -> int:
        """The most entries that any rank may hold: the same number on every rank, so that all cut the same chunks."""
        return self.slice_size if self.draft_vocabulary is None else self.draft_vocabulary.size

    def tokens_of(self, values_NX: Tensor) -> Tensor:
        """A view without the columns of padding; X is V, or W where there is a column for all tokens."""
        return values_NX[..., : self._tokens_in(values_NX.size(-1))]

    def mask_padding_(self, logits_NX: Tensor) -> Tensor:
        """Give padding no probability, in place."""
        return mask_padding_(logits_NX, self._tokens_in(logits_NX.size(-1)))

    def _tokens_in(self, columns: int) -> int:
        if self.draft_vocabulary is not None and columns == self.slice_size:
            return columns  # padding is never drafted
        return tokens_of_slice(self.tokens, columns, self._rank)

    @property
    def _rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def sum(self, values_NV: Tensor) -> Tensor:
        """[N, 1]"""
        return self.added(values_NV.sum(dim=-1, keepdim=True))

    def added(self, parts: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.ranks > 1:
            torch.distributed.all_reduce(parts, group=self.group)
        return parts

    def own(self, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the tokens in this rank's slice, [N, 1] (0 if another rank has it), and whether it has them."""
        first = self._rank * self.slice_size if self.draft_vocabulary is None else self.draft_vocabulary.first
        local_N1 = (tokens_N - first).unsqueeze(1)
        is_own_N1 = (local_N1 >= 0) & (local_N1 < self.slice_size)
        return local_N1.masked_fill(~is_own_N1, 0), is_own_N1

    def softmax_(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, in the memory of the logits, and the logarithm of their normalizer, [N, 1]."""
        (probabilities_NV,), normalizer_N1, _ = self.softmaxes_([logits_NV])
        return probabilities_NV, normalizer_N1

    def softmaxes_(
        self, logits: Sequence[Tensor], parts_NJ: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Several softmaxes, of slices of any width, and sums over ranks, by one exchange between these.

        Args:
            logits: K of [N, V], which are overwritten.
            parts_NJ: this rank's parts of further sums.

        Returns:
            The probabilities, in the memory of the logits; the logarithms of their normalizers [N, K]; the sums [N, J].
        """
        own_NK = torch.cat([each_NV.amax(-1, keepdim=True) for each_NV in logits], -1)
        weights = [each_NV.sub_(own_NK[..., k : k + 1]).exp_() for k, each_NV in enumerate(logits)]
        total_NK = torch.cat([each_NV.sum(-1, keepdim=True) for each_NV in weights], -1)
        largest_NK, total_NK, sums_NJ = self.joined(own_NK, total_NK, parts_NJ)
        share_NK = (own_NK - largest_NK).exp_().div_(total_NK)
        probabilities = [each_NV.mul_(share_NK[..., k : k + 1]) for k, each_NV in enumerate(weights)]
        return probabilities, total_NK.log() + largest_NK, sums_NJ

    def log_softmaxes_(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """Logarithms of the probabilities of several, in the memory of the logits, by one exchange between ranks."""
        own_NK = torch.cat([each_NV.amax(-1, keepdim=True) for each_NV in logits], -1)
        below = [each_NV.sub_(own_NK[..., k : k + 1]) for k, each_NV in enumerate(logits)]
        total_NK = torch.cat([each_NV.exp().sum(-1, keepdim=True) for each_NV in below], -1)
        largest_NK, total_NK, _ = self.joined(own_NK, total_NK)
        gap_NK = total_NK.log_().add_(largest_NK - own_NK)
        return [each_NV.sub_(gap_NK[..., k : k + 1]) for k, each_NV in enumerate(below)]

    def joined(
        self, largest_NK: Tensor, total_NK: Tensor, parts_NJ: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The whole rows' statistics of those of the slices, by one exchange between ranks.

        Args:
            largest_NK: this rank's largest logits, or others that are not far below.
            total_NK: sums of the exponentials of what this rank's logits have above these.
            parts_NJ: this rank's parts of further sums.
        """
        own = [largest_NK, total_NK, largest_NK[..., :0] if parts_NJ is None else parts_NJ]
        if self.ranks == 1:
            return own[0], own[1], own[2]
        packed_NX = torch.cat(own, -1)
        all_RNX = packed_NX.new_empty(self.ranks, *packed_NX.shape)
        torch.distributed.all_gather_into_tensor(all_RNX.flatten(0, 1), packed_NX, group=self.group)
        largest_RNK, total_RNK, parts_RNJ = all_RNX.split([each.size(-1) for each in own], -1)
        whole_NK = largest_RNK.amax(0)
        total_RNK = total_RNK * (largest_RNK - whole_NK).exp_()
        return whole_NK, total_RNK.sum(0), parts_RNJ.sum(0)

    def argmax(self, logits_NV: Tensor) -> Tensor:
        """The token of the largest logit over all slices, [N]; the lowest token among equals."""
        best_N1, token_N1 = logits_NV.max(dim=-1, keepdim=True)
        best_NR, token_NR = self._of_all_slices(best_N1, token_N1, logits_NV.size(-1))
        return token_NR.gather(-1, best_NR.argmax(dim=-1, keepdim=True)).squeeze(-1)

    def largest(self, logits_NV: Tensor, count: int) -> Tensor:
        """The tokens with the largest logits over all slices, [N, count], the largest first; padding is masked."""
        own_NC, token_NC = self.mask_padding_(logits_NV).topk(min(count, logits_NV.size(-1)))
        if self.ranks == 1:
            return token_NC
        best_NX, token_NX = self._of_all_slices(own_NC, token_NC, logits_NV.size(-1))
        return token_NX.gather(-1, best_NX.topk(count).indices)

    def _of_all_slices(self, values_NC: Tensor, places_NC: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """Every rank's values and their tokens, rank by rank, from their places in slices of so many entries."""
        if self.ranks == 1:
            return values_NC, places_NC
        tokens_NC = places_NC + self._rank * entries
        both = tuple([torch.empty_like(one) for _ in range(self.ranks)] for one in (values_NC, tokens_NC))
        for every, own in zip(both, (values_NC, tokens_NC), strict=True):
            torch.distributed.all_gather(every, own, group=self.group)
        return torch.cat(both[0], -1), torch.cat(both[1], -1)

    def drafted(self, values_NW: Tensor) -> Tensor:
        """The columns of the drafted tokens, [N, V], if every token has a column; else the values as they are."""
        if self.draft_vocabulary is None or values_NW.size(1) == self.slice_size:
            return values_NW
        return values_NW.index_select(1, self.draft_vocabulary.rows_K)
