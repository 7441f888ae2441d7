"""The kernels of drafting in Triton's interpreter, against torch's operations: prints what was found as JSON.

TRITON_INTERPRET=1 MEGATRON_MTP_COMPILED=0 python row_kernel_cases.py rows faults
"""

import itertools
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from interpreted import compute_bfloat16_as_a_gpu, planted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_mtp.platform import prepare

prepare()

from drafting_single import model_of  # noqa: E402
from megatron_single import join_world_of_one  # noqa: E402

from megatron_mtp.drafting import dense_layer, fused_rows, row_kernels  # noqa: E402
from megatron_mtp.drafting.api import generate  # noqa: E402
from megatron_mtp.drafting.kv_cache import KVCache, chain_rows  # noqa: E402
from megatron_mtp.drafting.products import _own  # noqa: E402
from megatron_mtp.drafting.runner import Runner  # noqa: E402

QK_NORM = {"qk_layernorm": True}
CENTRED = {"layernorm_zero_centered_gamma": True}
HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def kernels(used: bool = True) -> Iterator[None]:
    """As on a GPU, for models that are made inside."""
    with mock.patch.object(fused_rows, "has_kernels", lambda weight: used and weight.dtype in fused_rows.DTYPES):
        yield


@torch.inference_mode()
def main(wanted: list[str]) -> None:
    join_world_of_one()
    logging.disable()
    compute_bfloat16_as_a_gpu()
    fused_rows.WIDEST, fused_rows.GATED = 16, 16  # several parts a row
    parts: dict[str, Callable[[], Any]] = {
        "rows": lambda: {str(dtype): differences(dtype) for dtype in (torch.float32, *HALVES)},
        "texts": lambda: {name: same_texts(*given) for name, given in TEXTS.items()},
        "launched": launched,
        "faults": lambda: {fault: faulty(*given) for fault, given in FAULTS.items()},
    }
    print(json.dumps({name: parts[name]() for name in wanted}))


Pairs = Iterator[tuple[str, Tensor, Tensor]]


def differences(dtype: torch.dtype) -> dict[str, float]:
    """The largest of every kernel, relative to 1 or to the number itself where that is larger."""
    return worst_of(itertools.chain(norms(dtype), gates(dtype), places(dtype)))


def worst_of(pairs: Pairs) -> dict[str, float]:
    worst: Counter[str] = Counter()
    for name, made, wanted in pairs:
        assert made.dtype == wanted.dtype
        assert made.shape == wanted.shape
        difference = (made.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1)
        worst[name] = max(worst[name], difference.nan_to_num(1e9).max().item())
    return dict(worst)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cache
def layer_of(dtype: torch.dtype, index: int) -> Any:
    """A layer of a runner's model."""
    return Runner(model_of("gqa", 1, dtype, num_layers=1, **HEADS[index])).model.decoder.layers[0]


HEADS: list[dict[str, Any]] = [
    {},
    {"num_query_groups": 4, "kv_channels": 10},
    {"num_query_groups": 1, **QK_NORM},
    {"kv_channels": 12, "hidden_size": 40, **QK_NORM, **CENTRED},
]


def norms(dtype: torch.dtype) -> Pairs:
    """Of a norm as it is, and of one whose weights are stored less 1; rows that are not a power of two wide."""
    for index, (rows, batch), size in ((0, (1, 1), 0.003), (0, (2, 1), 3.0), (3, (1, 2), 3.0)):
        module = layer_of(dtype, index).pre_mlp_layernorm
        hidden, added = (size * normal(rows, batch, module.weight.numel(), dtype=dtype, seed=seed) for seed in (1, 2))
        made, wanted = [], []
        for used, results in ((False, wanted), (True, made)):
            with kernels(used):
                results += [dense_layer.short_norm(module)(hidden), *dense_layer._sum_and_norm(module)(hidden, added)]
        yield from zip(("norm", "sum", "norm of a sum"), made, wanted, strict=True)


def gates(dtype: torch.dtype) -> Pairs:
    config = layer_of(dtype, 0).config
    for wide in (normal(1, 1, 2 * 48, dtype=dtype), 4 * normal(2, 2, 2 * 21, dtype=dtype)):
        with kernels(False):
            wanted = dense_layer.activation(config, wide)(wide)
        with kernels():
            assert dense_layer.activation(config, wide) is fused_rows.gated_silu
            yield "gate", dense_layer.activation(config, wide)(wide), wanted


PLACES = [(0, 1.0, 1), (1, 1.0, 2), (2, 0.5, 2), (3, 0.5, 1), (3, 0.0, 2)]
"""Groups of all sizes, channels that are not a power of two, norms, angles of all channels, some and none."""


def places(dtype: torch.dtype) -> Pairs:
    for index, turned, batch in PLACES:
        attention = layer_of(dtype, index).self_attention
        channels, groups = attention.hidden_size_per_attention_head, attention.num_query_groups_per_partition
        mixed = 2 * normal(ROWS, batch, groups, 4 // groups + 2, channels, dtype=dtype)
        angles = angles_of(int(turned * channels) // 2 * 2, batch, dtype)
        made = placed(dense_layer._place_in_one, attention, mixed, angles)
        wanted = placed(dense_layer._place, attention, mixed, angles)
        yield from zip(("queries", "keys", "values"), made, wanted, strict=True)


ROWS = 2


def angles_of(channels: int, batch: int, dtype: torch.dtype) -> Any:
    """Of rows that stand elsewhere in every text, as a runner takes them from its table."""
    if channels == 0:
        return None
    half = normal(9, 1, 1, channels // 2, dtype=torch.float32, seed=3)
    table = dense_layer.turns(torch.cat((half, half), dim=-1), dtype)
    place_BS = torch.arange(batch).unsqueeze(1) + torch.arange(ROWS)
    return table[place_BS.T].unbind(2)


def placed(way: Any, attention: Any, mixed: Tensor, angles: Any) -> list[Tensor]:
    """Queries, keys and values of a window of 16 of 20 slots; the first text's first row is padding."""
    batch = mixed.size(1)
    held, core = KVCache(2, batch, 20), attention.core_attention
    core.scope.enter(held, chain_rows(torch.arange(batch) * 3 - 1, ROWS, 16, 20))
    with kernels():
        query, *window = way(attention)(mixed, angles)
    assert all(part.size(2) == 16 for part in window)
    return [query, *window]


TEXTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "norms of queries and keys": ("gqa", QK_NORM, {"method": "mtp", "num_speculative_tokens": 1}),
    "norms around 1": ("gqa", CENTRED, {"method": "mtp_tree", "tree": [2]}),
    "experts": ("moe", {}, {"method": "mtp_eagle", "num_speculative_tokens": 1}),
    "layer norms": ("mha-tied-layernorm", {}, {"method": "plain"}),
}


def same_texts(kind: str, changes: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether drafting with the kernels gives the tokens of plain decoding without."""
    prompts = [[5, 9], [7]]
    wanted = generate(Runner(model_of(kind, 1, torch.float32, **changes)), prompts, 3).token_ids
    with kernels(), mock.patch.object(Runner, "_place_experts", place_experts):
        target = Runner(model_of(kind, 1, torch.float32, **changes))
    return generate(target, prompts, 3, speculative=settings).token_ids == wanted


def place_experts(self: Runner) -> None:
    from megatron_mtp.drafting.experts import place_static_experts

    for layer in self._transformer_layers():
        place_static_experts(layer)


NO_KERNEL = ("empty", "detach")
"""Operations that start none, beside views."""


class Launches(TorchDispatchMode):
    """Counts the operations that compute: those that write, or make what was not there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        made = operation(*given, **(named or {}))
        held = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor)}
        new = any(t.untyped_storage().data_ptr() not in held for t in tree_leaves(made) if isinstance(t, Tensor))
        name = operation.overloadpacket.__name__
        if (new or operation._schema.is_mutable) and not any(word in name for word in NO_KERNEL):
            self.names[name] += 1
        return made


def launched() -> dict[str, dict[str, int]]:
    """What the second of two layers launches for four rows of a text, in bfloat16: without kernels, and with."""
    found = {}
    for name, used in (("before", False), ("after", True)):
        with kernels(used), mock.patch.object(dense_layer, "product", _own):
            target = Runner(model_of("gqa", dtype=torch.bfloat16))
        rows, cache = chain_rows(torch.tensor([20]), 4, 32, 40), KVCache(2, 1, 40)
        hidden = target.trunk(torch.tensor([[1, 2, 3, 4]]), rows, cache)
        layer, _ = target._layers[1]
        with Launches() as launches:
            layer(hidden, target._rotary(rows)[1])
        found[name] = dict(launches.names)
    return found


FAULTS = {
    "residual": (norms, "values += tl.load(added + places, mask=is_channel, other=0.0).to(tl.float32)", "pass"),
    "sum that is not written": (norms, "tl.store(sums + start + places,", "tl.store(sums + places,"),
    "eps": (
        norms,
        "length = tl.sqrt(tl.sum(squares) / CHANNELS + eps)",
        "length = tl.sqrt(tl.sum(squares) / CHANNELS)",
    ),
    "parts of a wide row": (norms, "squares += values * values", "squares = values * values"),
    "weight of a norm": (norms, "scaled = values / length * factors", "scaled = values / length"),
    "norm of queries": (places, "TURNED, NORMS_QUERIES, BLOCK", "TURNED, False, BLOCK"),
    "weight of keys": (places, "key_weight, key_eps, CHANNELS", "query_weight, key_eps, CHANNELS"),
    "angles": (places, "(places + TURNED // 2) % TURNED", "(places + TURNED // 2 + 1) % TURNED"),
    "sine": (places, "+ other * sines", "- other * sines"),
    "channels that are not turned": (places, "own = tl.where(is_turned, front, own)", "own = front"),
    "norm of the other half": (places, "(places + TURNED // 2) % TURNED", "places"),
    "angles of another text": (places, "+ text * angle_stride_B", ""),
    "heads of a group": (places, "group * QUERIES + part) * rows", "group + part) * rows"),
    "slots": (places, "text * slot_stride_B + row * slot_stride_R", "row * slot_stride_R"),
    "capacity": (places, "* GROUPS + group) * capacity + slot", "* GROUPS + group) * (capacity - 1) + slot"),
    "values": (places, "tl.store(values + target", "tl.store(keys + target"),
    "gate": (gates, "gates / (1 + tl.exp(-gates))", "gates / (1 + tl.exp(gates))"),
    "halves of a wide row": (gates, "tl.load(wide + WIDTH + places", "tl.load(wide + places"),
}
"""Faults to plant in the kernels: what they spoil, and what of the source becomes what."""


def faulty(cases: Callable[[torch.dtype], Pairs], old: str, new: str) -> float:
    """The largest difference in float32 with a kernel in which `old` is `new`."""
    with planted(row_kernels, old, new):
        return max(worst_of(cases(torch.float32)).values())


if __name__ == "__main__":
    main(sys.argv[1:])
