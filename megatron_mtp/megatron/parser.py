"""Megatron's own parser: flags that it lacks, and those that a machine needs."""

from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Any

CUDA, TE, APEX = "CUDA device", "Transformer Engine", "Apex's fused weight gradients"
"""Software and hardware that a machine may not have."""


@dataclass(frozen=True)
class MachineSetting:
    """A Megatron argument whose default needs something that a machine may lack.

    Attributes:
        name, value: the argument, and its value on such a machine.
        needs: requirement of the default. Apex fuses weight gradients of Megatron's own layers.
        flag: its command-line flag; None for arguments that only matter outside training.
    """

    name: str
    value: Any
    needs: tuple[str, ...]
    flag: str | None = None


MACHINE_SETTINGS = (
    MachineSetting("transformer_impl", "local", (CUDA, TE), "--transformer-impl local"),
    MachineSetting("distributed_backend", "gloo", (CUDA,), "--distributed-backend gloo"),
    MachineSetting("gradient_accumulation_fusion", False, (CUDA, TE, APEX), "--no-gradient-accumulation-fusion"),
    MachineSetting("persist_layer_norm", False, (CUDA, TE), "--no-persist-layer-norm"),
    MachineSetting("masked_softmax_fusion", False, (CUDA,), "--no-masked-softmax-fusion"),
    MachineSetting("apply_rope_fusion", False, (CUDA, TE), "--no-rope-fusion"),
    MachineSetting("num_workers", 0, (CUDA,), "--num-workers 0"),
    MachineSetting("bias_swiglu_fusion", False, (CUDA, TE)),
    MachineSetting("bias_gelu_fusion", False, (CUDA, TE)),
    MachineSetting("bias_dropout_fusion", False, (CUDA, TE)),
    MachineSetting("moe_token_dispatcher_type", "allgather", (CUDA, TE)),
)
"""Settings that Megatron needs on a machine without one of these, in training, drafting and proofs."""


def flags_without(lack: str) -> list[str]:
    """Return the command-line flags for a machine that lacks this."""
    return [word for row in MACHINE_SETTINGS if row.flag and lack in row.needs for word in row.flag.split()]


def arguments_without(lack: str) -> dict[str, Any]:
    """Return the arguments of a model that is not trained, on a machine that lacks this."""
    return {row.name: row.value for row in MACHINE_SETTINGS if lack in row.needs}


def add_yarn_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Flags for YaRN in latent attention that Megatron's configuration has and its parser lacks, with its defaults."""
    group = parser.add_argument_group("YaRN of multi-latent attention (megatron-mtp)")
    for flag, kind, default, text in (
        ("original-max-position-embeddings", int, 4096, "maximum position before the scaling"),
        ("beta-fast", float, 32.0, "channels with more rotations than this keep their angles"),
        (
            "beta-slow",
            float,
            1.0,
            "channels with fewer rotations than this are scaled by the factor",
        ),
    ):
        group.add_argument(f"--{flag}", type=kind, default=default, help=f"{text} (default: {default})")
    return parser
