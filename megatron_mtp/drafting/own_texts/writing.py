"""A model continues prompts, many at once, each as its number and the settings have it, whatever it shares a step with.

In:  a runner, and the prompts of texts by number.
Out: finished texts, in the order in which they end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.engine import ContinuousEngine, EngineSettings
from megatron_mtp.drafting.memory import blocks_for
from megatron_mtp.drafting.own_texts.journal import Written
from megatron_mtp.drafting.requests import Finish, Request
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling
from megatron_mtp.drafting.stats import AcceptanceStats

Numbered = tuple[int, list[int]]
"""A text's number and its prompt."""


@dataclass(frozen=True)
class How:
    """How texts are continued.

    Attributes:
        sampling: how a token is chosen.
        new_tokens: of each text, at most.
        seed: of all texts.
        stop_ids: a text ends after any of these.
        speculative: how they are drafted; None for plain decoding.
        together: texts that run at once.
    """

    sampling: Sampling
    new_tokens: int
    seed: int
    stop_ids: frozenset[int]
    speculative: SpeculativeConfig | None
    together: int

    def seed_of(self, number: int) -> int:
        """The seed of a text, which no other text of any seed has."""
        return (self.seed << 32) + number


def default_method(runner: Runner) -> SpeculativeConfig | None:
    """Drafts of the depths as they were trained, where there are any; None for plain decoding."""
    if not (runner.depths and runner.sequential):
        return None
    return SpeculativeConfig("mtp_eagle" if runner.shares_kv else "mtp")


def write_texts(
    runner: Runner, prompts: Iterable[Numbered], how: How, keep: Callable[[Written], object]
) -> AcceptanceStats:
    """Continue every prompt.

    Args:
        runner: the model.
        prompts: numbers and prompts, taken as places become free.
        how: the settings.
        keep: called with every text when it has ended.

    Returns:
        What it cost.
    """
    settings = EngineSettings(how.together, 2 * how.together, blocks_for(how.together, runner))
    engine = ContinuousEngine(runner, settings, how.speculative)
    live: dict[int, tuple[int, list[int], list[int]]] = {}
    left = iter(prompts)
    while True:
        while len(live) < 2 * how.together and (following := next(left, None)) is not None:
            number, prompt = following
            asked = Request(prompt, how.new_tokens, how.sampling, how.seed_of(number), stop_ids=how.stop_ids)
            live[engine.add(asked)] = number, prompt, []
        if not live:
            return engine.load.stats
        for update in engine.step():
            number, prompt, tokens = live[update.request]
            tokens += update.tokens
            if update.finish is Finish.ERROR:
                raise RuntimeError(f"the continuation of prompt {number} has failed; the log has the reason.")
            if update.finish is not None:
                del live[update.request]
                keep(Written(number, prompt, tokens, update.finish))
