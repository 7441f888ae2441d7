"""Softmax, argmax and sums over a vocabulary that is split over tensor-parallel ranks, in plain torch.

Megatron appends rows to embedding and output layer so that all ranks have slices of the same size.

    331 tokens in 512 rows, over two ranks      rank 0: 256 tokens      rank 1: 75 tokens and 181 rows of padding

The number of padding rows depends on the layout. They must have probability 0, or the losses would depend on the layout
too.

Letters in names: N positions, in one dimension or several, V this rank's slice of the vocabulary (of the draft
vocabulary if there is one), W this rank's slice of all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.model.draft_vocabulary import DraftVocabulary


def tokens_of_slice(vocab_size: int | None, rows: int, rank: int) -> int:
    """Return how many of a rank's `rows` are tokens; they are the first ones.

    Args:
        vocab_size: number of tokens of the whole vocabulary; None if every row is one.
        rows: number of rows of one rank's slice.
        rank: owner of the slice.
    """
    return rows if vocab_size is None else min(max(vocab_size - rank * rows, 0), rows)


@torch.no_grad()
def mask_padding_(logits: Tensor, tokens: int) -> Tensor:
    """Give the entries [..., tokens:] probability 0, in place.

    The value is finite, so that a rank whose slice is only padding does not compute inf - inf. Where the probability of
    a softmax is 0, so is its gradient, so autograd does not need to record this.
    """
    if tokens < logits.size(-1):
        logits[..., tokens:] = max(torch.finfo(logits.dtype).min, -1e30)
    return logits


@dataclass(frozen=True)
class Vocabulary:
    """This rank's slice of the vocabulary.

    Attributes:
        slice_size: number of entries on this rank; the same on every rank, except in a draft vocabulary.
        group: ranks that hold the slices; None if one rank holds all.
        logit_scale: factor of all logits.
        draft_vocabulary: the draft vocabulary, if the entries are not all tokens.
        tokens: size of the whole vocabulary; further rows are padding. None if every row is a token.
    """

    slice_size: int
    group: ProcessGroup | None = None
    logit_scale: float = 1.0
    draft_vocabulary: DraftVocabulary | None = None
    tokens: int | None = None

    @property
    def ranks(self) -> int:
        """R, number of ranks that hold slices."""
        return 1 if self.group is None else self.group.size()

    @property
    def size(self) -> int:
        """Number of entries of all slices, without padding."""
        if self.draft_vocabulary is not None:
            return self.draft_vocabulary.size
        return self.slice_size * self.ranks if self.tokens is None else self.tokens

    @property
    def widest(self) -> int:
        """Maximum number of entries on any rank. The same on every rank, so that all ranks use the same chunks."""
        return self.slice_size if self.draft_vocabulary is None else self.draft_vocabulary.size

    def tokens_of(self, values_NX: Tensor) -> Tensor:
        """Return a view without padding columns; X is V, or W if there is a column for every token."""
        return values_NX[..., : self._tokens_in(values_NX.size(-1))]

    def mask_padding_(self, logits_NX: Tensor) -> Tensor:
        """Give padding probability 0, in place."""
        return mask_padding_(logits_NX, self._tokens_in(logits_NX.size(-1)))

    def _tokens_in(self, columns: int) -> int:
        if self.draft_vocabulary is not None and columns == self.slice_size:
            return columns  # a draft vocabulary contains no padding
        return tokens_of_slice(self.tokens, columns, self._rank)

    @property
    def _rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def sum(self, values_NV: Tensor) -> Tensor:
        """Sum over the whole vocabulary, [N, 1]."""
        return self.added(values_NV.sum(dim=-1, keepdim=True))

    def added(self, parts: Tensor) -> Tensor:
        """Sum over ranks, in place."""
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
        """Compute probabilities, in the memory of the logits, and the logarithm of their normalizer, [N, 1]."""
        (probabilities_NV,), normalizer_N1, _ = self.softmaxes_([logits_NV])
        return probabilities_NV, normalizer_N1

    def softmaxes_(
        self, logits: Sequence[Tensor], parts_NJ: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Compute several softmaxes, of slices of any width, and sums over ranks, with one exchange between ranks.

        Args:
            logits: K tensors [N, V], which are overwritten.
            parts_NJ: this rank's parts of additional sums.

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
        """Compute several log-softmaxes, in the memory of the logits, with one exchange between ranks."""
        own_NK = torch.cat([each_NV.amax(-1, keepdim=True) for each_NV in logits], -1)
        below = [each_NV.sub_(own_NK[..., k : k + 1]) for k, each_NV in enumerate(logits)]
        total_NK = torch.cat([each_NV.exp().sum(-1, keepdim=True) for each_NV in below], -1)
        largest_NK, total_NK, _ = self.joined(own_NK, total_NK)
        gap_NK = total_NK.log_().add_(largest_NK - own_NK)
        return [each_NV.sub_(gap_NK[..., k : k + 1]) for k, each_NV in enumerate(below)]

    def joined(
        self, largest_NK: Tensor, total_NK: Tensor, parts_NJ: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combine the statistics of slices to those of whole rows, with one exchange between ranks.

        Args:
            largest_NK: this rank's largest logits, or bounds not far below them.
            total_NK: sums of exponentials of this rank's logits relative to these.
            parts_NJ: this rank's parts of additional sums.
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
        """Return the token with the largest logit over all slices, [N]; ties go to the lowest token."""
        best_N1, token_N1 = logits_NV.max(dim=-1, keepdim=True)
        best_NR, token_NR = self._of_all_slices(best_N1, token_N1, logits_NV.size(-1))
        return token_NR.gather(-1, best_NR.argmax(dim=-1, keepdim=True)).squeeze(-1)

    def largest(self, logits_NV: Tensor, count: int) -> Tensor:
        """Return the tokens with the largest logits over all slices, [N, count], largest first; padding is masked."""
        own_NC, token_NC = self.mask_padding_(logits_NV).topk(min(count, logits_NV.size(-1)))
        if self.ranks == 1:
            return token_NC
        best_NX, token_NX = self._of_all_slices(own_NC, token_NC, logits_NV.size(-1))
        return token_NX.gather(-1, best_NX.topk(count).indices)

    def _of_all_slices(self, values_NC: Tensor, places_NC: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """Return every rank's values and their tokens, in rank order, from indices within slices of this size."""
        if self.ranks == 1:
            return values_NC, places_NC
        tokens_NC = places_NC + self._rank * entries
        both = tuple([torch.empty_like(one) for _ in range(self.ranks)] for one in (values_NC, tokens_NC))
        for every, own in zip(both, (values_NC, tokens_NC), strict=True):
            torch.distributed.all_gather(every, own, group=self.group)
        return torch.cat(both[0], -1), torch.cat(both[1], -1)

    def drafted(self, values_NW: Tensor) -> Tensor:
        """Return the columns of the draft vocabulary, [N, V], if every token has a column.

        Otherwise the values unchanged.
        """
        if self.draft_vocabulary is None or values_NW.size(1) == self.slice_size:
            return values_NW
        return values_NW.index_select(1, self.draft_vocabulary.rows_K)
