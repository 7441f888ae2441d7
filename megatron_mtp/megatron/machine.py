"""What this machine has: a CUDA device where the job has GPUs, and kernel libraries that can be imported.

An installed library may still fail to import.
"""

import importlib
import os
import platform
import shutil
import sysconfig
from functools import cache
from pathlib import Path

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


def transformer_engine_works() -> bool:
    """Return whether Megatron can build its layers with Transformer Engine, which needs a CUDA device."""
    from megatron_mtp.megatron import cpu

    return not cpu.installed() and why_not("transformer_engine.pytorch") is None


def multiplies_bfloat16() -> bool:
    """Return whether this CPU multiplies matrices in bfloat16; otherwise torch converts each number, which is slow."""
    import torch

    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
