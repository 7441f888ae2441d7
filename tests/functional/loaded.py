"""What every fork of forks.py has imported; like a command, with one thread."""

from importlib import import_module

import torch

from megatron_mtp.platform import prepare

prepare()
torch.set_num_threads(1)
for name in ("training.run", "drafting.command", "checkpoint.verify"):
    import_module(f"megatron_mtp.{name}")
