"""What texts need from step to step: keys and values of the trunk, of depths and of a small model, and trunk states.

All of it is divided into the same slots: a batch has it for itself, or in blocks that many texts share (pages.py).
"""

import copy

import torch

from megatron_mtp.drafting.kv_cache import KVCache
from megatron_mtp.drafting.pages import Pages
from megatron_mtp.drafting.runner import Runner


class Memory:
    """Of a batch; or of an engine, whose batches see it `through` their pages.

    Args:
        runner: the target.
        capacity: slots of a text.

    Attributes:
        cache: the trunk's keys and values.
        states_B1TH: the trunk's states, from which depths draft; with pages [N, 1, S, H].
    """

    def __init__(self, runner: Runner, batch: int, capacity: int, pages: Pages | None = None) -> None:
        self.pages, self._depth_layers = pages, runner.depth_layers
        self._whole: Memory | None = None
        self.cache = KVCache(runner.trunk_layers, batch, capacity, pages)
        self._depths: list[KVCache] = []
        self._drafter: tuple[Runner, KVCache] | None = None
        blocks, slots = (batch, capacity + 1) if pages is None else (pages.blocks, pages.size)
        self.states_B1TH = torch.zeros(blocks, 1, slots, runner.hidden_size, dtype=runner.dtype, device=runner.device)

    def through(self, pages: Pages) -> "Memory":
        """The same memory, as the texts of other pages see it."""
        made = copy.copy(self)
        made.pages, made._whole = pages, self._whole or self
        made.cache = self.cache.through(pages)
        made._depths, made._drafter = [], None
        return made

    def depth_caches(self, depths: int) -> list[KVCache]:
        """Caches for a drafter's depths."""
        for depth in range(len(self._depths), depths):
            if self._whole is None:
                self._depths.append(self._new(self._depth_layers))
            else:
                self._depths.append(self._whole.depth_caches(depths)[depth].through(self._own_pages))
        return self._depths[:depths]

    def drafter_cache(self, drafter: Runner) -> KVCache:
        """A cache for a small model; of another model, a new one."""
        if self._drafter is None or self._drafter[0] is not drafter:
            whole = self._whole
            new = self._new(drafter.trunk_layers) if whole is None else whole.drafter_cache(drafter)
            self._drafter = drafter, new if whole is None else new.through(self._own_pages)
        return self._drafter[1]

    def has_drafter(self, drafter: Runner) -> bool:
        """Whether the cache of a small model is this one's."""
        return self._drafter is not None and self._drafter[0] is drafter

    def clear(self) -> None:
        """Forget all rows and keep the memory."""
        for cache in (self.cache, *self._depths, *(self._drafter or ())[1:]):
            cache.clear()

    @property
    def _own_pages(self) -> Pages:
        assert self.pages is not None
        return self.pages

    def _new(self, layers: int) -> KVCache:
        return KVCache(layers, self.cache.batch, self.cache.capacity, self.pages)
