"""Initialization of MTP layers that a loaded checkpoint lacks: random, or from the trunk's last layer.

`last-layer` initializes each missing MTP layer as one more step of the trunk: its transformer layer is a copy of the
trunk's last (or its stack of the last layers); its final norm is the trunk's, its input norms are 1, and eh_proj = [0 |
I] passes on the hidden state and drops the embedding.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.hybrid.hybrid_block import HybridStack
from torch import Tensor

from megatron_mtp.model.mtp_block import MultiTokenPredictionBlock
from megatron_mtp.spec.kinds import DRAFTERS, FIRST_TAP


def fill_absent_layers(
    loaded: dict[str, Any],
    own: dict[str, Any],
    block: MultiTokenPredictionBlock,
    absent: tuple[int, ...],
    init: str,
    seed: int,
    block_name: str = "mtp",
) -> dict[str, Any]:
    """Add entries for missing MTP layers to a loaded state.

    Args:
        loaded: state dict of a stage, as read.
        own: state dict of the stage, as initialized.
        block: MTP block of the stage.
        absent: indices of the layers to create.
        init: 'random' or 'last-layer'.
        seed: seed of 'random'.
        block_name: name of the block in the model.

    Raises:
        ValueError: the stage has no trunk layer to copy.
    """
    filled = dict(loaded)
    weights = RandomWeights.of(block.config, block.config.num_layers, seed)
    for index in absent:
        prefix = f"{block_name}.layers.{index}."
        new = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        if init == "random":
            new |= _drawn(f"mtp.layers.{index}.", block.layers[index], weights)
        else:
            new = {name: _from_trunk(name, value, loaded, block) for name, value in new.items()}
        filled |= {prefix + name: value for name, value in new.items()}
    return filled


def draw_anew(block: MultiTokenPredictionBlock, prefix: str, seed: int) -> None:
    """Draw the weights of a new block as 'random' does: the same under every layout; some modules start at zero.

    Args:
        prefix: key prefix of its layers in checkpoints.
        seed: seed of the draws.
    """
    weights = RandomWeights.of(block.config, block.config.num_layers, seed)
    for layer in block.layers:
        layer.load_state_dict(_drawn(prefix, layer, weights), strict=False)


def _drawn(prefix: str, layer: Any, weights: "RandomWeights") -> dict[str, Tensor]:
    """Draw this rank's part of a layer, by name relative to it.

    Raises:
        ValueError: there is no rule for a tensor, which would be as each rank happens to have initialized it.
    """

    def draw(entry: ShardedTensor) -> Tensor:
        part = weights.draw(entry.key, entry.global_shape, entry.global_slice())
        if part is None:
            raise ValueError(f"--mtp-init random cannot draw '{entry.key}'; give --mtp-init last-layer.")
        return part.view(entry.local_shape).to(entry.data)

    drawn = {}
    for name, entry in layer.sharded_state_dict(prefix).items():
        if isinstance(entry, ShardedTensorFactory):
            drawn[name.removeprefix(prefix)] = entry.merge_fn(dict_list_map_outplace(draw, entry.build()))
        elif isinstance(entry, ShardedTensor):
            drawn[name.removeprefix(prefix)] = draw(entry)
    return drawn


def _from_trunk(name: str, value: Any, loaded: dict[str, Any], block: MultiTokenPredictionBlock) -> Any:
    """Return the value of one entry of a depth; `name` is relative to the depth, `value` as initialized.

    Where a kernel's `_extra_state` is not stored, it stays as initialized; so do enorm and hnorm, at 1.

    Raises:
        ValueError: the stage has no trunk layer that could be copied.
    """
    part, _, rest = name.partition(".")
    if part == "tf_layer":
        numbers = [int(one.split(".")[2]) for one in loaded if one.startswith("decoder.layers.")]
        if not numbers:
            raise ValueError(
                "--mtp-init last-layer was given, but the pipeline stage of the MTP layers holds no trunk layer to "
                "copy; give --mtp-init random, or a layout with a trunk layer on that stage."
            )
        source = f"decoder.layers.{max(numbers)}.{rest}"
        if isinstance(stack := block.layers[0].tf_layer, HybridStack):  # its last layers match the trunk's last layers
            _, index, rest = rest.split(".", 2)
            source = f"decoder.layers.{max(numbers) + 1 - len(stack.layers) + int(index)}.{rest}"
        return loaded.get(source, value)
    if part == "final_layernorm":
        of_hybrid = f"decoder.final_norm.{rest}"
        return loaded.get(of_hybrid if of_hybrid in loaded else f"decoder.{name}", value)
    return _pass_hidden_state(value, block) if name == "eh_proj.weight" else value


def _pass_hidden_state(weight: Tensor, block: MultiTokenPredictionBlock) -> Tensor:
    """Return [0 | I]: this tensor-parallel rank's rows of the weight [H / TP, 2H]."""
    rows, columns = weight.shape
    first_row = block.tp_group.rank() * rows
    passing = torch.zeros_like(weight)
    row = torch.arange(rows, device=weight.device)
    passing[row, columns // 2 + first_row + row] = 1
    return passing


# --- random weights --------------------------------------------------------------------------------------------------
#
# Weights are drawn by key and row, so the same seed gives the same weights in every layout and in every tool.
#
# They follow Megatron's initialization of a new model: norms 1, biases 0, matrices normal with standard deviation
# `--init-method-std`, divided by sqrt(2 layers) for matrices that write to the residual stream. In Mamba and Gated
# DeltaNet layers, convolutions and decays A are uniform, and Mamba's steps dt are log-uniform. A rank draws its own
# rows and keeps its own columns, without communication between tensor- and expert-parallel ranks.
#
#     [rows, columns] over two ranks      split by rows: each draws its own; by columns: both draw all and keep half

DRAWN = "linear_", "eh_proj", "fc", "router", "gate_weight", "in_proj", "out_proj", "softmax_offset"
"""Name prefixes of matrices that are drawn at random, or of the modules that hold them."""

TO_RESIDUAL = ("linear_proj", "linear_fc2", "out_proj")
NORM_WEIGHT = "layer_norm_weight"
ZERO = "bias", "layer_norm_bias", "expert_bias", "head"
"""Parameters that start at zero: biases, and a drafter's own rows of the output head, which it copies afterwards."""
CONVOLUTION, KERNEL = "conv1d", 4
"""Module of a causal convolution, and its width in Mamba layers."""
MAMBA = "mixer"
A_RANGE, DT_RANGE, LEAST_DT = (1.0, 16.0), (1e-3, 0.1), 1e-4
"""Megatron's defaults in `MambaMixer` and `GatedDeltaNet`."""

Part = tuple[int | slice, ...]


@dataclass(frozen=True)
class RandomWeights:
    """Distributions of the weights of new MTP layers.

    Attributes:
        seed: seed of the run.
        deviation: standard deviation of matrices.
        layers: number of trunk layers.
        norm: weight of an identity norm.
    """

    seed: int
    deviation: float
    layers: int
    norm: float = 1.0

    @classmethod
    def of(cls, settings: Any, layers: int, seed: int) -> "RandomWeights":
        """Create from Megatron's arguments or its TransformerConfig, which use the same names."""
        deviation = getattr(settings, "init_method_std", 0.02)
        if getattr(settings, "use_mup", False) and settings.mup_base_hidden_size:
            deviation /= math.sqrt(settings.hidden_size / settings.mup_base_hidden_size)
        return cls(seed, deviation, layers, 0.0 if getattr(settings, "layernorm_zero_centered_gamma", False) else 1.0)

    @cached_property
    def _of_kinds(self) -> dict[str, float | str | None]:
        """Return initial values of parameters that only some drafter kinds have, by name."""
        return {own: deviation for row in DRAFTERS.values() for own, deviation in row.begins.items()}

    def draw(self, key: str, shape: Sequence[int], part: Part | None = None) -> Tensor | None:
        """Draw part of a tensor, float32; None if there is no rule for this kind of tensor.

        Args:
            key: key of the tensor in checkpoints.
            shape: shape of the whole tensor.
            part: the part to draw; None for all of it.
        """
        # Checkpoints store `in_proj.weight` in parts by meaning, such as `in_proj.weight.dt`.
        *_, above, module, name = f".{re.sub(r'(in_proj|conv1d)[.](weight|bias)[.].*', r'\1.\2', key)}".split(".")
        part = part or (slice(None),) * len(shape)
        if module == CONVOLUTION:
            bound = 1 / math.sqrt(shape[-1] if name == "weight" else KERNEL)
            return self._uniform(key, shape, part, -bound, bound)
        if name in ZERO:
            return torch.zeros(tuple(shape))[part]
        if name in self._of_kinds:
            return self._of_a_kind(self._of_kinds[name], key, shape, part)
        if name == "D" or (above, module) == (MAMBA, "norm"):  # Mamba's gated norm is not zero-centered
            return torch.ones(tuple(shape))[part]
        if name == NORM_WEIGHT or (module.endswith("norm") and name == "weight"):
            return torch.full(tuple(shape), self.norm)[part]
        if name == "A_log":
            return self._uniform(key, shape, part, *A_RANGE).log()
        if name == "dt_bias":
            if module != MAMBA:
                return torch.ones(tuple(shape))[part]
            dt = self._uniform(key, shape, part, *map(math.log, DT_RANGE)).exp().clamp(min=LEAST_DT)
            return dt + (-(-dt).expm1()).log()  # inverse of softplus
        if not (module.startswith(DRAWN) or name.startswith(DRAWN)):
            return None
        deviation = self.deviation / math.sqrt(2 * self.layers) if module in TO_RESIDUAL else self.deviation
        return deviation * self._normal(key, shape, part)

    def _of_a_kind(self, begin: float | str | None, key: str, shape: Sequence[int], part: Part) -> Tensor:
        """A drafter kind's own parameter, initialized by `DrafterKind.begins`."""
        if begin in (0, FIRST_TAP):
            made = torch.zeros(tuple(shape))
            if begin == FIRST_TAP:
                made[:, 0] = 1
            return made[part]
        return (self.deviation if begin is None else float(begin)) * self._normal(key, shape, part)

    def _uniform(self, key: str, shape: Sequence[int], part: Part, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.special.ndtr(self._normal(key, shape, part))

    def _normal(self, key: str, shape: Sequence[int], part: Part) -> Tensor:
        *of_rows, columns = shape
        rows = torch.arange(math.prod(of_rows)).view(of_rows)[part[:-1]]
        drawn = [normal_by_name(f"{self.seed}/{key}/{row}", columns)[part[-1]] for row in rows.flatten().tolist()]
        return torch.stack(drawn).view(*rows.shape, -1)


def normal_by_name(name: str, *shape: int) -> Tensor:
    """Return standard normal numbers that depend only on a name."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator, device="cpu")
