"""runtime.py: warnings of a running command reach the standard error of its process; CPU quotas of containers."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtp.megatron import runtime

LOGGING = """
import pathlib, sys
from megatron_mtp.megatron.runtime import quieten
quieten()  # as every verb does, before Megatron is imported
from drafting_single import prompts_of, runner_of
from megatron_single import join_world_of_one
from parrot import NAME, Parrot, running, words
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import Request
join_world_of_one()
runner = runner_of(depths=2)
runner.alarm.expected = [0.7, 0.35]
engine = Engine(runner, speculative=config_from({"method": "mtp", "num_speculative_tokens": 2}))
for seed, prompt in enumerate(prompts_of(8)):
    engine.add(Request(prompt, 60, seed=seed))
while engine.busy:
    engine.step()
with running(Parrot(), words(pathlib.Path(sys.argv[1]))) as server:
    server.engine.bug = RuntimeError("planted")
    assert server.post("/v1/completions", {"model": NAME, "prompt": "ab"}).status_code == 500
"""


@pytest.mark.matrix
def test_alarms_and_tracebacks_reach_standard_error(tmp_path: Path) -> None:
    """In a new process: when Megatron is imported, the root logger gets the handler that it keeps."""
    words = [sys.executable, "-c", LOGGING, str(tmp_path)]
    done = subprocess.run(words, cwd=Path(__file__).parents[2] / "support", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for said in ("drafting costs time and saves little", "the engine has failed", "RuntimeError: planted"):
        assert done.stderr.count(said) == 1, done.stderr[-3000:]
    assert "Warning" not in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, float("inf")),
        ({"cpu.max": "max 100000\n"}, float("inf")),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ],
)
def test_the_cpu_quota_of_a_container_is_read(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert runtime.cpu_quota(tmp_path) == expected
