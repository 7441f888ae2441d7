"""benchmarks/forced.py: what a teacher-forced pass expects of a step is what the engine does in it."""

import sys
from pathlib import Path

import pytest
from drafting_single import model_of, prompts_of, runner_of
from tiers import tiered
from torch import tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.forced import drafted, expected, forced_length


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(("kind", "method"), [("shared", "mtp_eagle"), ("repeated", "mtp")])
def test_greedy_steps_are_foreseen_exactly(kind: str, method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 3}
    made = drafted(runner_of(kind), prompts_of(60), 40, config, 0.0)
    assert sum(made.accepted) > 20
    assert sum(made.acceptance(3)) == pytest.approx(made.accepted_length - 1)
    assert forced_length(model_of(kind), made, 0.0) == made.accepted_length


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("kind", "method"), tiered([("shared", "mtp_eagle"), ("repeated", "mtp")], [("repeated", "mtp")])
)
def test_sampled_steps_are_foreseen_on_average(kind: str, method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 3}
    made = drafted(runner_of(kind), prompts_of(200), 40, config, 3.0)
    assert made.accepted_length > 1.3
    assert forced_length(model_of(kind), made, 3.0) == pytest.approx(made.accepted_length, rel=0.01)


def test_a_sampled_step_by_hand() -> None:
    """Text 0 1 1 with two drafts behind token 0 at position 1; p and q of both depths over three tokens."""
    p, q1, q2 = [0.5, 0.3, 0.2], [0.25, 0.5, 0.25], [0.5, 0.2, 0.3]
    trunk_SV, depths = tensor([p, p, p, p]).log(), [tensor([one] * 4).log() for one in (q1, q2)]
    first, second = 0.25 + 0.3 + 0.2, 0.5 + 0.2 + 0.2  # sums of min(p, q)
    text = [2, 0, 0, 1]  # position 2, the first draft's, holds token 0: accepted with q / p = 1 / 2
    assert expected(text, (2, 2), trunk_SV, depths, 1.0) == pytest.approx(first + 0.5 * second)
    assert expected(text, (2, 1), trunk_SV, depths, 1.0) == pytest.approx(first)
    assert expected([2, 0, 1, 0], (2, 2), trunk_SV, depths, 0.0) == 2.0  # argmax q1 = 1, argmax q2 = 0
    assert expected([2, 0, 1, 1], (2, 2), trunk_SV, depths, 0.0) == 1.0
