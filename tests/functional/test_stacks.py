"""Frameworks' own models of tiny folders, with attached layers: policy steps, fine-tuning, an export, and drafts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hf_models import make
from launch import ROOT

ENVIRONMENTS = ROOT / ".venv-stacks"
FRAMEWORKS = ("megatron_bridge", "ms_swift")
HEADS = [("qwen3", "new"), ("glm4_moe", "new"), ("glm4_moe", "own"), ("deepseek_v3", "new"), ("deepseek_v3", "own")]
"""A layer that is attached to the trunk of a folder, or the folder's own."""

PROMPTS, NEW = 8, 24


def folder_of(family: str, folder: Path) -> Path:
    depths = 0 if family == "qwen3" else 1
    return make(folder, family, depths, changes={"n_shared_experts": 1} if depths else None)


def worked(framework: str, folder: Path, out: Path, head: str) -> dict[str, Any]:
    """What stack_worker.py prints."""
    paths = [*([ENVIRONMENTS / framework] if framework in FRAMEWORKS else []), ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).with_name("stack_worker.py")
    command = [sys.executable, worker, framework, folder, out, head]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def accepted(folder: Path, checkpoint: Path) -> int:
    """First drafts that this package's engine accepts, of texts that the model was tuned on; texts do not change."""
    from megatron_mtp.runtime import prepare

    prepare()  # here, since Megatron would be imported for every test of this folder
    from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
    from megatron_mtp.checkpoint.convert.stream import Options
    from megatron_mtp.decoding.engine import generate
    from megatron_mtp.decoding.load import load_runner

    hf_to_mcore(folder, checkpoint, Options(quiet=True, workers=1))
    runner = load_runner(checkpoint)
    prompts = []
    for start in range(PROMPTS):
        row = [start * 11]
        for _ in range(5):
            row.append((row[-1] * 5 + 7) % 96)
        prompts.append(row)
    drafted = generate(runner, prompts, NEW, speculative={"method": "mtp", "num_speculative_tokens": 1})
    assert drafted.token_ids == generate(runner, prompts, NEW).token_ids
    return drafted.stats.accepted_at[0]


@pytest.mark.matrix
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("family", "head"), HEADS)
def test_a_frameworks_model_trains_attached_layers_that_draft(
    framework: str, family: str, head: str, tmp_path: Path
) -> None:
    if not (ENVIRONMENTS / framework / "installed.txt").is_file():
        pytest.skip(f"{framework} is not installed; run bash scripts/test_stacks.sh {framework}")
    began = time.monotonic()
    folder = folder_of(family, tmp_path / "hf")
    record = worked(framework, folder, tmp_path / "out", head)
    record["accepted"] = accepted(tmp_path / "out", tmp_path / "checkpoint")
    print(json.dumps({"family": family, "head": head, **record, "seconds": round(time.monotonic() - began)}))
    assert record["differ"] == []  # gradients and weights of the policy in three steps
    assert record["learned"] > 0
    assert record["lost without"]
    assert record["losses"][1] < record["losses"][0] / 2
    assert record["unequal"] == []  # the framework's export and this package's
    assert record["accepted"] > 0
    if head == "own":  # the same weights, data and optimizer in this package's model
        ours = worked("megatron_mtp", folder, tmp_path / "ours", head)
        assert record["losses"] == pytest.approx(ours["losses"], rel=1e-4)
        assert record["accepted"] == accepted(tmp_path / "ours", tmp_path / "of ours")
