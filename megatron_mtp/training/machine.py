"""Whether this process may train on the device that it found, and the environment that CUDA needs before it starts.

In:  the environment, which launchers fill, and the command line. Nothing is asked of other ranks.
Out: nothing, or a ValueError with one sentence.
"""

import argparse
import os
import platform

import torch

ALLOW_CPU = "MEGATRON_MTP_ALLOW_CPU"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
GIVEN_GPUS = (
    "CUDA_VISIBLE_DEVICES SLURM_JOB_GPUS SLURM_STEP_GPUS SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE "
    "SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK"
).split()
"""Variables by which a launcher gives GPUs to a job."""

NO_GPUS = ("", "0", "-1", "NoDevFiles", "void", "none")
"""Values of them that give none; of CUDA_VISIBLE_DEVICES, 0 is a device."""

BLACKWELL = 10
"""The major compute capability from which Megatron takes any number of connections."""


def check_device(on_cpu: bool) -> None:
    """Refuse a rank on the CPU in a job with GPUs: it would meet the others over gloo, slowly or never.

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
                f"look there with nvidia-smi and `megatron-mtp doctor`, or set {ALLOW_CPU}=1 to run on the CPU."
            )


def set_connections(argv: list[str], on_cpu: bool) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS where Megatron insists on 1; CUDA reads it when it starts.

    Raises:
        ValueError: it has another value, which Megatron refuses on a GPU before Blackwell.
    """
    if on_cpu or not _needs_one_connection(argv):
        return
    given = os.environ.setdefault(CONNECTIONS, "1")
    if given != "1" and torch.cuda.get_device_capability()[0] < BLACKWELL:
        raise ValueError(
            f"{CONNECTIONS} is {given}, but tensor and context parallelism need 1 on a GPU before Blackwell; unset it, "
            "or set it to 1."
        )


def _needs_one_connection(argv: list[str]) -> bool:
    """Whether ranks share a layer or a sequence, and nothing is asked for that needs more connections."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", "--context-parallel-size", dest="sizes", action="append")
    for flag in ("--use-torch-fsdp2", "--use-megatron-fsdp", "--overlap-moe-expert-parallel-comm"):
        parser.add_argument(flag, dest="other", action="store_true")
    given, _ = parser.parse_known_args(argv[1:])
    return any(size != "1" for size in given.sizes or []) and not given.other
