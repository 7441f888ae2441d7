"""Runs command lines, each in a forked child of one process that has imported torch and Megatron.

    with Server(folder) as server:
        ended = server.run(Case("train --seq-length 0"))

Every child works in a folder of its own, a copy of what earlier cases have left in `folder/assets`, changed as the case
says. `python fuzzing.py FOLDER` is the process that forks: a case a line in, what became of it a line out, both JSON.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
"""Seconds after which a child counts as hanging."""

WARNING = re.compile(r"Warning: |^  |^ERROR:megatron\.|\d%\|")
"""A library's warning, the line of source that Python shows with it, what Megatron logs of a step, a moving bar."""

Change = tuple[Any, ...]
"""What is done to a file of the folder: the name of a function of `CHANGES`, the path, and its further arguments."""


@dataclass(frozen=True)
class Case:
    """A command line, and what has to become of it.

    Attributes:
        line: verb and flags, as in a shell.
        bad: True if it must be refused, False if it must end well, None if it may do either.
        changes: of the files, before it runs.
        program: how the command is called, where it is not `megatron-mtp VERB`.
        statuses: further exit statuses that the verb documents.
        keeps: leave what it made for later cases.
        said: must stand in the refusal.
        failed: it once ended in another way, before the mistake was mended.
    """

    line: str
    bad: bool | None = True
    changes: tuple[Change, ...] = ()
    program: str | None = None
    statuses: tuple[int, ...] = ()
    keeps: bool = False
    said: str = ""
    failed: bool = False

    def __str__(self) -> str:
        verb, _, flags = self.line.partition(" ")
        return " ".join([verb, flags[-60:], *(f"[{' '.join(map(str, change))[:60]}]" for change in self.changes)])


@dataclass(frozen=True)
class Ended:
    """What a child has left: its exit status (-N for signal N, None if it was stopped), output, new files."""

    status: int | None
    out: str
    err: str
    made: list[str] = field(default_factory=list)
    seconds: float = 0.0


def faults(case: Case, ended: Ended) -> list[str]:
    """What is wrong with the end of a case; nothing, as it should be."""
    refused = ended.status not in (0, *case.statuses)
    lines = [line for line in ended.err.splitlines() if line.strip() and not WARNING.search(line)]
    found = {
        "does not end": ended.status is None,
        f"signal {-(ended.status or 0)}": (ended.status or 0) < 0,
        f"status {ended.status}": refused and (ended.status or 0) >= 0 and ended.status not in (2, None),
        "traceback": "Traceback (most recent call last)" in ended.err + ended.out,
        "wrong zero": case.bad is True and ended.status == 0,
        "refused": case.bad is False and ended.status == 2,
        f"{len(lines)} lines": ended.status == 2 and not 1 <= len(lines) <= 2,
        "says something else": ended.status == 2 and case.said not in ended.err,
        f"left {ended.made[:3]}": refused and bool(ended.made),
    }
    return [name for name, is_found in found.items() if is_found]


class Server:
    """The process that forks, from the first `with` to the end."""

    def __init__(self, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in RANKS}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def run(self, case: Case) -> Ended:
        """Run a case to its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(asdict(case)), file=self.process.stdin, flush=True)
        return Ended(**json.loads(self.process.stdout.readline()))


RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


# --- changes of files ------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Letters up to 255 are bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1"))


def cut(path: Path, size: int) -> None:
    """Keep the first bytes; of a negative size, all but the last."""
    data = path.read_bytes()
    path.write_bytes(data[:size])


def flip(path: Path, *places: int) -> None:
    """Invert the bytes at these places."""
    data = bytearray(path.read_bytes())
    for place in places:
        data[place % len(data)] ^= 0xFF
    path.write_bytes(bytes(data))


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def link(path: Path, target: str) -> None:
    path.symlink_to(target)


def put(path: Path, key: str, value: Any) -> None:
    """Set a key of a JSON object, `a.b` being b of a; None takes it away."""
    data = json.loads(path.read_text())
    *outer, last = key.split(".")
    inner = data
    for one in outer:
        inner = inner[one]
    inner[last] = value
    path.write_text(json.dumps({k: v for k, v in data.items() if (k, v) != (key, None)}))


CHANGES = {
    "write": write,
    "cut": cut,
    "flip": flip,
    "remove": remove,
    "folder": Path.mkdir,
    "link": link,
    "put": put,
}


# --- the process that forks ------------------------------------------------------------------------------------------


def load_everything() -> None:
    """What the verbs import, so that no child has to."""
    from megatron_mtp.platform import prepare

    prepare()
    import transformers

    import megatron_mtp.checkpoint.convert.depths
    import megatron_mtp.checkpoint.convert.exporting
    import megatron_mtp.checkpoint.convert.hf_form
    import megatron_mtp.checkpoint.convert.importing
    import megatron_mtp.checkpoint.proof.verify
    import megatron_mtp.command.completion
    import megatron_mtp.command.evaluate
    import megatron_mtp.data.command
    import megatron_mtp.drafting.command
    import megatron_mtp.report.command
    import megatron_mtp.training.run  # noqa: F401

    transformers.AutoTokenizer, transformers.AutoModelForCausalLM  # noqa: B018


def serve(folder: Path) -> None:
    """Answer cases until standard input ends."""
    output = os.fdopen(os.dup(1), "w")
    load_everything()
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(asdict(forked(case, folder))), file=output, flush=True)


def forked(case: dict[str, Any], folder: Path) -> Ended:
    """Run a case in a child; its folder goes when it ends."""
    place, assets = folder / "case", folder / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(assets, place, symlinks=True)
    for name, path, *arguments in case["changes"]:
        CHANGES[name](place / path, *arguments)
    before, started = set(files(place)), time.monotonic()
    child = os.fork()
    if child == 0:
        run_child(case, place, folder)
    status = wait_for(child)
    made = sorted(set(files(place)) - before)
    if case["keeps"]:
        shutil.rmtree(assets)
        place.rename(assets)
    out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
    return Ended(status, out, err, made, time.monotonic() - started)


def files(folder: Path) -> Iterator[str]:
    """Files that look whole: what is written beside, logs, caches and locks do not."""
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and not any(part in name for part in ("partial", ".lock", "cache", "tokenizer/")):
            yield name


def run_child(case: dict[str, Any], place: Path, folder: Path) -> None:
    """Never returns."""
    os.setsid()
    os.chdir(place)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    status = 1
    try:
        status = status_of(shlex.split(case["line"]), case["program"])
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def status_of(words: list[str], program: str | None) -> int:
    from megatron_mtp.command import line

    try:
        return line.main(words) if program is None else line.run(words[0], program, words[1:])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def wait_for(child: int) -> int | None:
    """The exit status, -N for signal N; a child that does not end is killed with all that it started."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
