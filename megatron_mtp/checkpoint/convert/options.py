"""What every conversion is given, and what it returns."""

from dataclasses import dataclass

import torch

from megatron_mtp.files import default_workers

STAYS_WIDE = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias")
"""Endings of the tensors that models keep in float32 beside bfloat16 weights."""


@dataclass(frozen=True)
class Options:
    """How to convert.

    Attributes:
        dtype: type of all floating-point tensors except those of `STAYS_WIDE`; None keeps each tensor's own.
        shard_bytes: size of the largest safetensors file.
        workers: number of layers that are converted at a time.
        resume: whether to continue an interrupted conversion.
        quiet: whether to show no progress bar.
    """

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    workers: int = default_workers()
    resume: bool = False
    quiet: bool = False

    def cast(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which the tensor of this Hugging Face name and type is written."""
        if self.dtype is None or not dtype.is_floating_point or name.endswith(STAYS_WIDE):
            return dtype
        return self.dtype


@dataclass(frozen=True)
class Converted:
    """What a conversion did: the family's title, and the numbers of depths, tensors and bytes."""

    family: str
    depths: int
    tensors: int
    bytes: int
