"""Shared keys: later passes of a repeated layer attend to the keys of pass 1, with or without a chain of their own.

Later passes attend to pass 1's keys and values, like the drafts of an engine that reuses the layer. Such an engine runs
the module over the known tokens with the trunk's states, one row per position, and keeps keys and values (pass 1). Then
each step computes one row at the next position from the previous row. So step d of the chain that starts at position i,
which is pass d at position i in training, is at position i + d - 1.

With --mtp-repeated-layer-shares-kv, it attends to the rows of pass 1 at 0 .. i, and to those of passes 2 .. d of its
own chain, at i + 1 .. i + d - 1:

    pass 3, i = 2      position   0    1    2    3    4
                       rows of    1    1    1    2    3          the last two started at i = 2

With --mtp-repeated-layer-first-pass-kv, it attends only to the rows of pass 1, as in GLM-5.2, whose engines choose keys
for the first draft of a step and reuse them for all others. Later passes then need no keys and values:

    pass 3, i = 2      position   0    1    2    3    4
                       rows of    1    1    1                    the query is at 4

Without sharing, pass d at i attends to the rows of pass d at 0 .. i, which no engine has: an engine would have to
compute each of them from drafts. NVIDIA/Megatron-LM#6472 also shares pass 1's latents without a chain, but leaves the
queries of all passes at position i.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_mtp.model.attention import PortableAttention
from megatron_mtp.model.latent_attention import LatentSelfAttention, PortableLatentAttention


class SharingAttention(PortableAttention):
    """Attention of a repeated layer. Within `sharing`, the first call is pass 1, the second pass 2, and so on.

    Attributes:
        passes: keys and values of the passes so far; None outside `sharing`, where it behaves like `PortableAttention`.
    """

    passes: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
        """Attend like `PortableAttention`, with queries and keys rotated to the positions of their pass."""
        if self.passes is not None:
            self.passes.append((key, value))
            (key, value), *self.chain = self.passes
        try:
            return super().forward(query, key, value, *others, **named)
        finally:
            self.chain = ()


class FirstPassKeys(MegatronModule):
    """Mix-in for Megatron's self-attention classes: within `sharing`, later passes attend only to pass 1's keys.

    Works with any core attention, because all passes have the same mask. Keys of grouped-query attention are stored
    before rotation: Megatron rotates queries and keys of a later pass by a pair of angles.

    Attributes:
        passes: pass 1's keys and values, and an empty tuple for each later pass; None outside `sharing`.
    """

    passes: list[tuple[Tensor, ...]] | None = None

    def get_query_key_value_tensors(self, *given: Any, **named: Any) -> tuple[Any, ...]:
        """Return Megatron's tuple, with pass 1's keys and values in a later pass."""
        query, key, value, *others = super().get_query_key_value_tensors(*given, **named)
        if self.passes is not None:
            # clone: Megatron may free what it recomputes, and a view would keep the queries' memory alive
            self.passes.append(() if self.passes else (key.clone(), value.clone()))
            key, value = self.passes[0]
        return query, key, value, *others

    @contextmanager
    def at_pass(self, number: int, first: tuple[Tensor, ...]) -> Iterator[list[tuple[Tensor, ...]]]:
        """Within this context, the next call is pass `number`, with keys and values `first`. Yields `passes`."""
        before, self.passes = self.passes, [first, *[()] * (number - 2)] if number > 1 else []
        try:
            yield self.passes
        finally:
            self.passes = before


class LatentFirstPassKeys(FirstPassKeys):
    """`FirstPassKeys` for latent attention classes, which rotate queries and keys by their own angles.

    Those of a later pass rotate further; its keys are not used.
    """

    rotary_pos_emb: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb.register_forward_pre_hook(partial(_turn_further, self), with_kwargs=True)


class ChainedLatentAttention(PortableLatentAttention):
    """Latent attention in a repeated layer with a chain, on Megatron's projections.

    Rotates keys of later passes, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb.register_forward_pre_hook(partial(_turn_further, self.core_attention), with_kwargs=True)


def _turn_further(
    layer: SharingAttention | FirstPassKeys, _: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Shift positions before latent attention computes its angles: pass d is d - 1 positions later."""
    return given, {**named, "offset": len(layer.passes or ())}


class RepeatedAttention(FirstPassKeys, SelfAttention):
    """Grouped-query attention in a repeated layer without a chain."""


class RepeatedLatentAttention(LatentFirstPassKeys, LatentSelfAttention):
    """Latent attention in a repeated layer without a chain, on Transformer Engine's projections."""


class PortableRepeatedLatentAttention(LatentFirstPassKeys, PortableLatentAttention):
    """Latent attention in a repeated layer without a chain, on Megatron's projections."""


FIRST_PASS_ALONE: dict[Any, Any] = {
    SelfAttention: RepeatedAttention,
    LatentSelfAttention: RepeatedLatentAttention,
    PortableLatentAttention: PortableRepeatedLatentAttention,
}
WITH_CHAIN: dict[Any, Any] = {
    PortableAttention: SharingAttention,
    PortableLatentAttention: ChainedLatentAttention,
}
"""Attention modules in the spec of a repeated layer, and their replacements if its passes have a chain of their own."""

Sharing = SharingAttention | FirstPassKeys


@contextmanager
def sharing(layers: Sequence[Sharing]) -> Iterator[None]:
    """Keep the passes of these layers within this context."""
    for layer in layers:
        layer.passes = []
    try:
        yield
    finally:
        for layer in layers:
            layer.passes = None


def recomputed(layer: SharingAttention, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Run one pass of the layer with activation checkpointing: the backward pass recomputes it.

    Only the keys and values of the pass are kept.
    """
    assert layer.passes is not None, "no passes are kept"
    before = [*layer.passes]

    def again(*given: Tensor) -> Tensor:
        kept, layer.passes = layer.passes, [*before]  # nothing is stored during the backward pass
        try:
            return run(*given)
        finally:  # torch leaves the recomputation by an exception as soon as it has what it needs
            made, layer.passes = layer.passes, kept
            if kept is not None:
                kept += made[len(before) :]

    made: Tensor = checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False)
    return made
