"""Computes the memory of a rank, in bytes, for every pipeline stage.

State: a parameter in a BF16 run takes 2 bytes, its gradient 4, and Adam's float32 copy and two moments 12, which a
distributed optimizer shards over the data-parallel ranks (Megatron's docs/user-guide/features/dist_optimizer.md).
Experts are sharded over expert-parallel ranks, and their optimizer over the remaining replicas.

Activations: what a chunk saves per microbatch, times the microbatches in flight (`schedule.in_flight`).

Losses: the trunk's loss is Megatron's, which holds all logits at once, in BF16 and in float32, unless
--mtp-linear-ce-main is set. The MTP layers' losses never hold all logits: they hold one chunk of them, the gradients of
the states [N, H], and the smaller of the output layer's gradient [V, H] in float32 and the gradients of all logits
[N, V] (`megatron_mtp/losses/linear_cross_entropy.py`; `CHUNK` repeats its chunk budget).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mtp.extensions.plan.launch import Line
from megatron_mtp.extensions.plan.placement import Placement, StageChunk
from megatron_mtp.extensions.plan.schedule import Pipeline, in_flight
from megatron_mtp.extensions.plan.sizes import Model, kept_bytes, local_size

CHUNK, LEAST_POSITIONS = 2**30, 256
"""Bytes of float32 logits in a chunk on a GPU, and its minimum number of positions."""
CHUNK_ON_CPU, LEAST_ON_CPU = 64 * 2**20, 8 * 2**20
"""Bytes of float32 logits in a chunk on a CPU, and the bytes it may take even if the weight gradient is small."""
CONTEXT = 3e9
"""Bytes for CUDA, NCCL and library workspaces (assumed)."""
FILLED = 0.94
"""Fraction of a GPU's memory that a run can use before fragmentation causes out-of-memory errors (assumed)."""

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Held:
    """Bytes on a rank of a stage, by purpose."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Total bytes on the rank."""
        return sum(self.parts.values())


PARTS = ("weights and gradients", "optimizer", "MTP layers", "embedding copies", "activations", "losses", "libraries")


def memory_of(model: Model, placement: Placement, pipeline: Pipeline, gpus: int) -> list[Held]:
    """Return the peak memory of a rank for every stage, by the parts in `PARTS`."""
    return [_of_rank(model, placement, pipeline, rank, gpus) for rank in range(placement.ranks)]


def _of_rank(model: Model, placement: Placement, pipeline: Pipeline, rank: int, gpus: int) -> Held:
    line, chunks = model.line, placement.of_rank(rank)
    state = States(line, gpus)
    layers = [layer for chunk in chunks for layer in model.layers[chunk.first : chunk.end]]
    dense, experts = local_size(layers, line)
    table = model.table / line.tensor_model_parallel_size
    embeds, ends = any(chunk.embedding for chunk in chunks), any(chunk.losses for chunk in chunks)
    depths = sum(chunk.depths for chunk in chunks)
    has_head = ends and (line.untie_embeddings_and_output_weights or not embeds)
    copies = depths and not embeds and (line.untie_embeddings_and_output_weights or not ends)
    tied_copy = has_head and not line.untie_embeddings_and_output_weights
    dense += table * (embeds + (has_head and not tied_copy))
    of_depths = local_size([model.depth] * (model.stored_depths if depths else 0), line)
    trunk_trains = not line.mtp_train_only
    weights = [kept_bytes_of_chunk(model, chunk) for chunk in chunks]
    parts = (
        state.held(dense, experts, trunk_trains),
        state.optimizer(dense, experts, trunk_trains),
        state.held(*of_depths) + state.optimizer(*of_depths),
        (copies + tied_copy) * (state.held(table, 0, trunk_trains) + state.optimizer(table, 0, trunk_trains)),
        in_flight(pipeline, rank, weights) + _working(model, chunks),
        loss_bytes(model, line.depths) if ends else 0.0,
        CONTEXT,
    )
    return Held(dict(zip(PARTS, map(float, parts), strict=True)))


@dataclass(frozen=True)
class States:
    """Bytes per parameter, for the precision and optimizer of the launch line."""

    line: Line
    gpus: int

    @property
    def weight(self) -> int:
        """Bytes per weight."""
        return 1 if self.line.fp8_param_gather and self.line.fp8_format else self.line.element

    @property
    def gradient(self) -> int:
        """Bytes per accumulated gradient element."""
        in_16_bits = self.line.element == 2 and (self.line.grad_reduce_in_bf16 or self.line.main_grads_dtype != "fp32")
        return 2 if in_16_bits else 4

    @property
    def moments(self) -> float:
        """Bytes of optimizer state per parameter, before sharding; a float32 run needs no copy of the weight."""
        line = self.line
        copy = DTYPES[line.main_params_dtype] if line.element == 2 else 0
        kept = {"adam": DTYPES[line.exp_avg_dtype] + DTYPES[line.exp_avg_sq_dtype], "sgd": 0}.get(line.optimizer, 4)
        return (copy + kept) * ((1 - line.optimizer_offload_fraction) if line.optimizer_cpu_offload else 1)

    def held(self, dense: float, experts: float, trains: bool = True) -> float:
        """Return the bytes of weights and gradients."""
        return (dense + experts) * (self.weight + (self.gradient if trains else 0))

    def optimizer(self, dense: float, experts: float, trains: bool = True) -> float:
        """Return the bytes of optimizer state on a rank."""
        line = self.line
        if not trains:
            return 0.0
        if not line.use_distributed_optimizer:
            return (dense + experts) * self.moments
        shared = self.gpus // (line.tensor_model_parallel_size * line.pipeline_model_parallel_size)
        of_experts = line.expert_model_parallel_size * line.expert_tensor * line.pipeline_model_parallel_size
        return self.moments * (dense / shared + experts / max(1, self.gpus // of_experts))


def kept_bytes_of_chunk(model: Model, chunk: StageChunk) -> float:
    """Return the bytes that a chunk saves per microbatch; every pass of a repeated MTP layer saves its own."""
    line = model.line
    passes = chunk.depths and line.depths
    a_token = sum(kept_bytes(layer, line) for layer in model.layers[chunk.first : chunk.end])
    a_token += passes * kept_bytes(model.depth, line)
    if chunk.embedding:
        a_token += line.whole("hidden_size") * line.element / sequence_ranks(line)
    if chunk.losses:  # the final norm's input and output
        a_token += 2 * line.whole("hidden_size") * line.element / sequence_ranks(line)
    return a_token * tokens_of(line) + scores_bytes(model, chunk)


def scores_bytes(model: Model, chunk: StageChunk) -> float:
    """Return the bytes of masks that attention without Transformer Engine saves: one element per pair of tokens."""
    line = model.line
    if line.transformer_impl != "local" or line.recompute_granularity == "full":
        return 0.0
    layers = [*model.layers[chunk.first : chunk.end], *[model.depth] * (chunk.depths and line.depths)]
    return sum(bool(layer.scores) for layer in layers) * tokens_of(line) * line.whole("seq_length") * line.element


def _working(model: Model, chunks: tuple[StageChunk, ...]) -> float:
    """Return the activations of the one layer being recomputed, under full recomputation."""
    line = model.line
    layers = [layer for chunk in chunks for layer in model.layers[chunk.first : chunk.end]]
    if line.recompute_granularity != "full" or not layers:
        return 0.0
    a_token = max(sum(kept.elements / (line.tensor_model_parallel_size) for kept in layer.kept) for layer in layers)
    return a_token * line.element * tokens_of(line)


def tokens_of(line: Line) -> float:
    """Return the tokens of a microbatch on a context-parallel rank."""
    return line.micro_batch_size * line.whole("seq_length") / line.context_parallel_size


def sequence_ranks(line: Line) -> int:
    """Return the number of ranks that share the tokens outside of attention and MLPs."""
    return line.tensor_model_parallel_size if line.sequence_parallel else 1


def loss_bytes(model: Model, depths: int) -> float:
    """Return the bytes that losses save for the backward pass, and the largest temporary bytes in addition."""
    line = model.line
    entries = line.vocabulary / line.tensor_model_parallel_size
    whole = 0.0 if line.mtp_linear_ce_main else tokens_of(line) * entries * whole_logit(line)
    rows = tokens_of(line) * depths * line.mtp_token_fraction
    chunked = chunked_bytes(rows, model.drafted / line.tensor_model_parallel_size, line)
    if line.mtp_linear_ce_main:
        chunked += chunked_bytes(tokens_of(line), entries, line)
    return whole + chunked


def whole_logit(line: Line) -> int:
    """Return the bytes per logit in Megatron's loss: the product and its float32 copy, which becomes probabilities."""
    return 4 if line.element == 4 else 2 + 4


def chunked_bytes(rows: float, entries: float, line: Line, budget: int = CHUNK) -> float:
    """Return the bytes of a loss in chunks for a number of rows (positions times depths)."""
    if not rows:
        return 0.0
    hidden, element = line.whole("hidden_size"), line.element
    keeps_logits = rows * element <= 4 * hidden
    beside = max(hidden, rows // 4) / 2  # positions in a chunk
    if line.transformer_impl == "local":  # treated as a CPU run
        budget, least = CHUNK_ON_CPU, LEAST_ON_CPU / (4 * entries)
        fourth = (rows + hidden) / 4 - hidden - rows * hidden / entries
        beside = max(hidden if rows < 4 * hidden else fourth, least)
    most = max(budget / (4 * entries), LEAST_POSITIONS)
    positions = min(rows, most if keeps_logits else min(most, beside))
    chunk = 0.0 if keeps_logits else positions * entries * element
    return chunk + rows * hidden * element + min(4.0 * entries * hidden, rows * entries * element)
