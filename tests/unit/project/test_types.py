"""mypy, as a test so that the other tests need not wait for it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_mypy_finds_no_errors() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
