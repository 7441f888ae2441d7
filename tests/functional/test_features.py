"""Megatron's features do not change runs with MTP layers: losses with and without their flags agree, step by step."""

from collections.abc import Callable
from pathlib import Path

import launch
import pytest
from features import FIRST, TRIED, Tried

SHORT = (
    "--train-iters 3 --log-interval 1 --eval-interval 9 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 "
    "--split 100,0,0"
).split()
Steps = dict[int, dict[str, float]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tried], Steps]:
    """Return the run without the flags, which several rows may share."""
    runs: dict[tuple[int, str], Steps] = {}

    def get(row: Tried) -> Steps:
        key = row.processes, row.both
        if key not in runs:
            runs[key] = steps_of(Tried("", *key), tmp_path_factory.mktemp("plain"))
        return runs[key]

    return get


def steps_of(row: Tried, folder: Path) -> Steps:
    flags = f"{row.both.format(folder=folder / 'saved')} {row.flags}".split()
    metrics = ["--mtp-metrics-dir", str(folder)]
    launch.run(launch.pretrain(*SHORT, *flags, *metrics, processes=row.processes), folder / "log")
    return launch.learned(folder)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=f"{row.flags.split()[0][2:]}-{row.processes}", marks=() if number in FIRST else pytest.mark.matrix
        )
        for number, row in enumerate(TRIED)
    ],
)
def test_a_feature_changes_no_loss(row: Tried, plain: Callable[[Tried], Steps], tmp_path: Path) -> None:
    with_flags, without = steps_of(row, tmp_path), plain(row)
    assert with_flags.keys() == without.keys() == {1, 2, 3}
    names = [name for name in without[1] if name.endswith("loss")]
    assert {"lm loss", "mtp_1 loss"} <= {*names}
    assert ("mtp_2 loss" in names) == ("--mtp-num-layers 1" not in row.both)
    apart = [abs(with_flags[step][name] - without[step][name]) for step in without for name in names]
    assert max(apart) <= row.apart
