"""A conversion that is killed leaves no folder that looks complete, and `--resume` ends with the same bytes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hf_models import make

from megatron_mtp.checkpoint.importing import Options, hf_to_mcore
from megatron_mtp.checkpoint.megatron_args import megatron_arguments
from megatron_mtp.checkpoint.streaming import PLAN, RECORDS, PartialFolder

WORKER = Path(__file__).parent / "killed_conversions.py"
MOMENTS = 6


@pytest.mark.parametrize("command", ["hf-to-mcore", "mcore-to-hf"])
def test_a_killed_conversion_is_resumed_to_the_same_bytes(command: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "deepseek_v3", 3)
    if command == "mcore-to-hf":
        hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True, workers=1), megatron_arguments)
        source = tmp_path / "mcore"
    words = [sys.executable, str(WORKER), str(source), str(tmp_path), str(MOMENTS), command]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    killed = [each for each in told if each["status"] == -signal.SIGKILL]
    assert killed, told
    assert [each for each in killed if each["target"] and each["partial"]] == []
    assert [each for each in told if each["resumed"] or not each["same"] or each["rest"]] == []


def test_a_run_killed_before_its_plan_was_written_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "out.partial" / RECORDS).mkdir(parents=True)
    assert not PartialFolder(tmp_path / "out", {"a": 1}, resume=False).resumed
    assert PartialFolder(tmp_path / "out", {"a": 1}, resume=True).resumed


def test_a_run_killed_while_its_records_were_removed_is_taken_up_again(tmp_path: Path) -> None:
    partial = PartialFolder(tmp_path / "out", {"a": 1}, resume=False)
    partial.keep(0, "done")
    partial.path.rename(partial.target)
    again = PartialFolder(tmp_path / "out", {"a": 1}, resume=True)
    assert again.record(0) == "done"
    again.finish()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_with_another_plan_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out" / RECORDS).mkdir(parents=True)
    (tmp_path / "out" / RECORDS / PLAN).write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        PartialFolder(tmp_path / "out", {"a": 1}, resume=True)
    assert (tmp_path / "out" / RECORDS / PLAN).read_text() == "mine"
