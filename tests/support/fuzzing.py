"""Run command lines, each in a fork of a process that has imported torch and Megatron (fork_server.py).

    cases = Cases(folder)
    ended = cases.run(Case("train --seq-length 0"))

Every case runs in its own folder: a copy of what earlier cases left in `folder/assets`, with the case's changes.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fork_server

TIMEOUT = 120.0
"""Seconds after which a child counts as hanging."""

WARNING = re.compile(r"Warning: |^  |^ERROR:megatron\.|\d%\|")
"""A library's warning and the source line that Python prints with it, Megatron's log of a step, or a progress bar."""

Change = tuple[Any, ...]
"""A change to a file of the folder: the name of a function of `CHANGES`, the path, and more arguments."""


@dataclass(frozen=True)
class Case:
    """A command line, and its expected result.

    Attributes:
        line: verb and flags, as in a shell.
        bad: True if it must be rejected, False if it must succeed, None if either is fine.
        changes: changes to files before it runs.
        program: how the command is called, if not `megatron-mtp VERB`.
        statuses: additional exit statuses that the verb documents.
        keeps: keep its output for later cases.
        said: text that the error must contain.
        failed: it once failed in another way; now fixed.
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
    """Result of a child: exit status (-N for signal N, None if it was stopped), output, new files."""

    status: int | None
    out: str
    err: str
    made: list[str] = field(default_factory=list)
    seconds: float = 0.0


def faults(case: Case, ended: Ended) -> list[str]:
    """Return what is wrong with a case's result; empty if it is right."""
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


class Cases:
    """Run command lines in a folder, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._place, self._assets = folder / "case", folder / "assets"
        self._assets.mkdir(parents=True)

    def run(self, case: Case) -> Ended:
        """Run a case; its folder is deleted when the next one starts."""
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._assets, self._place, symlinks=True)
        for name, path, *arguments in case.changes:
            CHANGES[name](self._place / path, *arguments)
        before, began = set(files(self._place)), time.monotonic()
        try:
            done = fork_server.run(words(case), env=fork_server.without_ranks(), cwd=self._place, timeout=TIMEOUT)
            ended: tuple[int | None, str, str] = (done.returncode, done.stdout, done.stderr)
        except subprocess.TimeoutExpired:
            ended = (None, "", "")
        made = sorted(set(files(self._place)) - before)
        if case.keeps:
            shutil.rmtree(self._assets)
            self._place.rename(self._assets)
        return Ended(*ended, made, time.monotonic() - began)


def words(case: Case) -> list[str]:
    """Return the command's arguments; a program other than the package is called by its name."""
    given = shlex.split(case.line)
    if case.program is None:
        return [sys.executable, "-m", "megatron_mtp", *given]
    call = f"cli.run({given[0]!r}, {case.program!r}, sys.argv[1:])"
    return [sys.executable, "-c", f"import sys; from megatron_mtp.cli import main as cli; sys.exit({call})", *given[1:]]


def files(folder: Path) -> Iterator[str]:
    """Yield files that look complete: no temporary files, logs, caches or locks."""
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and not any(part in name for part in ("partial", ".lock", "cache", "tokenizer/")):
            yield name


# --- changes of files ------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Write text whose characters up to 255 are single bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1"))


def cut(path: Path, size: int) -> None:
    """Keep the first `size` bytes; if negative, drop that many at the end."""
    data = path.read_bytes()
    path.write_bytes(data[:size])


def flip(path: Path, *places: int) -> None:
    """Invert the bytes at these offsets."""
    data = bytearray(path.read_bytes())
    for place in places:
        data[place % len(data)] ^= 0xFF
    path.write_bytes(bytes(data))


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def link(path: Path, target: str) -> None:
    path.symlink_to(target)


def put(path: Path, key: str, value: Any) -> None:
    """Set a key of a JSON object (`a.b` is b inside a); None removes it."""
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
