"""Memory of an engine: keys and values of the trunk, of depths and of a small model, and the trunk's states.

All of it is divided into the same blocks of slots (kv_cache.py).
Recurrent layers keep as much of a short sequence as of a long one: an entry for each sequence that runs
    (recurrent_state.py).
"""

import torch

from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.recurrent_state import state_bytes
from megatron_mtp.decoding.rows import BLOCK, BlockTables
from megatron_mtp.decoding.runner import Runner

MOST_GIB = 4.0
"""Cache that is taken unasked."""


class Memory:
    """Of an engine.

    Args:
        runner: the target.
        tables: any of the memory's, for its sizes.

    Attributes:
        cache: the trunk's keys and values.
        states_N1SH: the trunk's states, from which depths draft.
        free_entries: of recurrent layers, which no sequence has.
    """

    def __init__(self, runner: Runner, tables: BlockTables) -> None:
        self._tables, self._depth_layers = tables, runner.depth_layers
        self.cache = KVCache(runner.trunk_layers, tables)
        self._depths: list[KVCache] = []
        self._drafter: tuple[Runner, KVCache] | None = None
        sizes = tables.blocks, 1, tables.size, runner.state_size
        self.states_N1SH = torch.zeros(sizes, dtype=runner.dtype, device=runner.device)
        self.free_entries = list(range(tables.kept_entries))

    def depth_caches(self, depths: int) -> list[KVCache]:
        """Caches for a drafter's depths."""
        for _ in range(len(self._depths), depths):
            self._depths.append(KVCache(self._depth_layers, self._tables))
        return self._depths[:depths]

    def drafter_cache(self, drafter: Runner) -> KVCache:
        """A cache for a small model; of another model, a new one."""
        if self._drafter is None or self._drafter[0] is not drafter:
            self._drafter = drafter, KVCache(drafter.trunk_layers, self._tables)
        return self._drafter[1]

    def take_entry(self) -> int:
        """An entry for a sequence without rows; nothing is left there of a sequence that had it."""
        entry = self.free_entries.pop()
        for cache in self._caches:
            if cache.recurrence is not None:
                cache.recurrence.forget(entry)
        return entry

    def give_entry(self, entry: int) -> None:
        """A sequence has ended, or is put back."""
        self.free_entries.append(entry)

    def clear(self, blocks: list[int]) -> None:
        """Make all rows in some blocks zero, as those of a new memory are."""
        self.states_N1SH[blocks] = 0
        for cache in self._caches:
            cache.clear(blocks)

    @property
    def _caches(self) -> list[KVCache]:
        return [self.cache, *self._depths, *(() if self._drafter is None else self._drafter[1:])]


def block_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Bytes of one block: keys and values of the trunk, of depths and of a small model, and the trunk's states."""
    layers = sum(one.attending for one in (runner.trunk_keeps, *runner.depths_keep))
    total = (layers * _slot_numbers(runner) + runner.state_size) * runner.dtype.itemsize
    if drafter is not None:
        total += drafter.trunk_keeps.attending * _slot_numbers(drafter) * drafter.dtype.itemsize
    return total * BLOCK


def entry_bytes(runner: Runner, drafter: Runner | None = None) -> int:
    """Bytes that the recurrent layers of all these keep of one sequence; 0 where there are none."""
    total = sum(
        state_bytes(one, runner.dtype) for part in (runner.trunk_keeps, *runner.depths_keep) for one in part.states
    )
    if drafter is not None:
        total += sum(state_bytes(one, drafter.dtype) for one in drafter.trunk_keeps.states)
    return total


def blocks_in(gib: float, texts: int, runner: Runner, drafter: Runner | None = None) -> int:
    """Blocks that so much memory holds, beside what recurrent layers keep of so many sequences.

    Raises:
        ValueError: not even one.
    """
    each, states = block_bytes(runner, drafter), texts * entry_bytes(runner, drafter)
    blocks = int((gib * 2**30 - states) / each) - 1  # one belongs to no sequence
    if blocks < 1:
        least = (2 * each + states) / 2**30
        beside, fewer = (f" beside the states of {texts} texts", ", or run fewer texts") if states else ("", "")
        raise ValueError(
            f"a cache of {gib} GiB holds no block of {BLOCK} tokens{beside}; give at least {least:.6f}{fewer}."
        )
    return blocks


def blocks_for(texts: int, runner: Runner, drafter: Runner | None = None) -> int:
    """Blocks that so many sequences of full length need, as far as `MOST_GIB` holds them; errors as `blocks_in`."""
    each = -(-runner.positions // BLOCK) + 1  # and the drafts behind the last position
    return min(texts * each, blocks_in(MOST_GIB, texts, runner, drafter))


def _slot_numbers(runner: Runner) -> int:
    """Numbers that a layer keeps of a token."""
    config = runner.model.config
    if config.multi_latent_attention:
        return int(config.kv_lora_rank + config.qk_pos_emb_head_dim)
    groups = config.num_query_groups or config.num_attention_heads
    return int(2 * config.kv_channels * groups // config.tensor_model_parallel_size)
