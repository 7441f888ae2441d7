"""Known causes of wrong MTP losses, as changed rules of the reference that may reproduce Megatron's numbers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from megatron_mtp.extensions.prove.cases import MICROBATCHES, Case
from megatron_mtp.extensions.prove.reference import Rule, Weights
from megatron_mtp.extensions.prove.shrink import Tiny

ROLL, PACKED_ROLL = r"def roll_tensor\(", r"def _roll_tensor_packed_seq\("
LOSS, LOG = r"MTPLossAutoScaler\.apply\(", r"mtp_loss_for_log = |/ num_tokens,"
MASK, LABELS = r"loss_mask, num_tokens = roll_tensor\(", r"mtp_labels, _ = roll_tensor\("
EMBEDDING, JOIN = r"def _get_embeddings\(", r"torch\.cat\(\(decoder_input, hidden_states\)|def _concat_embeddings\("
CHAIN, SCALE = r"class MultiTokenPredictionBlock\(", r"mtp_loss_scale = "


@dataclass(frozen=True)
class Hypothesis:
    """A possible cause of wrong numbers.

    Attributes:
        words: what Megatron does, as the end of "Megatron's numbers are those of ...".
        rule: rule of the reference with this fault.
        places: patterns of the responsible line in multi_token_prediction.py, best first.
        known: public issues of NVIDIA/Megatron-LM.
    """

    words: str
    rule: Rule
    places: tuple[str, ...] = ()
    known: tuple[int, ...] = ()


RANKS = Hypothesis(
    "the mean of the context-parallel ranks' own means: each rank divides by its own targets",
    Rule(divisor="ranks", shown="ranks"),
    (r"safe_num_tokens = ", r"num_tokens_safe = ", LOSS),
    (7498, 7452, 7513),
)
OFFSETS = Hypothesis(
    "documents that end where they would without padding: the roll reads cu_seqlens_q, not cu_seqlens_q_padded",
    Rule(follow="true offsets"),
    (r"cu_seqlens = packed_seq_params\.cu_seqlens_q$", PACKED_ROLL),
    (4495, 6205),
)
COPY = Hypothesis(
    "an embedding whose copy on the stage of the MTP layers keeps its gradient to itself",
    Rule(detached=frozenset({"embedding"})),
    (r"self\.embedding = LanguageModelEmbedding\(",),
)
POSITIONS = Hypothesis(
    "learned position embeddings whose copy on the stage of the MTP layers keeps its gradient to itself",
    Rule(detached=frozenset({"positions"})),
    (r"self\.embedding = LanguageModelEmbedding\(",),
)


def hypotheses(case: Case, tiny: Tiny) -> Iterator[Hypothesis]:
    """Yield the causes that are possible in a case, likely ones first."""
    ranks, packed = case.layout.context, case.batch in ("packed", "padded")
    if case.batch == "padded":
        yield OFFSETS
    if ranks > 1:
        yield from _of_context_ranks(case)
    if case.layout.pipeline > 1:
        yield COPY
    if tiny.model["position_embedding"] == "learned_absolute":
        yield POSITIONS
        yield Hypothesis("position ids that stay when tokens are shifted", Rule(positions=False), (EMBEDDING,))
    yield from _of_divisors()
    yield from _of_shifts(packed)
    yield from _of_layers(tiny.depths)
    if tiny.depths > 1:
        last = (0.0,) * (tiny.depths - 1) + (1.0,)
        yield Hypothesis("a loss of depth 1 alone", Rule(single=last[::-1]), (LOSS,))
        yield Hypothesis("a loss of the last depth alone", Rule(single=last), (LOSS,))


def _of_context_ranks(case: Case) -> Iterator[Hypothesis]:
    ranks = case.layout.context
    yield RANKS
    yield Hypothesis(
        "a log of the context-parallel ranks' own means, while gradients are right",
        Rule(shown="ranks"),
        (LOG,),
        (4896,),
    )
    yield Hypothesis(
        "sums that are divided by the targets of the main loss, and a log of the ranks' own means",
        Rule(divisor="main", shown="ranks"),
        (LOSS,),
        (3159, 2417, 4896),
    )
    for inner in (Rule(), RANKS.rule):
        yield Hypothesis(
            f"MTP losses that weigh 1/{ranks}: their scale lacks the context-parallel size"
            + (", and ranks divide by their own targets" if inner.divisor == "ranks" else ""),
            replace(inner, factor=1 / ranks, shown="ranks"),
            (r"def set_loss_scale", LOSS),
            (3959,),
        )
    for (how, words), inner in product(
        {"chunk": "chunk", "local": "rank's own tokens, end to end"}.items(), (Rule(), RANKS.rule)
    ):
        yield Hypothesis(
            f"tokens that are shifted within a context-parallel {words}",
            replace(inner, follow=how),
            (PACKED_ROLL if case.batch in ("packed", "padded") else ROLL,),
        )


def _of_divisors() -> Iterator[Hypothesis]:
    for divisor, words, known in (
        ("main", "the targets of the main loss, not by a depth's own", (3159, 2417)),
        ("positions", "all positions, also those that the mask leaves out", ()),
        ("batch", "the targets of all microbatches", ()),
        ("none", "nothing", (1532,)),
    ):
        for shown in (divisor, "depth"):
            yield Hypothesis(
                f"sums that are divided by {words}" + (", while the log is right" if shown == "depth" else ""),
                Rule(divisor=divisor, shown=shown),
                (r"num_tokens_safe = |safe_num_tokens = ", LOSS),
                known,
            )
        yield Hypothesis(
            f"a log of sums that are divided by {words}, while gradients are right", Rule(shown=divisor), (LOG,)
        )


def _of_shifts(packed: bool) -> Iterator[Hypothesis]:
    roll = PACKED_ROLL if packed else ROLL
    for how, words in (
        ("never", "that are never shifted"),
        ("late", "one shift behind"),
        ("early", "one shift ahead"),
        ("twice", "that are shifted twice for each depth"),
    ):
        yield Hypothesis(f"masks {words}", Rule(masks=how), (MASK,))
        yield Hypothesis(f"targets {words}", Rule(labels=how), (LABELS,))
        yield Hypothesis(f"targets and masks {words}", Rule(labels=how, masks=how), (LABELS,))
        yield Hypothesis(f"embeddings of tokens {words}", Rule(tokens=how), (EMBEDDING,))
    yield Hypothesis("sums of masked targets too, divided by the others", Rule(masked=False), (MASK,))
    every = Rule(masked=False, divisor="positions", shown="positions")
    yield Hypothesis("a mean of masked targets too", every, (MASK,))
    yield Hypothesis("a last token that is followed by its document's first", Rule(follow="circle"), (roll,))
    if packed:
        yield Hypothesis("documents that run into each other", Rule(follow="buffer"), (roll,))


def _of_layers(depths: int) -> Iterator[Hypothesis]:
    yield Hypothesis("a projection of [hidden state; embedding]", Rule(swapped=True), (JOIN,))
    yield Hypothesis("enorm and hnorm in each other's place", Rule(norms="exchanged"), (JOIN,))
    for name in ("enorm", "hnorm", "final_layernorm"):
        yield Hypothesis(f"MTP layers without {name}", Rule(norms=name), (JOIN,))
    yield Hypothesis("hidden states from in front of the trunk's final norm", Rule(trunk_norm=False), (CHAIN,))
    if depths > 1:
        yield Hypothesis("a trunk's hidden state in every depth", Rule(hidden="trunk"), (CHAIN,))
    for part, words in (
        ("hidden", "the trunk"),
        ("embedding", "the embedding"),
        ("head", "the output layer"),
    ):
        words = f"MTP losses that send no gradient to {words}"
        yield Hypothesis(words, Rule(detached=frozenset({part})), (r"\.detach\(\)", CHAIN))
    every = frozenset({"hidden", "embedding", "head"})
    yield Hypothesis("MTP layers that are detached from the model", Rule(detached=every), (r"\.detach\(\)", CHAIN))


def weighed(found: Weights, right: Weights, case: Case, tiny: Tiny) -> Iterator[Hypothesis]:
    """Describe the weight of the MTP losses that best fits the gradients of the MTP layers."""
    pairs = [(found[name].double().flatten(), right[name].flatten()) for name in right if name.startswith("mtp.")]
    square = sum(float(one @ one) for _, one in pairs)
    if square == 0:
        return
    factor = sum(float(one @ other) for one, other in pairs) / square
    scale = float(tiny.config["mtp_loss_scaling_factor"])
    names = {
        float(tiny.depths): "as if lambda were not divided by the number of MTP layers",
        1 / tiny.depths: "as if lambda were divided twice by the number of MTP layers",
        float(case.layout.context): "too much by the context-parallel size",
        1 / scale: "as if there were no lambda",
        scale: "as if lambda were applied twice",
        float(MICROBATCHES): "too much by the number of microbatches",
        1 / MICROBATCHES: "too little by the number of microbatches",
        float(case.layout.data): "too much by the data-parallel size",
    }
    near = next((words for value, words in names.items() if abs(factor - value) < 1e-4 * max(value, 1)), "")
    if abs(factor) < 1e-9:
        near = "that is, no gradient reaches the MTP layers"
    words = f"MTP losses that weigh {factor:.4g} times what they should" + (f", {near}" if near else "")
    yield Hypothesis(words, Rule(factor=factor), (SCALE, LOSS))


def scaled_log(found: list[float], right: list[float]) -> Iterator[Hypothesis]:
    """Yield the cause that the log has a multiple of the losses, if the losses can be compared."""
    if len(found) == len(right) and all(right):
        factor = found[0] / right[0]
        words = f"a log of {factor:.4g} times the losses, while gradients are right"
        yield Hypothesis(words, Rule(log_factor=factor), (r"def track_mtp_metrics|def save_", LOG))


def place_of(hypothesis: Hypothesis, source: Path) -> str:
    """Return FILE:LINE of the cause in the user's Megatron, or only FILE if no line matches.

    Args:
        source: its multi_token_prediction.py; until 0.16 the loss is in gpt_model.py.
    """
    for pattern in hypothesis.places:
        for file in (source, source.parents[1] / "models/gpt/gpt_model.py"):
            lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
            for number, line in enumerate(lines, 1):
                if re.search(pattern, line.rstrip()):
                    return f"{file.name}:{number}"
    return source.name
