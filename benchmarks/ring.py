"""Memory of a drafter's attention on a context-parallel rank: gathered keys against ring attention (model/ring.py).

    python benchmarks/ring.py                     counted from 8k to 256k positions, measured up to 32k
    python benchmarks/ring.py --ranks 4           another number of ranks; default 8
    python benchmarks/ring.py --quick             does it run? (the figures mean nothing)

One process acts as the first rank of torch's fake process group, whose collectives and messages move no data. `eagle`
is the third pass of a multi-pass drafter over the rank's positions; `blocks` are blocks of 8 rows after every 64th of
them. Both have 8 query heads and 2 key heads of 64 channels, in float32.

"Counted" is the largest total size of live tensors in a forward and a backward pass, on torch's `meta` device, with the
CPU's fused attention for gathered keys. "Measured" is the peak of torch's CPU allocator. Times are CPU times.
"""

import sys
import weakref
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import MIB, Found, Goal, Table, allocated_peak, count, main
from megatron_mtp.data.batch import positions_of_ranks
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model import attention, block_drafter, ring
from megatron_mtp.model.attention import PortableAttention
from megatron_mtp.model.block_drafter import BlockAttention, Context

ON_CPU = prepare()
HEADS, KEY_HEADS, CHANNELS, ROWS, APART, PASSES = 8, 2, 64, 8, 64, 3
K = 2**10
LENGTHS = {"cpu": [8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 256 * K], "quick": [512]}
MEASURED = {"cpu": 32 * K, "quick": 512}
"""The longest sequence whose steps run."""
GROWTH = 1.1
"""With twice the positions, memory per position may grow by at most this factor."""
FLAGS: dict[str, dict[str, Any]] = {"--ranks": {"type": count, "default": 8, "metavar": "R", "help": "default: 8"}}
GATHER, RING = "gather", "ring"
Step = Callable[[], None]


def memory(wanted: Namespace) -> Found:
    """Measure every length, both ways."""
    torch.distributed.init_process_group("fake", rank=0, world_size=wanted.ranks, store=FakeStore())
    place = "quick" if wanted.quick else "cpu"
    counted, measured, of_ring = list[tuple[Any, ...]](), list[tuple[Any, ...]](), dict[str, list[float]]()
    for length in LENGTHS[place]:
        for name, step_of in (("eagle", eagle), ("blocks", blocks)):
            mib = {way: live_peak(step_of, length, way) for way in (GATHER, RING)}
            of_ring.setdefault(name, []).append(mib[RING] / length)
            counted.append((name, length, *(round(each, 1 if each < 1000 else None) for each in mib.values())))
            if length <= MEASURED[place]:
                steps = [step_of(length, way, "cpu") for way in (GATHER, RING)]
                peaks = [allocated_peak(step, on_cpu=True) for step in steps]
                measured.append((name, length, *peaks, *(round(seconds(step), 2) for step in steps)))
                print(f"> {measured[-1]}", flush=True)
    torch.distributed.destroy_process_group()
    goals = [
        Goal(f"{name}: MiB a position by ring, the longest sequences / the shortest", each[-1] / each[0], GROWTH)
        for name, each in of_ring.items()
    ]
    columns = ["drafter", "positions", "MiB, gather", "MiB, ring"]
    return Found(
        {"ranks": wanted.ranks},
        goals,
        [
            Table("Counted", columns, counted),
            Table("Measured", [*columns, "s, gather", "s, ring"], measured),
        ],
    )


def eagle(length: int, way: str, device: str) -> Step:
    """Return the last pass of a multi-pass drafter, with its backward pass."""
    core, group = core_of(PortableAttention)
    own = length // group.size()
    query, *pairs = rows(own, device, HEADS, *[KEY_HEADS] * 2 * PASSES)

    def step() -> None:
        core.chain = [*zip(pairs[2::2], pairs[3::2], strict=True)]
        with mock.patch.object(attention, "RING_FROM", length if way == RING else length + 1):
            made = core(query, *pairs[:2], None)
        torch.autograd.grad(made.sum(), (query, *pairs))

    return step


def blocks(length: int, way: str, device: str) -> Step:
    """Return blocks at some of the rank's positions, with their backward pass."""
    core, group = core_of(BlockAttention)
    bounds = torch.tensor([0, length])
    ranks_RW = positions_of_ranks(bounds, group.size())
    position_A = ranks_RW[group.rank()][::APART]
    query, key, value = rows(len(position_A) * ROWS, device, HEADS, KEY_HEADS, KEY_HEADS)
    known_key, known_value = rows(length if way == GATHER else length // group.size(), device, KEY_HEADS, KEY_HEADS)
    if way == GATHER:
        visible: Any = (torch.arange(length) <= position_A.unsqueeze(1))[None, None].to(device)
    else:
        visible = ring.reach_of(bounds, ranks_RW, position_A, group)

    def step() -> None:
        core.context = Context(known_key, known_value, visible, position_A.to(device) + 1)
        torch.autograd.grad(core(query, key, value).sum(), (query, key, value, known_key, known_value))

    return step


def core_of(kind: type[PortableAttention]) -> tuple[Any, Any]:
    """Return a drafter's attention, and the ranks that share its sequences."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS, num_query_groups=KEY_HEADS
    )
    groups = ProcessGroupCollection()
    groups.cp = torch.distributed.group.WORLD
    return kind(config, 1, AttnMaskType.causal, "self", 0.0, pg_collection=groups), groups.cp


def rows(count: int, device: str, *heads: int) -> list[Tensor]:
    """Return queries, keys and values of so many positions."""
    return [torch.randn(count, 1, each, CHANNELS, device=device, requires_grad=True) for each in heads]


def seconds(step: Step) -> float:
    """Return CPU seconds."""
    before = process_time()
    step()
    return process_time() - before


# --- counting without memory -----------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Sum the bytes of live tensors that operations create.

    Attributes:
        peak: the largest sum.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._now, self.peak = set[int](), 0, 0

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        made = call(*given, **(named or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._known:
            return
        self._known.add(key)
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def live_peak(step_of: Callable[[int, str, str], Step], length: int, way: str) -> float:
    """Return peak MiB in addition to queries, keys and values."""
    step, ranks = step_of(length, way, "meta"), torch.distributed.get_world_size()

    def gathered(values: Tensor, **_: Any) -> Tensor:
        return torch.cat([values] * ranks)

    def handed_on(values: list[Tensor], _: Any) -> Callable[[], list[Tensor]]:
        got = [torch.empty_like(each) for each in values]
        return lambda: got

    with (
        mock.patch.object(ring, "_handed_on", handed_on),
        mock.patch.object(attention, "gather_from_sequence_parallel_region", gathered),
        mock.patch.object(attention, "scaled_dot_product_attention", fused),
        mock.patch.object(block_drafter, "scaled_dot_product_attention", fused),
        Live() as live,
    ):
        step()
    return live.peak / MIB


def fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor:
    """Run the CPU's fused attention, which adds a mask to the scores."""
    bias = None if attn_mask is None else torch.zeros_like(attn_mask, dtype=query.dtype)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    made: Tensor = call(query, key, value, 0.0, False, attn_mask=bias, scale=others["scale"])[0]
    return made


if __name__ == "__main__":
    main(memory, __doc__, True, None, FLAGS)
