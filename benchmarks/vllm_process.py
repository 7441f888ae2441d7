"""Starts vllm_side.py with another Python, on weights of ours, and asks it."""

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.llama import llama_of
from megatron_mtp.drafting.requests import Request
from megatron_mtp.drafting.runner import Runner

SIDE = Path(__file__).with_name("vllm_side.py")


class VLLM:
    """vLLM with the trunk of a dense model of ours.

    Args:
        python: of the environment that vLLM is installed in.
        texts: that run at once, at most.

    Attributes:
        version: vLLM's.
        texts: tokens that the last requests gave.

    Raises:
        SystemExit: vLLM does not start.
    """

    def __init__(self, python: Path, runner: Runner, texts: int) -> None:
        self._folder = TemporaryDirectory(prefix="vllm-")
        llama_of(runner.model, runner.dtype)[0].save_pretrained(self._folder.name)
        dtype = str(runner.dtype).removeprefix("torch.")
        library = python.parents[1] / "lib" / "libiomp5.so"  # without it vLLM warns that it is slower
        env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        env |= {"LD_PRELOAD": str(library)} if library.exists() else {}
        command = [str(python), str(SIDE), self._folder.name, dtype, str(texts)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=env, **pipes)
        self.version = str(self._answer()["version"])
        self.texts: list[list[int]] = []

    def run(self, requests: list[Request]) -> None:
        """Answer these requests."""
        assert self._process.stdin is not None
        asked = [(request.prompt, request.max_new_tokens) for request in requests]
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        self.texts = self._answer()["texts"]

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("side: "):
                return dict(json.loads(line.removeprefix("side: ")))
        raise SystemExit(f"vLLM ended with status {self._process.wait()}; see above, or leave --vllm out.")
