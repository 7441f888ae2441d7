"""Megatron may be imported before `prepare()`: training, saving and resuming are the same as in the other order."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_mtp.platform import cpu

pytestmark = pytest.mark.skipif(not cpu.installed(), reason="there is a CUDA device here: nothing is substituted")


def ran(order: str, folder: Path) -> dict[str, Any]:
    """In a process of its own, since it is about what is imported when."""
    worker = Path(__file__).parent / "late_preparation.py"
    done = subprocess.run(
        [sys.executable, str(worker), order, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_order_of_imports_changes_nothing(tmp_path: Path) -> None:
    early, late = ran("early", tmp_path / "early"), ran("late", tmp_path / "late")
    assert early["before"] == []
    assert {"megatron.core.jit.jit_fuser", "megatron.core.transformer.module._FLOAT_TYPES"} <= set(late["before"])
    assert late["after"] == []
    for figures in early["learned"].values():
        assert [row["iteration"] for row in figures if row["split"] == "training"] == [1, 2, 3, 4, 5]
    assert late["learned"] == early["learned"]
