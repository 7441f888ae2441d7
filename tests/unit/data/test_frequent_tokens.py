"""data/checks.py: which tokens are most frequent, on data that can be counted by hand."""

from pathlib import Path

import pytest
from counted_dataset import dataset

from megatron_mtp.data import checks
from megatron_mtp.data.checks import most_frequent


def test_frequency_by_hand_and_lower_ids_among_equals(tmp_path: Path) -> None:
    one = dataset(tmp_path / "one", [5, 5, 5, 2, 2, 7, 1])
    assert most_frequent([one], None, 1, 10) == ([5], pytest.approx(3 / 7))
    assert most_frequent([one], None, 3, 10) == ([1, 2, 5], pytest.approx(6 / 7))
    assert most_frequent([one], None, 6, 10)[0] == [0, 1, 2, 3, 5, 7]


def test_datasets_count_as_they_are_blended(tmp_path: Path) -> None:
    one, two = dataset(tmp_path / "one", [5] * 8), dataset(tmp_path / "two", [3, 4])
    assert most_frequent([one, two], None, 1, 10) == ([5], pytest.approx(0.8))
    assert most_frequent([one, two], [0.1, 0.9], 2, 10) == ([3, 4], pytest.approx(0.9))


def test_a_long_dataset_is_counted_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SCAN_TOKENS", 128)
    long = dataset(tmp_path / "long", [1] * 500 + [2] * 400 + [3] * 100)
    assert most_frequent([long], None, 2, 10) == ([1, 2], pytest.approx(0.9, abs=0.02))


def test_a_missing_dataset_gives_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--data-path: the tokens of '.*gone' cannot be counted: "):
        most_frequent([str(tmp_path / "gone")], None, 1, 10)
