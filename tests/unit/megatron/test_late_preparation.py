"""Megatron may be imported before `prepare()`: training, saving and resuming do not depend on the order."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fork_server
import pytest

from megatron_mtp.megatron import cpu

pytestmark = pytest.mark.skipif(not cpu.installed(), reason="there is a CUDA device here: nothing is substituted")


WORKER = Path(__file__).parents[2] / "support" / "late_preparation.py"


def ran(order: str, folder: Path, run: Callable[..., Any]) -> dict[str, Any]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run([sys.executable, str(WORKER), order, str(folder)], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.matrix
def test_the_order_of_imports_changes_nothing(tmp_path: Path) -> None:
    """The fork server called prepare() before importing Megatron; the other order needs a separate process."""
    early = ran("early", tmp_path / "early", fork_server.run)
    late = ran("late", tmp_path / "late", partial(subprocess.run, capture_output=True, text=True))
    assert {"megatron.core.jit.jit_fuser", "megatron.core.transformer.module._FLOAT_TYPES"} <= set(late["before"])
    assert late["after"] == []
    assert [row["iteration"] for row in early["learned"] if row["split"] == "training"] == [1, 2, 3, 4, 5]
    assert late["learned"] == early["learned"]
