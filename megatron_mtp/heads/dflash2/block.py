"""DFlash2 (z-lab): DFlash with a convolution along each block, and a choice of each draft by the previous token.

**Convolution.** For a layer's rows in a block, row 0 being the newest token; x is the normalized input of attention or
of the MLP:

    y      = conv_1(attention(conv_0(x)))                                       the same for the MLP
    conv_s(z)[t, c] = sum_{k < 2} (base[s, k, c] + d[t, s, k, g(c)]) z[t - k, c]    z before row 0 is 0
    d[t]   = projection x[t]                                                    16 channels g share a number

**Choice.** With U the logits of the output layer and h the state that it reads, the drafts are chosen from left to
right, each among the 16 tokens b with the largest U(b). With a the previous token:

    S(a, b) = U(b) + <W1[a] * (P h), W2[b]>

In training, a is the text's token. The rows learn from U, as in DFlash; W1, W2, P and the rows also learn from the
cross-entropy of S over the 16 (`losses/selector.py`). A new drafter drafts the same as DFlash: base is 1 for k = 0, and
the rest of both kernels and W2 are 0.

Letters in names: S rows of all blocks, A blocks, R rows of one, B batch, H hidden, G groups of C channels, T rows that
a convolution sums.
"""

from dataclasses import replace
from functools import partial
from typing import Any, override

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, pad

from megatron_mtp.heads.dflash2.row import CANDIDATES, CHANNELS_OF_A_KERNEL, TAPS
from megatron_mtp.model.biased_blocks import BiasedBlocks, BiasedLayer
from megatron_mtp.model.head import Head
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules
from megatron_mtp.spec.head import HeadSpec


class Convolution(MegatronModule):
    """The convolutions before and after a part of a layer, replicated on every tensor-parallel rank.

    Attributes:
        rows: rows of a block. A call with fewer rows is a single block, as in drafting.
        tp_group: ranks with copies, of which a checkpoint stores one.
        base_kernel: [2, T, H], before and after.
        kernel_projection: [2 T G, H], computes what every row adds to both.
    """

    rows: int
    tp_group: ProcessGroup

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        hidden, groups = config.hidden_size, config.hidden_size // CHANNELS_OF_A_KERNEL
        made: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.base_kernel = torch.nn.Parameter(torch.zeros(2, TAPS, hidden, **made))
        self.kernel_projection = torch.nn.Parameter(torch.zeros(2 * TAPS * groups, hidden, **made))
        with torch.no_grad():
            self.base_kernel[:, 0] = 1

    def of_rows(self, input_SBH: Tensor) -> Tensor:
        """Return what the rows add to the kernels, [S, B, 2, T, G, 1], from the normalized input of the part."""
        return linear(input_SBH, self.kernel_projection).unflatten(-1, (2, TAPS, -1, 1))

    def forward(self, values_SBH: Tensor, added_SB2TG1: Tensor, side: int) -> Tensor:
        """Convolve the values, before the part (side 0) or after it (side 1)."""
        made_SBH = torch.zeros_like(values_SBH)
        for tap in range(TAPS):
            earlier_SBH = self._earlier(values_SBH, tap)
            grouped_SBGC = earlier_SBH.unflatten(-1, (-1, CHANNELS_OF_A_KERNEL))
            own_SBH = (added_SB2TG1[:, :, side, tap] * grouped_SBGC).flatten(-2)
            made_SBH = made_SBH + self.base_kernel[side, tap] * earlier_SBH + own_SBH
        return made_SBH

    def _earlier(self, values_SBH: Tensor, tap: int) -> Tensor:
        """Return values this many rows earlier, within each block."""
        if tap == 0:
            return values_SBH
        blocks = max(len(values_SBH) // self.rows, 1)
        values_ARBH = values_SBH.unflatten(0, (blocks, len(values_SBH) // blocks))
        return pad(values_ARBH[:, :-tap], (0, 0, 0, 0, tap, 0)).flatten(0, 1)


class Convolved(torch.nn.Module):
    """A part of a layer between two convolutions."""

    def __init__(self, config: TransformerConfig, *args: Any, **others: Any) -> None:
        super().__init__(config, *args, **others)
        self.conv = Convolution(config)

    def forward(self, hidden_SBH: Tensor, *args: Any, **others: Any) -> tuple[Tensor, Tensor | None]:
        """Return the part's output for the normalized rows, and its bias."""
        added = self.conv.of_rows(hidden_SBH)
        made_SBH, bias = super().forward(self.conv(hidden_SBH, added, 0), *args, **others)
        return self.conv(made_SBH, added, 1), bias


class ConvolvedAttention(Convolved, SelfAttention):
    """Attention of block rows; the context's keys and values are not convolved."""


class ConvolvedMLP(Convolved, MLP):
    """MLP of block rows."""


class DFlash2Layer(BiasedLayer):
    """All weights of the drafter.

    Attributes:
        markov_projection: P [R, H]; W1 and W2 are `markov_w1` and `markov_w2`.
    """

    def __init__(self, drafter: HeadSpec, config: TransformerConfig, *others: Any) -> None:
        super().__init__(drafter, config, *others)
        self.markov_projection = self.whole_on_every_rank(drafter.own["drafter_markov_rank"], config.hidden_size)

    @override
    def before(self, state: Tensor, token: Tensor) -> Tensor:
        """Return W1[token] * (P h)."""
        return super().before(state, token) * linear(state, self.markov_projection)


class DFlash2Block(BiasedBlocks):
    """Drafts K tokens at once, each chosen among the likeliest tokens.

    Raises:
        ValueError: the hidden size is not a multiple of 16.
    """

    def __init__(self, drafter: HeadSpec, config: TransformerConfig, *others: Any) -> None:
        if config.hidden_size % CHANNELS_OF_A_KERNEL:
            raise ValueError(
                f"the trunk's hidden size is {config.hidden_size}, and --drafter dflash2 needs a multiple of "
                f"{CHANNELS_OF_A_KERNEL}, whose channels share a kernel; give --drafter dflash."
            )
        super().__init__(drafter, config, *others)
        for module in self.modules():
            if isinstance(module, Convolution):
                module.rows, module.tp_group = self.rows, self.tp_group

    @classmethod
    @override
    def submodules(cls, drafter: HeadSpec, config: TransformerConfig) -> MultiTokenPredictionLayerSubmodules:
        plain = super().submodules(drafter, config)
        layer = plain.tf_layer.submodules
        convolved = replace(
            layer,
            self_attention=replace(layer.self_attention, module=ConvolvedAttention),
            mlp=partial(ConvolvedMLP.as_mlp_submodule, **layer.mlp.keywords),
        )
        return replace(plain, tf_layer=replace(plain.tf_layer, submodules=convolved))

    @override
    def make_layer(self, *args: Any) -> DFlash2Layer:
        return DFlash2Layer(self.drafter, self.config, self.drafted, *args)

    @override
    def head_of(self, head: Head) -> Head:
        return replace(super().head_of(head), candidates=CANDIDATES)
