"""No command line, config or damaged file ends a verb with a traceback, a signal, or a wrong exit status 0.

    .venv/bin/python -m pytest -n 0 FILE             a sample of every verb
    .venv/bin/python -m pytest --all -n 0 FILE       more of those that once failed
    FUZZ=all .venv/bin/python -m pytest -n 0 FILE    every case: half an hour on one core

FUZZ_SEED=N draws another sample.
"""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from fuzz_cases import ASSETS, every_case
from fuzzing import Case, Cases, Ended, faults

FIRST = {True: 1, False: 1}
"""Cases per verb in the first tier, for those that once failed and for the others."""
MATRIX = {True: 12, False: 2}
"""The same with --all."""


def sample(cases: list[Case], counts: dict[bool, int]) -> list[Case]:
    """Draw so many cases of every verb, by FUZZ_SEED; larger samples contain smaller ones."""
    groups: dict[tuple[str, bool], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.line.partition(" ")[0], case.failed), []).append(case)
    chance = random.Random(os.environ.get("FUZZ_SEED", "0"))
    return [
        case for (_, failed), group in groups.items() for case in chance.sample(group, len(group))[: counts[failed]]
    ]


def chosen() -> list[Case | ParameterSet]:
    """Return the cases of this run."""
    cases = every_case()
    if os.environ.get("FUZZ") == "all":
        return list(cases)
    first = sample(cases, FIRST)
    later = [case for case in sample(cases, MATRIX) if case not in first]
    return [*first, *(pytest.param(case, marks=pytest.mark.matrix) for case in later)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Create the corpus, checkpoints and run that the cases start from."""
    made = Cases(tmp_path_factory.mktemp("fuzz"))
    for case in ASSETS:
        ended = made.run(case)
        assert faults(case, ended) == [], ended.err
    return made


@pytest.mark.parametrize("case", chosen(), ids=str)
def test_a_command_line_succeeds_or_gives_a_clear_error(case: Case, cases: Cases) -> None:
    ended = cases.run(case)
    assert faults(case, ended) == [], ended.err[-3000:]


def test_there_are_cases_of_every_kind() -> None:
    cases = every_case()
    assert len(cases) >= 500
    assert len({repr(case) for case in cases}) == len(cases)
    assert {True, False, None} == {case.bad for case in cases}


@pytest.mark.parametrize(
    ("ended", "found"),
    [
        (Ended(2, "", "x: error: y\n"), []),
        (Ended(0, "", ""), ["wrong zero"]),
        (Ended(None, "", ""), ["does not end"]),
        (Ended(-8, "", ""), ["signal 8"]),
        (Ended(1, "", "Traceback (most recent call last):\n"), ["status 1", "traceback"]),
        (Ended(2, "", "usage\nmore\nerror\n"), ["3 lines"]),
        (Ended(2, "", ""), ["0 lines"]),
        (Ended(2, "", "error", ["new.idx"]), ["left ['new.idx']"]),
    ],
)
def test_the_harness_detects_planted_outcomes(ended: Ended, found: list[str], tmp_path: Path) -> None:
    assert faults(Case("train"), ended) == found


def test_the_harness_detects_a_childs_unexpected_outcome(cases: Cases) -> None:
    """It reports an unexpected error, and an expected one that is missing."""
    refused, done = Case("report nowhere"), Case("report run")
    assert faults(replace(refused, bad=False), cases.run(refused)) == ["refused"]
    assert faults(done, cases.run(done)) == ["wrong zero"]
