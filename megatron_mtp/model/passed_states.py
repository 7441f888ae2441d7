"""States of several layers as one tensor between pipeline stages.

Letters in names: S sequence, B batch, H hidden.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_mtp.model.stages import ReadStates


class PassedStates:
    """Hooks that pass states for a drafter on the last stage through an earlier stage of Megatron's own class.

    Args:
        model: the stage.
        numbers: numbers of the layers that the drafter reads.
    """

    def __init__(self, model: Any, numbers: tuple[int, ...]) -> None:
        self._read = ReadStates(model, numbers)
        model.register_forward_pre_hook(self._receive)
        model.register_forward_hook(self._send)

    def _receive(self, model: Any, _: Any) -> None:
        self._read.begin(model)

    def _send(self, _: Any, __: Any, hidden_SBH: Tensor) -> Tensor:
        return self._read.sent(hidden_SBH)


def as_one(hidden_SBH: Tensor, states: list[Tensor]) -> Tensor:
    """Join the states of the trunk and the MTP layers, if any, as the output of a stage for the heads."""
    return torch.cat([hidden_SBH, *states]) if states else hidden_SBH


def apart(whole: Tensor, depths: int) -> tuple[Tensor, list[Tensor]]:
    """Split the output of such a stage into the states of the trunk and of the MTP layers."""
    hidden_SBH, *states = whole.chunk(1 + depths)
    return hidden_SBH, states
