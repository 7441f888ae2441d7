"""Predicts the speed-up of drafting with K MTP layers from the acceptance of drafts.

A round with K drafts emits 1 + a_1 + ... + a_K tokens, where a_k is the rate at which drafts 1..k are all accepted
(Leviathan et al., arXiv:2211.17192, section 3.1). It costs a forward pass of K + 1 rows per request, and K passes of an
MTP layer with the output layer:

    speed-up = (1 + sum a_k) t(b) / (t(b (K + 1)) + K d(b))

t(n) is the time of a forward pass over n rows: reading the weights or computing the products, whichever is longer, plus
a fixed time per layer for launches and collectives. With E experts, n rows read E (1 - (1 - k / E)^n) of them, where k
is the number of experts per token.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron_mtp.extensions.plan.hardware import Card
from megatron_mtp.extensions.plan.sizes import EXPERTS, LayerSizes, Model

MOST = 7
RECORD = "mtp_acceptance.json"
"""File in a checkpoint or exported folder with the acceptance of its MTP layers."""
LAYER_SECONDS = 20e-6
"""Seconds per layer for launches and collectives with CUDA graphs (assumed); `--forward-ms` sets a measured forward."""


DECAY = 0.95
"""Ratio of the conditional acceptance of a draft to that of the previous draft; GLM-5.2 has 0.834, 0.783, 0.757."""


@dataclass(frozen=True)
class Accepted:
    """Acceptance a_k of the first drafts, and its source."""

    rates: tuple[float, ...]
    source: str

    def at(self, count: int) -> list[float]:
        """Return a_1 .. a_K. Beyond the known ones, each conditional acceptance is `DECAY` times the previous one."""
        rates = list(self.rates[:count])
        given = self.rates[-1] / (self.rates[-2] if len(self.rates) > 1 else 1.0)
        while len(rates) < count:
            given *= DECAY
            rates.append(rates[-1] * given)
        return rates

    def length(self, count: int) -> float:
        """Return the tokens per round with this number of drafts."""
        return 1 + sum(self.at(count))


PUBLISHED = {
    "deepseek": Accepted((0.817,), "DeepSeek-R1, vllm-project/vllm#12755: 81 to 82.3 %"),
    "glm": Accepted((0.834, 0.653, 0.494), "GLM-5.2, ggml-org/llama.cpp#25980, greedy"),
    "glm4": Accepted((0.838,), "GLM-4.5-Air, ikawrakow/ik_llama.cpp#1992, before its correction of the warm-up"),
    "qwen": Accepted((0.9, 0.5, 0.4), "Qwen3.6-27B, kyuz0/amd-strix-halo-vllm-toolboxes#53: lengths 1.9, 2.4, 2.8"),
}
"""Published acceptance by family, measured on different data and engines."""


def of_family(name: str) -> Accepted:
    """Return the published acceptance of a family.

    Raises:
        ValueError: none is known for the family.
    """
    if name not in PUBLISHED:
        raise ValueError(f"--accepted is '{name:.40}'; give a folder with {RECORD}, rates such as 0.8,0.6, or one of "
                         f"{', '.join(PUBLISHED)}.")  # fmt: skip
    return PUBLISHED[name]


def accepted_of(words: str) -> Accepted:
    """Parse `--accepted`: a folder or file with a record, comma-separated rates, or the name of a family.

    Raises:
        ValueError: the value is none of these, or the record is damaged.
    """
    path = Path(words)
    file = path / RECORD if path.is_dir() else path
    if file.is_file():
        try:
            return Accepted(_rates(json.loads(file.read_text(encoding="utf-8"))["acceptance"]), str(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a record of acceptance ({error}); evaluate the model again.") from error
    if words.replace(",", "").replace(".", "").strip().isdigit():
        return Accepted(_rates(words.split(",")), "as given")
    return of_family(words)


def _rates(values: Iterable[object]) -> tuple[float, ...]:
    rates = tuple(float(str(value)) for value in values)
    if not rates or any(not 0 < rate <= 1 for rate in rates) or any(a < b for a, b in pairwise(rates)):
        raise ValueError(
            f"acceptance rates are {rates}; give numbers above 0 and up to 1, each at most the one before."
        )
    return rates


@dataclass(frozen=True)
class DraftDecoder:
    """A model that decodes on GPUs.

    Attributes:
        tensor: tensor-parallel size.
        weight: bytes per weight.
        context: tokens per request in the KV cache.
        forward: measured seconds of a forward pass for one request without drafts, or None.
    """

    model: Model
    card: Card
    tensor: int
    weight: float = 2.0
    context: int = 1024
    forward: float | None = None

    def speed_up(self, accepted: Accepted, count: int, batch: int = 1) -> float:
        """Return the throughput with this number of drafts relative to plain decoding."""
        plain, verified = self.trunk(batch), self.trunk(batch * (count + 1))
        return accepted.length(count) * plain / (verified + count * self.depth(batch))

    def trunk(self, rows: int) -> float:
        """Return the seconds of a forward pass over this number of rows."""
        layers = self.model.layers
        return self._passes(layers, rows) + self._head(rows) + len(layers) * self.fixed

    def depth(self, rows: int) -> float:
        """Return the seconds of a pass of one MTP layer with the output layer."""
        return self._passes([self.model.depth], rows) + self._head(rows) + self.fixed

    @property
    def fixed(self) -> float:
        """Seconds per layer that do not depend on rows: a measured forward minus its weights and products."""
        if self.forward is None:
            return LAYER_SECONDS
        layers = self.model.layers
        return max(0.0, self.forward - self._passes(layers, 1) - self._head(1)) / len(layers)

    def _passes(self, layers: Sequence[LayerSizes], rows: int) -> float:
        read = work = cache = 0.0
        for layer in layers:
            for product in layer.products:
                missed = (1 - product.used / product.stored) ** rows if product.held == EXPERTS else 0.0
                read += product.size * (1 - missed)
                work += product.work
            cache += layer.cache * 2
            work += layer.pairs * self.context + layer.states
        moved = read * self.weight + cache * rows * self.context
        return max(moved / self._bandwidth, 2 * rows * work / self._rate)

    def _head(self, rows: int) -> float:
        table = self.model.table
        return max(table * self.weight / self._bandwidth, 2 * rows * table / self._rate)

    @property
    def _bandwidth(self) -> float:
        return self.card.bandwidth * self.card.reached.copies * self.tensor

    @property
    def _rate(self) -> float:
        peak = self.card.fp8 if self.weight <= 1 else self.card.bf16
        return peak * self.card.reached.products * self.tensor
