"""What every fork of forks.py has imported; like a command, with one thread."""

from importlib import import_module

import torch

from megatron_mtp.platform import prepare

prepare()
torch.set_num_threads(1)
MODULES = (
    *(f"megatron_mtp.{name}" for name in ("training.run", "drafting.command", "checkpoint.proof.verify")),
    "megatron.core.tokenizers.text",  # loads transformers
    "megatron.core.models.mimo",
)
for name in MODULES:
    import_module(name)
