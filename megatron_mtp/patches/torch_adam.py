"""Without Apex and TE, Megatron's distributed optimizer shards torch's Adam, but cannot resume with it (0.19.2).

torch's Adam keeps `step` as a tensor of every parameter, made by its first step; Apex and TE keep a number per group.
Each method below is Megatron's, put right where it overlooks that. The plain optimizers resume without help.
"""

from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class ResumableDistributedOptimizer(DistributedOptimizer):
    """Megatron's, for torch's Adam."""

    def state_dict(self) -> Any:
        """Asked for by a load before the first step: with the state that the first step would make."""
        if not self.optimizer.state and self.init_state_fn is not None:
            self.init_state_fn(self.optimizer)
            self._own_steps(torch.tensor(0.0))
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Megatron gives all parameters the one tensor, to which every one of them would then add 1 a step."""
        super().load_state_dict(state_dict)
        self._own_steps()

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Any]) -> None:
        """Loaded tensors come without a `step` or with that of a first step, while it is loaded by then and stays.

        In float32 they go into the parameters themselves.
        """
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": None})

    def _own_steps(self, step: torch.Tensor | None = None) -> None:
        for state in self.optimizer.state.values():
            if step is not None or "step" in state:
                state["step"] = (state["step"] if step is None else step).clone()


def install() -> None:
    """Let Megatron make the optimizer that resumes, where neither Apex nor TE is there."""
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        from megatron.core import optimizer

        optimizer.DistributedOptimizer = ResumableDistributedOptimizer
