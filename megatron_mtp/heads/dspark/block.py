"""DSpark (arXiv:2607.05147): a block of drafts that know the previous token and how likely they are accepted.

    logits      output(norm(x)) + W2 W1[t_{a+k-1}]          the row at a + k - 1 drafts t_{a+k}: K rows
    confidence  sigmoid(w [norm(x); W1[t_{a+k-1}]] + b)     learns the acceptance rate of sampled drafts

Letters in names: A blocks, D draft tokens of a block, B batch, H hidden, R rank of the bias, X both side by side.
"""

from typing import Any, override

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear

from megatron_mtp.model.biased_blocks import BiasedBlocks, BiasedLayer
from megatron_mtp.spec.head import HeadSpec


class DSparkLayer(BiasedLayer):
    """All weights of the drafter.

    Attributes:
        confidence_weight, confidence_bias: w [1, H + R] and b [1].
    """

    def __init__(self, drafter: HeadSpec, config: TransformerConfig, *others: Any) -> None:
        super().__init__(drafter, config, *others)
        self.confidence_weight = self.whole_on_every_rank(1, config.hidden_size + drafter.own["drafter_markov_rank"])
        self.confidence_bias = self.whole_on_every_rank(1)

    def confidence(self, state_and_token: Tensor) -> Tensor:
        """Return the logit of a draft being accepted, from norm(x) and W1[previous token] in one tensor."""
        return linear(state_and_token, self.confidence_weight, self.confidence_bias).squeeze(-1)


class DSparkBlock(BiasedBlocks):
    """Drafts K tokens at once, each with a confidence."""

    @override
    def make_layer(self, *args: Any) -> DSparkLayer:
        return DSparkLayer(self.drafter, self.config, self.drafted, *args)

    @override
    def confidence(self, both_ADBX: Tensor) -> Tensor:
        made: Tensor = self.layer.confidence(both_ADBX)
        return made.transpose(0, 1)
