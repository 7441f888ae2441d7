"""model/ring.py in one process: a softmax in parts and tiles against a single softmax (ranks: test_ring_ranks.py)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mtp.model import ring

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
POSITIONS, BATCH, HEADS, KEY_HEADS, CHANNELS = 17, 2, 4, 2, 8
SCALE = 0.3
Inputs = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "TILE", 5)


def inputs(dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    heads = HEADS, KEY_HEADS, KEY_HEADS
    shapes = [(POSITIONS, BATCH, each, CHANNELS - (place == 2)) for place, each in enumerate(heads)]
    return tuple(
        torch.randn(each, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for each in shapes
    )


def reach(window: tuple[int, int] | None = None) -> ring.Reach:
    """Return the reach for two documents."""
    own = torch.arange(POSITIONS)
    return ring.reach_of(torch.tensor([0, 6, POSITIONS]), own.unsqueeze(0), own, ALONE).within(own, window)


def at_once(query: Tensor, key: Tensor, value: Tensor, seen: ring.Reach) -> ring.Part:
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 2) for each in (key, value))
    scores = torch.einsum("sbnc,wbnc->bnsw", query, key) * SCALE
    own, first, last = torch.arange(len(key)), seen.first_S.unsqueeze(1), seen.last_S.unsqueeze(1)
    scores = scores.masked_fill(~((own >= first) & (own <= last)), -torch.inf)
    return torch.einsum("bnsw,wbnc->sbnc", scores.softmax(-1), value), scores.logsumexp(-1).permute(2, 0, 1)


def gradients(part: Callable[..., ring.Part], given: Inputs, *others: Any) -> tuple[ring.Part, Inputs]:
    """Return gradients of a weighted sum of outputs and logsumexp values."""
    out, log = part(*given, *others)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out), torch.linspace(1, 2, log.numel()).view_as(log)
    return (out, log), torch.autograd.grad((out * weights[0]).sum() + (log * weights[1]).sum(), given)


@pytest.mark.parametrize("window", [None, (2, 0), (3, -1), (1, 1)])
def test_tiled_attention_matches_one_softmax_and_its_gradients(window: tuple[int, int] | None) -> None:
    found = gradients(ring.ring_attention, inputs(), reach(window), SCALE)
    expected = gradients(at_once, inputs(), reach(window))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_two_parts_join_to_the_softmax_over_both() -> None:
    """Keys before a position go through the ring, the others at once; the first query attends to none of the former."""
    given, whole = inputs(), reach()
    first = ring.Reach(whole.first_S, whole.last_S.clamp(max=3), whole.positions_RW, ALONE)
    second = ring.Reach(whole.first_S.clamp(min=4), whole.last_S, whole.positions_RW, ALONE)
    parts = [ring.ring_attention(*given, each, SCALE) for each in (first, second)]
    found = ring.joined(parts)
    expected = at_once(*given, whole)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    torch.testing.assert_close(
        *(torch.autograd.grad((each * weights).sum(), given) for each in (found, expected)), rtol=1e-12, atol=1e-12
    )


def test_half_precision_is_summed_up_in_float32() -> None:
    """Outputs and gradients are as close to float64 as the inputs' rounding allows."""
    given = inputs(torch.bfloat16)
    exact = tuple(each.detach().double().requires_grad_() for each in given)
    (out, log), found = gradients(ring.ring_attention, given, reach(), SCALE)
    (wanted, of_all), expected = gradients(at_once, exact, reach())
    assert (out.dtype, log.dtype, found[1].dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    for mine, reference in zip((out, log, *found), (wanted, of_all, *expected), strict=True):
        assert (mine.double() - reference).abs().max() < 0.02 * reference.abs().max()


def test_a_rank_saves_only_its_own_keys_for_the_backward_pass() -> None:
    """And no scores, of which there are queries times keys."""
    kept, given = list[int](), inputs()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, log = ring.ring_attention(*given, reach(), SCALE)
    assert sorted(kept) == sorted(each.numel() for each in (*given, out, log))
