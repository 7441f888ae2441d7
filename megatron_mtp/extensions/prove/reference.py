"""Reference implementation of MTP in float64, from arXiv:2412.19437, eq. 21-25, with rules that can be changed.

    h'_i^k = M_k [norm(Emb(t_{i+k})); norm(h_i^{k-1})]     the embedding comes first, as in the published weights
    h^k = norm(TRM_k(h'^k)),   P_{i+k+1}^k = OutHead(h_i^k)
    L^k = mean of -log P^k_{i+k+1}[t_{i+k+1}] over the targets that count,   L_MTP = lambda / D * sum of L^k

A `Rule` defines how tokens are shifted, which targets count, and what sums are divided by. The default rule is the
paper's, within documents, over a whole microbatch. Letters in names: N all positions of a microbatch, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

from megatron_mtp.extensions.prove.cases import Batch

Weights = dict[str, Tensor]

ACTIVATIONS: dict[str, Any] = {
    "silu": silu,
    "gelu": gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: relu(x).square(),
}


@dataclass(frozen=True)
class Rule:
    """How MTP losses are computed. The defaults are eq. 21-25.

    Attributes:
        follow: which token comes next: within the "document", "row" (nothing follows the last token), "buffer"
            (documents run into each other), "circle" (a document's first token follows its last), "true offsets"
            (documents end where they would without padding), "chunk" or "local" (a context-parallel rank's own chunk or
            tokens).
        tokens, labels, masks: how many times each is shifted at a depth, a key of SHIFTS.
        masked: whether masked targets are excluded from the sum.
        positions: whether position ids are shifted along with the tokens.
        divisor: divisor of a depth's sum: number of the "depth"'s own targets, per context-parallel rank ("ranks"), of
            the "main" loss' targets, of all "positions", of the targets of all microbatches ("batch"), or "none".
        shown: divisor for the logged loss.
        factor: factor on the weight of the MTP losses.
        log_factor: factor on the logged losses.
        single: factors on the weights of individual depths; empty for 1 each.
        hidden: input of a depth: the "previous" depth's output, or the "trunk"'s.
        trunk_norm: whether the trunk's final norm comes before the MTP layers.
        swapped: whether the hidden state comes before the embedding.
        norms: "own", "exchanged", or the name of a missing norm.
        detached: parts that get no gradient from the MTP losses: "hidden", "embedding", "positions" (learned ones),
            "head".
    """

    follow: str = "document"
    tokens: str = "on time"
    labels: str = "on time"
    masks: str = "on time"
    masked: bool = True
    positions: bool = True
    divisor: str = "depth"
    shown: str = "depth"
    factor: float = 1.0
    log_factor: float = 1.0
    single: tuple[float, ...] = ()
    hidden: str = "previous"
    trunk_norm: bool = True
    swapped: bool = False
    norms: str = "own"
    detached: frozenset[str] = frozenset()


PAPER = Rule()

SHIFTS: dict[str, Callable[[int], int]] = {
    "on time": lambda depth: depth,
    "never": lambda depth: 0,
    "late": lambda depth: depth - 1,
    "early": lambda depth: depth + 1,
    "twice": lambda depth: 2 * depth,
}
"""Number of shifts at a depth."""


@dataclass(frozen=True)
class Microbatch:
    """A batch as one sequence of N tokens, with attention within documents."""

    tokens: Tensor
    labels: Tensor | None
    mask: Tensor
    positions: Tensor
    bounds: list[int]
    row: int
    true: list[int] | None
    ranks: int

    @classmethod
    def of(cls, batch: Batch, ranks: int) -> "Microbatch":
        """Create the microbatch for a number of context-parallel ranks."""
        rows, length = batch.tokens.shape
        bounds = batch.held or [length * number for number in range(rows + 1)]
        labels = None if batch.labels is None else batch.labels.flatten()
        mask, positions = batch.mask.flatten().double(), batch.positions.flatten()
        true = batch.true if batch.true != batch.held else None
        return cls(batch.tokens.flatten(), labels, mask, positions, bounds, length, true, ranks)

    def visible(self) -> Tensor:
        """Attention mask [N, N], True where a position sees another."""
        place = torch.arange(self.bounds[-1])
        document = torch.bucketize(place, torch.tensor(self.bounds[1:]), right=True)
        return (document[:, None] == document) & (place <= place[:, None])

    def owners(self) -> tuple[Tensor, Tensor]:
        """Return the context-parallel rank and the chunk number of every position, [N] each."""
        owner = torch.zeros(self.bounds[-1], dtype=torch.long)
        chunks = owner.clone()
        for number, (start, end) in enumerate(pairwise(self.bounds)):
            for chunk, places in enumerate(torch.arange(start, end).chunk(2 * self.ranks)):
                owner[places] = min(chunk, 2 * self.ranks - 1 - chunk)
                chunks[places] = 2 * self.ranks * number + chunk
        return owner, chunks

    def following(self, how: str) -> Tensor:
        """Return the next position of every position, [N]; -1 for none."""
        size = self.bounds[-1]
        after = torch.arange(1, size + 1)
        if how == "local":
            return self._following_on_ranks()
        ends = {
            "document": self.bounds[1:],
            "circle": self.bounds[1:],
            "row": list(range(self.row, size + 1, self.row)),
            "buffer": [size],
            "true offsets": (self.true or self.bounds)[1:],
        }
        if how == "chunk":
            chunks = self.owners()[1]
            after[torch.cat([chunks[1:] != chunks[:-1], torch.tensor([True])])] = -1
            return after
        after[torch.tensor(ends[how]) - 1] = -1
        if how == "circle":
            for start, end in pairwise(self.bounds):
                after[end - 1] = start
        if how == "true offsets":
            after[ends[how][-1] :] = torch.arange(ends[how][-1], size)  # the remaining positions stay in place
        return after

    def _following_on_ranks(self) -> Tensor:
        after = torch.full((self.bounds[-1],), -1)
        owner = self.owners()[0]
        for start, end in pairwise(self.bounds):
            for rank in range(self.ranks):
                own = torch.arange(start, end)[owner[start:end] == rank]
                after[own[:-1]] = own[1:]
        return after


def shifted(values: Tensor, following: Tensor, times: int) -> Tensor:
    """Return the values of the following tokens, 0 where there is none."""
    for _ in range(times):
        values = torch.where(following < 0, torch.zeros_like(values), values[following])
    return values


class Model:
    """A GPT with MTP layers that uses Megatron's names of weights.

    Args:
        weights: float64 leaf tensors by name.
        config: fields of TransformerConfig.
        model: arguments of GPTModel.
    """

    def __init__(self, weights: Weights, config: dict[str, Any], model: dict[str, Any]) -> None:
        self.weights, self.config, self.model = weights, config, model

    def losses(
        self, batch: Microbatch, rule: Rule = PAPER, trunk: tuple[Tensor, Tensor] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return negative log-likelihoods and their masks, [N] each, for the main loss and every depth.

        `trunk` is the output of the method of that name, for callers that compare many rules.
        """
        after, visible, weights = batch.following(rule.follow), batch.visible(), self.weights
        labels, mask = batch.labels, batch.mask
        if labels is None:
            labels, mask = (shifted(values, after, 1) for values in (batch.tokens, mask))
        normed, hidden = trunk or self.trunk(batch, visible)
        head = weights["embedding.word_embeddings.weight" if self.model["tied"] else "output_layer.weight"]
        found = [(_nll(normed @ head.T, labels), mask)]
        detached = rule.detached | (frozenset(("hidden", "embedding", "head")) if self._detaches() else frozenset())
        first = normed if rule.trunk_norm else hidden
        first = first.detach() if "hidden" in detached else first
        state = first
        for depth in range(1, int(self.config["mtp_num_layers"]) + 1):
            steps = SHIFTS[rule.tokens](depth)
            place = shifted(batch.positions, after, steps) if rule.positions else batch.positions
            embedded = self.embedded(shifted(batch.tokens, after, steps), place, "positions" in detached)
            embedded = embedded.detach() if "embedding" in detached else embedded
            state = self._layer_of_mtp(depth, embedded, state if rule.hidden == "previous" else first, batch, rule)
            logits = state @ (head.detach() if "head" in detached else head).T
            counted = shifted(mask, after, SHIFTS[rule.masks](depth))
            found.append((_nll(logits, shifted(labels, after, SHIFTS[rule.labels](depth))), counted))
        return found

    def _detaches(self) -> bool:
        return bool(self.config.get("mtp_detach_heads"))

    def trunk(self, batch: Microbatch, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last layer's output, with and without the final norm, [N, H] each."""
        hidden = self.embedded(batch.tokens, batch.positions)
        for number in range(int(self.config["num_layers"])):
            hidden = self.layer(f"decoder.layers.{number}.", hidden, batch.positions, visible)
        return self.norm("decoder.final_layernorm", hidden), hidden

    def embedded(self, tokens: Tensor, positions: Tensor, detached: bool = False) -> Tensor:
        """Return embeddings [N, H], plus learned position embeddings, detached or not, if the model has them."""
        found = self.weights["embedding.word_embeddings.weight"][tokens]
        learned = self.weights.get("embedding.position_embeddings.weight")
        if learned is None:
            return found
        return found + (learned.detach() if detached else learned)[positions]

    def _layer_of_mtp(self, depth: int, embedded: Tensor, hidden: Tensor, batch: Microbatch, rule: Rule) -> Tensor:
        prefix = f"mtp.layers.{0 if self.config['mtp_use_repeated_layer'] else depth - 1}."
        names = ("hnorm", "enorm") if rule.norms == "exchanged" else ("enorm", "hnorm")
        both = [
            values if rule.norms == name else self.norm(prefix + name, values)
            for name, values in zip(names, (embedded, hidden), strict=True)
        ]
        joined = self.linear(f"{prefix}eh_proj", torch.cat(both[::-1] if rule.swapped else both, -1))
        found = self.layer(f"{prefix}mtp_model_layer.", joined, batch.positions, batch.visible())
        return found if rule.norms == "final_layernorm" else self.norm(f"{prefix}final_layernorm", found)

    # --- a layer ---------------------------------------------------------------------------------------------------

    def linear(self, name: str, values: Tensor) -> Tensor:
        """Apply a linear layer, with its bias if it has one."""
        out = values @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def norm(self, name: str, values: Tensor) -> Tensor:
        """Apply a LayerNorm or RMSNorm; the identity if the model has no such norm."""
        weight = self.weights.get(f"{name}.weight")
        if weight is None:
            return values
        weight = weight + float(self.config["layernorm_zero_centered_gamma"])
        epsilon = float(self.config["layernorm_epsilon"])
        if self.config["normalization"] == "LayerNorm":
            return layer_norm(values, weight.shape, weight, self.weights[f"{name}.bias"], epsilon)
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon) * weight

    def layer(self, prefix: str, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Apply a transformer layer to [N, H]."""
        attend = self._latent_attention if self.config.get("multi_latent_attention") else self._attention
        hidden = hidden + attend(
            f"{prefix}self_attention.", self.norm(f"{prefix}input_layernorm", hidden), positions, visible
        )
        normed = self.norm(f"{prefix}pre_mlp_layernorm", hidden)
        routed = f"{prefix}mlp.router.weight" in self.weights
        return hidden + (self._experts(f"{prefix}mlp.", normed) if routed else self.mlp(f"{prefix}mlp.", normed))

    def mlp(self, prefix: str, values: Tensor) -> Tensor:
        """Apply an MLP, gated or not."""
        inner = self.linear(f"{prefix}linear_fc1", values)
        activation = ACTIVATIONS[self.config["activation"]]
        if self.config["gated_linear_unit"]:
            gate, up = inner.chunk(2, -1)
            return self.linear(f"{prefix}linear_fc2", activation(gate) * up)
        return self.linear(f"{prefix}linear_fc2", activation(inner))

    def _experts(self, prefix: str, values: Tensor) -> Tensor:
        config, routed = self.config, int(self.config["moe_router_topk"])
        scores = values @ self.weights[f"{prefix}router.weight"].T
        if config["moe_router_score_function"] == "sigmoid":
            best, chosen = scores.sigmoid().topk(routed, -1)
            best = best / best.sum(-1, keepdim=True) if routed > 1 else best
        elif config["moe_router_pre_softmax"]:
            best, chosen = scores.softmax(-1).topk(routed, -1)
        else:
            best, chosen = scores.topk(routed, -1)
            best = best.softmax(-1)
        best = best * float(config.get("moe_router_topk_scaling_factor", 1.0))
        share = torch.zeros_like(scores).scatter(-1, chosen, best)
        experts = [self.mlp(f"{prefix}experts.local_experts.{number}.", values) for number in range(scores.size(-1))]
        found = sum(share[:, number : number + 1] * out for number, out in enumerate(experts))
        if f"{prefix}shared_experts.linear_fc1.weight" in self.weights:
            found = found + self.mlp(f"{prefix}shared_experts.", values)
        return torch.as_tensor(found)

    def _attention(self, prefix: str, values: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        heads, groups = int(self.config["num_attention_heads"]), int(self.config["num_query_groups"])
        channels, more = int(self.config["kv_channels"]), heads // groups
        mixed = self.linear(f"{prefix}linear_qkv", values).view(len(values), groups, more + 2, channels)
        query, key, value = mixed[:, :, :more].flatten(1, 2), mixed[:, :, more], mixed[:, :, more + 1]
        query, key = self.norm(f"{prefix}q_layernorm", query), self.norm(f"{prefix}k_layernorm", key)
        if self.model["position_embedding"] == "rope":
            query, key = self._turned(query, positions), self._turned(key, positions)
        key, value = key.repeat_interleave(more, 1), value.repeat_interleave(more, 1)
        return self.linear(f"{prefix}linear_proj", _attended(query, key, value, visible, channels**-0.5))

    def _latent_attention(self, prefix: str, values: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        config, heads = self.config, int(self.config["num_attention_heads"])
        plain, rotary, rank = (int(config[name]) for name in ("qk_head_dim", "qk_pos_emb_head_dim", "kv_lora_rank"))
        if config["q_lora_rank"] is None:
            query = self.linear(f"{prefix}linear_q_proj", values)
        else:
            compressed = self.norm(f"{prefix}q_layernorm", self.linear(f"{prefix}linear_q_down_proj", values))
            query = self.linear(f"{prefix}linear_q_up_proj", compressed)
        query = query.view(len(values), heads, plain + rotary)
        compressed, turning = self.linear(f"{prefix}linear_kv_down_proj", values).split([rank, rotary], -1)
        both = self.linear(f"{prefix}linear_kv_up_proj", self.norm(f"{prefix}kv_layernorm", compressed))
        key, value = both.view(len(values), heads, -1).split([plain, int(config["v_head_dim"])], -1)

        def turned(x: Tensor) -> Tensor:  # rotates interleaved pairs, and returns them in two halves
            return self._turned(torch.cat([x[..., ::2], x[..., 1::2]], -1), positions)

        query = torch.cat([query[..., :plain], turned(query[..., plain:])], -1)
        key = torch.cat([key, turned(turning.unsqueeze(1)).expand(-1, heads, -1)], -1)
        attended = _attended(query, key, value, visible, (plain + rotary) ** -0.5)
        return self.linear(f"{prefix}linear_proj", attended)

    def _turned(self, values: Tensor, positions: Tensor) -> Tensor:
        """Apply RoPE to [N, heads, channels]."""
        size = int(values.size(-1) * (1 if self.config.get("multi_latent_attention") else self.model["rotary_percent"]))
        turning, still = values[..., :size], values[..., size:]
        rates = float(self.model["rotary_base"]) ** (-torch.arange(0, size, 2).double() / size)
        angle = torch.outer(positions.double(), rates)[:, None]
        if self.config["rotary_interleaved"]:
            one, two = turning[..., ::2], turning[..., 1::2]
            pairs = [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()]
            return torch.cat([torch.stack(pairs, -1).flatten(-2), still], -1)
        one, two = turning.chunk(2, -1)
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin(), still], -1)


def _attended(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, value).flatten(1)


def _nll(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1)[torch.arange(len(labels)), labels]


# --- a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Expected results of a step: logged losses by depth, and gradients by name."""

    logged: list[float]
    gradients: Weights


def expected(model: Model, batches: Sequence[Microbatch], per_token: bool, rule: Rule = PAPER) -> Expected:
    """Compute the losses and gradients of a step.

    Microbatches have equal weights or, with a per-token loss, weights proportional to the targets of their main loss.
    """
    found = [model.losses(batch, rule) for batch in batches]
    logged, total = total_of(model, batches, found, per_token, rule)
    leaves = {name: weight for name, weight in model.weights.items() if weight.requires_grad}
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    filled = (
        torch.zeros_like(leaves[name]) if one is None else one for name, one in zip(leaves, gradients, strict=True)
    )
    return Expected(logged, dict(zip(leaves, filled, strict=True)))


def total_of(
    model: Model,
    batches: Sequence[Microbatch],
    found: Sequence[list[tuple[Tensor, Tensor]]],
    per_token: bool,
    rule: Rule = PAPER,
) -> tuple[list[float], Tensor]:
    """Compute the logged losses by depth and the step's loss from the losses of all positions."""
    depths = int(model.config["mtp_num_layers"])
    weight = rule.factor * float(model.config["mtp_loss_scaling_factor"]) / max(depths, 1)
    main = [(values * mask).sum() for (values, mask), *_ in found]
    counts = [mask.sum() for (_, mask), *_ in found]
    everything = torch.stack(counts).sum()
    total, logged = torch.zeros((), dtype=torch.float64), [0.0] * depths
    for number, (batch, losses) in enumerate(zip(batches, found, strict=True)):
        share = counts[number] / everything if per_token else torch.tensor(1 / len(found), dtype=torch.float64)
        total = total + share * main[number] / counts[number]
        for depth in range(1, depths + 1):
            counts_of_depth = [one[depth][1].sum() for one in found]
            mean = _mean(batch, losses, depth, rule.divisor, counts_of_depth, per_token, rule.masked)
            shown = (
                mean
                if rule.shown == rule.divisor and not (per_token and rule.divisor == "ranks")
                else _mean(batch, losses, depth, rule.shown, counts_of_depth, False, rule.masked)
            )
            own = rule.single[depth - 1] if rule.single else 1.0
            total = total + weight * own * share * mean
            logged[depth - 1] += rule.log_factor * float(shown.detach()) / len(found)
    return logged, total


def _mean(
    batch: Microbatch,
    losses: list[tuple[Tensor, Tensor]],
    depth: int,
    divisor: str,
    counts: list[Tensor],
    by_count: bool,
    masked: bool,
) -> Tensor:
    """Compute a depth's loss in a microbatch.

    Args:
        divisor: see `Rule`.
        counts: number of the depth's targets in every microbatch.
        masked: whether masked targets are excluded from the sum.
        by_count: whether means of context-parallel ranks are weighted by the targets of their main loss.
    """
    values, mask = losses[depth]
    sums, main = values * mask if masked else values, losses[0][1]
    if divisor == "ranks":
        owner = batch.owners()[0]
        own = [owner == rank for rank in range(batch.ranks)]
        means = torch.stack([sums[one].sum() / mask[one].sum().clamp(min=1) for one in own])
        return (means * torch.stack([main[one].sum() for one in own])).sum() / main.sum() if by_count else means.mean()
    by = {
        "depth": mask.sum(),
        "main": main.sum(),
        "positions": torch.tensor(float(mask.numel())),
        "batch": torch.stack(counts).mean(),
        "none": torch.tensor(1.0),
    }
    return sums.sum() / by[divisor].clamp(min=1)
