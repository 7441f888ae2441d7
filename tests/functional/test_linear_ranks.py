"""losses/linear_cross_entropy.py with the vocabulary split over two ranks."""

import re
from pathlib import Path

import launch
import pytest

TOLERANCE = 1e-6
LOSSES = 18


@pytest.mark.parametrize("cases", [2, pytest.param(6, marks=pytest.mark.matrix)])
def test_two_slices_give_the_values_and_gradients_of_the_definition(cases: int, tmp_path: Path) -> None:
    worker = launch.torchrun(2, Path(__file__).parents[1] / "support" / "linear_worker.py", str(cases))
    printed = launch.run(worker, tmp_path / "log")
    found = {name: float(figure) for name, figure in re.findall(r"worst of (.*): (\S+)", printed)}
    assert len(found) == LOSSES
    assert max(found.values()) <= TOLERANCE, found
    exchanges = dict(re.findall(r"exchanges of (.*): (\d+)", printed))
    wanted = {"ce with both": "1", "kd": "2", "tv": "2", "e2e_tv": "2", "lk": "4"}
    assert {name: exchanges[name] for name in wanted} == wanted
