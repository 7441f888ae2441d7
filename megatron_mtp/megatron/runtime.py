"""Make Megatron runnable on this machine, and find out which kernel libraries are usable.

Call `prepare()` once, before a model is built or a Megatron flag is parsed. Megatron may be imported before, except on
a CPU with Transformer Engine. An installed library may still fail to import. A broken Transformer Engine would end the
process: Megatron imports it and only treats ImportError as absence.
"""

import importlib
import logging
import os
import platform
import shutil
import sys
import sysconfig
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import cast


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


ALLOW_CPU = "MEGATRON_MTP_ALLOW_CPU"
GIVEN_GPUS = (
    "CUDA_VISIBLE_DEVICES SLURM_JOB_GPUS SLURM_STEP_GPUS SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE "
    "SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK"
).split()
"""Environment variables with which a launcher assigns GPUs to a job."""

NO_GPUS = ("", "0", "-1", "NoDevFiles", "void", "none")
"""Values of these variables that assign no GPU; in CUDA_VISIBLE_DEVICES, 0 is a device."""


def check_device(on_cpu: bool) -> None:
    """Reject a rank on the CPU in a job with GPUs, which would reach the others over gloo, slowly or never.

    Raises:
        ValueError: the launcher gave GPUs, this rank finds none, and MEGATRON_MTP_ALLOW_CPU is not 1.
    """
    if not on_cpu or os.environ.get(ALLOW_CPU) == "1":
        return
    for name in GIVEN_GPUS:
        given = os.environ.get(name, "").strip()
        if given not in NO_GPUS or (given == "0" and name == "CUDA_VISIBLE_DEVICES"):
            raise ValueError(
                f"rank {os.environ.get('RANK', '0')} on {platform.node()} finds no CUDA device, but {name} is {given}; "
                f"check it with nvidia-smi and `megatron-mtp doctor`, or set {ALLOW_CPU}=1 to run on the CPU."
            )


@cache
def why_not(module: str) -> str | None:
    """Return why a module cannot be imported, or None. A build for another torch or driver may raise anything."""
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            return "it is not installed"
        return f"it cannot be imported: {type(error).__name__}: {error}"[:200]
    return None


def why_no_launcher() -> str | None:
    """Return why Triton cannot build the C module that launches kernels; None if it can."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc, clang, or CC)"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if header.is_file() else f"there is no {header} (of the package python3-dev)"


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


def transformer_engine_works() -> bool:
    """Return whether Megatron can build its layers with Transformer Engine, which needs a CUDA device."""
    from megatron_mtp.megatron import cpu

    return not cpu.installed() and why_not("transformer_engine.pytorch") is None


def fuses_weight_gradients() -> bool:
    """Return whether Apex's extension is installed, which adds a weight gradient to its buffer in the product."""
    return why_not("fused_weight_gradient_mlp_cuda") is None


def mamba_works() -> bool:
    """Return whether Megatron's Mamba-2 layers are usable; they need a CUDA device."""
    return _all_usable("mamba_ssm", "causal_conv1d", "einops")


def delta_rule_works() -> bool:
    """Return whether Megatron's Gated DeltaNet layers are usable; they need a CUDA device."""
    return _all_usable("fla")


def _all_usable(*modules: str) -> bool:
    from megatron_mtp.megatron import cpu

    return not cpu.installed() and all(why_not(module) is None for module in modules)
