"""AutoK (decoding/method.py) on a clock of its own: what K is picked, and what a drafter that errs costs."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from drafting_single import model_of

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.method import FIRST_REST_STEPS, SHARE, AutoK
from megatron_mtp.decoding.runner import Runner

pytestmark = pytest.mark.usefixtures("megatron")


@dataclass
class Machine:
    """A text that grows: seconds of a forward of the target, of a row more in it, of a draft, of a row to catch up on.

    Attributes:
        accepts: how many of K drafts are right at a step.
    """

    accepts: Callable[[int, int], int]
    draft: float = 0.2
    row: float = 0.02
    behind: float = 0.02
    prompt: int = 32

    def run(self, auto: AutoK, tokens: int) -> tuple[float, list[int]]:
        """Seconds over those of plain decoding, where a forward takes 1; K of every step."""
        emitted, seconds, counts, missing = 0, 0.0, list[int](), self.prompt
        auto.fall_behind(self.prompt)
        while emitted < tokens:
            count = auto.choose()
            drafter = count * self.draft + (missing * self.behind if count else 0)
            target = 1 + count * self.row
            missing = 0 if count else missing + 1
            right = min(self.accepts(len(counts), count), count)
            auto.learn(count, step_of(drafter, target, count, right))
            emitted += right + 1
            seconds += drafter + target
            counts.append(count)
        return seconds / emitted, counts


def step_of(drafter: float, target: float, offered: int, accepted: int) -> AcceptanceStats:
    """Of one text."""
    made = AcceptanceStats(target_seconds=target, drafter_seconds=drafter)
    made.count(offered, accepted, accepted + 1)
    return made


def never(_: int, __: int) -> int:
    return 0


@pytest.mark.parametrize("most", [1, 2, 5, 15])
@pytest.mark.parametrize("behind", [0.0, 0.002, 0.02, 0.05])
@pytest.mark.parametrize("draft", [0.02, 0.1, 0.2, 0.35])
def test_a_drafter_that_is_never_right_costs_two_percent_at_most(draft: float, behind: float, most: int) -> None:
    """Of 128 tokens, the trial included; in the long run it is what trials may cost."""
    machine = Machine(never, draft, behind=behind)
    beyond_trial = machine.prompt * behind
    for tokens, bound in ((128, 0.02 + beyond_trial / 128), (1000, 1.5 * SHARE + beyond_trial / 1000)):
        cost, _ = machine.run(AutoK(most), tokens)
        assert cost <= 1 + bound


def test_every_rest_is_at_least_twice_as_long_as_the_least_before_it() -> None:
    _, counts = Machine(never, behind=0.0).run(AutoK(2), 5000)
    drafted = [step for step, count in enumerate(counts) if count]
    assert drafted[:2] == [0, 1]
    rests = [later - earlier for earlier, later in pairwise(drafted[1:])]
    assert len(rests) >= 3
    assert all(rest >= FIRST_REST_STEPS * 2**number for number, rest in enumerate(rests))


def test_a_clock_that_jitters_ends_no_rest() -> None:
    """The seconds of a forward come and go with other load; without a new draft they say nothing of acceptance."""
    auto, counts = AutoK(2), list[int]()
    auto.fall_behind(32)
    for step in range(300):
        counts.append(auto.choose())
        slow = 1.5 if step > 3 else 1.0  # the two steps with drafts seem fast from then on
        auto.learn(counts[-1], step_of(0.2 * counts[-1] + 0.6 * (step == 0), slow, counts[-1], 0))
    assert sum(counts[:4]) == 4
    assert sum(counts[4 + FIRST_REST_STEPS :]) <= 3


def test_a_drafter_that_needs_much_to_catch_up_never_drafts_again() -> None:
    _, counts = Machine(never, behind=0.05).run(AutoK(2), 3000)
    assert not any(counts[2:])


def test_a_text_that_becomes_easy_is_drafted_again() -> None:
    _, counts = Machine(lambda step, count: count if step > 500 else 0, behind=0.001).run(AutoK(2), 4000)
    assert counts[-1] == 2
    assert sum(counts[2:500]) <= 4


def test_a_drafter_that_is_right_is_used_from_the_first_step() -> None:
    cost, counts = Machine(lambda _, count: count).run(AutoK(2), 128)
    assert counts == [2, 2, 0, 0, *[2] * (len(counts) - 4)]
    assert cost < 0.55


def test_more_drafts_are_tried_where_the_first_ones_are_right() -> None:
    _, counts = Machine(lambda _, count: min(count, 4), draft=0.05).run(AutoK(8), 200)
    assert counts[0] == 2
    assert counts[-1] == 4


def taught(drafter: float, accepted: list[float], target: float = 1.0) -> AutoK:
    """A choice after some steps in which a draft cost `drafter` and position k was accepted so often."""
    auto, rates = AutoK(len(accepted)), [round(1000 * rate) for rate in accepted]
    for _ in range(8):
        count = auto.choose()
        auto.learn(
            count,
            AcceptanceStats(1, 1, rates, [1000] * len(rates), target_seconds=target, drafter_seconds=drafter * count),
        )
    return auto


def test_as_many_drafts_as_pay_off() -> None:
    """Rates from the start 0.8, 0.6, 0.1; tokens 1, 1.8, 2.4, 2.5."""
    assert taught(0.1, [0.8, 0.6, 0.1]).choose() == 2
    assert taught(0.01, [0.8, 0.6, 0.1]).choose() == 3
    assert taught(0.7, [0.8, 0.6, 0.1]).choose() == 1
    assert taught(0.9, [0.8, 0.6, 0.1]).choose() == 0


def test_a_forward_of_more_rows_may_cost_more() -> None:
    """A draft that is free and right half of the time, and doubles the target's time, does not pay."""
    auto = AutoK(1)
    for _ in range(8):
        count = auto.choose()
        auto.learn(count, AcceptanceStats(1, 1, [500], [1000], target_seconds=1.0 + count))
    assert auto.choose() == 0


def test_batches_of_one_size_share_what_was_measured() -> None:
    target = Runner(model_of("gqa", 2))
    config = {"method": "mtp", "num_speculative_tokens": "auto"}
    generate(target, [[1, 2, 3]], 8, speculative=config)
    (measured,) = target.auto_counts.values()
    steps = measured._steps
    assert steps > 0
    generate(target, [[4, 5]], 8, speculative=config)
    assert list(target.auto_counts.values()) == [measured]
    assert measured._steps > steps
    generate(target, [[4, 5], [6]], 8, speculative=config)
    assert len(target.auto_counts) == 2
