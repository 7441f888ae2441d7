"""Transformer Engine's modules and parameter names in plain torch, without tensor parallelism.

Frameworks build their models on Transformer Engine's classes, which need a CUDA device. After `install()` they build,
load and export the same models on a CPU. Names that are not used for computing are empty classes and functions that
return nothing.
"""

import sys
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = "transformer_engine"
VERSION = "2.11.0"
ABSENT = {
    f"{ROOT}.pytorch.{name}" for name in "optimizers cpu_offload cpp_extensions permutation cross_entropy".split()
}
"""Modules that cannot be imported; Megatron works without them."""


class _Weights(nn.Module):
    def __init__(self, in_features: int, out_features: int, tp_size: int = 1, **settings: Any) -> None:
        super().__init__()
        assert tp_size == 1
        self.in_features, self.out_features, self.tp_size = in_features, out_features, tp_size
        self.use_bias, self.return_bias = settings["bias"], settings["return_bias"]
        self.parallel_mode, self.dtype = settings["parallel_mode"], settings.get("params_dtype")
        self._make_weights(settings["init_method"])

    def _make_weights(self, init_method: Any) -> None:
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=self.dtype))
        init_method(self.weight)
        self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=self.dtype)) if self.use_bias else None


class Linear(_Weights):
    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._multiplied(inputs)

    def _multiplied(self, inputs: Tensor) -> Any:
        if self.return_bias:
            return functional.linear(inputs, self.weight), self.bias
        return functional.linear(inputs, self.weight, self.bias)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, eps: float, **settings: Any) -> None:
        super().__init__(in_features, out_features, **settings)
        norm = NORMS[settings["normalization"]](in_features, eps, settings["zero_centered_gamma"])
        self.eps, self.zero_centered_gamma = eps, settings["zero_centered_gamma"]
        self.normalization = settings["normalization"]
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, getattr(norm, "bias", None)
        self.return_layernorm_output = False

    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = _normed(
            inputs, self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps,
            self.zero_centered_gamma,
        )  # fmt: skip
        made = self._multiplied(normed)
        if not self.return_layernorm_output:  # adapters set it
            return made
        return (*made, normed) if self.return_bias else (made, normed)


class RMSNorm(nn.Module):
    def __init__(self, normalized_shape: int, eps: float, zero_centered_gamma: bool = False, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.full((normalized_shape,), 0.0 if zero_centered_gamma else 1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return _normed(inputs, "RMSNorm", self.weight, None, self.eps, self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    def __init__(self, normalized_shape: int, eps: float, zero_centered_gamma: bool = False, **_: Any) -> None:
        super().__init__(normalized_shape, eps, zero_centered_gamma)
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, inputs: Tensor) -> Tensor:
        return _normed(inputs, "LayerNorm", self.weight, self.bias, self.eps, self.zero_centered_gamma)


NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


def _normed(inputs: Tensor, kind: str, weight: Tensor, bias: Tensor | None, eps: float, is_centered: bool) -> Tensor:
    weight = weight + 1 if is_centered else weight
    if kind == "RMSNorm":
        return functional.rms_norm(inputs, weight.shape, weight, eps)
    return functional.layer_norm(inputs, weight.shape, weight, bias, eps)


class GroupedLinear(_Weights):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **settings: Any) -> None:
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **settings)
        assert not self.use_bias

    def _make_weights(self, init_method: Any) -> None:
        for index in range(self.num_gemms):
            weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=self.dtype))
            init_method(weight)
            self.register_parameter(f"weight{index}", weight)

    def forward(self, inputs: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        parts = inputs.split(m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits)
        return torch.cat([functional.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])

    # State other than weights that checkpoints need; it only exists with FP8.

    fp8_meta, fp8, fp8_calibration = MappingProxyType({"fp8_checkpoint": False}), False, False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None: ...


class DotProductAttention(nn.Module):
    """Causal attention within the documents of a packed row."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any) -> Tensor:
        assert "causal" in named["attn_mask_type"]
        if named.get("qkv_format", "sbhd") == "thd":
            padded, offsets = named.get("cu_seqlens_q_padded"), named["cu_seqlens_q"]
            ends = (offsets if padded is None else padded).tolist()
            parts = [slice(*ends_of_one) for ends_of_one in pairwise(ends)]
            made = [self._attended(query[p, None], key[p, None], value[p, None]) for p in parts]
            return torch.cat(made)[:, 0]
        return self._attended(query, key, value)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [S, B, heads * D] from [S, B, heads, D]."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        made = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return made.permute(2, 0, 1, 3).flatten(2)


class _SplitAlongDim:
    @staticmethod
    def apply(tensor: Tensor, dim: int, sizes: list[int]) -> Any:
        return torch.split(tensor, sizes, dim)


MODULES: dict[str, Any] = {
    one.__name__: one
    for one in (Linear, LayerNormLinear, RMSNorm, LayerNorm, GroupedLinear, DotProductAttention, _SplitAlongDim)
}


# --- all other names -------------------------------------------------------------------------------------------------


class Nothing(nullcontext[None]):
    """Result of an unknown function: false, and a context manager that does nothing."""

    def __bool__(self) -> bool:
        return False


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing if name.islower() else _empty(name)


class Empty(metaclass=_Names):
    def __init__(self, *_: Any, **__: Any) -> None: ...


def _empty(name: str) -> type:
    return _Names(name, (Empty,), {})


class Names(ModuleType):
    """A module that has every name: a class, or a callable module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in MODULES and name.strip("_")[0].islower():
            made: Any = sys.modules.get(f"{self.__name__}.{name}") or Names(f"{self.__name__}.{name}")
        else:
            made = MODULES.get(name) or _empty(name)
        setattr(self, name, made)
        return made

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return Nothing()


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_here = name.split(".")[0] == ROOT and name not in ABSENT
        return ModuleSpec(name, self, is_package=True) if is_here else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == ROOT:
            module.__version__ = VERSION  # type: ignore[attr-defined]


def install() -> None:
    """Install the modules. Call it before Megatron is imported."""
    sys.meta_path.insert(0, _Finder())
