"""A page whose creation is killed at any moment is complete, or is the previous one."""

import json
import secrets
import sys
from pathlib import Path

import fork_server
import pytest

WORKER = Path(__file__).parent / "killed_reports.py"


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.matrix)])
def test_a_killed_report_leaves_no_partial_page(kills: int, tmp_path: Path) -> None:
    """There are few calls that change files, and a third of all kills should hit each."""
    losses = ({"iteration": step, "split": "training", "lm loss": 1 / step} for step in range(1, 400))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in losses))
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    words = [sys.executable, str(WORKER), str(tmp_path), str(kills), str(seed)]
    done = fork_server.run(words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"killed": kills, "wrong": []}
