"""Block drafters that know the previous token: a low-rank bias is added to their logits, as in DSpark.

    logits of draft k    output(h) + W2 W1[t_{a+k-1}]     h the row's state after the norm

Letters in names: A blocks, D draft tokens of a block, B batch, H hidden, R rank of the bias, X both side by side, V
vocabulary, N draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, override

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.model.block_drafter import BlockDrafter, BlockDrafterLayer
from megatron_mtp.model.head import Head
from megatron_mtp.spec.head import HeadSpec


class BiasedLayer(BlockDrafterLayer):
    """All weights of the drafter.

    Attributes:
        markov_w1: W1 [V, R].
        markov_w2: W2 [N, R], with the same rows as the output layer.
    """

    def __init__(self, drafter: HeadSpec, config: TransformerConfig, drafted: int | None, *others: Any) -> None:
        super().__init__(drafter, config, drafted, *others)
        rank = drafter.own["drafter_markov_rank"]
        self.markov_w1 = self.whole_on_every_rank(drafter.vocabulary, rank)
        self.markov_w2 = self.whole_on_every_rank(drafted or drafter.vocabulary, rank)

    def before(self, state: Tensor, token: Tensor) -> Tensor:
        """What the token before a draft gives the bias, [..., R], for a state [..., H] after the norm: W1[token]."""
        return self.markov_w1[token]


class BiasedBlocks(BlockDrafter):
    """Drafts K tokens at once, with a logit bias by the previous token."""

    @override
    def with_bias(
        self, states_ADBH: Tensor, before_DBA: Tensor, embedded: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        read_ADBR = self.before(states_ADBH, before_DBA.permute(2, 0, 1), embedded)
        both_ADBX = torch.cat([states_ADBH, read_ADBR], dim=-1)
        return list(both_ADBX.unbind(1)), self.confidence(both_ADBX)

    def before(self, states_ADBH: Tensor, token_ADB: Tensor, embedded: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the bias features of the tokens before each draft, [A, D, B, R].

        Args:
            embedded: embeddings [S, B, H] of tokens [B, S].
        """
        made: Tensor = self.layer.before(states_ADBH, token_ADB)
        return made

    @property
    def bias_weight(self) -> Tensor:
        """Return the rows [N, R] whose products with these features are the bias."""
        made: Tensor = self.layer.markov_w2
        return made

    def confidence(self, both_ADBX: Tensor) -> Tensor | None:
        """Return logits [D, A, B] of the drafts being accepted, for kinds that learn them."""
        return None

    @override
    def head_of(self, head: Head) -> Head:
        head = super().head_of(head)
        rows_NR = copy_to_tensor_model_parallel_region(self.bias_weight, group=self.tp_group)
        if head.draft_vocabulary is not None:
            first, count = head.draft_vocabulary.first, head.draft_vocabulary.rows_K.numel()
        else:
            count = len(head.weight)
            first = count * self.tp_group.rank()
            rows_NR = pad(rows_NR, (0, 0, 0, count * self.tp_group.size() - len(rows_NR)))
        return replace(head, bias_rows=rows_NR[first : first + count])
