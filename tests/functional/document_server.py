"""Runs the commands of documents without starting Python for each: forks of one process that has imported Megatron.

    python document_server.py SOCKET

bash runs a block as it is printed. On its PATH the programs are copies of `CLIENT`, which hands arguments, folder,
environment and standard streams over the socket and ends with the status that comes back. A fork runs the command as
Python would, or, where `PARSED` has a reason not to, parses it.
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from documents import DOORS, ROOT, parse

PROGRAMS = ("python", "megatron-mtp", "torchrun", "bash", "sbatch", "vllm")
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    request = {{"command": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "folder": os.getcwd()}}
    request["environment"] = dict(os.environ)
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or b"1"))
"""
LONGEST = 2**17
"""Bytes of a request."""

PARSED = {
    "bash scripts/setup.sh": "installs",
    "bash scripts/quickstart.sh": "trains for minutes",
    "bash scripts/attach_mtp.sh": "trains for minutes",
    "megatron-mtp attach": "trains for minutes",
    "bash scripts/test.sh": "runs all tests, this one included",
    "torchrun --nproc-per-node 8": "wants eight processes",
    "python -m pytest": "is run with all tests",
    "sbatch": "needs SLURM, of which scripts/test_slurm.sh starts one",
    "vllm serve": "needs vLLM, which has an environment of its own (scripts/test_vllm.sh)",
    "python -m sglang.launch_server": "needs SGLang, which has no build for a CPU",
}
"""How a command begins that is not run, but looked up and parsed, to the reason."""

SHORTER = {"train": ("--exit-interval", "2")}
"""Flags that a verb gets beside those of the document, so that a training ends after two steps."""


def serve(address: str) -> None:
    """Fork for every request, for ever."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
        while True:
            connection, _ = listening.accept()
            with connection:
                if os.fork() == 0:
                    listening.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    answer(connection)


def answer(connection: socket.socket) -> None:
    """Take the place of the command, and end."""
    message, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    request = json.loads(message)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    status = status_of(request["command"])
    sys.stdout.flush()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    connection.send(str(status).encode())
    os._exit(status)


def status_of(command: list[str]) -> int:
    """The exit status of a command, run or parsed."""
    written = " ".join(command)
    beginning = next((beginning for beginning in PARSED if written.startswith(beginning)), None)
    try:
        if beginning is None:
            run(*command)
        else:
            print(f"[parsed alone, since it {PARSED[beginning]}: {written}]", flush=True)
            look_up(*command)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run(program: str, *arguments: str) -> None:
    """What the program would do."""
    if program == "megatron-mtp":
        from megatron_mtp.command.line import main

        sys.argv = [program, *arguments, *SHORTER.get(arguments[0], ())]
        sys.exit(main())
    if program != "python":
        sys.exit(f"{program} {' '.join(arguments)}: not run here, and not in PARSED")
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [first, *rest, *SHORTER.get(DOORS.get(first, ""), ())]
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
    from megatron_mtp.platform import prepare

    prepare()

    import megatron_mtp.checkpoint.proof.verify
    import megatron_mtp.drafting.command
    import megatron_mtp.training.run  # noqa: F401

    serve(sys.argv[1])
