"""Greedy: a draft is accepted while it is what plain decoding would have chosen."""

from torch import Tensor

from megatron_mtp.drafting.types import Draft, Round, Verdict
from megatron_mtp.drafting.verifiers.walk import chosen, walk


def greedy(logits_BRV: Tensor, draft: Draft, _: Round) -> Verdict:
    """Token-identical to plain greedy decoding; the token after the path is the target's argmax."""
    best_BR = logits_BRV.argmax(dim=-1)

    def is_the_best(node: int, here_B: Tensor, _: Tensor) -> Tensor:
        return draft.tokens_BN[:, node] == chosen(best_BR, here_B)

    kept_BR, last_B = walk(draft, is_the_best)
    return Verdict(kept_BR, chosen(best_BR, last_B))
