"""Reading the files of a run: rows of metrics.jsonl and run.json, and error messages for damaged ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_mtp.training.read_runs import read_rows, read_run_record

ROW = {"iteration": 10, "split": "training", "lm loss": 2.5, "tokens": 3}

DAMAGED = {
    "half a line": '{"iteration": 60, "spl',
    "no object": "[1]",
    "no step": '{"split": "training", "lm loss": 1.0}',
    "no split": '{"iteration": 1, "lm loss": 1.0}',
    "a text": '{"iteration": 1, "split": "training", "lm loss": "1"}',
    "a truth": '{"iteration": 1, "split": "training", "lm loss": true}',
    "a step below 0": '{"iteration": -1, "split": "training", "lm loss": 1.0}',
    "400 digits": '{"iteration": 1, "split": "training", "lm loss": ' + "9" * 400 + "}",
    "5,000 digits": '{"iteration": 1, "split": "training", "lm loss": ' + "9" * 5000 + "}",
    "a step of 400 digits": '{"iteration": ' + "9" * 400 + ', "split": "training", "lm loss": 1.0}',
    "too deep": "[" * 100000,
    "another split": '{"iteration": 1, "split": "tests", "lm loss": 1.0}',
    "a list as split": '{"iteration": 1, "split": ["training"], "lm loss": 1.0}',
}


def test_rows_are_read_in_their_order(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "split": "validation-code", "lm loss": float("nan")}, {**ROW, "split": "test"}]
    (tmp_path / "metrics.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert list(map(str, read_rows(tmp_path))) == list(map(str, rows))


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(ROW)}\n{line}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged in line 2;"):
        read_rows(tmp_path)


def test_folders_without_valid_metrics_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl"):
        read_rows(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="is empty"):
        read_rows(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        read_rows(tmp_path)


START = {"date": "2026-01-31T12:00:00+00:00", "iteration": 0, "command": ["train", "x"], "versions": {"torch": "2"}}
DAMAGED_STARTS: dict[str, Any] = {
    "no object": [],
    "no starts": {"starts": [], "arguments": {}},
    "starts that are none": {"starts": [1], "arguments": {}},
    "no arguments": {"starts": [START]},
    "no date": {"starts": [{**START, "date": "today"}], "arguments": {}},
    "no words": {"starts": [{**START, "command": [1]}], "arguments": {}},
    "no step": {"starts": [{**START, "iteration": "1"}], "arguments": {}},
}


@pytest.mark.parametrize("broken", DAMAGED_STARTS.values(), ids=DAMAGED_STARTS.keys())
def test_a_damaged_run_record_is_named(broken: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        read_run_record(tmp_path)


def test_a_run_record_is_read_where_there_is_one(tmp_path: Path) -> None:
    assert read_run_record(tmp_path) is None
    whole = {"starts": [START], "arguments": {"lr": 1e-3}}
    (tmp_path / "run.json").write_text(json.dumps(whole))
    assert read_run_record(tmp_path) == whole
