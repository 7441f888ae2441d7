"""Computes the seconds of a training step, by part.

The product of a weight [r, c] with N tokens takes 2 N r c / rate, and twice that in the backward pass. Attention has
half of the pairs of a sequence. Operations between products are limited by memory bandwidth: each saved activation is
read and written `Reached.passes` times. A collective of B bytes over n ranks takes B (n - 1) / n / link; if it overlaps
with computation, only the excess counts.

The trunk's output layer has one product forward and two backward. For the MTP layers, all three are in the forward
pass, where their loss computes its gradients, and `ce` reads and writes 6 bytes per logit
(docs/explanation/design.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_mtp.extensions.plan.hardware import Card
from megatron_mtp.extensions.plan.memory import States, sequence_ranks, tokens_of
from megatron_mtp.extensions.plan.placement import Loads, Placement, StageChunk
from megatron_mtp.extensions.plan.schedule import Pipeline, simulate
from megatron_mtp.extensions.plan.sizes import EXPERTS, TENSOR, WHOLE, LayerSizes, Model, local_size, work
from megatron_mtp.spec.config import loss_parts

PARTS = ("products", "attention", "between products", "head and losses", "tensor parallel", "experts' exchange")
"""Parts of the time of a microbatch in a chunk."""
OF_STEP = ("gradients", "optimizer", "P2P", "bubbles")
"""Parts of a step outside of the chunks."""

Seconds = dict[str, float]
"""Seconds by part."""

LOGIT_BYTES = {"ce": 6, "kd": 10}
"""Bytes read and written per logit by the chunked losses in 16 bits; 14 for others (docs/explanation/design.md)."""
OF_LABELS = ("ce", "dpace")
"""Losses that do not use the trunk's logits."""
ONE_BY_ONE = 4
"""Memory traffic of an unfused optimizer relative to a fused one: torch's AdamW has eight operations, each of which
reads and writes one to three numbers per parameter."""
WHOLE_LOGIT_BYTES = 34
"""Bytes per logit in Megatron's cross-entropy: on an H200, 16,384 x 131,072 logits take 8 ms more than the products."""


@dataclass(frozen=True)
class PassCost:
    """Seconds per microbatch by part, forward and backward."""

    forward: Seconds = field(default_factory=dict)
    backward: Seconds = field(default_factory=dict)

    def add(self, part: str, forward: float, backward: float) -> None:
        """Add seconds to a part."""
        self.forward[part] = self.forward.get(part, 0.0) + forward
        self.backward[part] = self.backward.get(part, 0.0) + backward

    def __add__(self, other: "PassCost") -> "PassCost":
        made = PassCost(dict(self.forward), dict(self.backward))
        for part in other.forward:
            made.add(part, other.forward[part], other.backward[part])
        return made

    def times(self, factor: float) -> "PassCost":
        """Return the cost multiplied by a factor."""
        return PassCost(
            *({part: factor * value for part, value in one.items()} for one in (self.forward, self.backward))
        )

    @property
    def ahead(self) -> float:
        """Seconds of the forward pass."""
        return sum(self.forward.values())

    @property
    def back(self) -> float:
        """Seconds of the backward pass."""
        return sum(self.backward.values())

    @property
    def total(self) -> float:
        """Seconds of the forward and the backward pass."""
        return self.ahead + self.back


@dataclass(frozen=True)
class Clock:
    """Computes the cost of parts of a model on a GPU.

    Attributes:
        slower: factor for everything but output layer and losses, from a measured step (`planning.calibrated`).
    """

    model: Model
    card: Card
    gpus: int
    slower: float = 1.0

    def layer(self, layer: LayerSizes, trains: bool = True) -> PassCost:
        """Return the cost of a trunk layer or an MTP layer."""
        line, reached, cost = self.model.line, self.card.reached, PassCost()
        tokens, backs = tokens_of(line), 2 if trains else 0
        rate = self.card.fp8 if line.fp8_format else self.card.bf16
        again = self._again(layer) if trains else PassCost()
        for held, part in (((TENSOR, WHOLE), reached.products), ((EXPERTS,), reached.experts)):
            seconds = 2 * tokens * work(layer.products, line, held) / (rate * part)
            cost.add("products", seconds, backs * seconds)
        seen = line.whole("seq_length") / 2
        seconds = 2 * tokens * (layer.pairs * seen + layer.states) / line.tensor_model_parallel_size
        seconds /= self.card.bf16 * reached.attention
        cost.add("attention", seconds, 2.5 * seconds if trains else 0)
        moved = tokens * reached.passes * self._kept_elements(layer) * line.element
        seconds = moved / (self.card.bandwidth * reached.copies)
        cost.add("between products", seconds, backs * seconds)
        self._exchange(layer, cost, trains)
        return (cost + again).times(self.slower)

    def _kept_elements(self, layer: LayerSizes) -> float:
        parts = {TENSOR: self.model.line.tensor_model_parallel_size, WHOLE: sequence_ranks(self.model.line)}
        return sum(one.elements / parts[one.held] for one in layer.kept)

    def _again(self, layer: LayerSizes) -> PassCost:
        """Return the cost that recomputation adds to the backward pass."""
        line, cost = self.model.line, PassCost()
        if line.recompute_granularity is None:
            return cost
        is_full = line.recompute_granularity == "full"
        rate = self.card.fp8 if line.fp8_format else self.card.bf16
        again = [one for one in layer.products if is_full or (one.module and one.module in line.recompute_modules)]
        for held, part in (((TENSOR, WHOLE), self.card.reached.products), ((EXPERTS,), self.card.reached.experts)):
            cost.add("products", 0, 2 * tokens_of(line) * work(again, line, held) / (rate * part))
        if is_full:
            pairs = layer.pairs * line.whole("seq_length") / 2 + layer.states
            seconds = 2 * tokens_of(line) * pairs / line.tensor_model_parallel_size
            cost.add("attention", 0, seconds / (self.card.bf16 * self.card.reached.attention))
        return cost

    def _exchange(self, layer: LayerSizes, cost: PassCost, trains: bool) -> None:
        """Return the cost of tensor, context and expert parallel communication."""
        line = self.model.line
        state = tokens_of(line) * line.whole("hidden_size") * line.element
        tensor = line.tensor_model_parallel_size
        once = state * (tensor - 1) / tensor / self._link(tensor)
        cost.add(
            "tensor parallel", 2 * layer.regions * once, (3 if line.sequence_parallel else 2) * layer.regions * once
        )
        ring = line.context_parallel_size
        if ring > 1 and layer.pairs:
            keys = tokens_of(line) * layer.cache * line.element / tensor
            seconds = keys * (ring - 1) / self._link(ring * tensor)
            hidden = cost.forward["attention"]
            cost.add("tensor parallel", max(0.0, seconds - hidden), max(0.0, 2 * seconds - 2.5 * hidden) * trains)
        if layer.routed and line.expert_model_parallel_size > 1:
            seconds = self._dispatch(layer)
            if line.overlap_moe_expert_parallel_comm:
                seconds = max(0.0, seconds - cost.ahead)
            cost.add("experts' exchange", seconds, seconds * trains)

    def _dispatch(self, layer: LayerSizes) -> float:
        """Return the cost of sending tokens to experts and back; `flex` sends a token to each node only once."""
        line, card = self.model.line, self.card
        ranks = line.expert_model_parallel_size
        inside = min(ranks, max(1, card.node // line.expert_tensor))
        nodes = ranks / inside
        copies = float(layer.routed)
        if line.moe_token_dispatcher_type == "flex" and nodes > 1:
            copies = nodes * (1 - (1 - 1 / nodes) ** layer.routed)
            copies = min(copies, layer.routed, line.moe_router_group_topk or copies)
        a_token = line.whole("hidden_size") * line.element * tokens_of(line) / sequence_ranks(line)
        within = layer.routed * a_token * (inside - 1) / inside / (card.link * card.reached.links)
        across = copies * a_token * (nodes - 1) / nodes / (card.network * card.reached.links)
        return 2 * max(within, across)

    def _link(self, ranks: int) -> float:
        card = self.card
        return (card.link if ranks <= card.node else card.network) * card.reached.links

    def embedding(self) -> PassCost:
        """Return the cost of the embedding lookup and its gradients."""
        line, cost = self.model.line, PassCost()
        moved = tokens_of(line) * line.whole("hidden_size") * line.element
        seconds = 2 * moved / (self.card.bandwidth * self.card.reached.copies)
        cost.add("between products", seconds, 2 * seconds)
        return cost.times(self.slower)

    def losses(self, depths: int) -> PassCost:
        """Return the cost of output layer and loss for the trunk and a number of MTP layers."""
        line, cost = self.model.line, PassCost()
        tensor, hidden, tokens = line.tensor_model_parallel_size, line.whole("hidden_size"), tokens_of(line)
        rate = self.card.bf16 * self.card.reached.head
        memory = self.card.bandwidth * self.card.reached.copies
        logits, wide = tokens * line.vocabulary / tensor, line.element / 2
        product = 2 * logits * hidden / rate
        if line.mtp_linear_ce_main:
            cost.add("head and losses", 3 * product + LOGIT_BYTES["ce"] * wide * logits / memory, 0)
        else:
            moved = WHOLE_LOGIT_BYTES * wide * logits / memory
            cost.add("head and losses", product + moved / 2, 2 * product + moved / 2)
        rows = depths * line.mtp_token_fraction * tokens * self.model.drafted / tensor
        for name, part in loss_parts(line.mtp_loss):
            each = 3 * 2 * hidden / rate + LOGIT_BYTES.get(name, 14) * wide / memory
            taught = 2 * logits * hidden / rate if depths and name not in OF_LABELS else 0
            cost.add("head and losses", part * (rows * each + taught), 0)
        return cost

    def chunk(self, chunk: StageChunk) -> PassCost:
        """Return the cost of a microbatch in a chunk."""
        line, cost = self.model.line, PassCost()
        for layer in self.model.layers[chunk.first : chunk.end]:
            cost += self.of_layer(layer, not line.mtp_train_only)
        if chunk.embedding:
            cost += self.embedding()
        for _ in range(line.depths if chunk.depths else 0):
            cost += self.of_layer(self.model.depth, True)
        return cost + self.losses(line.depths) if chunk.losses else cost

    def of_layer(self, layer: LayerSizes, trains: bool) -> PassCost:
        """Return `layer`, computed once for equal layers."""
        key = (id(layer), trains)
        if key not in self._made:
            self._made[key] = self.layer(layer, trains)
        return self._made[key]

    _made: dict[tuple[int, bool], PassCost] = field(default_factory=dict)

    def loads(self) -> Loads:
        """Return the seconds that `placement.balanced` distributes."""
        line, trains = self.model.line, not self.model.line.mtp_train_only
        layers = tuple(self.of_layer(layer, trains).total for layer in self.model.layers)
        passes = line.depths / max(1, line.mtp_num_layers or 0)
        depth = self.of_layer(self.model.depth, True).total * passes
        return Loads(layers, self.embedding().total, depth, self.losses(line.depths).total)

    def hop(self, placement: Placement) -> float:
        """Return the seconds to send states to the next stage; a stage of MTP layers sends the states of all depths."""
        line = self.model.line
        if placement.ranks == 1:
            return 0.0
        state = tokens_of(line) * line.whole("hidden_size") * line.element / sequence_ranks(line)
        apart = self.gpus // placement.ranks
        return self.slower * state / self._link(self.card.node + 1 if apart >= self.card.node else 1)

    def gradients(self, placement: Placement, rank: int, cost: PassCost) -> tuple[float, float]:
        """Return the seconds of exposed gradient and weight communication over replicas, and of the optimizer."""
        line, state = self.model.line, States(self.model.line, self.gpus)
        dense, experts = rank_size(self.model, placement, rank)
        replicas = self.gpus // (line.tensor_model_parallel_size * line.pipeline_model_parallel_size)
        of_experts = line.expert_model_parallel_size * line.expert_tensor * line.pipeline_model_parallel_size
        expert_replicas = max(1, self.gpus // of_experts)
        reduced = gathered = 0.0
        for size, count in ((dense, replicas), (experts, expert_replicas)):
            way = size * (count - 1) / count / self._link(count * line.tensor_model_parallel_size)
            reduced += state.gradient * way
            gathered += state.weight * way if line.use_distributed_optimizer else state.gradient * way
        reduced, gathered = self.slower * reduced, self.slower * gathered
        hidden = cost.back if line.overlap_grad_reduce else 0.0
        hidden_gather = cost.ahead if line.overlap_param_gather else 0.0
        shown = max(0.0, reduced - hidden) + max(0.0, gathered - hidden_gather)
        moved = 2 * state.optimizer(dense, experts) + (state.gradient + state.weight) * (dense + experts)
        moved *= ONE_BY_ONE if line.transformer_impl == "local" else 1
        return shown, self.slower * moved / (self.card.bandwidth * self.card.reached.copies)


def rank_size(model: Model, placement: Placement, rank: int) -> tuple[float, float]:
    """Return the parameters that a rank trains: all but experts, and experts."""
    chunks, line = placement.of_rank(rank), model.line
    frozen = line.mtp_train_only
    layers = [layer for chunk in chunks for layer in model.layers[chunk.first : chunk.end]] if not frozen else []
    if any(chunk.depths for chunk in chunks):
        layers += [model.depth] * model.stored_depths
    dense, experts = local_size(layers, line)
    tables = sum(chunk.embedding + chunk.losses + bool(chunk.depths and not chunk.embedding) for chunk in chunks)
    tied = not line.untie_embeddings_and_output_weights
    tables = min(tables, 1) if tied else min(tables, 2)
    return dense + (0 if frozen else tables * model.table / line.tensor_model_parallel_size), experts


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        seconds: seconds of the whole step.
        parts: seconds of the slowest rank by `PARTS` and `OF_STEP`, which add up to the step.
        ranks: seconds by part for every pipeline rank.
    """

    seconds: float
    parts: Seconds
    ranks: tuple[Seconds, ...]

    @property
    def bubbles(self) -> float:
        """Fraction of the step in which the slowest rank waits."""
        return (self.parts["bubbles"] + self.parts["P2P"]) / self.seconds


def step_time(clock: Clock, placement: Placement, pipeline: Pipeline) -> StepTime:
    """Simulate the schedule of a placement and return its step time."""
    costs = [clock.chunk(chunk) for chunk in placement.chunks]
    forward, backward = [cost.ahead for cost in costs], [cost.back for cost in costs]
    hop = clock.hop(placement)
    if placement.ranks == 1:
        spent = pipeline.microbatches * sum((*forward, *backward))
        without_hops = spent
    else:
        spent = simulate(pipeline, forward, backward, hop).seconds
        without_hops = simulate(pipeline, forward, backward).seconds
    count = placement.ranks
    ranks = [_of_rank(clock, placement, rank, costs[rank::count], pipeline) for rank in range(count)]
    for parts in ranks:
        works = sum(parts[part] for part in PARTS)
        parts["P2P"], parts["bubbles"] = spent - without_hops, without_hops - works
    tail = max(parts["gradients"] + parts["optimizer"] for parts in ranks)
    slowest = max(ranks, key=lambda parts: sum(parts[part] for part in PARTS))
    shown = dict(slowest)
    shown["bubbles"] += tail - shown["gradients"] - shown["optimizer"]
    return StepTime(spent + tail, shown, tuple(ranks))


def _of_rank(clock: Clock, placement: Placement, rank: int, costs: Iterable[PassCost], pipeline: Pipeline) -> Seconds:
    summed = sum(costs, PassCost())
    a_part = {part: summed.forward.get(part, 0.0) + summed.backward.get(part, 0.0) for part in PARTS}
    gradients, optimizer = clock.gradients(placement, rank, summed)
    made = {part: pipeline.microbatches * seconds for part, seconds in a_part.items()}
    return made | {"gradients": gradients, "optimizer": optimizer}
