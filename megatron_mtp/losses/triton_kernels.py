"""Kernels for a GPU: a row of products becomes the gradient by them in one place, in two to four passes over the row.

One program takes one row. A first pass finds the largest logit and the normalizer, the last one writes gradients
in the products' memory and type. All in between is float32, in registers. Losses of the overlap are two kernels, since
the overlaps of all depths at a position may decide how much each of them counts. triton_chunk.py calls them.

Logits are `factor` times the products, at temperatures included. Columns from `TOKENS` on are padding, with probability
0; their gradient is 0. Row n is compared with the trunk's row `taught[n]`, and with `GATHERED` entry v with its column
`columns[v]`. A row of weight 0 has gradient 0. Letters as in distillation.py: q is the depth's distribution, p the
trunk's.
"""

import triton
import triton.language as tl


@triton.jit
def trial(numbers):
    """Store a one: that it runs shows that kernels can be built and launched here."""
    tl.store(numbers, 1.0)


@triton.jit
def cross_entropy(
    products,
    stride,
    labels,
    weights,
    losses,
    factor,
    size,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    DRAFTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formulas as in cross_entropy.py; with `DRAFTED` a label of -1 has loss 0 and gradient 0."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    label = tl.load(labels + row)
    is_own = (label >= 0) & (label < ENTRIES)
    product = tl.load(products + label, mask=is_own, other=0.0).to(tl.float32)  # no warp has written a gradient yet
    largest, total = _statistics(products, products, factor, TOKENS, False, BLOCK)
    surplus = 0.0
    if SMOOTHING != 0:
        surplus = _sum_below(products, largest, factor, TOKENS, BLOCK)
    below = product * factor - largest
    normalizer = tl.log(total) + largest
    loss = tl.log(total) - (1 - SMOOTHING) * below - SMOOTHING * (surplus / size) + Z_LOSS * normalizer * normalizer
    weight = tl.load(weights + row)
    if DRAFTED:
        loss = tl.where(label < 0, 0.0, loss)
        weight = tl.where(label < 0, 0.0, weight)
    tl.store(losses + row, loss)
    for start in range(0, ENTRIES, BLOCK):
        places = start + tl.arange(0, BLOCK)
        q = tl.exp(_logits(products, products, places, factor, TOKENS, False) - largest) / total
        hit = tl.where(places == label, 1 - SMOOTHING, 0.0)
        gradient = (1 + 2 * Z_LOSS * normalizer) * q - hit - SMOOTHING / size
        _store(products, places, gradient, weight, ENTRIES, TOKENS)


@triton.jit
def divergence(
    products,
    stride,
    teachers,
    teacher_stride,
    taught,
    columns,
    weights,
    losses,
    factor,
    temperature,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
    LARGEST_GAP: tl.constexpr,
    FLOOR: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """t^2 KL(p || q), and its gradient t (q - p)."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    teachers += tl.load(taught + row) * teacher_stride
    q_largest, q_total = _statistics(products, columns, factor, TOKENS, False, BLOCK)
    p_largest, p_total = _statistics(teachers, columns, factor, TOKENS, GATHERED, BLOCK)
    weight = tl.load(weights + row)
    loss = 0.0
    for start in range(0, ENTRIES, BLOCK):
        places = start + tl.arange(0, BLOCK)
        q_below = _logits(products, columns, places, factor, TOKENS, False) - q_largest
        p_below = _logits(teachers, columns, places, factor, TOKENS, GATHERED) - p_largest
        q, p = tl.exp(q_below) / q_total, tl.exp(p_below) / p_total
        loss += _divergence(q_below, q_total, p_below, p_total, places < TOKENS, LARGEST_GAP, FLOOR)
        _store(products, places, temperature * (q - p), weight, ENTRIES, TOKENS)
    tl.store(losses + row, temperature * temperature * loss)


@triton.jit
def overlap(
    products,
    stride,
    teachers,
    teacher_stride,
    taught,
    columns,
    found,
    factor,
    temperature,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
    TEACHER_TOKENS: tl.constexpr,
    LARGEST_GAP: tl.constexpr,
    FLOOR: tl.constexpr,
    GATHERED: tl.constexpr,
    DIVERGES: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store in `found` what `overlap_gradient` needs of a row; products are kept, and p is over all tokens.

    In their order: log a; kd, with `DIVERGES`; the part of a where q is short of p; the largest logit and the logarithm
    of the sum above it, of q, of p, and of p over the drafted tokens, which kd compares with.
    """
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    teachers += tl.load(taught + row) * teacher_stride
    found += row * FOUND
    q_largest, q_total = _statistics(products, columns, factor, TOKENS, False, BLOCK)
    p_largest, p_total = _statistics(teachers, columns, factor, TEACHER_TOKENS, False, BLOCK)
    drafted_largest, drafted_total = p_largest, p_total
    if DIVERGES and GATHERED:
        drafted_largest, drafted_total = _statistics(teachers, columns, factor, TOKENS, True, BLOCK)
    largest, total, short, loss = float("-inf"), 0.0, 0.0, 0.0
    for start in range(0, ENTRIES, BLOCK):
        places = start + tl.arange(0, BLOCK)
        q_below = _logits(products, columns, places, factor, TOKENS, False) - q_largest
        p_logits = _logits(teachers, columns, places, factor, TOKENS, GATHERED)
        log_q, log_p = q_below - tl.log(q_total), p_logits - p_largest - tl.log(p_total)
        smaller = tl.minimum(log_q, log_p)
        new = tl.maximum(largest, tl.max(smaller))
        finite = tl.where(new == float("-inf"), 0.0, new)
        parts = tl.exp(smaller - finite)
        total = total * tl.exp(largest - finite) + tl.sum(parts)
        short = short * tl.exp(largest - finite) + tl.sum(tl.where(log_q < log_p, parts, 0.0))
        largest = new
        if DIVERGES:
            p_below = p_logits - drafted_largest
            loss += _divergence(q_below, q_total, p_below, drafted_total, places < TOKENS, LARGEST_GAP, FLOOR)
    tl.store(found, tl.log(total) + largest)
    tl.store(found + 1, temperature * temperature * loss)
    tl.store(found + 2, short / total)
    tl.store(found + 3, q_largest)
    tl.store(found + 4, tl.log(q_total))
    tl.store(found + 5, p_largest)
    tl.store(found + 6, tl.log(p_total))
    tl.store(found + 7, drafted_largest)
    tl.store(found + 8, tl.log(drafted_total))


@triton.jit
def overlap_gradient(
    products,
    stride,
    teachers,
    teacher_stride,
    taught,
    columns,
    found,
    masks,
    slopes,
    divergence_slopes,
    factor,
    temperature,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
    GATHERED: tl.constexpr,
    DIVERGES: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slope times the gradient of -log a, as in overlap.py; with `DIVERGES` the other slope times that of kd, too."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    teachers += tl.load(taught + row) * teacher_stride
    found += row * FOUND
    log_overlap, short = tl.load(found), tl.load(found + 2)
    q_largest, q_normalizer = tl.load(found + 3), tl.load(found + 4)
    p_largest, p_normalizer = tl.load(found + 5), tl.load(found + 6)
    drafted_largest, drafted_normalizer = tl.load(found + 7), tl.load(found + 8)
    weight, slope = tl.load(masks + row), tl.load(slopes + row)
    for start in range(0, ENTRIES, BLOCK):
        places = start + tl.arange(0, BLOCK)
        log_q = _logits(products, columns, places, factor, TOKENS, False) - q_largest - q_normalizer
        p_logits = _logits(teachers, columns, places, factor, TOKENS, GATHERED)
        log_p = p_logits - p_largest - p_normalizer
        q = tl.exp(log_q)
        short_q = tl.where(log_q < log_p, tl.exp(log_q - log_overlap), 0.0)
        gradient = slope * (q * short - short_q) / temperature
        if DIVERGES:
            p = tl.exp(p_logits - drafted_largest - drafted_normalizer)
            gradient += tl.load(divergence_slopes + row) * temperature * (q - p)
        _store(products, places, gradient, weight, ENTRIES, TOKENS)


@triton.jit
def _logits(products, columns, places, factor, TOKENS: tl.constexpr, GATHERED: tl.constexpr):
    """In float32, -inf beyond the tokens."""
    is_token = places < TOKENS
    if GATHERED:
        places = tl.load(columns + places, mask=is_token, other=0)
    values = tl.load(products + places, mask=is_token, other=0.0).to(tl.float32)
    return tl.where(is_token, values * factor, float("-inf"))


@triton.jit
def _statistics(products, columns, factor, TOKENS: tl.constexpr, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit, and the sum of all exponentials of what they have above it."""
    largest, total = float("-inf"), 0.0
    for start in range(0, TOKENS, BLOCK):
        logits = _logits(products, columns, start + tl.arange(0, BLOCK), factor, TOKENS, GATHERED)
        new = tl.maximum(largest, tl.max(logits))
        finite = tl.where(new == float("-inf"), 0.0, new)  # of blocks without any probability so far
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(logits - finite))
        largest = new
    return largest, total


@triton.jit
def _sum_below(products, largest, factor, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of all logits less the largest."""
    total = 0.0
    for start in range(0, TOKENS, BLOCK):
        places = start + tl.arange(0, BLOCK)
        below = _logits(products, products, places, factor, TOKENS, False) - largest
        total += tl.sum(tl.where(places < TOKENS, below, 0.0))
    return total


@triton.jit
def _divergence(q_below, q_total, p_below, p_total, is_token, LARGEST_GAP: tl.constexpr, FLOOR: tl.constexpr):
    """These tokens' part of KL(p || q), without the sum of terms that cancel."""
    gap = tl.where(is_token, q_below, 0.0) - tl.where(is_token, p_below, 0.0) + (tl.log(p_total) - tl.log(q_total))
    gap = tl.where(gap > LARGEST_GAP, LARGEST_GAP, gap)
    q, p = tl.exp(q_below) / q_total, tl.exp(p_below) / p_total
    terms = _exponential_beyond_linear(gap) * tl.maximum(p, q * FLOOR)
    return tl.sum(tl.where(is_token, terms, 0.0))


@triton.jit
def _exponential_beyond_linear(x):
    """exp(x) - 1 - x, by its series near 0, where the terms cancel."""
    series = 1.0 + x / 11.0
    for divisor in tl.static_range(10, 2, -1):
        series = 1.0 + x / divisor * series
    return tl.where(tl.abs(x) < 1, x * x / 2 * series, tl.exp(x) - 1 - x)


@triton.jit
def _store(products, places, gradient, weight, ENTRIES: tl.constexpr, TOKENS: tl.constexpr):
    """The gradient times the position's weight; 0 where that is 0, whatever the gradient."""
    gradient = tl.where(places < TOKENS, gradient, 0.0)
    gradient = tl.where(weight == 0, 0.0, gradient * weight)
    tl.store(products + places, gradient.to(products.dtype.element_ty), mask=places < ENTRIES)
