"""Domino (arXiv:2605.29707): DFlash's block, with a bias by all tokens before a draft in the block.

    g_k     = GRU(embedding(t_{a+k-1}), g_{k-1})            g_0 = 0, without biases; t_a the newest token
    logits  output(h_k) + W2 silu(W1 [h_k; g_k])            of draft k = 2 .. K, h_k its row's state after the norm
    logits  output(h_1)                                     of draft 1

In training, the tokens are the text's. The loss is (1 - s) times that of these logits plus s times that of output(h_k)
alone; s falls from 1 to 0 over the run, so that the rows learn before the bias does.

Letters in names: A blocks, D draft tokens of a block, B batch, H hidden, G size of the GRU's state, R rank of the bias.
"""

from collections.abc import Callable
from typing import Any, override

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear, silu

from megatron_mtp.model.biased_blocks import BiasedBlocks
from megatron_mtp.model.block_drafter import BlockDrafterLayer
from megatron_mtp.spec.head import HeadSpec


class DominoLayer(BlockDrafterLayer):
    """All weights of the drafter.

    Attributes:
        gru_input, gru_state: [3 G, H] and [3 G, G], for the reset gate, the update gate and the new state, in torch's
            order.
        bias_input, bias_output: W1 [R, H + G] and W2 [V, R].
    """

    def __init__(self, drafter: HeadSpec, config: TransformerConfig, *others: Any) -> None:
        super().__init__(drafter, config, *others)
        size, rank = drafter.own["drafter_gru_size"], drafter.own["drafter_markov_rank"]
        hidden = config.hidden_size
        self.gru_input = self.whole_on_every_rank(3 * size, hidden)
        self.gru_state = self.whole_on_every_rank(3 * size, size)
        self.bias_input = self.whole_on_every_rank(rank, hidden + size)
        self.bias_output = self.whole_on_every_rank(drafter.vocabulary, rank)

    def after(self, embedded_NH: Tensor, before_NG: Tensor | None) -> Tensor:
        """Return the GRU's state [N, G] after these tokens, from the previous state; None before the first."""
        if before_NG is None:
            before_NG = embedded_NH.new_zeros(len(embedded_NH), self.gru_state.size(1))
        return torch.gru_cell(embedded_NH, before_NG, self.gru_input, self.gru_state)

    def biased_by(self, state: Tensor, memory: Tensor) -> Tensor:
        """Return the input of W2, [..., R], for states [..., H] and the GRU's states [..., G]."""
        return silu(linear(torch.cat([state, memory], dim=-1), self.bias_input))


class DominoBlock(BiasedBlocks):
    """Drafts K tokens at once; each but the first has a bias by the previous tokens of the block."""

    @override
    def make_layer(self, *args: Any) -> DominoLayer:
        return DominoLayer(self.drafter, self.config, self.drafted, *args)

    @override
    def before(self, states_ADBH: Tensor, token_ADB: Tensor, embedded: Callable[[Tensor], Tensor]) -> Tensor:
        blocks, drafts, width = token_ADB.shape
        embedded_ADBH = embedded(token_ADB.flatten(0, 1).t()).unflatten(0, (blocks, drafts))
        states, memory = list[Tensor](), None
        for token_ABH in embedded_ADBH.unbind(1):
            memory = self.layer.after(token_ABH.flatten(0, 1), memory)
            states.append(memory.unflatten(0, (blocks, width)))
        read_ADBR: Tensor = self.layer.biased_by(states_ADBH, torch.stack(states, dim=1))
        return torch.cat([torch.zeros_like(read_ADBR[:, :1]), read_ADBR[:, 1:]], dim=1)

    @property
    @override
    def bias_weight(self) -> Tensor:
        made: Tensor = self.layer.bias_output
        return made
