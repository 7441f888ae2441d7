"""The device: everything that knows whether there is a GPU, and which libraries of kernels can be used.

    cpu.py        what Megatron needs to run without CUDA: a table of substitutions, each with its reason
    stand_ins.py  what is substituted: streams, events, random state, device strings
    kernels.py    whether Transformer Engine and Apex's extension can be used on this machine

`prepare()` is called once, before anything of Megatron is imported.
"""

import warnings


def prepare() -> bool:
    """Make Megatron runnable on this machine; returns whether it runs on the CPU.

    Only this call imports torch, so that command lines are parsed without it.
    """
    import torch

    from megatron_mtp.platform import cpu, kernels

    kernels.hide_broken_transformer_engine()
    on_cpu = cpu.installed() or not torch.cuda.is_available()
    if on_cpu:
        # On a machine without a GPU nobody misses these kernels, and every import says that they are not there.
        warnings.filterwarnings("ignore", message="(?i).*(apex|transformer.engine).*", category=UserWarning)
        cpu.install()
    from megatron_mtp.patches import table

    table.install()
    return on_cpu
