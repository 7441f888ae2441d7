"""Training that is killed at random moments, however often, ends with the checkpoints of an uninterrupted run.

The first tier has one kill while a checkpoint is written: tests/functional/test_resume.py.
"""

import json
import os
import secrets
import sys
from pathlib import Path

import fork_server
import pytest

WORKER = Path(__file__).parents[2] / "support" / "killed_trainings.py"


KILLS = 8


@pytest.mark.matrix
def test_a_killed_training_loses_no_checkpoint_and_resumes(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    words = [sys.executable, str(WORKER), str(tmp_path), str(KILLS), str(seed)]
    done = fork_server.run(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["killed"] == KILLS
    assert told["wrong"] == []
    assert any(told["found at"]), "every kill came before the first save"
