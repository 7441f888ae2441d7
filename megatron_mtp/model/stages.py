"""What a pipeline asks of a model with draft heads, and no hook on its forward can do.

states that are read    a drafter reads layers of earlier stages, whose states travel beside the hidden states: input
                        and output of a stage are wider
a stage of the heads    `|m|L` in a layout: the stage sends the states of trunk and MTP layers as one, and the last
                        stage has no head that drafts
schedule plans          --overlap-moe-expert-parallel-comm takes the forward apart: schedule_plan.py

So `TrainedStage` and `Attached` stay two classes. They share the hooks, the output head and what heads draft
(attachment.py), the states that are read (here), and the loss of a head (../losses/objective.py). A run's stage has its
objective in the forward, sends on what later stages need, and may have a frozen trunk. Someone's loop asks for the loss
after a forward, may run others in between, and its model keeps the MTP block of Megatron's class.

Letters in names: S sequence, B batch, H hidden, X states of several layers side by side.
"""

from typing import Any

import torch
from torch import Tensor

NO_BACKWARD = -1
"""Id of autograd's task outside of a backward pass."""


class ReadStates:
    """What some layers return in a forward pass, on one stage after the other; number n is the n-th layer.

    A pipeline stage has some of the layers. It gets the states after layers before its own beside its input, and sends
    them on with those of its own layers.
    """

    def __init__(self, model: Any, numbers: tuple[int, ...]) -> None:
        self.numbers, self.hidden, self.after = numbers, model.config.hidden_size, dict[int, Tensor]()
        if not numbers:
            return
        model.config.variable_seq_lengths = model.pg_collection.pp.size() > 1  # stages send tensors of any width
        for layer in model.decoder.layers:
            if layer.layer_number in numbers:
                layer.register_forward_hook(self._keep)

    def _keep(self, layer: Any, _: Any, made: Any) -> None:
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            return  # a layer that is recomputed; nobody would take its states
        self.after[layer.layer_number] = (made[0] if isinstance(made, tuple) else made).detach()

    def begin(self, model: Any) -> None:
        """Before a forward of a stage: forget one that failed, and take apart what the stage before has sent."""
        self.after.clear()
        if not model.pre_process:
            model.decoder.input_tensor = self.received(model.decoder.input_tensor)

    def received(self, given: Any) -> Any:
        """A stage's input, without the states that came with it."""
        whole = given[0] if isinstance(given, list) else given
        if not self.numbers or whole is None:
            return given
        hidden_SBH, *before = whole.split(self.hidden, dim=-1)
        self.after.update(zip(self.numbers, (one.detach() for one in before), strict=False))
        return hidden_SBH

    def sent(self, hidden_SBH: Tensor) -> Tensor:
        """A stage's output, with the states so far."""
        return torch.cat([hidden_SBH, *self.taken().values()], dim=-1) if self.after else hidden_SBH

    def taken(self) -> dict[int, Tensor]:
        """The states [S, B, H] by the numbers of their layers, in rising order; they are given once."""
        taken, self.after = dict(sorted(self.after.items())), {}
        return taken


class PassedStates:
    """Carries the states that a drafter of the last stage reads through an earlier stage of Megatron's own class.

    Args:
        model: the stage.
        numbers: of the layers that are read.
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
    """The output of a stage of the heads' own: the states of the trunk and of the MTP layers, if there are any."""
    return torch.cat([hidden_SBH, *states]) if states else hidden_SBH


def apart(whole: Tensor, depths: int) -> tuple[Tensor, list[Tensor]]:
    """The states of the trunk and of the MTP layers that such a stage has sent."""
    hidden_SBH, *states = whole.chunk(1 + depths)
    return hidden_SBH, states
