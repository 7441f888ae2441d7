"""Sizes of layers: matrix products, attention scores, and activations saved for the backward pass.

A layer's parameters are the rows x columns of its products plus its vectors. A token costs one multiply-add per weight
of the products that it uses; causal attention has half of all pairs, each with heads x (width of queries + width of
values) multiply-adds.

Saved activations are counted tensor by tensor, as in Korthikanti et al. (arXiv:2205.05198, section 4), without scores,
which fused attention recomputes. For GPT-3's layer with dropout they are the paper's 34 bytes per token and channel, 16
of which are not split over tensor-parallel ranks without sequence parallelism (`tests/extensions/plan/test_sizes.py`).

    symbol   layer of a hybrid pattern            Megatron's flag
    *        attention                            --num-attention-heads, --multi-latent-attention
    -  E     MLP, experts                         --ffn-hidden-size, --num-experts
    M  G     Mamba-2, Gated DeltaNet              --mamba-*, --linear-*
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from megatron_mtp.extensions.plan.launch import Line, experts_by_layer, inner_of, trunk_of

TENSOR, WHOLE, EXPERTS = "tensor", "whole", "experts"
"""How a weight is distributed: split over tensor-parallel ranks, replicated on them, or split over expert ranks."""


@dataclass(frozen=True)
class Product:
    """A weight [rows, columns] and its product with tokens.

    Attributes:
        held: `TENSOR`, `WHOLE` or `EXPERTS`.
        stored: number of such weights, for example one per expert.
        used: number of these that a token is multiplied with.
        module: value of --recompute-modules that recomputes it in the backward pass.
    """

    rows: int
    columns: int
    held: str = TENSOR
    stored: int = 1
    used: int = 1
    module: str = ""

    @property
    def size(self) -> int:
        """Parameters."""
        return self.rows * self.columns * self.stored

    @property
    def work(self) -> int:
        """Multiply-adds per token in a forward pass."""
        return self.rows * self.columns * self.used


@dataclass(frozen=True)
class Kept:
    """Elements per token that a layer saves for its backward pass.

    Attributes:
        held: `TENSOR` if they are always split over tensor-parallel ranks, `WHOLE` if only with sequence parallelism.
        module: value of --recompute-modules with which they are not saved.
        enters_product: whether they are the input of a product, which is stored in 8 bits in FP8 runs.
    """

    elements: float
    held: str = TENSOR
    module: str = ""
    enters_product: bool = False


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer of a GPT or a hybrid pattern.

    Attributes:
        vectors: parameters of norms, biases and convolutions.
        pairs: multiply-adds per pair of tokens in attention.
        states: multiply-adds per token in a recurrence.
        scores: heads whose scores are saved by attention without a fused kernel.
        routed: experts per token.
        cache: elements per token in the KV cache.
        regions: tensor-parallel regions, with a collective on either side.
    """

    products: tuple[Product, ...]
    kept: tuple[Kept, ...]
    vectors: int = 0
    pairs: int = 0
    states: int = 0
    scores: int = 0
    routed: int = 0
    cache: int = 0
    regions: int = 0

    @property
    def size(self) -> int:
        """Parameters."""
        return sum(product.size for product in self.products) + self.vectors

    def __add__(self, other: "LayerSizes") -> "LayerSizes":
        return LayerSizes(
            self.products + other.products,
            self.kept + other.kept,
            *(getattr(self, name) + getattr(other, name) for name in _COUNTS),
        )


_COUNTS = ("vectors", "pairs", "states", "scores", "routed", "cache", "regions")


@dataclass(frozen=True)
class Model:
    """Sizes of the model of a launch line.

    Attributes:
        line: the launch line.
        layers: layers of the trunk, in order.
        depth: an MTP layer: its projection of two states, its norms and its inner layer.
    """

    line: Line
    layers: tuple[LayerSizes, ...]
    depth: LayerSizes

    @property
    def table(self) -> int:
        """Parameters of the embedding; the output layer has as many."""
        return self.line.vocabulary * self.line.whole("hidden_size")

    @property
    def drafted(self) -> int:
        """Number of tokens in the vocabulary of the MTP layers."""
        return self.line.mtp_draft_vocab_size or self.line.vocabulary

    @property
    def stored_depths(self) -> int:
        """Number of MTP layers with their own weights."""
        if self.line.mtp_use_repeated_layer:
            return min(self.line.depths, 1)
        return self.line.mtp_num_layers or 0

    @property
    def size(self) -> int:
        """All parameters, including MTP layers."""
        tables = self.table * (2 if self.line.untie_embeddings_and_output_weights else 1)
        final = _norm(self.line, self.line.whole("hidden_size"))
        return sum(layer.size for layer in self.layers) + tables + final + self.depth.size * self.stored_depths


def model_of(line: Line) -> Model:
    """Return the model of a line. Raise ValueError if a size is missing or a symbol of the pattern is unknown."""
    hidden = line.whole("hidden_size")
    if line.hybrid_layer_pattern is None:
        experts = experts_by_layer(line.moe_layer_freq, line.whole("num_layers")) if line.num_experts else []
        kinds = [True, False] if line.num_experts else [False]
        made = {kind: LAYERS["*"](line) + LAYERS["E" if kind else "-"](line) for kind in kinds}
        layers = tuple(made[kind] for kind in experts) if experts else (made[False],) * line.whole("num_layers")
        inner = layers[-1]
    else:
        trunk = trunk_of(line.hybrid_layer_pattern).replace("|", "")
        layers = tuple(_by_letter(line, letter) for letter in trunk)
        inner = _sum(_by_letter(line, letter) for letter in inner_of(line.hybrid_layer_pattern))
    more = (Kept(2 * hidden, WHOLE),) if line.transformer_impl == "local" else ()
    joined = LayerSizes(
        (Product(2 * hidden, hidden),),
        (Kept(2 * hidden, WHOLE), Kept(2 * hidden, WHOLE, "", True), Kept(hidden, WHOLE), *more),
        3 * _norm(line, hidden),
    )
    return Model(line, layers, joined + inner)


def _by_letter(line: Line, letter: str) -> LayerSizes:
    if letter not in LAYERS:
        raise ValueError(f"--hybrid-layer-pattern has '{letter}'; a plan knows {' '.join(LAYERS)}.")
    return LAYERS[letter](line)


def _sum(layers: Iterable[LayerSizes]) -> LayerSizes:
    first, *others = layers
    for other in others:
        first = first + other
    return first


def _norm(line: Line, width: int) -> int:
    return width if line.normalization == "RMSNorm" else 2 * width


def _around(line: Line) -> tuple[Kept, ...]:
    """Return what is saved around a layer: input and output of its norm, and a dropout mask of 1 byte per element.

    Without Transformer Engine, attention and MLP together save three more states, as counted in a step on a CPU.
    """
    hidden = line.whole("hidden_size")
    mask = (Kept(hidden / line.element, WHOLE),) if line.hidden_dropout else ()
    more = (Kept(1.5 * hidden, WHOLE),) if line.transformer_impl == "local" else ()
    return Kept(hidden, WHOLE), Kept(hidden, WHOLE, "layernorm", True), *mask, *more


def _biases(line: Line, *widths: int) -> int:
    return 0 if line.disable_bias_linear else sum(widths)


def attention(line: Line) -> LayerSizes:
    """Return the sizes of grouped-query or latent attention."""
    return latent(line) if line.multi_latent_attention else grouped(line)


def grouped(line: Line) -> LayerSizes:
    """Return the sizes of grouped-query attention, with one product for queries, keys, values and optional gates."""
    hidden, heads = line.whole("hidden_size"), line.whole("num_attention_heads")
    width = line.kv_channels or hidden // heads
    groups = (line.num_query_groups or 1) if line.group_query_attention else heads
    queries, keys = heads * width, groups * width
    into = queries * (2 if line.attention_output_gate else 1) + 2 * keys
    normed = queries + keys if line.qk_layernorm else 0
    kept = (
        *_around(line),
        Kept(into + normed),
        *((Kept(queries),) if line.attention_output_gate else ()),
        Kept(queries, enters_product=True),
    )
    biases = into if line.add_qkv_bias and line.disable_bias_linear else _biases(line, into, hidden)
    vectors = _norm(line, hidden) + biases + (2 * width if line.qk_layernorm else 0)
    return LayerSizes(
        (Product(hidden, into), Product(queries, hidden)),
        kept,
        vectors,
        pairs=2 * queries,
        scores=heads,
        cache=2 * keys,
        regions=1,
    )


def latent(line: Line) -> LayerSizes:
    """Return the sizes of DeepSeek's latent attention (arXiv:2405.04434, section 2.1).

    The down-projections are replicated on tensor-parallel ranks with Transformer Engine, and split without it.
    """
    hidden, heads = line.whole("hidden_size"), line.whole("num_attention_heads")
    content, position, value = line.qk_head_dim, line.qk_pos_emb_head_dim, line.v_head_dim
    rank, keys = line.q_lora_rank, line.kv_lora_rank
    width, narrow = content + position, TENSOR if line.transformer_impl == "local" else WHOLE
    products = [
        *([Product(hidden, rank, narrow)] if rank else []),
        Product(rank or hidden, heads * width, module="mla_up_proj"),
        Product(hidden, keys + position, narrow),
        Product(keys, heads * (content + value), module="mla_up_proj"),
        Product(heads * value, hidden),
    ]
    kept = (
        *_around(line),
        Kept(2 * (rank or 0) + 2 * keys + position, WHOLE),
        Kept(heads * (2 * width + value), module="mla_up_proj"),
        Kept(heads * value, enters_product=True),
    )
    norms = (rank or 0) + keys if line.qk_layernorm else 0
    return LayerSizes(
        tuple(products),
        kept,
        _norm(line, hidden) + norms,
        pairs=heads * (width + value),
        scores=heads,
        cache=keys + position,
        regions=1,
    )


def mlp(line: Line) -> LayerSizes:
    """Return the sizes of a dense MLP."""
    hidden = line.whole("hidden_size")
    wide = line.ffn_hidden_size or default_width(line)
    gated = 2 if line.swiglu or line.quick_geglu else 1
    kept = (*_around(line), Kept(gated * wide, module="mlp"), Kept(wide, module="mlp", enters_product=True))
    biases = _biases(line, gated * wide, hidden)
    products = (Product(hidden, gated * wide, module="mlp"), Product(wide, hidden, module="mlp"))
    return LayerSizes(products, kept, _norm(line, hidden) + biases, regions=1)


def default_width(line: Line) -> int:
    """Return Megatron's default --ffn-hidden-size: 4 H, or with --swiglu 8 H / 3, rounded down to a multiple of 64."""
    hidden = line.whole("hidden_size")
    return int(4 * hidden * 2 / 3 / 64) * 64 if line.swiglu else 4 * hidden


def experts(line: Line) -> LayerSizes:
    """Return the sizes of routed experts, an optional shared expert, and their router."""
    hidden, count, used = line.whole("hidden_size"), line.whole("num_experts"), line.moe_router_topk
    wide, shared = (
        line.moe_ffn_hidden_size or line.ffn_hidden_size or default_width(line),
        line.moe_shared_expert_intermediate_size,
    )
    gated = 2 if line.swiglu or line.quick_geglu else 1
    products = [
        Product(hidden, count, WHOLE),
        Product(hidden, gated * wide, EXPERTS, count, used, "moe"),
        Product(wide, hidden, EXPERTS, count, used, "moe"),
    ]
    kept = [
        *_around(line),
        Kept(2 * count * 4 / line.element, WHOLE),  # the router's logits and probabilities are in float32
        Kept(used * hidden, WHOLE, "moe", True),
        Kept(used * gated * wide, WHOLE, "moe"),
        Kept(used * wide, WHOLE, "moe_act", True),
    ]
    if shared:
        module = "shared_experts"
        products += [Product(hidden, gated * shared, module=module), Product(shared, hidden, module=module)]
        kept += [Kept(gated * shared, module=module), Kept(shared, module=module, enters_product=True)]
    biases = 0 if line.disable_bias_linear else count * (gated * wide + hidden)
    vectors = _norm(line, hidden) + biases + (hidden if line.moe_shared_expert_gate else 0)
    return LayerSizes(
        tuple(products), tuple(kept), vectors, routed=used, regions=1 if shared or line.expert_tensor > 1 else 0
    )


def mamba(line: Line) -> LayerSizes:
    """Return the sizes of Mamba-2: two products, a convolution, and a recurrence of head dim x state per head."""
    hidden, wide_head, state = line.whole("hidden_size"), line.mamba_head_dim, line.mamba_state_dim
    heads = line.mamba_num_heads or 2 * hidden // wide_head
    wide, mixed = heads * wide_head, 2 * line.mamba_num_groups * state
    products = (Product(hidden, 2 * wide + mixed + heads), Product(wide, hidden))
    kept = (*_around(line), Kept(2 * wide + mixed + heads), Kept(2 * wide + 2 * mixed), Kept(wide, enters_product=True))
    convolution = (wide + mixed) * (line.linear_conv_kernel_dim + 1)
    vectors = _norm(line, hidden) + wide + 3 * heads + convolution
    return LayerSizes(products, kept, vectors, states=3 * wide * state, regions=1)


def delta(line: Line) -> LayerSizes:
    """Return the sizes of Gated DeltaNet (arXiv:2412.06464).

    One product computes queries, keys, values, gates and two numbers per head.
    """
    hidden = line.whole("hidden_size")
    keys = line.linear_num_key_heads * line.linear_key_head_dim
    heads = line.linear_num_value_heads
    values = heads * line.linear_value_head_dim
    mixed = 2 * keys + values
    products = (Product(hidden, mixed + values + 2 * heads), Product(values, hidden))
    kept = (*_around(line), Kept(mixed + values + 2 * heads), Kept(2 * mixed), Kept(2 * values, enters_product=True))
    vectors = _norm(line, hidden) + mixed * line.linear_conv_kernel_dim + line.linear_value_head_dim + 2 * heads
    return LayerSizes(products, kept, vectors, states=3 * values * line.linear_key_head_dim, regions=1)


LAYERS: dict[str, Callable[[Line], LayerSizes]] = {"*": attention, "-": mlp, "E": experts, "M": mamba, "G": delta}
"""Layers by symbol of a hybrid pattern. A GPT layer is attention and an MLP."""


def work(products: Iterable[Product], line: Line, held: Iterable[str] = (TENSOR, WHOLE, EXPERTS)) -> float:
    """Return the multiply-adds per token on one tensor-parallel rank, by how the weights are distributed.

    Tokens are assumed to be spread evenly over experts, so that a rank does as much work as its own tokens need.
    """
    parts = {TENSOR: line.tensor_model_parallel_size, WHOLE: _sequence(line), EXPERTS: line.tensor_model_parallel_size}
    return sum(one.work / parts[one.held] for one in products if one.held in held)


def local_size(layers: Iterable[LayerSizes], line: Line) -> tuple[float, float]:
    """Return a rank's parameters of these layers: all but experts, and experts."""
    together = list(layers)
    of_experts = line.expert_model_parallel_size * line.expert_tensor
    parts = {TENSOR: line.tensor_model_parallel_size, WHOLE: 1}
    products = list(chain.from_iterable(layer.products for layer in together))
    dense = sum(one.size / parts[one.held] for one in products if one.held != EXPERTS)
    dense += sum(layer.vectors for layer in together)
    return dense, sum(one.size for one in products if one.held == EXPERTS) / of_experts


def kept_bytes(layer: LayerSizes, line: Line) -> float:
    """Return the bytes per token that a rank saves for a layer, with the line's recomputation."""
    if line.recompute_granularity == "full":
        return line.whole("hidden_size") * line.element / _sequence(line)
    left_out = set(line.recompute_modules) if line.recompute_granularity == "selective" else set()
    if "moe" in left_out:
        left_out.add("moe_act")
    parts = {TENSOR: line.tensor_model_parallel_size, WHOLE: _sequence(line)}
    total = 0.0
    for one in layer.kept:
        if one.module not in left_out or not one.module:
            each = 1 if line.fp8_format and one.enters_product else line.element
            total += one.elements * each / parts[one.held]
    return total


def _sequence(line: Line) -> int:
    return line.tensor_model_parallel_size if line.sequence_parallel else 1
