"""Rows of several texts one behind the other, so that the padding between them does not run.

A forward of prompts has as many rows of each text as the longest needs. Products do not depend on texts, so they run
the rows that count as if these were one text's. Attention and recurrent layers put them back into their places.

    rows of three texts    -  -  A0        packed    A0 B0 B1 B2 C0 C1
                           B0 B1 B2
                           -  C0 C1

Letters in names: B batch, R rows of a text, X rows that count, S rows as Megatron has them, H hidden, N heads,
C channels.
"""

from dataclasses import dataclass, fields

from torch import Tensor

from megatron_mtp.decoding.kv_cache import Chain, KVCache, Rows
from megatron_mtp.decoding.pages import PackedPages, Pages


@dataclass(frozen=True)
class Packed(Rows):
    """The rows of a chain that count: positions and slots [1, X], and the chain's own mask.

    Attributes:
        chain: all rows.
        place_X: where those that count stand among the B * R rows.
    """

    chain: Chain
    place_X: Tensor

    def tokens(self, tokens_BR: Tensor) -> Tensor:
        """[1, X]."""
        return tokens_BR.flatten()[self.place_X].unsqueeze(0)

    def states(self, hidden_SBH: Tensor) -> Tensor:
        """[X, 1, H]."""
        return hidden_SBH.transpose(0, 1).flatten(0, 1)[self.place_X].unsqueeze(1)

    def cache(self, cache: KVCache) -> KVCache:
        """The same memory, as these rows are written to it."""
        pages, rows = cache.pages, self.chain.counts_BR.size(1)
        own = {one.name: getattr(pages, one.name) for one in fields(Pages)}
        return cache.through(PackedPages(**own, text_X=self.place_X // rows))

    def heads(self, packed_1NXC: Tensor) -> Tensor:
        """[B, N, R, C], with zeros for padding."""
        return self._put_back(packed_1NXC[0].transpose(0, 1)).transpose(1, 2)

    def packed_heads(self, heads_BNRC: Tensor) -> Tensor:
        """[1, N, X, C]."""
        return heads_BNRC.transpose(1, 2).flatten(0, 1)[self.place_X].transpose(0, 1).unsqueeze(0)

    def unpacked(self, packed_X1H: Tensor) -> Tensor:
        """States of all rows [S, B, H], with zeros for padding."""
        return self._put_back(packed_X1H[:, 0]).transpose(0, 1)

    def _put_back(self, values: Tensor) -> Tensor:
        counts_BR = self.chain.counts_BR
        made = values.new_zeros(counts_BR.numel(), *values.shape[1:])
        return made.index_copy_(0, self.place_X, values).unflatten(0, counts_BR.shape)


def packed(rows: Rows, cache: KVCache) -> Packed | None:
    """The rows that count; None where padding may run as well, or there is none."""
    if not isinstance(rows, Chain) or not rows.packs:
        return None
    place_X = rows.counts_BR.flatten().nonzero()[:, 0]
    if place_X.numel() == rows.counts_BR.numel():
        return None
    positions_1X, slots_1X = (one.flatten()[place_X].unsqueeze(0) for one in (rows.positions_BR, rows.slots_BR))
    return Packed(positions_1X, slots_1X, rows.mask_B1RW, rows, place_X)
