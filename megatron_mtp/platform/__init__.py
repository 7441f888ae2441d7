"""Everything that knows which device it runs on.

`prepare()` is called once, before anything of Megatron is imported.
"""

import torch

from megatron_mtp.platform import cpu


def prepare() -> bool:
    """Make Megatron runnable on this machine; returns whether it runs on the CPU."""
    on_cpu = cpu.installed() or not torch.cuda.is_available()
    if on_cpu:
        cpu.install()
    from megatron_mtp.platform import wheel

    wheel.install()
    return on_cpu
