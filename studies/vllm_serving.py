"""Sixteen requests at once: the engine and vLLM for CPU, on the same random weights of SmolLM2-135M's shape.

    python studies/vllm_serving.py PYTHON               vLLM is in PYTHON's environment (scripts/test_vllm.sh)
    python studies/vllm_serving.py PYTHON --dtype bfloat16

Each text has 64 new tokens. vLLM has no depths to draft with; vllm_side.py is its process.

Run at 5f33b9e.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from operator import eq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.agreeing import SMOLLM2, agreeing_model
from benchmarks.harness import Goal, add_common_flags, hardware, interleave, limit_threads, report
from benchmarks.llama import llama_of
from benchmarks.serving import ON_CPU, Sides, faster, rates_of, rates_table, requests_of
from megatron_mtp.drafting.requests import Request
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.model.build import join_world

SIDE = Path(__file__).with_name("vllm_side.py")


def main() -> None:
    """Measure the engine and vLLM in turns, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="of the environment that vLLM for CPU is installed in")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    add_common_flags(parser, {"here": 3})
    args = parser.parse_args()
    limit_threads(args)
    join_world()
    model = agreeing_model(depths=2, noise=0.5, **SMOLLM2)
    runner = Runner(model.to(getattr(torch, args.dtype)))
    requests = [replace(one, max_new_tokens=64) for one in requests_of(runner, 16, "uniform")]
    sides, theirs = Sides(runner, requests), VLLM(args.python, runner, len(requests))
    named = {name: run for name, run in sides.named().items() if name.startswith("engine")}
    spent = interleave({**named, "vllm": lambda: theirs.run(requests)}, args.repeats or 3, 1)
    theirs.end()
    same = sum(map(eq, sides.texts["engine plain"], theirs.texts))
    results = {"vllm": theirs.version, "dtype": args.dtype, "same_texts": same, **rates_of(spent, requests)}
    sides_of_ours = ("engine plain", "engine")
    goals = [Goal(f"{side} over vLLM, {args.dtype}", faster(spent, side, "vllm"), 1.0, ">=") for side in sides_of_ours]
    report("vllm_serving", hardware(ON_CPU), results, goals, [rates_table(results)])


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
        raise SystemExit(f"vLLM ended with status {self._process.wait()}; see above.")


if __name__ == "__main__":
    main()
