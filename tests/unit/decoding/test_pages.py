"""Rows in blocks that sequences share: through tables they equal contiguous slots of each sequence."""

from collections.abc import Iterator

import pytest
import torch
from drafting_single import model_of, runs, tree_of
from megatron_single import VOCABULARY
from torch import Tensor

from megatron_mtp.decoding.backend import Modules
from megatron_mtp.decoding.block_manager import BlockManager, BlockTable
from megatron_mtp.decoding.block_tables import BlockTables, read_rows, write_rows
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.rows import Rows, ancestors_of
from megatron_mtp.decoding.runner import Runner

pytestmark = pytest.mark.usefixtures("megatron")

SIZE, SLOTS, TEXTS = 4, 40, 3


def scattered(seed: int = 1) -> BlockTables:
    """Put every page of three sequences in its own block, and the page of scratch slot 43 in block 0."""
    pages = SLOTS // SIZE
    order = torch.randperm(TEXTS * pages, generator=torch.Generator().manual_seed(seed)) + 1
    table_BL = torch.cat([order.view(TEXTS, pages), torch.zeros(TEXTS, 1, dtype=torch.long)], dim=1)
    return BlockTables(table_BL, TEXTS * pages + 1, SIZE)


def test_block_tables_match_a_hand_computed_example() -> None:
    """The example of block_tables.py: slots 0 .. 3 are in block 5, slots 4 .. 7 in block 2."""
    pages, memory = BlockTables(torch.tensor([[5, 2, 0]]), 6, 4), torch.zeros(6, 1, 4, 1)
    write_rows(memory, torch.arange(1.0, 9).view(1, 1, 8, 1), pages.places(torch.arange(8).unsqueeze(0)))
    assert memory.view(6, 4).tolist() == [[0] * 4, [0] * 4, [5, 6, 7, 8], [0] * 4, [0] * 4, [1, 2, 3, 4]]
    assert read_rows(memory, pages.places(torch.tensor([[7, 0]]))).flatten().tolist() == [8, 1]
    assert Rows(torch.tensor([6]), 1, 6, pages).window_of(memory).flatten().tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("heads", [1, 2])
def test_scattered_blocks_hold_the_same_rows_as_contiguous_slots(heads: int) -> None:
    generator = torch.Generator().manual_seed(2)
    for pages in (scattered(), scattered(5)):
        both = [(KVCache(1, tables), tables) for tables in (runs(TEXTS, SLOTS), pages)]
        for _ in range(20):
            slots_BR = torch.stack([torch.randperm(SLOTS, generator=generator)[:5] for _ in range(TEXTS)])
            to_BR = torch.stack([torch.randperm(SLOTS, generator=generator)[:5] for _ in range(TEXTS)])
            new = torch.randn(TEXTS, heads, 5, 3, generator=generator)
            windows = []
            for cache, tables in both:
                rows = Rows(slots_BR[:, 0], 5, 13, tables)
                rows.memory_places = tables.places(slots_BR)
                windows.append(cache.append(0, new, 2 * new, rows))
            assert all(torch.equal(a, b) for a, b in zip(*windows, strict=True))
            for cache, tables in both:
                cache.keep(tables.places(slots_BR), tables.places(to_BR))
            held = [
                [Rows(slots_BR[:, 0], 5, SLOTS, at).window_of(one) for one in cache.take(0, heads, 3, new)]
                for cache, at in both
            ]
            assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
            read = [read_rows(cache.take(0, heads, 3, new)[0], at.places(slots_BR)) for cache, at in both]
            assert torch.equal(*read)


def forwards(tables: BlockTables) -> Iterator[tuple[Tensor, Rows]]:
    """Yield prompts of different lengths with padding before them, single rows, a draft and a tree."""
    first_B = torch.tensor([-3, 0, -6])
    generator = torch.Generator().manual_seed(4)
    for count in (9, 1, 4, 1, 3):
        window = min(int(first_B.max()) + count + 5, SLOTS)
        tokens_BR = torch.randint(VOCABULARY, (TEXTS, count), generator=generator)
        yield tokens_BR, Rows(first_B, count, window, tables)
        first_B = first_B + count
    ancestors_BRR, depth_BR = ancestors_of(torch.tensor([[0, 0, 2, 2, 1]]).expand(TEXTS, -1))
    tokens_BR = torch.randint(VOCABULARY, (TEXTS, 6), generator=generator)
    yield tokens_BR, tree_of(first_B, depth_BR, ancestors_BRR, 33, tables)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("is_compiled", [True, False])
@torch.inference_mode()
def test_forward_passes_through_block_tables_are_bit_identical(
    kind: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setenv("MEGATRON_MTP_COMPILED", "0")
    runner = Runner(model_of(kind, 1, torch.float32))
    assert is_compiled or type(runner.backend) is Modules
    both = runs(TEXTS, SLOTS), scattered()
    caches = [[KVCache(layers, tables) for layers in (2, 1)] for tables in both]
    for steps in zip(*map(forwards, both), strict=True):
        made = []
        for (tokens_BR, rows), (trunk, depth) in zip(steps, caches, strict=True):
            states_SBH = runner.trunk(tokens_BR, rows, trunk)
            made.append((states_SBH, runner.depth(1, states_SBH, tokens_BR, rows, depth)))
        real = rows.positions_BR.T.unsqueeze(2) > 0  # what a padding row attends to is arbitrary
        for one, other in zip(*made, strict=True):
            assert torch.equal(one * real, other * real)


@pytest.mark.parametrize("kind", ["gqa", "mla", "moe", "bias-ungated-qknorm"])
@torch.inference_mode()
def test_rows_without_padding_match_rows_with_padding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 30, 7 and 20 rows, of which the last starts at slot 5."""
    monkeypatch.setenv("MEGATRON_MTP_COMPILED", "0")
    runner, pages = Runner(model_of(kind, 1, torch.float32)), scattered()
    first_B, begin_B = torch.tensor([0, -23, 10]), torch.tensor([0, 0, 15])
    live_BR = first_B.unsqueeze(1) + torch.arange(30) >= begin_B.unsqueeze(1)
    tokens_BR = torch.randint(VOCABULARY, (TEXTS, 30), generator=torch.Generator().manual_seed(3))
    made, held = [], []
    for packs in (True, False):
        trunk, depth = (KVCache(layers, pages) for layers in (2, 1))
        runner.trunk(tokens_BR[:, :15], Rows(torch.zeros(TEXTS, dtype=torch.long), 15, 15, pages), trunk)
        rows = Rows(first_B, 30, SLOTS, pages, live_BR, packs)
        assert (rows.without_padding() is not None) == packs
        states_SBH = runner.trunk(tokens_BR, rows, trunk)
        made.append((states_SBH, runner.depth(1, states_SBH, tokens_BR, rows, depth)))
        held.append([one[1:] for cache in (trunk, depth) for one in cache.keys + cache.values if one is not None])
    real = (live_BR & (first_B.unsqueeze(1) + torch.arange(30) >= 0)).T.unsqueeze(2)
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one * real, other * real)
    for one, other in zip(*held, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_in_place_of_padding_do_not_change_other_blocks() -> None:
    """All scratch slots are in block 0."""
    pages, cache = scattered(), torch.zeros(TEXTS * SLOTS // SIZE + 1, 1, SIZE, 2)
    write_rows(cache, torch.ones(TEXTS, 1, 2, 2), pages.places(torch.full((TEXTS, 2), pages.capacity)))
    assert cache[1:].count_nonzero() == 0


# ---- free and cached blocks


def test_cached_prefixes_by_hand() -> None:
    """The example of block_manager.py: blocks of 4, one token ahead, tokens 7 8 9 1  2 3 4 5  6 7."""
    pool, tokens = BlockManager(5, 4, 1), [7, 8, 9, 1, 2, 3, 4, 5, 6, 7]
    held = BlockTable()
    assert pool.extend(held, 10) == []
    pool.learn(held, tokens, {0: 6})
    assert [known.key for known in held.known] == [(0, (7, 8, 9, 1, 2)), (1, (2, 3, 4, 5, 6))]
    found = pool.find([7, 8, 9, 1, 2, 3, 4, 5, 6])
    assert found.blocks == held.blocks[:2]
    assert pool.seen_of(found) == {0: 5}  # the drafter had run 5 rows: all of the first block
    assert pool.find([7, 8, 9, 1, 2, 3, 4, 5]).blocks == held.blocks[:1]
    assert pool.find([7, 8, 9, 1, 3]).blocks == []


def test_blocks_freed_first_are_reused_first_and_prefixes_stay_longest() -> None:
    pool, tokens = BlockManager(4, 2, 0), [1, 2, 3, 4, 5]
    held, other = BlockTable(), BlockTable()
    pool.extend(held, 5)
    pool.learn(held, tokens, {})
    first, second, _ = held.blocks
    pool.give_back(held)
    assert (pool.free, pool.used) == (4, 0)
    assert set(pool.extend(other, 6) or []) < set(other.blocks)
    assert second in other.blocks
    assert first not in other.blocks
    assert pool.find(tokens).blocks == [first]


def test_too_few_free_blocks_allocate_none() -> None:
    pool, held = BlockManager(3, 4, 0), BlockTable()
    assert pool.extend(held, 13) is None
    assert held.blocks == []
    assert pool.extend(held, 12) == []
    assert pool.free == 0


def test_unfilled_rows_are_not_attributed_to_anothers_block() -> None:
    """Two sequences fill the same prefix at the same time; only the second's drafter has run."""
    pool, tokens = BlockManager(4, 2, 0), [1, 2, 3]
    one, other = BlockTable(), BlockTable()
    for held in (one, other):
        pool.extend(held, 3)
    pool.learn(one, tokens, {})
    pool.learn(other, tokens, {0: 3})
    assert pool.seen_of(pool.find(tokens)) == {}
    pool.learn(one, tokens, {0: 3})
    assert pool.seen_of(pool.find(tokens)) == {0: 3}
