"""training/best_state.py: the best state is recorded once it is saved, and after a kill the recorded state exists."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mtp.training import best_state
from megatron_mtp.training import run as training
from megatron_mtp.training.best_state import FILE, Best, BestState, ended_run, read_best
from megatron_mtp.training.datasets import SameSamples

pytestmark = pytest.mark.usefixtures("megatron")
TRACKER = "latest_checkpointed_iteration.txt"


def run(folder: Path, iteration: int = 0, **changes: Any) -> Namespace:
    settings = {"iteration": iteration, "rank": 0, "save": str(folder), "load": str(folder), "finetune": False}
    settings |= {"save_interval": 8, "eval_interval": 2, "mtp_patience": 3, "train_iters": 24, "train_samples": None}
    return Namespace(**settings, skip_train=False, **changes)


def save(folder: Path, step: int) -> None:
    (folder / f"iter_{step:07d}").mkdir(exist_ok=True)
    (folder / TRACKER).write_text(str(step))


def judged(state: BestState, folder: Path, lengths: dict[int, float]) -> list[int]:
    """Return the steps whose state was the best so far; each is then saved."""
    found = []
    for step, length in lengths.items():
        if state.learn(step, length):
            save(folder, step)
            state.keep()
            found.append(step)
    return found


def iterations(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


def test_the_best_state_alone_stays_beside_those_of_the_interval(tmp_path: Path) -> None:
    state = BestState(run(tmp_path))
    assert judged(state, tmp_path, {2: 1.1, 4: 1.3, 6: 1.3, 8: 1.4, 10: 1.5, 12: float("nan"), 14: 1.2}) == [
        2,
        4,
        8,
        10,
    ]
    assert iterations(tmp_path) == [8, 10]  # 8 is from --save-interval
    assert read_best(tmp_path) == Best(10, 1.5)
    assert [state.is_over(step) for step in (14, 16)] == [False, True]
    save(tmp_path, 24)
    state.end()
    assert read_best(tmp_path) == Best(10, 1.5, ended=24)
    assert (tmp_path / TRACKER).read_text() == "10"


def test_only_a_resumed_run_knows_the_best_state_so_far(tmp_path: Path) -> None:
    judged(BestState(run(tmp_path)), tmp_path, {2: 1.1, 4: 1.5, 6: 1.2})
    resumed = BestState(run(tmp_path, iteration=4))
    assert judged(resumed, tmp_path, {6: 1.2, 8: 1.4}) == []
    assert resumed.is_over(10)
    assert BestState(run(tmp_path)).improves(0.5)
    assert BestState(run(tmp_path, iteration=2)).improves(0.5), "which goes on from before the best"


def test_a_best_state_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's loop saves step 8 because of --save-interval, and we save the others."""
    args, saved = run(tmp_path, do_valid=True), list[str]()
    metrics: Any = SimpleNamespace(best=BestState(args), validated=0.0, keep_best=lambda: None)
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training.loop, "save_checkpoint_and_time", lambda step, *_, **__: saved.append(f"{step}"))

    def megatrons(_: Any, __: Any, ___: Any, step: int, *____: Any) -> bool:
        saved.extend([f"{step} by Megatron"] * (step % args.save_interval == 0))
        return False

    decide = training._best_states(metrics, megatrons)
    for step in range(1, 11):
        metrics.validated += 0.1
        decide(None, None, None, step, 0, {}, None)
    assert saved == ["2", "4", "6", "8 by Megatron", "10"]


@pytest.mark.parametrize("moment", ["written_beside", "remove"])
def test_a_kill_leaves_an_existing_best_state(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = BestState(run(tmp_path))
    judged(state, tmp_path, {2: 1.1})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(best_state, moment, killed)
    with pytest.raises(KeyboardInterrupt):
        judged(state, tmp_path, {4: 1.5})
    known = read_best(tmp_path)
    assert known is not None
    assert known.iteration == (2 if moment == "written_beside" else 4)
    assert known.iteration in iterations(tmp_path)
    assert iterations(tmp_path)[-1] == 4, "from which a resumed run goes on"


def test_a_run_that_has_ended_is_not_trained_again(tmp_path: Path) -> None:
    state = BestState(run(tmp_path))
    judged(state, tmp_path, {2: 1.1})
    assert ended_run(run(tmp_path)) is None
    state.end()
    (tmp_path / TRACKER).write_text("24")  # a kill before the tracker is written
    best = ended_run(run(tmp_path))
    assert best is not None
    best.settle(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "2"
    for changes in ({"train_iters": 48}, {"finetune": True}, {"load": str(tmp_path / "other")}, {"mtp_patience": None}):
        assert ended_run(Namespace(**{**vars(run(tmp_path)), **changes})) is None
    for damaged in ("{", "[]", json.dumps({"iteration": 2}), '{"iteration": 3, "expected accepted length": 1}'):
        (tmp_path / FILE).write_text(damaged)
        assert ended_run(run(tmp_path)) is None


def test_every_evaluation_takes_the_same_samples() -> None:
    data = SameSamples([10, 11, 12, 13], count=3, length=7)
    assert [data[place] for place in range(len(data))] == [10, 11, 12, 10, 11, 12, 10]
