"""Greedy: a draft is accepted while it is what plain decoding would have chosen."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.decoding.types import Draft, Round, Verdict
from megatron_mtp.decoding.verifiers.base import Verifier
from megatron_mtp.decoding.verifiers.walk import chosen, walk


@partial(Verifier, line="accept the trunk's argmax", greedy_only=True, recordable=True)
def greedy(logits_BRV: Tensor, draft: Draft, _: Round) -> Verdict:
    """Token-identical to plain greedy decoding; the token after the path is the target's argmax."""
    best_BR = logits_BRV.argmax(dim=-1)
    if draft.nodes == 0:
        return Verdict(torch.ones_like(best_BR, dtype=torch.bool), best_BR[:, 0])
    if draft.is_chain:
        return _chain(best_BR, draft)

    def is_the_best(node: int, here_B: Tensor, _: Tensor) -> Tensor:
        return draft.tokens_BN[:, node] == chosen(best_BR, here_B)

    kept_BR, last_B = walk(draft, is_the_best)
    return Verdict(kept_BR, chosen(best_BR, last_B))


def _chain(best_BR: Tensor, draft: Draft) -> Verdict:
    """The same without a pass over nodes."""
    right_BN = draft.tokens_BN == best_BR[:, :-1]
    if draft.valid_BN is not None:
        right_BN = right_BN & draft.valid_BN
    kept_BR = pad(right_BN, (1, 0), value=True).cumprod(dim=1)
    return Verdict(kept_BR.bool(), chosen(best_BR, kept_BR.sum(dim=1) - 1))
