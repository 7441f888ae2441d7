"""Compares placements of D = 0..4 MTP layers and recommends one.

For each number of MTP layers there are up to four placements: the launch line's own, the naive one (layers spread
evenly, MTP layers on the last stage), a last stage with fewer layers, and a separate stage for the MTP layers. The
fastest one that fits the GPU's memory is recommended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_mtp.extensions.plan.hardware import Card
from megatron_mtp.extensions.plan.launch import Line, inner_of, read, trunk_of
from megatron_mtp.extensions.plan.memory import FILLED, Held, memory_of
from megatron_mtp.extensions.plan.placement import Placement, balanced, even, flags_of, of_line
from megatron_mtp.extensions.plan.schedule import Pipeline
from megatron_mtp.extensions.plan.sizes import Model, model_of
from megatron_mtp.extensions.plan.step_time import Clock, StepTime, step_time

GIVEN, NAIVE, LIGHTER, ALONE = "as given", "naive", "lighter last stage", "stage of their own"
MOST_DEPTHS = 4


@dataclass(frozen=True)
class Option:
    """A placement for a number of MTP layers, with its memory and time."""

    depths: int
    name: str
    placement: Placement
    memory: tuple[Held, ...]
    time: StepTime
    fits: bool

    @property
    def fullest(self) -> float:
        """Bytes of the stage with the most memory."""
        return max(held.total for held in self.memory)


@dataclass(frozen=True)
class Plan:
    """All options for a launch line.

    Attributes:
        words: words of the launch line.
        depths: number of MTP layers to plan for.
    """

    words: tuple[str, ...]
    model: Model
    card: Card
    gpus: int
    depths: int
    options: tuple[Option, ...]

    def of(self, depths: int, name: str | None = None) -> list[Option]:
        """Return the options for a number of MTP layers, fastest first; only those with this name if given."""
        found = [one for one in self.options if one.depths == depths and name in (None, one.name)]
        return sorted(found, key=lambda one: (not one.fits, one.time.seconds))

    @property
    def recommended(self) -> Option:
        """Fastest option for the planned MTP layers that fits in memory, or the fastest of all if none fits."""
        return self.of(self.depths)[0]

    @property
    def margin(self) -> float:
        """Fraction of the naive placement's step time that the recommended placement saves."""
        naive = self.of(self.depths, NAIVE)[0].time.seconds
        return 1 - self.recommended.time.seconds / naive

    def overhead(self, depths: int) -> float:
        """Return the added time relative to a step without MTP layers, each with its best placement."""
        return self.of(depths)[0].time.seconds / self.of(0)[0].time.seconds - 1

    @property
    def flags(self) -> list[str]:
        """Launch line with the recommended placement."""
        return flags_of(self.recommended.placement, self.model.line, self.words)


def plan(words: Sequence[str], card: Card, gpus: int, depths: int | None = None, seconds: float | None = None) -> Plan:
    """Plan a launch line.

    Args:
        words: the launch line.
        card: type of all GPUs of the job.
        gpus: number of GPUs.
        depths: number of MTP layers to plan for; None for the line's, or 1.
        seconds: measured step time of the line without MTP layers; everything but output layer and losses is scaled to
            match it.

    Raises:
        ValueError: the line lacks a size, or does not fit the GPUs.
    """
    line = read(words)
    line.data_parallel(gpus)
    wanted = depths if depths is not None else (line.mtp_num_layers or 1)
    slower = 1.0 if seconds is None else calibrated(with_depths(line, 0), card, gpus, seconds)
    counts = sorted({*range(MOST_DEPTHS + 1), wanted})
    options = tuple(one for count in counts for one in _options(line, count, card, gpus, slower))
    return Plan(tuple(words), model_of(with_depths(line, wanted)), card, gpus, wanted, options)


def with_depths(line: Line, depths: int) -> Line:
    """Set the number of MTP layers of a line; its placement is dropped if it has a different number."""
    if line.hybrid_layer_pattern is not None:
        pattern = line.hybrid_layer_pattern
        changed = replace(line, hybrid_layer_pattern="/".join([trunk_of(pattern), *[inner_of(pattern)] * depths]))
        return replace(changed, mtp_num_layers=depths or None)
    changed = replace(
        line, mtp_num_layers=depths or None, mtp_unroll=None if depths != line.mtp_num_layers else line.mtp_unroll
    )
    if depths == (line.mtp_num_layers or 0) or line.pipeline_model_parallel_layout is None:
        return changed
    chunks = line.chunks
    return replace(
        changed,
        pipeline_model_parallel_layout=None,
        num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
    )


def calibrated(line: Line, card: Card, gpus: int, seconds: float) -> float:
    """Find the factor for everything but output layer and losses that matches a measured step, by bisection.

    Raises:
        ValueError: output layer and losses alone take longer than the step.
    """
    model, pipeline = model_of(line), pipeline_of(line, gpus)
    placement = even(len(model.layers), 0, line.pipeline_model_parallel_size, line.chunks)

    def step(factor: float) -> float:
        return step_time(Clock(model, card, gpus, factor), placement, pipeline).seconds

    if seconds <= (least := step(0.0)):
        raise ValueError(
            f"--step-seconds is {seconds:g}, and head and losses alone take {least:.3g} s at the card's rates; give "
            "the seconds of a whole step, or other rates with --gpu."
        )
    low, high = 0.0, 1.0
    while step(high) < seconds:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if step(middle) < seconds else (low, middle)
    return high


def pipeline_of(line: Line, gpus: int) -> Pipeline:
    """Return the pipeline schedule of a line."""
    ranks, virtual = line.pipeline_model_parallel_size, line.chunks
    group = line.microbatch_group_size_per_virtual_pipeline_stage or ranks
    ahead = int(line.overlap_moe_expert_parallel_comm and virtual > 1)
    return Pipeline(ranks, virtual, line.microbatches(gpus), group, ahead)


def _options(line: Line, depths: int, card: Card, gpus: int, slower: float) -> Iterator[Option]:
    changed = with_depths(line, depths)
    model = model_of(changed)
    clock, pipeline = Clock(model, card, gpus, slower), pipeline_of(changed, gpus)
    for name, placement in _placements(line, changed, model, clock):
        memory = tuple(memory_of(model, placement, pipeline, gpus))
        fits = all(held.total <= FILLED * card.memory for held in memory)
        yield Option(depths, name, placement, memory, step_time(clock, placement, pipeline), fits)


def _placements(line: Line, changed: Line, model: Model, clock: Clock) -> Iterator[tuple[str, Placement]]:
    """Return placements by name, without duplicates."""
    ranks, virtual, layers = line.pipeline_model_parallel_size, line.chunks, len(model.layers)
    depths = changed.mtp_num_layers or 0
    naive = even(layers, depths, ranks, virtual)
    yield NAIVE, naive
    if ranks == 1:
        return
    seen = {naive}
    if _places(line) and depths == (line.mtp_num_layers or 0):
        seen.add(given := of_line(changed, layers))
        yield GIVEN, given
    loads = clock.loads()
    if (lighter := balanced(loads, depths, ranks, virtual)) not in seen:
        seen.add(lighter)
        yield LIGHTER, lighter
    # Megatron supports a separate stage for MTP layers only for GPT models, and not on the first rank.
    if depths and line.hybrid_layer_pattern is None and ranks > 2:
        yield ALONE, balanced(loads, depths, ranks, virtual, alone=True)


def _places(line: Line) -> bool:
    """Return whether the line places layers explicitly."""
    names = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    return any(getattr(line, name) is not None for name in names) or (
        "|" in (line.hybrid_layer_pattern or "")
        or line.account_for_embedding_in_pipeline_split
        or line.account_for_loss_in_pipeline_split
    )
