"""Sends states of draft heads between pipeline stages, which hooks on a forward cannot do.

hidden states of layers     a drafter reads layers of earlier stages; their states are sent next to the stage's output,
                            so that inputs and outputs of stages are wider
a stage for the heads       `|m|L` in a layout: the stage sends the states of trunk and MTP layers as one tensor, and
                            the last stage has no draft heads
schedule plans              --overlap-moe-expert-parallel-comm splits the forward into parts: schedule_plan.py

This is why `TrainedStage` and `Attached` are two classes. They share the hooks, the output layer and the drafts
(attachment.py), the hidden states for drafters (here), and the loss of a head (../losses/head_objective.py). A stage of
a run computes its objective in the forward, sends states to later stages, and may have a frozen trunk. A custom loop
asks for the loss after a forward, may run other forwards in between, and keeps Megatron's own MTP block in its model.

Letters in names: S sequence, B batch, H hidden, X concatenated states of several layers.
"""

from typing import Any

import torch
from torch import Tensor

NO_BACKWARD = -1
"""Id of autograd's task outside of a backward pass."""


class ReadStates:
    """Collects the outputs of some layers in a forward pass, stage by stage. Layers are counted from 1.

    A pipeline stage holds some of the layers. It receives the states of earlier layers next to its input, and sends
    them on together with the states of its own layers.
    """

    def __init__(self, model: Any, numbers: tuple[int, ...]) -> None:
        self.numbers, self.hidden, self.after = numbers, model.config.hidden_size, dict[int, Tensor]()
        if not numbers:
            return
        model.config.variable_seq_lengths = model.pg_collection.pp.size() > 1  # stages send tensors of different widths
        for layer in model.decoder.layers:
            if layer.layer_number in numbers:
                layer.register_forward_hook(self._keep)

    def _keep(self, layer: Any, _: Any, made: Any) -> None:
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            return  # the layer is being recomputed; its state was already stored
        self.after[layer.layer_number] = (made[0] if isinstance(made, tuple) else made).detach()

    def begin(self, model: Any) -> None:
        """Before the forward of a stage: discard states of a failed one, and split what the previous stage sent."""
        self.after.clear()
        if not model.pre_process:
            model.decoder.input_tensor = self.received(model.decoder.input_tensor)

    def received(self, given: Any) -> Any:
        """Return a stage's input without the states that came with it, and keep those."""
        whole = given[0] if isinstance(given, list) else given
        if not self.numbers or whole is None:
            return given
        hidden_SBH, *before = whole.split(self.hidden, dim=-1)
        self.after.update(zip(self.numbers, (one.detach() for one in before), strict=False))
        return hidden_SBH

    def sent(self, hidden_SBH: Tensor) -> Tensor:
        """Return a stage's output, concatenated with all states so far."""
        return torch.cat([hidden_SBH, *self.taken().values()], dim=-1) if self.after else hidden_SBH

    def taken(self) -> dict[int, Tensor]:
        """Return the states [S, B, H] by layer number, in ascending order, and forget them."""
        taken, self.after = dict(sorted(self.after.items())), {}
        return taken
