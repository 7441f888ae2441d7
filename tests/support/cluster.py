"""A simulated cluster: the jobs of scripts/slurm run with stand-ins for SLURM's commands."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "scripts" / "slurm"
RECIPES = sorted(file.stem for file in (JOBS / "recipes").glob("*.sh"))


class Cluster:
    """Environment of a job: SLURM's variables, and stand-ins for its commands that record their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        (folder / "bin").mkdir()
        self.answer("srun", "")
        self.answer("scontrol", "echo node7; echo node8; echo JobState=RUNNING")

    def answer(self, command: str, script: str) -> None:
        """Define what a command does after its arguments are recorded."""
        file = self.folder / "bin" / command
        file.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >>{self.folder}/{command}\n{script}\n')
        file.chmod(0o755)

    def submit(self, job: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a job's script as its first node would."""
        return self.start((JOBS / f"{job}.sbatch").read_text(), *arguments, **variables)

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a copy of a batch script, as SLURM does."""
        environment = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HOME": str(self.folder), "VENV": sys.prefix,
            "RUN_DIR": str(self.run), "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "RANKS_PER_NODE": "4", **variables,
        }  # fmt: skip
        copy = self.folder / "slurm_script"
        copy.write_text(script)
        return subprocess.run(["bash", copy, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)

    def given(self, command: str = "srun") -> list[str]:
        """Return the arguments of all calls of a command."""
        called = self.folder / command
        return called.read_text().split("\0")[:-1] if called.exists() else []
