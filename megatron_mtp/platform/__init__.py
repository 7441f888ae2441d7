"""The device: everything that depends on whether there is a GPU, and on which libraries of kernels can be used.

    cpu.py        what Megatron needs to run without CUDA: a table of substitutions, each with its reason
    stand_ins.py  what is substituted: streams, events, random state, device strings
    kernels.py    whether Transformer Engine and Apex's extension can be used on this machine

`prepare()` is called once, before a model is built or a flag of Megatron is parsed; Megatron may be imported before.
A Transformer Engine that is installed and broken is the exception: Megatron imports it, and ends with its error.
"""

import contextlib
import io
import logging
import warnings


def quieten() -> None:
    """Prepare, and silence Megatron and transformers, which warn a lot when they are imported on a CPU."""
    warnings.filterwarnings("ignore")
    with contextlib.redirect_stderr(io.StringIO()):
        prepare()
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("megatron", "transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def prepare() -> bool:
    """Make Megatron runnable on this machine; returns whether it runs on the CPU.

    Only this call imports torch, so that command lines are parsed without it.
    """
    import torch

    from megatron_mtp.platform import cpu, kernels

    kernels.hide_broken_transformer_engine()
    on_cpu = cpu.installed() or not torch.cuda.is_available()
    if on_cpu:
        # Without a GPU these kernels are not used; every import would warn that they are missing.
        warnings.filterwarnings("ignore", message="(?i).*(apex|transformer.engine).*", category=UserWarning)
        cpu.install()
    from megatron_mtp.patches import table

    table.install()
    return on_cpu
