"""Losses: from hidden states, labels and the shared head to per-token values.

A loss is a function `(hidden_SBH, labels_BS, head) -> loss_BS` with one row in `LOSSES`. Masks, weights and reduction
are in one place, `combine`.
"""

from collections.abc import Callable

from torch import Tensor

from megatron_mtp.losses.cross_entropy import cross_entropy
from megatron_mtp.model.sharing import Head

Loss = Callable[[Tensor, Tensor, Head], Tensor]

LOSSES: dict[str, Loss] = {"ce": cross_entropy}
