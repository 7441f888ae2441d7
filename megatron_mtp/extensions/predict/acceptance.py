"""Acceptance by position of an engine's drafts compared with training, and the cost of each engine rule.

A round makes K drafts for the tokens after the newest one and keeps them up to the first that differs from the trunk's
own token; the trunk adds one more. "Acceptance" of position d is the fraction of rounds that keep at least d drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.extensions.predict.engines import WORDS, Difference, Feeding, differences
from megatron_mtp.extensions.predict.rows import Text, drafts, read_text, trained_feeding

NOTABLE = 0.02
"""Gain in accepted drafts per round from exchanged halves, from which they are named as a cause."""


@dataclass(frozen=True)
class Sample:
    """A document that an engine would generate: the prompt and its greedy continuation.

    Attributes:
        tokens: all tokens, at least K + 1 more than are counted.
        prompt: number of prompt tokens.
        end: number of tokens after which no round starts.
    """

    tokens: list[int]
    prompt: int
    end: int


@dataclass(frozen=True)
class Cause:
    """A rule that differs from training, and the acceptance if only that rule were as in training."""

    difference: Difference
    undone: AcceptanceStats


@dataclass(frozen=True)
class Prediction:
    """Acceptance in an engine.

    Attributes:
        engine: by its rules.
        trained: by the rules of training, for as many drafts as the MTP layers were trained for.
        causes: causes of the difference, largest first.
    """

    engine: AcceptanceStats
    trained: AcceptanceStats
    causes: list[Cause]


def predicted(
    model: LanguageModule,
    samples: list[Sample],
    count: int,
    feeding: Feeding,
    progress: Callable[[], object] = lambda: None,
) -> Prediction:
    """Return the acceptance of `count` drafts per round by an engine's rules, by training's, and with each rule undone.

    Args:
        model: the whole model.
        samples: documents as the engine would generate them.
        count: K, drafts per round.
        feeding: the engine's rules.
        progress: called once per document.
    """
    trained = trained_feeding(model)
    found = differences(trained, feeding, count)
    ways = {each.rule: replace(feeding, **{each.rule: getattr(trained, each.rule)}) for each in found}
    ways |= {"": feeding, "swapped": replace(feeding, swapped=not feeding.swapped)}
    sums = {name: AcceptanceStats() for name in ways}
    promised = AcceptanceStats()
    for sample in samples:
        text = read_text(model, sample.tokens)
        for name, way in ways.items():
            sums[name] += accepted(model, text, sample, count, way)
        promised += accepted(model, text, sample, min(count, model.mtp.depths), trained)
        progress()
    if sums["swapped"].accepted_per_forward >= sums[""].accepted_per_forward + NOTABLE:
        found.append(EXCHANGED)
    causes = [Cause(each, sums[each.rule]) for each in found]
    return Prediction(sums[""], promised, sorted(causes, key=lambda cause: -cause.undone.accepted_per_forward))


EXCHANGED = Difference(
    "swapped",
    WORDS["swapped", False],
    f"{WORDS['swapped', True]} in this checkpoint",
)
"""Cause that is in the given folder, not in an engine."""


def accepted(model: LanguageModule, text: Text, sample: Sample, count: int, feeding: Feeding) -> AcceptanceStats:
    """Return the acceptance over the rounds that an engine would need for this document."""
    stats = AcceptanceStats()
    for kept in rounds(drafts(model, text, count, feeding), sample):
        stats.count(count, kept, kept + 1)
    return stats


def rounds(made: list[list[int]], sample: Sample) -> list[int]:
    """Return how many drafts each round of a document keeps.

    Args:
        made: draft d of the round that starts after row i, for all i; it is for token i + d + 1.
        sample: the document; its first new token comes without drafts.

    With six tokens, of which two are the prompt, and two drafts per round, the first round starts at row 1 with tokens
    0 .. 2 known, and its drafts are for tokens 3 and 4.
    """
    known, kept = sample.prompt + 1, []
    while known < sample.end:
        right = 0
        while right < len(made) and made[right][known - 2] == sample.tokens[known + right]:
            right += 1
        known += right + 1
        kept.append(right)
    return kept
