"""A training that is killed at any moment, however often, ends with the checkpoints of one that nobody killed."""

import json
import os
import secrets
import sys
from pathlib import Path

import fork_server
import pytest

WORKER = Path(__file__).parent / "killed_trainings.py"


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.matrix)])
def test_a_killed_training_loses_no_checkpoint_and_goes_on(kills: int, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    words = [sys.executable, str(WORKER), str(tmp_path), str(kills), str(seed)]
    done = fork_server.run(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["killed"] == kills
    assert told["wrong"] == []
    assert any(told["found at"]), "every kill came before the first save"
