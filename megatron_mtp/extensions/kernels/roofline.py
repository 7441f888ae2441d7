"""Roofline model: predicted milliseconds of a loss with its products and gradients.

    seconds = products x 2 N H V / rate + kernels + sum's bytes x V H / copies
    kernel  = N V x the larger of bytes a logit / copies and instructions a logit / issued

    products   logits, gradients of the states and of the head; a loss by the trunk's distribution makes the trunk's
               logits, too
    rate       the peak of the card, times the share that products reach: the one unknown. The time of `ce` on an H200
               gives it, less all else that `ce` takes
    copies     the peak of the card, times `COPIES`
    issued     half of the card's float32 peak: an instruction of every lane in every cycle. Instructions are those of
               the H200's binary; other cards have nearly as many. An A100 issues twice as many that are not float32
    sum        the head's gradient in float32 (losses/weight_gradient.py): every chunk reads and writes it

The rate of products includes what they read and write themselves. Launches, and what a row costs in addition to its
logits, are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mtp.extensions.kernels.cards import Card
from megatron_mtp.extensions.kernels.compiled import Kernel

COPIES = 0.9
"""Share of peak memory bandwidth that a copy reaches: 4.3 TB/s read and written on an H200, 3.0 on an H100."""
SUM_OF_A_CHUNK = 8
"""Bytes moved for an entry of the head's gradient in each chunk: read and written in float32."""
SUM_ONCE = 4 + 14
"""Bytes moved once for an entry: it is zeroed; the backward pass reads it, writes and reads it scaled, and writes it in
bfloat16.
"""

HIDDEN = 2048
"""Hidden size H of the H200 measurement in docs/explanation/evidence_gpu.md."""
SEEN_POSITIONS = 1024
"""Rows of a chunk in the H200 measurement."""
SEEN = {"ce": 0.05458, "kd": 0.07298, "tv": 0.0742}
"""Seconds measured on the H200. `CALIBRATING` gives the share of peak that products reach; the other values are
predicted from it.
"""
CALIBRATING = "ce"


@dataclass(frozen=True)
class Work:
    """What a loss does.

    Attributes:
        products: of states and head, or of like sizes.
        kernels: in the order of their launches, compiled for an H200.
        tokens, entries, hidden: N, V and H.
        positions: rows of a chunk.
    """

    products: int
    kernels: Sequence[Kernel]
    tokens: int
    entries: int
    hidden: int
    positions: int

    def seconds(self, card: Card, reached: float) -> float:
        """Return the time on a card whose products reach this fraction of their peak."""
        return self._operations / (card.bf16 * reached) + self._beside_products(card)

    def reached(self, card: Card, seconds: float) -> float:
        """Return the fraction of the peak that products reach if the work took this long."""
        return self._operations / (card.bf16 * (seconds - self._beside_products(card)))

    @property
    def _operations(self) -> float:
        return self.products * 2 * self.tokens * self.hidden * self.entries

    def _beside_products(self, card: Card) -> float:
        of_sum = SUM_OF_A_CHUNK * self.tokens / self.positions + SUM_ONCE
        moved = of_sum * self.entries * self.hidden / _copies(card)
        return moved + sum(seconds_of(kernel, card, self.tokens * self.entries) for kernel in self.kernels)


def seconds_of(kernel: Kernel, card: Card, logits: int) -> float:
    """Return the time of a single kernel."""
    return logits * max(kernel.moved / _copies(card), _issued(kernel, card))


def is_issue_bound(kernel: Kernel, card: Card) -> bool:
    """Return whether it is limited by instructions rather than memory."""
    return _issued(kernel, card) > kernel.moved / _copies(card)


def _issued(kernel: Kernel, card: Card) -> float:
    assert kernel.instructions is not None
    return kernel.instructions / (card.float32 / 2)


def _copies(card: Card) -> float:
    return COPIES * card.bandwidth
