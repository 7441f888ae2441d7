"""A command of a document, as bash calls it: run as Python would or, where `PARSED` has a reason not to, parsed.

    python document_command.py PROGRAM ARGUMENT ...

bash runs a block as it is printed; the programs on its PATH run this file in forks (fork_server.py).
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from documents import DOORS, ROOT, parse

PROGRAMS = ("python", "megatron-mtp", "torchrun", "bash", "sbatch", "vllm", "guidellm")
PARSED = {
    "bash scripts/setup.sh": "installs",
    "python -m pip download": "downloads",
    "python -m pip install": "installs",
    "bash scripts/quickstart.sh": "trains for minutes",
    "bash scripts/attach_mtp.sh": "trains for minutes",
    "megatron-mtp attach": "trains for minutes",
    "bash scripts/test.sh": "runs all tests, this one included",
    "torchrun --nproc-per-node 8": "wants eight processes",
    "python -m pytest": "is run with all tests",
    "sbatch": "needs SLURM, of which scripts/test_slurm.sh starts one",
    "megatron-mtp serve": "serves until a signal ends it (tests/functional/test_serve.py)",
    "guidellm run": "needs a server (tests/functional/test_serve.py)",
    "vllm serve": "needs vLLM, which has an environment of its own (scripts/test_vllm.sh)",
    "python -m sglang.launch_server": "needs SGLang, which has no build for a CPU",
}
"""How a command begins that is not run, but looked up and parsed, to the reason."""

FEW_TOKENS = ("--mtp-draft-vocab-size", "64")
"""Of a draft vocabulary, for the scene's small models; the last value on a command line counts."""
SHORTER = {"train": ("--exit-interval", "2"), "sample": ("--texts", "3", "--max-new-tokens", "8")}
"""Flags that a verb gets beside those of the document, so that a training ends after two steps, a text after few."""


def main(*command: str) -> None:
    """Run or parse the command; the package's own processes, which `sys.executable` starts, are forks too."""
    sys.executable = str(shutil.which("python"))
    written = " ".join(command)
    beginning = next((beginning for beginning in PARSED if written.startswith(beginning)), None)
    if beginning is None:
        run(*command)
    else:
        print(f"[parsed alone, since it {PARSED[beginning]}: {written}]", flush=True)
        look_up(*command)


def run(program: str, *arguments: str) -> None:
    """What the program would do."""
    few_tokens = FEW_TOKENS if "draft-vocab" in arguments else ()
    if program == "megatron-mtp":
        from megatron_mtp.cli.main import main

        sys.argv = [program, *arguments, *SHORTER.get(arguments[0], ()), *few_tokens]
        sys.exit(main())
    if program != "python":
        sys.exit(f"{program} {' '.join(arguments)}: not run here, and not in PARSED")
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [first, *rest, *SHORTER.get(DOORS.get(first, ""), ()), *few_tokens]
    sys.path.insert(0, str(Path(first).resolve().parent))
    runpy.run_path(first, run_name="__main__")


def look_up(program: str, *arguments: str) -> None:
    """Whether the program is there, and takes these arguments."""
    if program in ("bash", "sbatch"):
        script = next((word for word in arguments if word.endswith(".sbatch")), arguments[0])
        if subprocess.run(["/bin/bash", "-n", script]).returncode:
            sys.exit(f"{script} is no script of bash")
    if program == "python" and arguments[:2] == ("-m", "pytest"):
        import pytest

        os.chdir(ROOT)
        sys.exit(pytest.main([*arguments[2:], "--collect-only", "-q", "-n", "0"]))
    if program != "bash":
        parse(program, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
