"""Data passed between the parts of a step: run -> propose -> verify -> keep -> emit.

The trunk scores R = N + 1 rows of a sequence in one forward pass: row 0 is t_m, the newest token, and rows 1 .. N are
the drafted nodes. A draft is a tree: every node names the row that it continues, and a chain is a tree with one branch.

        row      0     1     2     3            the root t_m, two candidates for the next token, and one more token
        token    t_m   a     b     c            that continues b
        parent         0     0     2

Letters in names: B batch, N drafted nodes, R = N + 1 rows, V vocabulary, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.sampling import Noise, Sampling, SamplingOfEach


@dataclass(frozen=True)
class Draft:
    """Draft tokens of a proposer.

    Attributes:
        tokens_BN: draft tokens; each node comes after its parent.
        probs_BNV: q, the distribution that each was sampled from; None for deterministic drafts.
        parents_BN: row that each node continues; None for a chain.
        valid_BN: False where a node is padding or is scored without being a candidate; None if all are candidates.
    """

    tokens_BN: Tensor
    probs_BNV: Tensor | None = None
    parents_BN: Tensor | None = None
    valid_BN: Tensor | None = None

    @property
    def nodes(self) -> int:
        """N, number of draft tokens per sequence."""
        return self.tokens_BN.size(1)

    @property
    def is_chain(self) -> bool:
        """Whether every token continues the previous one."""
        return self.parents_BN is None

    def parents(self) -> Tensor:
        """[B, N], also for a chain."""
        if self.parents_BN is not None:
            return self.parents_BN
        return torch.arange(self.nodes, device=self.tokens_BN.device).expand_as(self.tokens_BN)

    def distributions(self, like: Tensor) -> Tensor:
        """Return q of every node, [B, N, V], in the dtype of `like` [..., V]; one-hot for a deterministic draft."""
        return (one_hot(self.tokens_BN, like.size(-1)) if self.probs_BNV is None else self.probs_BNV).to(like)

    def valid(self) -> Tensor:
        """[B, N], bool."""
        return torch.ones_like(self.tokens_BN, dtype=torch.bool) if self.valid_BN is None else self.valid_BN

    def levels(self) -> list[list[int]]:
        """Return the depth of every node, from 1, on the host.

        -1 for nodes that are not candidates or have no parent.
        """
        if self.is_chain and self.valid_BN is None:
            return [list(range(1, self.nodes + 1))] * self.tokens_BN.size(0)
        found = []
        for valid, parents in zip(self.valid().tolist(), self.parents().tolist(), strict=True):
            level = [0]
            for ok, parent in zip(valid, parents, strict=True):
                level.append(level[parent] + 1 if ok and level[parent] >= 0 else -1)
            found.append(level[1:])
        return found


@dataclass(frozen=True)
class Verdict:
    """The target's verdict on a draft.

    Attributes:
        kept_BR: rows on the accepted path; always includes the root.
        token_B: token after the path: recovered after a rejection, bonus if all drafts were accepted.
    """

    kept_BR: Tensor
    token_B: Tensor

    @property
    def accepted_B(self) -> Tensor:
        """[B], number of accepted drafts of every sequence."""
        return self.kept_BR.sum(dim=1) - 1


@dataclass(frozen=True)
class StepOutput:
    """Tokens that a step added, on the device; a captured step writes the same tensors again.

    Attributes:
        draft: the verified draft.
        tokens_BR: accepted drafts and the token after them; later entries are undefined.
        count_B: number of tokens that were added.
        drafter_seconds: drafting time, if the draft was made in one call.
    """

    draft: Draft
    tokens_BR: Tensor
    count_B: Tensor
    drafter_seconds: float = 0.0


@dataclass(frozen=True)
class Round:
    """Inputs of proposers and verifiers other than the draft and the target's logits.

    Attributes:
        sampling: temperature, top-k, top-p and min-p, for target and drafter alike.
        noise: random numbers of every request for this round.
        config: settings of the method and of the verifier.
        token_ids: tokens of every sequence up to t_m, on the host; not available in a captured step.
        tokens_BT: the same on the device, with undefined values after t_m; `noise.position_B` is their number.
    """

    sampling: Sampling | SamplingOfEach
    noise: Noise
    config: SpeculativeConfig
    token_ids: Sequence[list[int]] = ()
    tokens_BT: Tensor | None = None
