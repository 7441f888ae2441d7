"""Weights of new depths, drawn by key and row: the same seed gives the same weights in every layout and in every tool.

They follow Megatron's initialization of a new model: norms 1, biases 0, matrices normal with standard deviation
`--init-method-std`, divided by sqrt(2 layers) for matrices that write to the residual stream. A rank draws the rows
that it holds and takes its columns, without communication between tensor- and expert-parallel ranks.

    [rows, columns] over two ranks      cut by rows: each draws its own; by columns: both draw all, each keeps half
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

DRAWN = ("linear_", "eh_proj", "fc", "router", "gate_weight", "in_proj", "out_proj", "softmax_offset", "markov_w1")
"""First letters of the names of matrices, or of the modules that hold them."""

TO_RESIDUAL = ("linear_proj", "linear_fc2", "out_proj")
NORM_WEIGHT, BIASES = "layer_norm_weight", ("bias", "layer_norm_bias", "expert_bias")

Part = tuple[int | slice, ...]


@dataclass(frozen=True)
class RandomWeights:
    """Distributions of the weights of new depths.

    Attributes:
        seed: of the run.
        deviation: of matrices.
        layers: of the trunk.
        norm: the weight of a norm that changes nothing.
    """

    seed: int
    deviation: float
    layers: int
    norm: float = 1.0

    @classmethod
    def of(cls, settings: Any, layers: int, seed: int) -> "RandomWeights":
        """By Megatron's arguments or its TransformerConfig, which have the same names."""
        deviation = getattr(settings, "init_method_std", 0.02)
        if getattr(settings, "use_mup", False) and settings.mup_base_hidden_size:
            deviation /= math.sqrt(settings.hidden_size / settings.mup_base_hidden_size)
        return cls(seed, deviation, layers, 0.0 if getattr(settings, "layernorm_zero_centered_gamma", False) else 1.0)

    def draw(self, key: str, shape: Sequence[int], part: Part | None = None) -> Tensor | None:
        """The part of a tensor, float32; None where there is no rule for this kind of tensor.

        Args:
            key: of the tensor in checkpoints.
            shape: of the whole tensor.
            part: its place in the whole tensor; None for all of it.
        """
        # Checkpoints keep the rows of `in_proj.weight` apart by what they make, as `in_proj.weight.dt`.
        *_, module, name = re.sub(r"in_proj\.weight\..*", "in_proj.weight", key).split(".")
        part = part or (slice(None),) * len(shape)
        if name in BIASES:
            return torch.zeros(tuple(shape))[part]
        if name == NORM_WEIGHT or (module.endswith("norm") and name == "weight"):
            return torch.full(tuple(shape), self.norm)[part]
        if not (module.startswith(DRAWN) or name.startswith(DRAWN)):
            return None
        deviation = self.deviation / math.sqrt(2 * self.layers) if module in TO_RESIDUAL else self.deviation
        return deviation * self._normal(key, shape, part)

    def _normal(self, key: str, shape: Sequence[int], part: Part) -> Tensor:
        *of_rows, columns = shape
        rows = torch.arange(math.prod(of_rows)).view(*of_rows)[part[:-1]]
        drawn = [normal_by_name(f"{self.seed}/{key}/{row}", columns)[part[-1]] for row in rows.flatten().tolist()]
        return torch.stack(drawn).view(*rows.shape, -1)


def normal_by_name(name: str, *shape: int) -> Tensor:
    """Standard normal numbers that depend on a name alone."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator, device="cpu")
