"""GPU kernels that turn a row of logits into its gradient in place, in two or three passes over the row.

One program handles one row of this rank's vocabulary slice. `statistics` finds the largest logit and the normalizer,
which ranks exchange. The last kernel of a loss writes gradients in the memory and type of the products. Everything in
between is float32, in registers. Overlap losses have one more pass, because the overlaps of all depths at a position
may decide how much each of them counts. triton_chunk.py launches the kernels.

Logits are `factor` times the products, which includes temperatures. Columns from `TOKENS` on are padding, with
probability 0 and gradient 0. Row n is compared with the trunk's row `taught[n]`; with `GATHERED`, entry v is compared
with its column `columns[v]`. A row of weight 0 has gradient 0. Letters as in distillation.py: q is the MTP layer's
distribution, p the trunk's.
"""

import triton
import triton.language as tl


@triton.jit
def trial(numbers):
    """Store a one, to test that kernels can be compiled and launched here."""
    tl.store(numbers, 1.0)


@triton.jit
def statistics(
    products,
    stride,
    columns,
    found,
    factor,
    TOKENS: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store in `found` a row's largest logit, the sum of exponentials relative to it, and the sum of logits."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    largest, total, plain = float("-inf"), 0.0, 0.0
    for start in range(0, TOKENS, BLOCK):
        places = start + tl.arange(0, BLOCK)
        logits = _logits(products, columns, places, factor, TOKENS, GATHERED)
        new = tl.maximum(largest, tl.max(logits))
        finite = tl.where(new == float("-inf"), 0.0, new)  # all logits so far are -inf
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(logits - finite))
        plain += tl.sum(tl.where(places < TOKENS, logits, 0.0))
        largest = new
    tl.store(found + 3 * row, largest)
    tl.store(found + 3 * row + 1, total)
    tl.store(found + 3 * row + 2, plain)


@triton.jit
def cross_entropy(
    products,
    stride,
    labels,
    weights,
    whole,
    factor,
    size,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient as in token_loss.py. A label on another rank is -1."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    label, weight = tl.load(labels + row), tl.load(weights + row)
    largest, total = _whole(whole, row)
    growth = 1 + 2 * Z_LOSS * (tl.log(total) + largest)
    for start in range(0, ENTRIES, BLOCK):
        places = start + tl.arange(0, BLOCK)
        q = tl.exp(_logits(products, products, places, factor, TOKENS, False) - largest) / total
        hit = tl.where(places == label, 1 - SMOOTHING, 0.0)
        _store(products, places, growth * q - hit - SMOOTHING / size, weight, ENTRIES, TOKENS)


@triton.jit
def divergence(
    products,
    stride,
    teachers,
    teacher_stride,
    taught,
    columns,
    of_q,
    of_p,
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
    """Compute these entries' part of t^2 KL(p || q), and its gradient t (q - p)."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    state = tl.load(taught + row)
    teachers += state * teacher_stride
    q_largest, q_total = _whole(of_q, row)
    p_largest, p_total = _whole(of_p, state)
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
    of_q,
    of_p,
    of_drafted,
    found,
    factor,
    temperature,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
    LARGEST_GAP: tl.constexpr,
    FLOOR: tl.constexpr,
    GATHERED: tl.constexpr,
    DIVERGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store in `found` these entries' part of the overlap a of q with p, where p is over all tokens.

    In order: the largest logarithm of min(p, q), the sum of exponentials relative to it, the part of this sum where q
    is below p, and, with `DIVERGES`, kd, which compares with p over the draft tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    state = tl.load(taught + row)
    teachers += state * teacher_stride
    q_largest, q_total = _whole(of_q, row)
    p_largest, p_total = _whole(of_p, state)
    drafted_largest, drafted_total = _whole(of_drafted, state)
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
    tl.store(found + 4 * row, largest)
    tl.store(found + 4 * row + 1, total)
    tl.store(found + 4 * row + 2, short)
    tl.store(found + 4 * row + 3, temperature * temperature * loss)


@triton.jit
def overlap_gradient(
    products,
    stride,
    teachers,
    teacher_stride,
    taught,
    columns,
    of_q,
    of_p,
    of_drafted,
    overlaps,
    shorts,
    masks,
    slopes,
    divergence_slopes,
    factor,
    temperature,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
    GATHERED: tl.constexpr,
    DIVERGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write slope times the gradient of -log a (distillation.py); with `DIVERGES`, add the other slope times kd's."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    state = tl.load(taught + row)
    teachers += state * teacher_stride
    q_largest, q_total = _whole(of_q, row)
    p_largest, p_total = _whole(of_p, state)
    drafted_largest, drafted_total = _whole(of_drafted, state)
    log_overlap, short = tl.load(overlaps + row), tl.load(shorts + row)
    weight, slope = tl.load(masks + row), tl.load(slopes + row)
    for start in range(0, ENTRIES, BLOCK):
        places = start + tl.arange(0, BLOCK)
        log_q = _logits(products, columns, places, factor, TOKENS, False) - q_largest - tl.log(q_total)
        p_logits = _logits(teachers, columns, places, factor, TOKENS, GATHERED)
        log_p = p_logits - p_largest - tl.log(p_total)
        q = tl.exp(log_q)
        short_q = tl.where(log_q < log_p, tl.exp(log_q - log_overlap), 0.0)
        gradient = slope * (q * short - short_q) / temperature
        if DIVERGES:
            p = tl.exp(p_logits - drafted_largest) / drafted_total
            gradient += tl.load(divergence_slopes + row) * temperature * (q - p)
        _store(products, places, gradient, weight, ENTRIES, TOKENS)


@triton.jit
def _whole(statistics, row):
    """Return the largest logit of a whole row, and the sum of exponentials relative to it."""
    return tl.load(statistics + 2 * row), tl.load(statistics + 2 * row + 1)


@triton.jit
def _logits(products, columns, places, factor, TOKENS: tl.constexpr, GATHERED: tl.constexpr):
    """Load logits in float32, -inf beyond the vocabulary."""
    is_token = places < TOKENS
    if GATHERED:
        places = tl.load(columns + places, mask=is_token, other=0)
    values = tl.load(products + places, mask=is_token, other=0.0).to(tl.float32)
    return tl.where(is_token, values * factor, float("-inf"))


@triton.jit
def _divergence(q_below, q_total, p_below, p_total, is_token, LARGEST_GAP: tl.constexpr, FLOOR: tl.constexpr):
    """Return the tokens' part of KL(p || q), without adding terms that cancel."""
    gap = tl.where(is_token, q_below, 0.0) - tl.where(is_token, p_below, 0.0) + (tl.log(p_total) - tl.log(q_total))
    gap = tl.where(gap > LARGEST_GAP, LARGEST_GAP, gap)
    q, p = tl.exp(q_below) / q_total, tl.exp(p_below) / p_total
    terms = _exponential_beyond_linear(gap) * tl.maximum(p, q * FLOOR)
    return tl.sum(tl.where(is_token, terms, 0.0))


@triton.jit
def _exponential_beyond_linear(x):
    """Return exp(x) - 1 - x, by its series near 0, where the terms cancel."""
    series = 1.0 + x / 11.0
    for divisor in tl.static_range(10, 2, -1):
        series = 1.0 + x / divisor * series
    return tl.where(tl.abs(x) < 1, x * x / 2 * series, tl.exp(x) - 1 - x)


@triton.jit
def _store(products, places, gradient, weight, ENTRIES: tl.constexpr, TOKENS: tl.constexpr):
    """Store the gradient times the position's weight; 0 if the weight is 0, even if the gradient is not finite."""
    gradient = tl.where(places < TOKENS, gradient, 0.0)
    gradient = tl.where(weight == 0, 0.0, gradient * weight)
    tl.store(products + places, gradient.to(products.dtype.element_ty), mask=places < ENTRIES)
