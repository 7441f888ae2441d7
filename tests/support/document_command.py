"""Run a command of a page or a help text as bash would, with small sizes. If `LISTED` has a reason, only parse it.

    python document_command.py PROGRAM ARGUMENT ...

bash runs a block unchanged; the programs on its PATH run this file in forks (fork_server.py). Training stops after two
steps, generation after a few tokens; torchrun starts two ranks; `serve` runs in the background, as in another terminal,
until `end_servers`; sbatch runs its job here.
"""

import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

from documents import DOORS, ROOT, launcher, parse
from huggingface_hub import constants

PROGRAMS = ("python", "megatron-mtp", "torchrun", "bash", "sbatch", "vllm", "guidellm", "docker", "llama-server")
LISTED = {
    "bash scripts/setup.sh": "installs",
    "python -m pip download": "downloads",
    "bash scripts/quickstart.sh": "trains for minutes",
    "bash scripts/test.sh": "runs all tests, this one included",
    "python -m pytest": "is run with all tests",
    "sbatch --nodes 2 --gpus-per-node": "needs GPUs (tests/unit/training/test_recipes.py reads the recipe)",
    "sbatch --nodes 1 --gpus-per-node": "needs GPUs (tests/unit/training/test_recipes.py reads the recipe)",
    "sbatch --mem 64G": "needs the checkpoint of such a run (tests/functional/test_slurm.py converts one)",
    "megatron-mtp prove": "ends with status 1 where Megatron is wrong (tests/extensions/prove runs it)",
    "megatron-mtp check": "needs a model that was trained to draft (tests/unit/cli/test_check.py runs it)",
    "megatron-mtp sample --server": "needs a server of the model (tests/functional/test_serve.py runs it)",
    "megatron-mtp attach models/Qwen3-0.6B my_texts runs/own --self-generated 2000 --texts-by": (
        "needs a server of the model (tests/unit/cli/test_served_texts.py runs one)"
    ),
    "docker": "needs Docker",
    "guidellm run": "needs guidellm, which has an environment of its own",
    "vllm serve": "needs vLLM, which has an environment of its own (scripts/test_vllm.sh)",
    "python -m sglang.launch_server": "needs SGLang, which has no build for a CPU",
    "python convert_trained.py": "needs a checkout of llama.cpp (scripts/test_llama_cpp.sh)",
    "llama-server": "needs a build of llama.cpp (scripts/test_llama_cpp.sh)",
}
"""Prefixes of commands that are not run but looked up and parsed, with the reason."""

LISTED_CODE = {"import convert_hf_to_gguf": "needs a checkout of llama.cpp (scripts/test_llama_cpp.sh)"}
"""Prefixes of Python blocks that are not run but compiled, with the reason."""

SHORTER = {
    "train": ("--exit-interval", "2"),
    "sample": ("--texts", "3", "--max-new-tokens", "8"),
    "evaluate": ("--eval-iters", "2"),
    "attach": "--steps 2 --sequence 64 --batch 16 --evaluated-batches 1 --max-new-tokens 8".split(),
    "generate": ("--max-new-tokens", "16"),
    "predict": "--prompts 4 --prompt-tokens 8 --new-tokens 8".split(),
    "serve": ("--cache-gib", "0.01"),
    "plan": ("--global-batch-size", "1024"),
}
"""Flags added to those of the document; on a command line the last value counts."""
SMALLER = {"--mtp-draft-vocab-size": "64", "--self-generated": "50", "--eval-iters": "2"}
"""Flags whose value in the document is replaced."""
RANKS = 2
IS_SHORT = "MEGATRON_MTP_TEST_IS_SHORT"
"""Set for subprocesses of a command, whose flags were shortened already."""
PORTS = "MEGATRON_MTP_TEST_PORTS"
"""The port of a server without --port, and that of a server with another port."""
PATIENCE = 120.0


def main(*command: str) -> None:
    """Run or parse the command. Subprocesses that the package starts with `sys.executable` are forks too."""
    sys.executable = str(shutil.which("python"))
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = os.environ["HF_HUB_CACHE"], True  # read before the fork
    written = " ".join(command)
    beginning = next((beginning for beginning in LISTED if written.startswith(beginning)), None)
    if beginning is None:
        run(*command)
    else:
        print(f"[parsed alone, since it {LISTED[beginning]}: {written}]", flush=True)
        look_up(*command)


def run(program: str, *arguments: str) -> None:
    """Do what the program would do."""
    match program, arguments:
        case "megatron-mtp", (verb, *rest):
            run_verb(verb, rest)
        case "python", ("-m", "megatron_mtp", verb, *rest):
            run_verb(verb, rest)
        case "python", ("-m", "torch.distributed.run", *rest):
            run_ranks(*rest)
        case "python", ("-m", module, *rest):
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case "python", (script, *rest) if script in DOORS:
            run_verb(DOORS[script], rest)
        case "python", (script, *rest):
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
        case "torchrun", _:
            run_ranks(*arguments)
        case "sbatch", _:
            run_job(*arguments)
        case _:
            sys.exit(f"{program} {' '.join(arguments)}: not run here, and not in LISTED")


def run_verb(verb: str, arguments: Sequence[str]) -> None:
    """Run the verb with few steps and tokens."""
    from megatron_mtp.cli.main import main

    is_first = IS_SHORT not in os.environ
    os.environ[IS_SHORT] = "1"
    if is_first or verb == "generate":  # the last command of `attach`
        arguments = shorter(verb, arguments)
        if verb == "serve":
            return start_server([sys.executable, "-m", "megatron_mtp", verb, *arguments])
    if verb == "serve":
        Path(f"{arguments[-1]}.{os.getpid()}.server").touch()
    sys.argv = ["megatron-mtp", verb, *arguments]
    sys.exit(main())


def shorter(verb: str, arguments: Sequence[str]) -> list[str]:
    """Return the document's flags, followed by flags that make the command small."""
    smaller = [word for flag in SMALLER if flag in arguments for word in (flag, SMALLER[flag])]
    port = ["--port", os.environ[PORTS].split()["--port" in arguments]] if verb == "serve" else []
    return [*arguments, *SHORTER.get(verb, ()), *smaller, *port]


def run_ranks(*arguments: str) -> None:
    """Run what torchrun would start, in `RANKS` processes."""
    given = launcher().parse_args(arguments)
    words = [given.training_script, *given.training_script_args]
    if given.module and words[0] == "megatron_mtp" and IS_SHORT not in os.environ:
        words = [*words[:2], *shorter(words[1], words[2:])]
    elif words[0] in DOORS and IS_SHORT not in os.environ:
        words = [words[0], *shorter(DOORS[words[0]], words[1:])]
    os.environ[IS_SHORT] = "1"
    command = [sys.executable, *["-m"] * given.module, *words]
    ranks = int(given.nproc_per_node) if given.nproc_per_node == "1" else RANKS
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    if words[:2] == ["megatron_mtp", "serve"]:
        return start_server(command, ranks)
    running = [start(command, rank) for rank in range(ranks)]
    while any(rank.poll() is None for rank in running) and not any(rank.poll() for rank in running):
        time.sleep(0.1)
    for rank in running:
        rank.terminate()
    sys.exit(max(rank.wait() for rank in running))


def start(command: Sequence[str], rank: int, log: IO[bytes] | None = None) -> "subprocess.Popen[bytes]":
    of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if "WORLD_SIZE" in os.environ else {}
    return subprocess.Popen(command, env={**os.environ, **of_rank}, stdout=log, stderr=log)


def start_server(command: Sequence[str], ranks: int = 1) -> None:
    """Start a server in the background, and return when it answers."""
    port = command[-1]
    end_servers(Path(), port)
    with open(f"{port}.log", "wb") as log:
        running = [start(command, rank, log) for rank in range(ranks)]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and all(one.poll() is None for one in running):
        try:
            urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except URLError:
            time.sleep(0.2)
    sys.exit(f"no server at {port}: {Path(f'{port}.log').read_text()[-3000:]}")


def end_servers(folder: Path, port: str = "*") -> None:
    """Stop the servers that were started in the folder. Raise AssertionError if one failed."""
    files = list(folder.glob(f"{port}.*.server"))
    processes = [int(file.name.split(".")[1]) for file in files]
    for file, process in zip(files, processes, strict=True):
        os.kill(process, signal.SIGTERM)
        file.unlink()
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, "a server goes on after SIGTERM"
        time.sleep(0.1)
    for log in folder.glob(f"{port}.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]


SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """#!/bin/bash
echo localhost
"""


def run_job(*arguments: str) -> None:
    """Run sbatch's job on one node, with stand-ins for SLURM's commands. Job arrays run one task after another."""
    place = next(place for place, word in enumerate(arguments) if word.endswith(".sbatch"))
    last = next((word.partition("=0-")[2] for word in arguments[:place] if word.startswith("--array=0-")), "")
    stand_ins = Path("slurm").absolute()
    stand_ins.mkdir(exist_ok=True)
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (stand_ins / name).write_text(script)
        (stand_ins / name).chmod(0o755)
    if not (stand_ins / "python").exists():
        (stand_ins / "python").symlink_to(sys.executable)
    job = {
        **os.environ, "PATH": f"{stand_ins}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_JOB_NAME": "job",
        "SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "STEPS": "4",
        "SAVE_INTERVAL": "4",
    }  # fmt: skip
    for index in range(int(last or 0) + 1):
        element = {"SLURM_ARRAY_TASK_ID": str(index)} if last else {}
        done = subprocess.run(["/bin/bash", *arguments[place:]], env={**job, **element})
        if done.returncode:
            sys.exit(done.returncode)


def look_up(program: str, *arguments: str) -> None:
    """Check that the program exists and accepts these arguments."""
    if program in ("bash", "sbatch"):
        script = next((word for word in arguments if word.endswith(".sbatch")), arguments[0])
        if subprocess.run(["/bin/bash", "-n", script]).returncode:
            sys.exit(f"{script} is not a script of bash")
    if program == "python" and arguments[:2] == ("-m", "pytest"):
        import pytest

        os.chdir(ROOT)
        sys.exit(pytest.main([*arguments[2:], "--collect-only", "-q", "-n", "0"]))
    if program != "bash":
        parse(program, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
