"""Threads of compiled code: fewer while they are delayed, more again after a pause."""

import ctypes

import pytest
import torch

from megatron_mtp.extensions.cpu_rows.threads import FIRST_PAUSE, HELD_UP, LONGEST_PAUSE, WINDOW, Team


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Team:
    """Return a team of eight threads, as many as torch has."""
    given = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    return Team(ctypes.c_int64(0))


def window(team: Team, now: float, held_up: float) -> int:
    """Return the size after a window of calls with this fraction of delays; torch must have the same."""
    for _ in range(4):
        team.learn(now, WINDOW / 4, held_up * WINDOW / 4)
    assert torch.get_num_threads() == team.size
    return team.size


def test_all_threads_run_on_a_quiet_machine(team: Team) -> None:
    assert [window(team, 0.0, HELD_UP / 2) for _ in range(3)] == [8, 8, 8]


def test_a_single_long_step_does_not_count(team: Team) -> None:
    team.learn(0.0, WINDOW / 10, WINDOW / 10)
    for _ in range(20):
        team.learn(0.0, WINDOW / 10, 0.0)
    assert team.size == 8


def test_fewer_threads_run_while_threads_stall(team: Team) -> None:
    assert [window(team, 0.0, 0.5) for _ in range(5)] == [4, 2, 1, 1, 1]


def test_more_threads_are_tried_after_a_pause_that_doubles(team: Team) -> None:
    now, pauses = 0.0, list[float]()
    assert window(team, now, 0.5) == 4
    while len(pauses) < 7:
        began = now
        while window(team, now, 0.0) < 8:
            now += FIRST_PAUSE / 4
        pauses.append(now - began)
        assert window(team, now, 0.5) == 4
    expected = [min(FIRST_PAUSE * 2**number, LONGEST_PAUSE) for number in range(7)]
    assert pauses == pytest.approx(expected)


def test_a_call_receives_the_team_size_and_its_stalls_are_counted(team: Team) -> None:
    sizes = list[int]()

    def held_up(_: str, size: int) -> None:
        sizes.append(size)
        team.stalled.value += int(1e9)

    team.run(held_up, "other arguments")
    assert sizes == [8]
    assert team._held_up == 1.0


def test_a_single_thread_is_never_reduced(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    team.run(lambda size: None)
    assert (team.size, team._seconds) == (1, 0.0)
