"""On a machine with a CUDA device, the tensors that tests create are on it, with the numbers that a CPU draws."""

import sys
from pathlib import Path
from typing import Any, override

import torch
from torch.overrides import TorchFunctionMode

TESTS = str(Path(__file__).parents[1])
NAMES = "arange empty eye full linspace ones rand randint randn randperm tensor zeros".split()
CONSTRUCTORS = {getattr(torch, name) for name in NAMES}


class OnDevice(TorchFunctionMode):
    """Move to the device what a file of the tests creates without naming a device.

    Tensors of the package stay where its code creates them: one that it leaves on the host by mistake is noticed.
    """

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        made = function(*args, **given)
        names_no_device = function in CONSTRUCTORS and given.get("device") is None
        if names_no_device and sys._getframe(1).f_code.co_filename.startswith(TESTS):
            return made.detach().cuda().requires_grad_(made.requires_grad)
        return made
