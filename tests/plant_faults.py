"""Plant each fault of planted_faults.toml in a copy of this tree, and count the faults that the first tier of tests
catches.

    .venv/bin/python tests/plant_faults.py                  all faults; a second call resumes an interrupted one
    .venv/bin/python tests/plant_faults.py attach seeds     faults with one of these words in their name or file

A fault is caught if one of the tests in its row fails with it, and all of them pass without it. Results are appended to
runs/planted_faults.jsonl, and are valid until the package, the tests or the row changes. The exit status is 0 if at
least 95 % are caught.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from time import monotonic

ROOT = Path(__file__).parents[1]
TABLE, RESULTS = ROOT / "tests" / "planted_faults.toml", ROOT / "runs" / "planted_faults.jsonl"
LEAST = 0.95
"""Fraction of faults that the first tier must catch."""
TIMEOUT = 300
"""Seconds after which a fault's tests are stopped; the fault then counts as not caught."""
SOUND = "none"
"""Name of the result without a fault."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: name of the fault.
        file: edited file of the package, relative to the root.
        before, after: text that occurs once in the file, and its replacement.
        breaks: one sentence on what goes wrong.
        seen_by: pytest names of tests of the first tier that catch it.
    """

    name: str
    file: str
    before: str
    after: str
    breaks: str
    seen_by: tuple[str, ...]

    @property
    def room(self) -> str:
        """Folder of the package that has the fault, or its file."""
        return Path(self.file).parts[1].removesuffix(".py")

    def planted(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: `before` is missing or occurs more than once.
        """
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: the text before occurs {count} times in {self.file}; correct its row.")
        return text.replace(self.before, self.after)


@dataclass(frozen=True)
class Result:
    """Result of a fault's tests: the first that failed, or None; and the error if they could not run."""

    name: str
    key: str
    seen_by: str | None
    seconds: float
    trouble: str | None = None


def read_table() -> list[Fault]:
    """Return the faults in the order of the file."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [Fault(name, **{**row, "seen_by": tuple(row["seen_by"])}) for name, row in rows.items()]


def main(words: Sequence[str]) -> int:
    faults = [one for one in read_table() if not words or any(word in f"{one.name} {one.file}" for word in words)]
    if not faults:
        print(f"plant_faults: error: no fault of {TABLE.name} has {' or '.join(words)} in its name.", file=sys.stderr)
        return 2
    files = _files()
    tree, known = _digest(files), _known()
    tests = sorted({test for fault in faults for test in fault.seen_by})
    jobs: list[tuple[Fault | None, str]] = [(None, f"{tree} {_hash(tests)}")]
    jobs += [(fault, f"{tree} {_hash(asdict(fault))}") for fault in faults]
    waiting = [(fault, key) for fault, key in jobs if key not in known]
    known |= _tried(waiting, tests, files)
    results = [known[key] for _, key in jobs]
    return _report(faults, results[0], results[1:])


def _tried(waiting: list[tuple[Fault | None, str]], tests: list[str], files: list[Path]) -> dict[str, Result]:
    """Try faults by key, as many at a time as there are cores; results are saved as they come in."""
    found: dict[str, Result] = {}
    RESULTS.parent.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(os.cpu_count()) as pool,
        RESULTS.open("a", encoding="utf-8") as kept,
    ):
        copies = SimpleQueue[Path]()
        for number in range(min(os.cpu_count() or 1, len(waiting))):
            copies.put(_copy(files, Path(folder) / str(number)))
        running = [pool.submit(_try, fault, tests, key, copies) for fault, key in waiting]
        try:
            for number, done in enumerate(as_completed(running), start=1):
                result = done.result()
                found[result.key] = result
                print(json.dumps(asdict(result)), file=kept, flush=True)
                print(f"[{number}/{len(running)}] {result.name}: {_said(result)}, {result.seconds:.0f} s", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C
    return found


def _report(faults: list[Fault], sound: Result, results: list[Result]) -> int:
    rows = [
        (fault.name, fault.room, _said(result), f"{result.seconds:.0f}")
        for fault, result in zip(faults, results, strict=True)
    ]
    _print_table([("fault", "room", "seen by", "seconds"), *rows])
    planted, seen = Counter(fault.room for fault in faults), Counter[str]()
    seen.update(fault.room for fault, result in zip(faults, results, strict=True) if result.seen_by)
    _print_table([("room", "seen", "planted"), *((room, str(seen[room]), str(planted[room])) for room in planted)])
    if sound.seen_by or sound.trouble:
        print(f"plant_faults: error: without a fault the tests do not pass: {_said(sound)}.", file=sys.stderr)
        return 2
    share = seen.total() / len(faults)
    print(f"{seen.total()} of {len(faults)} seen ({share:.1%})")
    return int(share < LEAST)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    print()


def _said(result: Result) -> str:
    if result.name == SOUND:
        return result.seen_by or result.trouble or "all tests pass"
    return result.seen_by or f"NOT SEEN{f' ({result.trouble})' if result.trouble else ''}"


def _try(fault: Fault | None, tests: list[str], key: str, copies: "SimpleQueue[Path]") -> Result:
    """Run a fault's tests with the fault in a copy of the tree, or all named tests without a fault."""
    copy = copies.get()
    try:
        if fault is None:
            return _run(copy, SOUND, key, tests)
        file = copy / fault.file
        sound, status = file.read_text(encoding="utf-8"), file.stat()
        file.write_text(fault.planted(sound), encoding="utf-8")
        try:
            return _run(copy, fault.name, key, fault.seen_by)
        finally:
            file.write_text(sound, encoding="utf-8")
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # cached bytecode depends on it
    finally:
        copies.put(copy)


def _run(copy: Path, name: str, key: str, tests: Iterable[str]) -> Result:
    command = [sys.executable, *"-m pytest -x -q -n0 -rfE -p no:cacheprovider".split(), *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begun, trouble = monotonic(), None
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=None if name == SOUND else TIMEOUT)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, trouble = "", f"not ended after {TIMEOUT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", said, re.MULTILINE)
    if trouble is None and process.returncode not in (0, 1):
        trouble = f"pytest ended with status {process.returncode}"
    seen_by = failed[1] if failed and trouble is None else None
    return Result(name, key, seen_by, round(monotonic() - begun, 1), trouble)


def _files() -> list[Path]:
    """Return the tree's files relative to the root: committed and new ones, without those that git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()})


def _copy(files: list[Path], folder: Path) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)
    return folder


def _digest(files: list[Path]) -> str:
    """Return a digest of the package and the tests. The table is excluded, since each row has its own key."""
    digest = hashlib.sha256()
    for file in files:
        if file.parts[0] in ("megatron_mtp", "tests") and ROOT / file != TABLE:
            digest.update(f"{file}\0".encode() + (ROOT / file).read_bytes())
    return digest.hexdigest()[:16]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _known() -> dict[str, Result]:
    """Return the saved results by key."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {result.key: result for result in (Result(**json.loads(line)) for line in lines if line.endswith("}"))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
