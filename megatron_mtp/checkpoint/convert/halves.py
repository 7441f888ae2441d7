"""Keys of a GPT's tensors in the hybrid of the same layers, and back; those of the optimizer's state too.

decoder.layers.3.self_attention.linear_qkv.weight   <->   decoder.layers.6.self_attention.linear_qkv.weight
decoder.layers.3.mlp.linear_fc2.weight              <->   decoder.layers.7.mlp.linear_fc2.weight
mtp.layers.0.transformer_layer.mlp.router.weight    <->   mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight
decoder.final_layernorm.weight                      <->   decoder.final_norm.weight
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_mtp.checkpoint.families.blocks import FUSED_NORM, OWN_NORM, mlp_norm_keys
from megatron_mtp.checkpoint.mcore.tensors import STATE
from megatron_mtp.model.hybrid import SHARDED_STACK, trunk_and_depths

_STATE = rf"((?:{STATE}state\.\w+\.)?)"
_GPT_LAYER = re.compile(_STATE + r"decoder\.layers\.(\d+)\.(.+)")
_GPT_DEPTH = re.compile(_STATE + r"(mtp\.layers\.\d+\.)transformer_layer\.(.+)")
_GPT_NORM = re.compile(_STATE + r"decoder\.final_layernorm\.(.+)")
_DEPTH = re.compile(_STATE + rf"(mtp\.layers\.\d+\.){SHARDED_STACK}\.layers\.(\d+)\.(.+)")
_NORM = re.compile(_STATE + r"decoder\.final_norm\.(.+)")
_MLP_NORM = re.compile(rf"(?:{re.escape(FUSED_NORM)}|{re.escape(OWN_NORM)})(weight|bias)")
HALVES = {"input_layernorm": 0, "self_attention": 0, "pre_mlp_layernorm": 1, "mlp": 1}
"""Which of the two symbols of a GPT's layer a module belongs to."""
WITNESSES = {
    Symbols.ATTENTION: "self_attention.linear_qkv.weight",
    Symbols.MLA: "self_attention.linear_kv_up_proj.weight",
    Symbols.MLP: "mlp.linear_fc2.weight",
    Symbols.MOE: "mlp.router.weight",
}
"""A tensor that a layer of this kind has, and no other."""


@dataclass(frozen=True)
class Halves:
    """The layers of a model that is a GPT and a hybrid.

    Attributes:
        trunk: symbols of the trunk.
        depth: symbols of a depth; empty if there are none.
    """

    trunk: str
    depth: str

    @classmethod
    def of(cls, pattern: str) -> "Halves":
        """The layers that a hybrid's pattern names."""
        trunk, depths = trunk_and_depths(pattern)
        return cls(trunk, depths[0] if depths else "")

    def hybrid_key(self, key: str) -> str:
        """The hybrid's key of a GPT's tensor.

        Raises:
            ValueError: the tensor is in a layer, or part of one, that the model does not have.
        """
        if match := _GPT_LAYER.fullmatch(key):
            state, layer, rest = match.groups()
            half = 2 * int(layer) + _half(rest, key)
            return f"{state}decoder.layers.{half}.{_in_hybrid(rest, self._symbol(half, key))}"
        if match := _GPT_DEPTH.fullmatch(key):
            state, depth, rest = match.groups()
            half = _half(rest, key)
            return f"{state}{depth}{SHARDED_STACK}.layers.{half}.{_in_hybrid(rest, self.depth[half])}"
        return _GPT_NORM.sub(r"\1decoder.final_norm.\2", key)

    def gpt_keys(self, key: str) -> list[str]:
        """The GPT's keys of a hybrid's tensor: several where its modules with and without TE have other names."""
        if match := _GPT_LAYER.fullmatch(key):
            state, half, rest = match.groups()
            layer = int(half) // 2
            self._symbol(int(half), key)
            symbols, place = self.trunk[2 * layer : 2 * layer + 2], f"{state}decoder.layers.{layer}."
        elif match := _DEPTH.fullmatch(key):
            state, depth, _, rest = match.groups()
            symbols, place = self.depth, f"{state}{depth}transformer_layer."
        else:
            return [_NORM.sub(r"\1decoder.final_layernorm.\2", key)]
        norm = _MLP_NORM.fullmatch(rest)
        if norm is None:
            return [place + rest]
        names = mlp_norm_keys(mla=symbols[0] == Symbols.MLA, moe=symbols[1] == Symbols.MOE)
        return [f"{place}{name}{norm.group(1)}" for name in names]

    def check(self, keys: Iterable[str], depths: int, source: str) -> None:
        """Whether a checkpoint has the layers of its arguments.

        Args:
            keys: the hybrid's keys of all tensors.
            depths: number of physical depths.
            source: what messages call the checkpoint.

        Raises:
            ValueError: a layer is missing or of another kind.
        """
        held = set(keys)
        layers = {f"decoder.layers.{index}.": symbol for index, symbol in enumerate(self.trunk)}
        for depth in range(depths):
            stack = f"mtp.layers.{depth}.{SHARDED_STACK}.layers."
            layers |= {f"{stack}{index}.": symbol for index, symbol in enumerate(self.depth)}
        for place, symbol in layers.items():
            if place + WITNESSES[symbol] not in held:
                raise ValueError(
                    f"{source} lacks '{place}{WITNESSES[symbol]}' (its key in a hybrid), which its arguments call for; "
                    "the checkpoint is damaged."
                )

    def _symbol(self, index: int, key: str) -> str:
        if index >= len(self.trunk):
            raise ValueError(
                f"'{key}' is behind the last of the trunk's layers {self.trunk} in the checkpoint's arguments; the "
                "checkpoint is damaged."
            )
        return self.trunk[index]


def _half(rest: str, key: str) -> int:
    half = HALVES.get(rest.partition(".")[0])
    if half is None:
        raise ValueError(f"'{key}' has no place in a hybrid model; the checkpoint has to stay a GPT.")
    return half


def _in_hybrid(rest: str, symbol: str) -> str:
    """A layer's part under the name that it has in a hybrid, where the norm before experts stands alone."""
    norm = _MLP_NORM.fullmatch(rest)
    return rest if norm is None else (OWN_NORM if symbol == Symbols.MOE else FUSED_NORM) + norm.group(1)
