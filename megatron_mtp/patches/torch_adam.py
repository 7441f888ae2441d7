"""Without Apex and TE, Megatron's distributed optimizer shards torch's Adam, but cannot resume with it.

torch's Adam keeps `step` as a tensor for every parameter, and its first step makes these tensors; Apex and TE keep a
number for every group. Each method below is Megatron's, corrected where it assumes a number. Megatron's other
optimizers resume correctly.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
else:
    DistributedOptimizer = object  # the table of patches is read without importing Megatron


class _Resumable(DistributedOptimizer):
    """Before Megatron's class in the order of methods, for torch's Adam."""

    def state_dict(self) -> Any:
        """With the state that the first step would make; a load asks for it before that step."""
        if not self.optimizer.state and self.init_state_fn is not None:
            self.init_state_fn(self.optimizer)
            self._own_steps(torch.tensor(0.0))
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load it, with a `step` for every parameter: they shared one tensor, and each would add 1 to it every step."""
        super().load_state_dict(state_dict)
        self._own_steps()

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Any]) -> None:
        """Set the tensors, but keep `step`, which is loaded before them.

        The loaded tensors have no `step`, or that of a first step. Float32 tensors go into the parameters themselves.
        """
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": None})

    def _own_steps(self, step: torch.Tensor | None = None) -> None:
        for state in self.optimizer.state.values():
            if step is not None or "step" in state:
                state["step"] = (state["step"] if step is None else step).clone()


def resumable(distributed_optimizer: type) -> type:
    """In the place of the class in `megatron.core.optimizer`, which makes the optimizers."""
    return type("ResumableDistributedOptimizer", (_Resumable, distributed_optimizer), {})
