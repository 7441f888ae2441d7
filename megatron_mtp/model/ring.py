"""Ring attention over the keys of all context-parallel ranks, without gathering them on any rank.

Each rank starts with its own keys and values, and passes on what it has until it has seen those of all ranks. A query
attends to a contiguous range of positions, from its document's start or the start of its window. Other keys of a query,
such as the rows of its own block, are on its rank and form a separate part:

    part   output of a softmax over some keys, and the logarithm L of its sum
    whole  sum over parts of exp(L - log sum exp L) output                      `joined`

The backward pass recomputes the scores; gradients of keys and values travel around the ring with them. Scores are
computed in tiles of queries and keys, so that memory does not depend on the sequence length.

Letters in names: S this rank's queries, W its keys, R ranks, B batch, N query heads, G key heads, M query heads of a
key head, C channels, Q and K queries and keys of a tile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from megatron_mtp.data.batch import to_device

TILE = 512
"""Queries and keys of a tile of scores."""

LOWEST = -1e30
"""Replaces the logarithm of an empty sum, -inf, where the difference of two would be NaN."""

Part = tuple[Tensor, Tensor]
"""Output [S, B, N, C] of a softmax over some keys, and the logarithm [S, B, N] of its sum."""


@dataclass(frozen=True)
class Reach:
    """Range of keys that each query sees: positions `first_S` to `last_S`; no keys if last is before first.

    Attributes:
        first_S, last_S: range of each of this rank's queries, as positions in the whole sequences.
        positions_RW: positions of the keys of every rank. All three tensors are on the host.
        group: the context-parallel group.
    """

    first_S: Tensor
    last_S: Tensor
    positions_RW: Tensor
    group: ProcessGroup

    def of_rows(self, position_AK: Tensor, window: tuple[int, int] | None) -> "Reach":
        """Replace each query by several rows at later positions, from which their windows are counted."""
        first_S, last_S = (each.unsqueeze(1).expand_as(position_AK).flatten() for each in (self.first_S, self.last_S))
        return Reach(first_S, last_S, self.positions_RW, self.group).within(position_AK.flatten(), window)

    def within(self, position_S: Tensor, window: tuple[int, int] | None) -> "Reach":
        """Restrict the ranges to the windows of queries at these positions; -1 means no limit."""
        before, after = window or (-1, -1)
        first_S = self.first_S if before < 0 else self.first_S.maximum(position_S - before)
        last_S = self.last_S if after < 0 else self.last_S.minimum(position_S + after)
        return Reach(first_S, last_S, self.positions_RW, self.group)

    def tiles(self, rank: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield tiles of queries and keys of a rank with visible pairs, and their mask [Q, K]; None if all are visible.

        The host decides from the bounds of a tile, so that the GPU never waits.
        """
        position_W = self.positions_RW[rank]
        first_S, last_S, there_W = (to_device(each, device) for each in (self.first_S, self.last_S, position_W))
        of_keys = [(keys, *_ends(position_W[keys])) for keys in _slices(len(position_W))]
        for queries in _slices(len(first_S)):
            (first, latest), (earliest, last) = _ends(self.first_S[queries]), _ends(self.last_S[queries])
            for keys, low, high in of_keys:
                if high < first or low > last:
                    continue
                seen_QK = None
                if low < latest or high > earliest:
                    seen_QK = there_W[keys] >= first_S[queries].unsqueeze(1)
                    seen_QK &= there_W[keys] <= last_S[queries].unsqueeze(1)
                yield queries, keys, seen_QK


def reach_of(bounds: Tensor, ranks: Tensor, position_S: Tensor, group: ProcessGroup, is_causal: bool = True) -> Reach:
    """Return the ranges that queries see within their documents: everything, or up to their own position.

    Args:
        bounds: starts and ends of the documents.
        ranks: positions [R, W] of every rank.
    """
    document_S = torch.searchsorted(bounds, position_S, right=True) - 1
    return Reach(bounds[document_S], position_S if is_causal else bounds[document_S + 1] - 1, ranks, group)


def ring_attention(query_SBNC: Tensor, key_WBGC: Tensor, value_WBGC: Tensor, reach: Reach, scale: float) -> Part:
    """Compute the part of a softmax over the keys of all ranks. Values may have fewer channels than keys."""
    apply: Callable[..., Part] = _Ring.apply  # torch annotates it since 2.15
    return apply(query_SBNC, key_WBGC, value_WBGC, reach, scale)


def joined(parts: Sequence[Part]) -> Tensor:
    """Combine the parts of one softmax into its output [S, B, N, C], in the data type of the first part."""
    logs_PSBN = torch.stack([log_SBN for _, log_SBN in parts])
    shares_PSBN = (logs_PSBN - logs_PSBN.logsumexp(0)).exp()
    made = sum(share_SBN.unsqueeze(-1) * out_SBNC for share_SBN, (out_SBNC, _) in zip(shares_PSBN, parts, strict=True))
    assert isinstance(made, Tensor)
    return made.to(parts[0][0].dtype)


class _Ring(torch.autograd.Function):
    """Autograd function of `ring_attention`. It saves queries, output and the rank's own keys and values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, reach: Reach, scale: float) -> Part:
        query_BGMSC, groups = _by_groups(query, key.size(2)), key.size(2)
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query_BGMSC.new_zeros(*query_BGMSC.shape[:-1], value.size(-1), dtype=wide)
        log = query_BGMSC.new_full(query_BGMSC.shape[:-1], -torch.inf, dtype=wide)
        for rank, (key_W, value_W) in _around([key, value], reach.group):
            key_BG1WC, value_BG1WC = _by_groups(key_W, groups), _by_groups(value_W, groups)
            for queries, keys, seen_QK in reach.tiles(rank, query.device):
                scores = _scores(query_BGMSC[..., queries, :], key_BG1WC[..., keys, :], seen_QK, scale)
                whole = torch.logaddexp(log[..., queries], scores.logsumexp(-1))
                after = whole.clamp(min=LOWEST)
                added = (scores - after.unsqueeze(-1)).exp().to(value.dtype) @ value_BG1WC[..., keys, :]
                kept = (log[..., queries] - after).exp().unsqueeze(-1)
                out[..., queries, :] = out[..., queries, :] * kept + added
                log[..., queries] = whole
        out, log = _by_positions(out).to(query.dtype), _by_positions(log.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(query, key, value, out, log)
        ctx.reach, ctx.scale = reach, scale
        return out, log

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        query, key, value, out, log = ctx.saved_tensors
        of_out, of_log = gradients
        wide, groups = log.dtype, key.size(2)
        less = (of_out.to(wide) * out).sum(-1) - of_log
        query, of_out, log, less = (
            _by_groups(each, groups) for each in (query, of_out, log[..., None], less[..., None])
        )
        log = log.clamp(min=LOWEST)
        of_query = torch.zeros_like(query, dtype=wide)
        of_pair = [torch.zeros_like(each, dtype=wide) for each in (key, value)]
        for rank, (key_W, value_W) in _around([key, value], ctx.reach.group):
            key_BG1WC, value_BG1WC = _by_groups(key_W, groups), _by_groups(value_W, groups)
            of_key, of_value = (_by_groups(each, groups).squeeze(2) for each in of_pair)
            for queries, keys, seen_QK in ctx.reach.tiles(rank, query.device):
                these, key_K, value_K = query[..., queries, :], key_BG1WC[..., keys, :], value_BG1WC[..., keys, :]
                weights = (_scores(these, key_K, seen_QK, ctx.scale) - log[..., queries, :]).exp()
                given = of_out[..., queries, :]
                of_value[..., keys, :] += (weights.to(given.dtype).mT @ given).sum(2)
                slopes = weights * ((given @ value_K.mT).to(wide) - less[..., queries, :]) * ctx.scale
                slopes = slopes.to(these.dtype)
                of_query[..., queries, :] += slopes @ key_K
                of_key[..., keys, :] += (slopes.mT @ these).sum(2)
            of_pair = _handed_on(of_pair, ctx.reach.group)()  # travels with the keys, and ends at their owner
        return (_by_positions(of_query).to(query.dtype), of_pair[0].to(key.dtype), of_pair[1].to(key.dtype), None, None)


def _scores(query: Tensor, key: Tensor, seen_QK: Tensor | None, scale: float) -> Tensor:
    scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)).mul_(scale)
    return scores if seen_QK is None else scores.masked_fill_(~seen_QK, -torch.inf)


def _by_groups(values_SBNC: Tensor, groups: int) -> Tensor:
    """Rearrange to [B, G, M, S, C], with the M query heads of each key head together; M is 1 for keys and values."""
    return values_SBNC.permute(1, 2, 0, 3).unflatten(1, (groups, -1))


def _by_positions(values_BGMSC: Tensor) -> Tensor:
    """Rearrange the result of `_by_groups` back to [S, B, N, C]."""
    return values_BGMSC.flatten(1, 2).permute(2, 0, 1, 3).contiguous()


def _around(values: list[Tensor], group: ProcessGroup) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the values of every rank with its number. The next values are in transit while these are used."""
    rank, ranks = group.rank(), group.size()
    for step in range(ranks):
        coming = _handed_on(values, group) if step < ranks - 1 else None
        yield (rank - step) % ranks, values
        if coming is not None:
            values = coming()


def _handed_on(values: list[Tensor], group: ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start sending values to the next rank. Calling the result waits for the values of the previous rank."""
    rank, ranks = group.rank(), group.size()
    if ranks == 1:
        return lambda: values
    following, before = (torch.distributed.get_global_rank(group, (rank + by) % ranks) for by in (1, -1))
    given, got = [each.contiguous() for each in values], [torch.empty_like(each) for each in values]
    sends = [P2POp(torch.distributed.isend, each, following, group) for each in given]
    receives = [P2POp(torch.distributed.irecv, each, before, group) for each in got]
    works = torch.distributed.batch_isend_irecv([*sends, *receives])

    def arrived() -> list[Tensor]:
        for work in works:
            work.wait()
        given.clear()
        return got

    return arrived


def _ends(values: Tensor) -> tuple[int, int]:
    low, high = values.aminmax()
    return int(low), int(high)


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, TILE):
        yield slice(start, min(start + TILE, count))
