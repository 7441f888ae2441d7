"""Runs the user's own training script in one process on the CPU, and saves its steps for grads.py.

    python script_worker.py FOLDER SCRIPT FLAG ...

The script and its Megatron run unchanged: CUDA is substituted (megatron_mtp/megatron/cpu.py), but Megatron is not
patched. Two hooks record the batch before the model's forward, and weights and gradients after the last backward pass.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INPUTS = ("input_ids", "position_ids", "attention_mask")
"""Arguments of the model's forward, in positional order."""


class Steps:
    """Saves every step: its batches during the step, the rest at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.batches = folder, 0, list[dict[str, Tensor]]()

    def keep(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the batch; a hook that runs before a model's forward."""
        if not (model.training and torch.is_grad_enabled()):
            return
        given = dict(zip(INPUTS, args, strict=False)) | kwargs
        batch = {"tokens": given["input_ids"], "labels": given.get("labels"), "loss_mask": given.get("loss_mask")}
        if (packed := given.get("packed_seq_params")) is not None:
            batch |= {"cu_seqlens": packed.cu_seqlens_q, "cu_seqlens_padded": packed.cu_seqlens_q_padded}
        self.batches.append({name: one.clone() for name, one in batch.items() if one is not None})

    def write(self, model: Any) -> None:
        """Write a step to FOLDER/step-N."""
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
        from safetensors.torch import save_file

        tracker: Any = MTPLossLoggingHelper
        tensors = {"losses": tracker.tracker["loss_values"] / len(self.batches)}
        for name, weight in model.named_parameters():
            gradient = getattr(weight, "main_grad", None)
            tensors |= {f"weights.{name}": weight, f"gradients.{name}": weight.grad if gradient is None else gradient}
        for number, batch in enumerate(self.batches):
            tensors |= {f"microbatches.{number}.{name}": one for name, one in batch.items()}
        made = self.folder / f"step-{self.number}"
        made.mkdir()
        save_file({name: one.detach().clone().contiguous() for name, one in tensors.items()}, made / "step.safetensors")
        self.number, self.batches = self.number + 1, []


def hook(steps: Steps) -> None:
    """Install hooks on every new model and at the end of every step."""
    from megatron.core import distributed
    from megatron.core.models.gpt.gpt_model import GPTModel

    finalize, made = distributed.finalize_model_grads, GPTModel.__init__

    def finalized(model: Any, *args: Any, **kwargs: Any) -> Any:
        found = finalize(model, *args, **kwargs)
        steps.write(model[0])
        return found

    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.register_forward_pre_hook(steps.keep, with_kwargs=True)

    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.")]:
        for name, value in list(vars(module).items()):
            if value is finalize:  # training loops import it by name
                setattr(module, name, finalized)
    GPTModel.__init__ = initialized


def main(folder: str, script: str, flags: list[str]) -> None:
    """Run the script."""
    from megatron_mtp.megatron import cpu
    from megatron_mtp.megatron.runtime import hide_transformer_engine

    hide_transformer_engine()
    cpu.install()
    if find_spec("megatron.core.datasets.helpers_cpp") is not None:
        from megatron.core.datasets import utils

        utils.compile_helpers = lambda: None  # scripts run make even if they are already compiled
    hook(Steps(Path(folder)))
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
