"""AutoK (decoding/auto_count.py) with a simulated clock: which K is chosen, and what a bad drafter costs."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from drafting_single import model_of

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding.auto_count import FIRST_REST_STEPS, FIRST_STEPS, SHARE, TRIAL_STEPS, AutoK
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.megatron import cpu

pytestmark = pytest.mark.usefixtures("megatron")
TRIED = [step for step, drafts in enumerate(FIRST_STEPS) if drafts]
"""The first steps with drafts."""


@dataclass
class Machine:
    """A simulated sequence: seconds of a target forward pass, of each additional row, of a draft, and of a row to catch
    up.

    Attributes:
        accepts: number of correct drafts out of K at a step.
        slower: additional time of a step, by number: code that is loaded or compiled at first use.
        overhead: engine time in every step.
    """

    accepts: Callable[[int, int], int]
    draft: float = 0.2
    row: float = 0.02
    behind: float = 0.02
    prompt: int = 32
    slower: tuple[float, ...] = ()
    overhead: float = 0.0

    def run(self, auto: AutoK, tokens: int) -> tuple[float, list[int]]:
        """Return seconds relative to plain decoding, where a forward pass takes 1, and K of every step."""
        emitted, seconds, counts, missing = 0, 0.0, list[int](), self.prompt
        while emitted < tokens:
            count = auto.choose(missing)
            drafter = count * self.draft + (missing * self.behind if count else 0)
            target = 1 + count * self.row + sum(self.slower[len(counts) : len(counts) + 1])
            missing = 0 if count else missing + 1
            right = min(self.accepts(len(counts), count), count)
            auto.learn(count, step_of(drafter, target, count, right), self.overhead)
            emitted += right + 1
            seconds += drafter + target + self.overhead
            counts.append(count)
        return seconds / emitted, counts


def step_of(drafter: float, target: float, offered: int, accepted: int) -> AcceptanceStats:
    """Return a step of one sequence."""
    made = AcceptanceStats(target_seconds=target, drafter_seconds=drafter)
    made.count(offered, accepted, accepted + 1)
    return made


def never(_: int, __: int) -> int:
    return 0


@pytest.mark.parametrize("most", [1, 2, 5, 15])
@pytest.mark.parametrize("behind", [0.0, 0.002, 0.02, 0.05])
@pytest.mark.parametrize("draft", [0.02, 0.1, 0.2, 0.35])
def test_a_useless_drafter_costs_at_most_two_percent(draft: float, behind: float, most: int) -> None:
    """Of 128 tokens, including the trial; in the long run, as much as trials may cost."""
    machine = Machine(never, draft, behind=behind)
    beyond_trial = machine.prompt * behind
    for tokens, bound in ((128, 0.02 + beyond_trial / 128), (1000, 1.5 * SHARE + beyond_trial / 1000)):
        cost, _ = machine.run(AutoK(most), tokens)
        assert cost <= 1 + bound


def test_pauses_of_drafting_at_least_double() -> None:
    _, counts = Machine(never, behind=0.0).run(AutoK(2), 5000)
    drafted = [step for step, count in enumerate(counts) if count]
    assert drafted[: len(TRIED)] == TRIED
    gaps = [later - earlier for earlier, later in pairwise(drafted[len(TRIED) - 1 :])]
    rests = [gap for gap in gaps if gap > 1]
    assert len(gaps) == TRIAL_STEPS * len(rests)
    assert len(rests) >= 3
    assert all(rest >= FIRST_REST_STEPS * 2**number for number, rest in enumerate(rests))


def test_timing_jitter_does_not_end_a_pause() -> None:
    """Forward times vary with other load; without a new draft they carry no information about acceptance."""
    auto, counts, missing = AutoK(2), list[int](), 32
    for step in range(300):
        counts.append(auto.choose(missing))
        missing = 0 if counts[-1] else missing + 1
        slow = 1.5 if step >= len(FIRST_STEPS) else 1.0  # makes the earlier steps with drafts look fast
        auto.learn(counts[-1], step_of(0.2 * counts[-1] + 0.6 * (step == 0), slow, counts[-1], 0))
    assert counts[: len(FIRST_STEPS)] == [2 * drafts for drafts in FIRST_STEPS]
    assert sum(counts[len(FIRST_STEPS) + FIRST_REST_STEPS :]) <= 3


def test_a_useless_drafter_with_a_large_backlog_stays_off() -> None:
    _, counts = Machine(never, behind=0.05).run(AutoK(2), 3000)
    assert not any(counts[len(TRIED) :])


def test_drafting_resumes_when_a_sequence_becomes_easy() -> None:
    _, counts = Machine(lambda step, count: count if step > 500 else 0, behind=0.001).run(AutoK(2), 4000)
    assert counts[-1] == 2
    assert sum(counts[len(TRIED) : 500]) <= 4 * TRIAL_STEPS


def test_a_good_drafter_is_used_from_the_first_step() -> None:
    cost, counts = Machine(lambda _, count: count).run(AutoK(2), 128)
    first = [2 * drafts for drafts in FIRST_STEPS]
    assert counts == [*first, *[2] * (len(counts) - len(first))]
    assert cost < 0.55


def test_first_steps_that_load_code_do_not_end_drafting() -> None:
    """A process's first step takes many times as long, and the second, the first with drafts, twice as long."""
    _, counts = Machine(lambda _, count: count, slower=(20, 1.5)).run(AutoK(2), 128)
    assert all(counts[len(FIRST_STEPS) :])


@pytest.mark.parametrize("texts", [1, 4])
def test_the_cost_of_drafts_is_counted_per_step_not_per_sequence(texts: int) -> None:
    """Rejected drafts of several sequences have a cost, even if every sequence gains a token."""
    auto, counts = AutoK(2), list[int]()
    for _ in range(400):
        counts.append(auto.choose())
        made = AcceptanceStats(target_seconds=1.0, drafter_seconds=0.4 * counts[-1])
        for _ in range(texts):
            made.count(counts[-1], 0, 1)
        auto.learn(counts[-1], made)
    assert sum(counts[len(TRIED) :]) <= 2 * TRIAL_STEPS


@pytest.mark.parametrize(("left", "drafts"), [(10, False), (2000, True)])
def test_a_drafter_catches_up_where_enough_tokens_are_left(left: int, drafts: bool) -> None:
    """A draft halves the time, and the prompt's rows cost as much as 64 plain steps."""
    auto, catching_up = AutoK(1), True
    for _ in range(60):
        count = auto.choose(640 if catching_up else 0)
        auto.learn(count, step_of(0.02 * count + 64.0 * catching_up * count, 1.0, count, count))
        catching_up = catching_up and not count
    while auto.holds:
        auto.learn(auto.choose(), step_of(0.02, 1.0, 1, 1))
    assert (auto.choose(640, left) > 0) == drafts


def test_plain_steps_are_timed_again_while_drafts_pay() -> None:
    """Plain steps that become fast are detected."""
    auto, counts = AutoK(2), list[int]()
    for step in range(1000):
        counts.append(auto.choose())
        plain = 1.0 if step < 300 else 0.25
        auto.learn(counts[-1], step_of(0.1 * counts[-1], 1.0 if counts[-1] else plain, counts[-1], counts[-1]))
    assert all(counts[len(FIRST_STEPS) : 200])
    assert sum(counts[-200:]) <= 2 * TRIAL_STEPS


def test_engine_overhead_makes_more_drafts_worthwhile() -> None:
    """With 0.8 per draft and 0.3 correct beyond the first, the second draft pays off if engine overhead per step is
    large.
    """

    def taught(overhead: float) -> int:
        auto = AutoK(2)
        for _ in range(40):
            count = auto.choose()
            stats = AcceptanceStats(1, 1, [950, 500], [1000, 950], target_seconds=1.0, drafter_seconds=0.5 * count)
            auto.learn(count, stats, overhead)
        return auto.choose()

    assert taught(0.0) == 1
    assert taught(1.0) == 2


def test_more_drafts_are_tried_where_the_first_ones_are_right() -> None:
    _, counts = Machine(lambda _, count: min(count, 4), draft=0.05).run(AutoK(8), 200)
    assert counts[0] == 2
    assert counts[-1] == 4


def taught(drafter: float, accepted: list[float], target: float = 1.0) -> AutoK:
    """Return an AutoK after steps in which a draft cost `drafter` and position k was accepted at these rates."""
    auto, rates = AutoK(len(accepted)), [round(1000 * rate) for rate in accepted]
    for _ in range(40):
        count = auto.choose()
        auto.learn(
            count,
            AcceptanceStats(1, 1, rates, [1000] * len(rates), target_seconds=target, drafter_seconds=drafter * count),
        )
    return auto


def test_as_many_drafts_as_pay_off() -> None:
    """Cumulative rates 0.8, 0.6, 0.1; tokens 1, 1.8, 2.4, 2.5."""
    assert taught(0.1, [0.8, 0.6, 0.1]).choose() == 2
    assert taught(0.01, [0.8, 0.6, 0.1]).choose() == 3
    assert taught(0.7, [0.8, 0.6, 0.1]).choose() == 1
    assert taught(0.9, [0.8, 0.6, 0.1]).choose() == 0


def test_a_forward_of_more_rows_may_cost_more() -> None:
    """A free draft that is right half of the time but doubles the target's time does not pay off."""
    auto = AutoK(1)
    for _ in range(40):
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


@pytest.mark.skipif(not cpu.installed(), reason="on a GPU it records a CUDA graph, and such a step is not timed")
def test_a_step_is_credited_to_the_batch_size_that_chose_its_k() -> None:
    """Two sequences, one of which ends in its first step: the step's time is not used for the other batch size."""
    target = Runner(model_of("gqa", 2))
    generate(target, [[4, 5], [6]], [1 + 1, 8], speculative={"method": "mtp", "num_speculative_tokens": "auto"})
    steps = {seqs: auto._steps for (_, seqs), auto in target.auto_counts.items()}
    assert steps[2] > 0


def test_drafting_is_not_continued_for_another_batch() -> None:
    """The drafter would have to run the rows of sequences that were decoded plainly until now."""
    auto = taught(0.1, [0.8, 0.6, 0.1])
    assert auto.choose() == 2
    assert auto.holds
    auto.change_batch()
    assert auto.choose(missed=1000, left=1.0) == 0
    assert not auto.rests


def test_sequences_that_soon_end_do_not_cause_a_pause() -> None:
    auto = taught(0.1, [0.8, 0.6, 0.1])
    auto.change_batch()
    for _ in range(30):
        assert auto.choose(missed=1000, left=10.0) == 0
        auto.learn(0, step_of(0.0, 1.0, 0, 0))
    auto.change_batch()
    assert auto.choose(missed=1, left=100.0) == 2


def test_a_few_slow_steps_do_not_rule_out_a_draft_count() -> None:
    """K = 2 was timed in a slow moment, and its neighbors show that it is not slow."""
    _, counts = Machine(lambda _, count: min(count, 2), draft=0.1, slower=(9.0,) * 5).run(AutoK(4), 200)
    assert counts.count(2) > 0.8 * len(counts[20:])
