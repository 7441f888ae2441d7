"""Placements: which layers each pipeline stage holds.

A placement is a list of chunks in model order. With p pipeline ranks, chunk c is on rank c % p, as in Megatron's
interleaved schedule. All MTP layers are in one chunk, which must be the last virtual stage of a rank other than the
first (`PipelineParallelLayerLayout.validate_layer_layout`).

    Et|tt|tmL      E embedding, t trunk layer, m MTP layer, L output layer and losses
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, product

from megatron_mtp.extensions.plan.launch import Line, inner_of, stages_of, trunk_of, without


@dataclass(frozen=True)
class StageChunk:
    """A stage, virtual or not: trunk layers `first` to `end` - 1, MTP layers, embedding, output layer and losses."""

    first: int
    end: int
    depths: int = 0
    embedding: bool = False
    losses: bool = False

    def __str__(self) -> str:
        return "E" * self.embedding + "t" * (self.end - self.first) + "m" * self.depths + "L" * self.losses


@dataclass(frozen=True)
class Placement:
    """Chunks of a model in order, over `ranks` pipeline ranks."""

    chunks: tuple[StageChunk, ...]
    ranks: int

    @property
    def virtual(self) -> int:
        """Chunks per rank."""
        return len(self.chunks) // self.ranks

    def of_rank(self, rank: int) -> tuple[StageChunk, ...]:
        """Return the chunks of a rank."""
        return self.chunks[rank :: self.ranks]

    def layout(self) -> str:
        """Return Megatron's layout string, with three or more equal stages in a row abbreviated."""
        stages = [str(chunk) for chunk in self.chunks]
        written = []
        for stage, group in groupby(stages[:-1]):
            count = len(list(group))
            written.append(f"({stage}|)*{count}" if count > 2 else f"{stage}|" * count)
        return "".join(written) + stages[-1]


def of_counts(counts: Sequence[int], depths: int, ranks: int, alone: bool = False) -> Placement:
    """Build a placement from trunk layers per chunk, with MTP layers in the last chunk or alone in the one before."""
    ends = list(accumulate(counts))
    last = len(counts) - 1
    holds = last - 1 if alone and depths else last
    return Placement(
        tuple(
            StageChunk(end - count, end, depths if number == holds else 0, number == 0, number == last)
            for number, (count, end) in enumerate(zip(counts, ends, strict=True))
        ),
        ranks,
    )


def even(layers: int, depths: int, ranks: int, virtual: int) -> Placement:
    """Spread layers evenly, with one more in the first chunks; MTP layers, output layer and losses in the last."""
    chunks = ranks * virtual
    return of_counts([layers // chunks + (number < layers % chunks) for number in range(chunks)], depths, ranks)


def of_line(line: Line, layers: int) -> Placement:
    """Return the placement in a launch line.

    Raises:
        ValueError: the stages do not fit the layers, the MTP layers or the ranks.
    """
    ranks, virtual, depths = line.pipeline_model_parallel_size, line.chunks, line.mtp_num_layers or 0
    if line.pipeline_model_parallel_layout is not None:
        return _of_layout(line.pipeline_model_parallel_layout, layers, depths, ranks)
    if line.hybrid_layer_pattern is not None and "|" in trunk_of(line.hybrid_layer_pattern):
        counts = [len(stage) for stage in trunk_of(line.hybrid_layer_pattern).split("|")]
        if len(counts) % ranks:
            raise ValueError(f"--hybrid-layer-pattern has {len(counts)} stages; give a multiple of {ranks} ranks.")
        return of_counts(counts, depths, ranks)
    first, last = line.decoder_first_pipeline_num_layers, line.decoder_last_pipeline_num_layers
    ahead, behind = line.account_for_embedding_in_pipeline_split, line.account_for_loss_in_pipeline_split
    between = layers - (first or 0) - (last or 0) + ahead + behind
    middle = ranks - (first is not None) - (last is not None)
    if between < 0 or (middle and between % (middle * virtual)) or (not middle and between):
        raise ValueError(
            f"{layers} layers do not divide over {ranks} pipeline ranks with {virtual} stages each; add "
            "--pipeline-model-parallel-layout, or drop the flags of stages."
        )
    each = between // (middle * virtual) if middle else 0
    counts = [each] * (ranks * virtual)
    counts[0] -= ahead
    counts[-1] -= behind
    for rank, given in ((0, first), (ranks - 1, last)):
        if given is not None:
            counts[rank::ranks] = [given // virtual] * virtual
    return of_counts(counts, depths, ranks)


def _of_layout(layout: str, layers: int, depths: int, ranks: int) -> Placement:
    stages = stages_of(layout)
    letters = "".join(stages)
    wanted = f"E{'t' * layers}{'m' * depths}L"
    if letters != wanted:
        raise ValueError(
            f"--pipeline-model-parallel-layout has {letters.count('t')} layers and {letters.count('m')} MTP layers, "
            f"and the line {layers} and {depths}; E has to be first and L last. Correct one of them."
        )
    if len(stages) % ranks:
        raise ValueError(
            f"--pipeline-model-parallel-layout has {len(stages)} stages; give a multiple of "
            f"--pipeline-model-parallel-size {ranks}."
        )
    ends = list(accumulate(stage.count("t") for stage in stages))
    return Placement(
        tuple(
            StageChunk(first, end, stage.count("m"), "E" in stage, "L" in stage)
            for (first, end), stage in zip(pairwise([0, *ends]), stages, strict=True)
        ),
        ranks,
    )


@dataclass(frozen=True)
class Loads:
    """Seconds per microbatch, forward and backward: each trunk layer, the embedding, an MTP layer, and the losses.

    Attributes:
        tail: seconds of the output layer and all losses, including MTP's.
    """

    layers: tuple[float, ...]
    embedding: float
    depth: float
    tail: float


def balanced(loads: Loads, depths: int, ranks: int, virtual: int, alone: bool = False) -> Placement:
    """Find the placement with the smallest load on the slowest rank, and among these the shortest longest chunk.

    Starts from an even placement and moves layers from busy chunks to idle ones as long as that helps.
    """
    fixed = 2 if alone and depths else 0  # one chunk for the MTP layers and one for the losses after it
    layers, free = len(loads.layers), ranks * virtual - fixed
    counts = [layers // free + (number < layers % free) for number in range(free)] + [0] * fixed
    ends = [0.0, *accumulate(loads.layers)]
    extra = [0.0] * (ranks * virtual)
    extra[0] += loads.embedding
    extra[-2 if fixed else -1] += depths * loads.depth
    extra[-1] += loads.tail

    def chunks_of(counts: Sequence[int]) -> list[float]:
        bounds = [0, *accumulate(counts)]
        return [ends[end] - ends[first] + more for (first, end), more in zip(pairwise(bounds), extra, strict=True)]

    def cost(chunks: Sequence[float]) -> tuple[float, float, float]:
        of_ranks = [sum(chunks[rank::ranks]) for rank in range(ranks)]
        return round(max(of_ranks), 9), round(max(chunks), 9), round(sum(each**2 for each in chunks), 12)

    chunks = chunks_of(counts)
    least = cost(chunks)
    while True:
        by_load = sorted(range(ranks), key=lambda rank: sum(chunks[rank::ranks]))
        longest = sorted(range(free), key=chunks.__getitem__)
        sources = [number for number in (*longest[-2:], *range(by_load[-1], free, ranks)) if counts[number]]
        targets = [*longest[:2], *range(by_load[0], free, ranks), *range(by_load[min(1, ranks - 1)], free, ranks)]
        better = None
        for source, target in product(dict.fromkeys(sources), dict.fromkeys(targets)):
            tried = list(counts)
            tried[source] -= 1
            tried[target] += 1
            if (found := cost(chunks_of(tried))) < least:
                better, least = tried, found
        if better is None:
            return of_counts(counts, depths, ranks, alone)
        counts, chunks = better, chunks_of(better)


OF_STAGES = (
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Flags that a layout replaces."""


def flags_of(placement: Placement, line: Line, words: Sequence[str]) -> list[str]:
    """Replace the placement in the words of a launch line."""
    depths = sum(chunk.depths for chunk in placement.chunks)
    if line.hybrid_layer_pattern is not None:
        letters = trunk_of(line.hybrid_layer_pattern).replace("|", "")
        trunk = "|".join(letters[chunk.first : chunk.end] for chunk in placement.chunks)
        pattern = "/".join([trunk, *[inner_of(line.hybrid_layer_pattern)] * depths])
        return [*without(words, "hybrid_layer_pattern"), "--hybrid-layer-pattern", pattern]
    kept = without(words, "mtp_num_layers", *(OF_STAGES if placement.ranks > 1 else ()))
    of_depths = ["--mtp-num-layers", str(depths)] if depths else []
    of_stages = ["--pipeline-model-parallel-layout", placement.layout()] if placement.ranks > 1 else []
    return [*kept, *of_depths, *of_stages]
