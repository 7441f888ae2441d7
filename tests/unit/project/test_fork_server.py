"""tests/support/fork_server.py: a command in a fork behaves and exits as in a new process, and is cleaned up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import psutil
import pytest
from tiers import tiered

CODE = {
    "nothing": "pass",
    "a number": "import sys; sys.exit(3)",
    "a sentence": "import sys; sys.exit('no')",
    "an error": "1 / 0",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first')",
    "its arguments": "import sys; print(sys.argv, sys.path[0])",
    "its input": "print(input())",
    "its folder": "import os; print(os.getcwd(), os.environ['HERE'])",
    "main": "import __main__; print(__name__, __main__.sys) if 'sys' in dir(__main__) else print(__name__)",
}


def both(folder: Path, *words: str) -> list[tuple[int, str, list[str]]]:
    """Return status, output and last error line, of a fork and of a new process."""
    command, environment = [sys.executable, *words], {**os.environ, "HERE": "there"}
    done = [
        fork_server.run(command, input="given\n", env=environment, cwd=folder),
        subprocess.run(
            command,
            input="given\n",
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
        ),
    ]
    return [(each.returncode, each.stdout, each.stderr.splitlines()[-1:]) for each in done]


FIRST = ("a sentence", "an error", "Ctrl-C", "a thread", "its arguments", "main")


@pytest.mark.parametrize("name", tiered(CODE, FIRST))
def test_forked_code_ends_as_in_a_new_process(name: str, tmp_path: Path) -> None:
    fork, process = both(tmp_path, "-c", CODE[name], "one", "two")
    assert fork == process


def test_scripts_and_modules_find_their_own_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "script.py").write_text("import beside, sys; print(__name__, beside.NAME, sys.argv)")
    for words in (["script.py", "one"], ["-m", "script", "one"]):
        fork, process = both(tmp_path, *words)
        assert fork == process
        assert fork[0] == 0


def test_processes_started_by_a_fork_are_forks(tmp_path: Path) -> None:
    """There `sys.executable` is what the command starts with; a program of another name uses Python's."""
    said = "import os, sys; print(sys.executable, os.getppid())"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {said!r}])"
    python = fork_server.program(tmp_path / "python")
    named = fork_server.program(tmp_path / "named", "-c", said)
    words = [str(python), "-c", code]
    inside = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    alone = subprocess.run([str(named)], capture_output=True, text=True, check=True).stdout.split()
    assert [inside[0], alone[0]] == [str(python), sys.executable]
    assert inside[1] == alone[1]  # the server's


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("end", ["kill", "forget"])
def test_an_abandoned_command_ends_with_its_children(end: str, tmp_path: Path) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with open(tmp_path / "out", "w+b") as out:
        process = fork_server.start([sys.executable, "-c", code], stdout=out)
    while not (tmp_path / "out").read_text().endswith("\n"):
        time.sleep(0.01)
    pids = [process.pid, int((tmp_path / "out").read_text())]
    if end == "kill":
        process.kill()
    del process
    deadline = time.monotonic() + fork_server.TIMEOUT
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, f"of {pids} one goes on"
        time.sleep(0.01)
