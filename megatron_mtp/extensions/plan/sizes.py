"""Layers as what they cost: products with weights, attention's scores, and activations kept for the backward pass.

A layer's parameters are the sum of rows x columns of its products and of its vectors. A token needs as many
multiply-adds as the products that are used on it; half of the pairs of a causal attention exist, each with
heads x (width of queries + width of values).

What a layer keeps is counted as in Korthikanti et al. (arXiv:2205.05198, section 4), tensor by tensor, without scores,
which fused attention makes again. For GPT-3's layer with dropout it is their 34 bytes - 16 of them over tensor ranks
where there is no sequence parallelism - per token and channel (`tests/extensions/plan/test_sizes.py`).

    letter   layer of a hybrid pattern            Megatron's flag
    *        attention                            --num-attention-heads, --multi-latent-attention
    -  E     MLP, experts                         --ffn-hidden-size, --num-experts
    M  G     Mamba-2, Gated DeltaNet              --mamba-*, --linear-*
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from megatron_mtp.extensions.plan.launch import Line, experts_by_layer, inner_of, trunk_of

TENSOR, WHOLE, EXPERTS = "tensor", "whole", "experts"
"""How a weight is held: cut over tensor ranks, by every one of them, or cut over expert ranks."""


@dataclass(frozen=True)
class Product:
    """A weight [rows, columns], and its product with tokens.

    Attributes:
        held: `TENSOR`, `WHOLE` or `EXPERTS`.
        stored: copies with weights of their own, such as experts.
        used: of these, how many a token is multiplied with.
        module: the word of --recompute-modules that runs it again in the backward pass.
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
        """Multiply-adds of a token in a forward pass."""
        return self.rows * self.columns * self.used


@dataclass(frozen=True)
class Kept:
    """Elements of a token that a layer keeps for its backward pass.

    Attributes:
        held: `TENSOR` if tensor ranks share it always, `WHOLE` if only with sequence parallelism.
        module: the word of --recompute-modules that leaves it out.
        enters_product: it is the input of a product, and 8 bits wide in FP8.
    """

    elements: float
    held: str = TENSOR
    module: str = ""
    enters_product: bool = False


@dataclass(frozen=True)
class LayerSizes:
    """One layer, of a GPT or of a hybrid pattern.

    Attributes:
        vectors: parameters of norms, biases and convolutions.
        pairs: multiply-adds of two tokens that see each other.
        states: multiply-adds of a token in a recurrence.
        scores: heads whose scores an attention without a fused kernel keeps.
        routed: experts of a token.
        cache: elements of a token in a cache of keys and values.
        regions: parts that tensor ranks compute together, with a collective on either side.
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
    """The model of a launch line.

    Attributes:
        line: the line.
        layers: the trunk's, in order.
        depth: an MTP layer: its projection of two states, its norms and its inner layer.
    """

    line: Line
    layers: tuple[LayerSizes, ...]
    depth: LayerSizes

    @property
    def table(self) -> int:
        """Parameters of the embedding, and as many of the head."""
        return self.line.vocabulary * self.line.whole("hidden_size")

    @property
    def drafted(self) -> int:
        """Entries of the vocabulary that MTP layers have a loss on."""
        return self.line.mtp_draft_vocab_size or self.line.vocabulary

    @property
    def stored_depths(self) -> int:
        """MTP layers with weights of their own."""
        if self.line.mtp_use_repeated_layer:
            return min(self.line.depths, 1)
        return self.line.mtp_num_layers or 0

    @property
    def size(self) -> int:
        """Parameters of everything, MTP layers too."""
        tables = self.table * (2 if self.line.untie_embeddings_and_output_weights else 1)
        final = _norm(self.line, self.line.whole("hidden_size"))
        return sum(layer.size for layer in self.layers) + tables + final + self.depth.size * self.stored_depths


def model_of(line: Line) -> Model:
    """The model of a line; ValueError where a size is missing, or a letter of the pattern unknown."""
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
    """The input of a layer's norm, the norm's output, and the mask of a dropout behind the layer, 1 byte an element.

    Without Transformer Engine three more states of an attention and an MLP together: counted in a step on a CPU.
    """
    hidden = line.whole("hidden_size")
    mask = (Kept(hidden / line.element, WHOLE),) if line.hidden_dropout else ()
    more = (Kept(1.5 * hidden, WHOLE),) if line.transformer_impl == "local" else ()
    return Kept(hidden, WHOLE), Kept(hidden, WHOLE, "layernorm", True), *mask, *more


def _biases(line: Line, *widths: int) -> int:
    return 0 if line.disable_bias_linear else sum(widths)


def attention(line: Line) -> LayerSizes:
    """Grouped-query or latent attention."""
    return latent(line) if line.multi_latent_attention else grouped(line)


def grouped(line: Line) -> LayerSizes:
    """Queries, keys and values by one product; with a gate, as many gates as queries."""
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
    """DeepSeek's: queries, keys and values from narrow states (arXiv:2405.04434, section 2.1).

    Transformer Engine's products that make the narrow states are whole on every tensor rank; Megatron's own are cut.
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
    """A dense MLP."""
    hidden = line.whole("hidden_size")
    wide = line.ffn_hidden_size or default_width(line)
    gated = 2 if line.swiglu or line.quick_geglu else 1
    kept = (*_around(line), Kept(gated * wide, module="mlp"), Kept(wide, module="mlp", enters_product=True))
    biases = _biases(line, gated * wide, hidden)
    products = (Product(hidden, gated * wide, module="mlp"), Product(wide, hidden, module="mlp"))
    return LayerSizes(products, kept, _norm(line, hidden) + biases, regions=1)


def default_width(line: Line) -> int:
    """Megatron's --ffn-hidden-size: 4 H, or with --swiglu two thirds of it, cut to a multiple of 64."""
    hidden = line.whole("hidden_size")
    return int(4 * hidden * 2 / 3 / 64) * 64 if line.swiglu else 4 * hidden


def experts(line: Line) -> LayerSizes:
    """Routed experts, a shared one if there is one, and their router."""
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
    """Mamba-2: one product in, a convolution, a recurrence of head dim x state a head, and one product out."""
    hidden, wide_head, state = line.whole("hidden_size"), line.mamba_head_dim, line.mamba_state_dim
    heads = line.mamba_num_heads or 2 * hidden // wide_head
    wide, mixed = heads * wide_head, 2 * line.mamba_num_groups * state
    products = (Product(hidden, 2 * wide + mixed + heads), Product(wide, hidden))
    kept = (*_around(line), Kept(2 * wide + mixed + heads), Kept(2 * wide + 2 * mixed), Kept(wide, enters_product=True))
    convolution = (wide + mixed) * (line.linear_conv_kernel_dim + 1)
    vectors = _norm(line, hidden) + wide + 3 * heads + convolution
    return LayerSizes(products, kept, vectors, states=3 * wide * state, regions=1)


def delta(line: Line) -> LayerSizes:
    """Gated DeltaNet: queries, keys, values, gates and two numbers a head by one product (arXiv:2412.06464)."""
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
"""Layers by the letters of a hybrid pattern; a GPT's layer is attention and an MLP."""


def work(products: Iterable[Product], line: Line, held: Iterable[str] = (TENSOR, WHOLE, EXPERTS)) -> float:
    """Multiply-adds of a token on one tensor rank, by how the weights are held.

    Experts: with tokens of all ranks spread evenly, a rank has as much of them as its own tokens need.
    """
    parts = {TENSOR: line.tensor_model_parallel_size, WHOLE: _sequence(line), EXPERTS: line.tensor_model_parallel_size}
    return sum(one.work / parts[one.held] for one in products if one.held in held)


def local_size(layers: Iterable[LayerSizes], line: Line) -> tuple[float, float]:
    """Parameters that a rank holds of these layers: all but experts, and experts."""
    together = list(layers)
    of_experts = line.expert_model_parallel_size * line.expert_tensor
    parts = {TENSOR: line.tensor_model_parallel_size, WHOLE: 1}
    products = list(chain.from_iterable(layer.products for layer in together))
    dense = sum(one.size / parts[one.held] for one in products if one.held != EXPERTS)
    dense += sum(layer.vectors for layer in together)
    return dense, sum(one.size for one in products if one.held == EXPERTS) / of_experts


def kept_bytes(layer: LayerSizes, line: Line) -> float:
    """Bytes of a token of one context rank that a rank keeps of a layer, with the line's recomputation."""
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
