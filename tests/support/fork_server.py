"""Run Python commands without starting Python: fork a process that has imported torch, Megatron and this package.

    done = fork_server.run([sys.executable, "-m", "megatron_mtp", "inspect", folder])

A fork gets what a new process would get: arguments, `sys.executable`, working directory, environment, standard streams,
and its own session. It runs the script, module (`-m`) or code (`-c`) as `__main__` and exits as Python would. All
workers of a pytest run share one server, which ends with the run. A fork cannot use a CUDA device of its parent: a
command that may use one runs in a new process, unless the server has not touched the device, as in
benchmarks/gpu/lines.py.

Tests that need a new process start one themselves: tests of imports, of torchrun, Ctrl-C and broken pipes, and of
anything that asks torch for a device, since forks already have stand-ins.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy

ROOT, PYTHON = Path(__file__).parents[2], sys.executable
TIMEOUT = 300.0
"""Seconds after which a command, or the start of the server, counts as hanging."""

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a test's own process group leaves in the environment."""

PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    request = {{"words": [*{words!r}, *sys.argv[1:]], "folder": os.getcwd()}}
    request["environment"] = {{**os.environ, "CUDA_VISIBLE_DEVICES": ""}}
    request["executable"] = {executable!r}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    server.recv(32)
    status = int(server.recv(32) or b"1")
    sys.exit(status if status >= 0 else 128 - status)
"""
"""A program that runs `words` and its arguments in a fork, and exits with its status."""

LONGEST = 2**17
"""Largest request in bytes."""


# --- in tests --------------------------------------------------------------------------------------------------------


class Fork:
    """A running command, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, words: Sequence[str], connection: socket.socket) -> None:
        self.args, self._connection = words, connection
        self.returncode: int | None = None
        connection.settimeout(TIMEOUT)
        said = connection.recv(32)
        if not said:
            raise ConnectionError("the process that forks has ended.")
        connection.settimeout(None)
        self.pid = int(said)

    def poll(self) -> int | None:
        """Return the exit status, -N for signal N; None while it runs."""
        with_status = self.returncode is None and select.select([self._connection], [], [], 0)[0]
        return self.wait() if with_status else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait, and return the exit status. Raise subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._connection.recv(32) or b"-9")
            self._connection.close()
        return self.returncode

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the command ends."""
        return self._connection.fileno()

    def kill(self) -> None:
        """Kill the command, and what it started in its session."""
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


def start(
    words: Sequence[str],
    *,
    stdin: int | IO[Any] = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.DEVNULL,
    stderr: int | IO[Any] = subprocess.DEVNULL,
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
) -> "Fork | subprocess.Popen[bytes]":
    """Start a command, in a fork if it begins with `sys.executable`."""
    environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
    if words[0] not in (PYTHON, sys.executable) or (_has_device() and environment.get("CUDA_VISIBLE_DEVICES") != ""):
        return subprocess.Popen(
            words, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, cwd=cwd, start_new_session=True
        )
    return fork(_connect(), words, stdin, stdout, stderr, environment, cwd)


def fork(
    connection: socket.socket,
    words: Sequence[str],
    stdin: int | IO[Any],
    stdout: int | IO[Any],
    stderr: int | IO[Any],
    environment: Mapping[str, str],
    cwd: str | Path | None = None,
) -> Fork:
    """Start the command in a fork of the server at the other end of the connection, whatever `words[0]` is.

    Raises:
        OSError: the server has ended, or does not answer.
    """
    request = {"words": list(words[1:]), "folder": str(cwd or os.getcwd()), "environment": {**environment}}
    request["executable"] = words[0]
    with open(os.devnull, "r+b") as null:
        streams = [null if each == subprocess.DEVNULL else each for each in (stdin, stdout, stderr)]
        numbers = [each if isinstance(each, int) else each.fileno() for each in streams]
        if stderr == subprocess.STDOUT:
            numbers[2] = numbers[1]
        socket.send_fds(connection, [json.dumps(request).encode()], numbers)
    return Fork(words, connection)


def run(
    words: Sequence[str],
    *,
    input: str = "",
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = TIMEOUT,
    merged: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a command and return its output, including errors if `merged`."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(input.encode())
        given.seek(0)
        process = start(words, stdin=given, stdout=out, stderr=out if merged else err, env=env, cwd=cwd)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        printed = []
        for stream in (out, err):
            stream.seek(0)
            printed.append(stream.read().decode(errors="replace"))
    return subprocess.CompletedProcess(list(words), status, *printed)


def program(file: Path, *words: str) -> Path:
    """Write a program that runs `python WORDS ARGUMENTS` in a fork, without a device."""
    _connect().close()
    executable = PYTHON if words else str(file)
    file.write_text(PROGRAM.format(python=PYTHON, address=_address(), words=words, executable=executable))
    file.chmod(0o755)
    return file


def without_ranks() -> dict[str, str]:
    """Return the environment for a command that is not a rank of the test's own group."""
    return {name: value for name, value in os.environ.items() if name not in RANKS}


@functools.cache
def _has_device() -> bool:
    import torch

    from megatron_mtp.megatron import cpu

    return torch.cuda.is_available() and not cpu.installed()  # under the stand-ins torch reports a device


def _address() -> str:
    """Return an address in Linux's abstract socket namespace, which leaves no file."""
    return f"\0megatron-mtp-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"


def _connect() -> socket.socket:
    """Connect to the server; start it unless another worker has."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline, server = time.monotonic() + TIMEOUT, None
    with tempfile.TemporaryFile() as said:
        while True:
            try:
                connection.connect(_address())
                return connection
            except ConnectionRefusedError:
                server = server or _start_server(said)
                if server.poll():
                    said.seek(0)
                    raise RuntimeError(f"the server of forks did not start: {said.read().decode()[-3000:]}") from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def _start_server(said: IO[bytes]) -> "subprocess.Popen[bytes]":
    of_run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**without_ranks(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return subprocess.Popen(
        [PYTHON, __file__, _address()[1:], str(of_run)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        start_new_session=True,
    )


# --- the forking process ---------------------------------------------------------------------------------------------


def serve(listening: socket.socket, of_run: int, run: "Callable[..., None] | None" = None) -> None:
    """Fork for every request; a fork runs its command with `run_main`, or with `run`."""
    gc.freeze()  # otherwise garbage collection in a fork would copy shared pages
    Server(listening, of_run, run or run_main).serve()


class Server:
    """Fork for every request until the process `of_run` ends; `run` executes a command's arguments as `__main__`."""

    def __init__(self, listening: socket.socket, of_run: int, run: Callable[..., None]) -> None:
        self._listening, self._run, self._run_main = listening, os.pidfd_open(of_run), run
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by process handle
        self._clients: dict[int, int] = {}  # process handle by connection handle
        self._waiting = select.poll()

    def serve(self) -> None:
        self._listening.listen(64)
        for handle in (self._listening.fileno(), self._run):
            self._waiting.register(handle, select.POLLIN)
        while True:
            for handle, _ in self._waiting.poll():
                if handle == self._run:
                    for child, _ in self._children.values():
                        kill(child)
                    return
                if handle == self._listening.fileno():
                    self._fork()
                elif handle in self._children:
                    self._report(handle)
                elif handle in self._clients:  # the client hung up and no longer waits for the command
                    kill(self._children[self._clients[handle]][0])
                    self._waiting.unregister(handle)

    def _fork(self) -> None:
        connection, _ = self._listening.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        message, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
        if not message or user != os.getuid():
            connection.close()
            return
        child = os.fork()
        if child == 0:
            become(json.loads(message), streams, connection, self._run_main)
        for stream in streams:
            os.close(stream)
        handle = os.pidfd_open(child)
        self._children[handle], self._clients[connection.fileno()] = (child, connection), handle
        for each in (handle, connection.fileno()):
            self._waiting.register(each, select.POLLIN)

    def _report(self, handle: int) -> None:
        child, connection = self._children.pop(handle)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(OSError):
            connection.send(str(status).encode())
        del self._clients[connection.fileno()]
        for each in (handle, connection.fileno()):
            with contextlib.suppress(KeyError):
                self._waiting.unregister(each)
        connection.close()
        os.close(handle)


def kill(child: int) -> None:
    """Kill a process and its session, if it has one already."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(child, signal.SIGKILL)


def become(request: dict[str, Any], streams: list[int], connection: socket.socket, run: Callable[..., None]) -> None:
    """Become the command, and exit as Python does."""
    status = 1
    try:
        os.setsid()
        connection.send(str(os.getpid()).encode())
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        numpy.random.seed()
        sys.executable = request["executable"]
        status = status_of(request["words"], run)
        threading._shutdown()  # type: ignore[attr-defined]  # join threads
        atexit._run_exitfuncs()
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
    finally:
        os._exit(status)


def status_of(words: list[str], run: Callable[..., None]) -> int:
    """Run a command in this process, and return its exit status."""
    try:
        run(*words)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_main(first: str, *rest: str) -> None:
    """Run `python FIRST ...` as `__main__`."""
    if first == "-m":
        sys.path[0], sys.argv = os.getcwd(), list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0], sys.argv = str(Path(first).resolve().parent), [first, *rest]
        runpy.run_path(first, run_name="__main__")


LATE = (
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models.default_tokenizer",
)
"""Modules that commands import lazily."""


def import_all() -> None:
    """Import the whole package and its installed dependencies."""
    import megatron_mtp
    from megatron_mtp.megatron.runtime import prepare

    prepare()
    import transformers
    from quicker import parse_sources_once, shorten_mock_data

    ours = (name for _, name, _ in pkgutil.walk_packages(megatron_mtp.__path__, "megatron_mtp."))
    for name in (*LATE, *(name for name in ours if not name.endswith("__main__"))):
        with contextlib.suppress(ImportError):
            import_module(name)
    transformers.AutoTokenizer, transformers.AutoModelForCausalLM  # noqa: B018  lazy imports
    shorten_mock_data()
    parse_sources_once()
    from megatron_mtp.training.flags import all_parser

    own = sys.path[0]
    for folder in (ROOT, ROOT / "tests" / "support"):  # for scripts; other import paths are cached already
        sys.path[0] = str(folder)
        all_parser("pretrain_gpt.py")  # cached, so that forks do not build it again
    sys.path[0] = own


def threads() -> int:
    """Return the number of threads of this process; a fork keeps only one."""
    return len(os.listdir("/proc/self/task"))


def main(address: str, of_run: int) -> None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(f"\0{address}")
    except OSError:
        return  # another worker's server is already running
    import_all()
    assert threads() == 1, f"a fork would lack {threads() - 1} threads of this process"
    serve(listening, of_run)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
