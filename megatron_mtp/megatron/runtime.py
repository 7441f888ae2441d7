"""Make Megatron runnable on this machine.

Call `prepare()` once, before a model is built or a Megatron flag is parsed. Megatron may be imported before, except on
a CPU with Transformer Engine. A broken Transformer Engine would end the
process: Megatron imports it and only treats ImportError as absence.
"""

import logging
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import cast

from megatron_mtp.megatron.machine import why_not


def quieten() -> None:
    """Prepare, and silence Megatron and transformers, which print many warnings during import on a CPU.

    The streams are unchanged: Megatron gives the root logger a handler, which keeps the stream that it finds.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    prepare()
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("megatron_mtp").setLevel(logging.WARNING)  # our warnings are meant for users
    for name in ("megatron", "transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def prepare() -> bool:
    """Make Megatron runnable on this machine. Return whether it runs on the CPU.

    torch is imported only here, so command lines can be parsed without it.

    Raises:
        ImportError: on a CPU, Megatron was imported before this call and uses modules of Transformer Engine.
    """
    import torch

    from megatron_mtp.megatron import cpu

    on_cpu = cpu.installed() or not torch.cuda.is_available()
    if on_cpu or why_not("transformer_engine.pytorch") is not None:
        hide_transformer_engine()
    if on_cpu:
        # These kernels are not used on a CPU; every import would warn that they are missing.
        warnings.filterwarnings("ignore", message="(?i).*(apex|transformer.engine).*", category=UserWarning)
        cpu.install()
        if "OMP_NUM_THREADS" not in os.environ and (quota := cpu_quota()) < torch.get_num_threads():
            torch.set_num_threads(max(int(quota), 1))
    from megatron_mtp.megatron.patches import table

    table.install()
    return on_cpu


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the number of CPUs that a container may use at a time (cgroup v2 or v1); infinity without a quota.

    If more threads run, the kernel stops all of them until the next period of the quota.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return float("inf")


def hide_transformer_engine() -> None:
    """Make its import raise ImportError, which Megatron treats as absence; its modules need a CUDA device."""
    wrapper = sys.modules.get("megatron.core.extensions.transformer_engine")
    if getattr(wrapper, "HAVE_TE", False):
        raise ImportError(
            "Megatron was imported before megatron_mtp.megatron.runtime.prepare() and took modules of Transformer "
            "Engine, which cannot be used on this machine; call prepare() first."
        )
    modules: dict[str, ModuleType | None] = cast("dict[str, ModuleType | None]", sys.modules)
    modules["transformer_engine"] = None  # makes its import raise ImportError
