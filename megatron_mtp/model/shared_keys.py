"""Passes of a repeated layer that share keys (--mtp-repeated-layer-shares-kv).

Later passes attend to pass 1's keys and values, as the drafts of an engine do that reuses the layer: it runs the
module over the known tokens with the trunk's states, one row a position, and keeps keys and values (pass 1). Then
every step adds one row at the next position, made from the row before. So step d of the chain that starts at position
i, which is pass d at position i in training, stands at position i + d - 1 and sees

    the rows of pass 1 at 0 .. i, and of passes 2 .. d those of its own chain, at i + 1 .. i + d - 1

    pass 3, i = 2      position   0    1    2    3    4
                       rows of    1    1    1    2    3          the last two started at i = 2

Without sharing, pass d at i sees the rows of pass d at 0 .. i, which no engine has: there every one of them would
have been made from drafts. NVIDIA/Megatron-LM#6472 (for latent attention) and GLM-5.2's KVShare share pass 1's keys
too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_mtp.model.attention import PortableAttention


class SharingAttention(PortableAttention):
    """Attention of a repeated layer. While passes are kept (`sharing`), the first call is pass 1, the second pass 2, ..

    Attributes:
        passes: keys and values of the passes so far; None while none are kept, where it is `PortableAttention`.
    """

    passes: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
        """Attend as `PortableAttention`, with queries and keys rotated to the positions of their pass."""
        self.chain = ()
        if self.passes is not None:
            self.passes.append((key, value))
            (key, value), *self.chain = self.passes
        return super().forward(query, key, value, *others, **named)


@contextmanager
def sharing(layers: list[SharingAttention]) -> Iterator[None]:
    """Keep the passes of these layers while this lasts."""
    for layer in layers:
        layer.passes = []
    try:
        yield
    finally:
        for layer in layers:
            layer.passes, layer.chain = None, ()


def recomputed(layer: SharingAttention, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Result of `run` in one pass of the layer; the backward pass computes it again.

    Of what was computed, only the pass's keys and values are held in between.
    """
    assert layer.passes is not None, "no passes are kept"
    before = [*layer.passes]

    def again(*given: Tensor) -> Tensor:
        kept, layer.passes = layer.passes, [*before]  # in the backward pass none are kept
        try:
            return run(*given)
        finally:  # the backward pass leaves by an exception of torch's, as soon as it has what it needs
            made, layer.passes = layer.passes, kept
            if kept is not None:
                kept += made[len(before) :]

    made: Tensor = checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False)
    return made
