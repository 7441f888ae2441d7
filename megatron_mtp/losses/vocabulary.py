"""Softmax, argmax and sums over a vocabulary that is cut over tensor-parallel ranks, in plain torch.

Letters in names: N positions, in one dimension or several, V this rank's slice of the vocabulary (of the drafted tokens
where there is a draft vocabulary), W this rank's slice of all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_mtp.model.head import DraftVocabulary, mask_padding_, tokens_of_slice

if TYPE_CHECKING:
    from megatron_mtp.model.head import Head


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
        best_N, token_N = logits_NV.max(dim=-1)
        if self.ranks == 1:
            return token_N
        token_N = token_N + self._rank * logits_NV.size(-1)
        best = [torch.empty_like(best_N) for _ in range(self.ranks)]
        tokens = [torch.empty_like(token_N) for _ in range(self.ranks)]
        torch.distributed.all_gather(best, best_N, group=self.group)
        torch.distributed.all_gather(tokens, token_N, group=self.group)
        winner_N = torch.stack(best).argmax(dim=0, keepdim=True)
        return torch.stack(tokens).gather(0, winner_N).squeeze(0)

    def drafted(self, values_NW: Tensor) -> Tensor:
        """The columns of the drafted tokens, [N, V], if every token has a column; else the values as they are."""
        if self.draft_vocabulary is None or values_NW.size(1) == self.slice_size:
            return values_NW
        return values_NW.index_select(1, self.draft_vocabulary.rows_K)


def vocabulary_of(head: "Head", drafts: bool = False) -> Vocabulary:
    """The vocabulary that the head's rows stand for; with `drafts`, that of the rows that the depths draft with."""
    drafted = head.draft_vocabulary if drafts else None
    rows = len(head.weight) if drafted is None else drafted.rows_K.numel()
    return Vocabulary(rows, head.tp_group, head.logit_scale, drafted, head.vocab_size)
