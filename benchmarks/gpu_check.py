"""Checks that need a CUDA device; torch and Megatron are imported once, and every part is a fork with its own limit.

    scripts/gpu_check.sh                                  all parts; results in runs/gpu/PART.json as they come in
    scripts/gpu_check.sh --short                          is training correct, and how fast? (at most 4 minutes)
    scripts/gpu_check.sh --parts losses graphs --out DIR  some of the parts that --list shows
    scripts/gpu_check.sh --device cpu --quick [--short]   does it run? (the figures mean nothing; no page)
    scripts/gpu_check.sh start --out DIR --minutes 13     start, and return at once
    scripts/gpu_check.sh follow --out DIR --seconds 170 --pack FILE.tgz
                                                          print new events until all parts have ended
    scripts/gpu_check.sh --merge DIR [DIR ...]            docs/explanation/evidence_gpu.md from several runs

A part that fails, crashes or exceeds its limit affects no other part's results, and keeps its own so far. A part that
lacks a package is not run, and its record has the reason.

Exits with status 0 if every part ran and met its goals, 1 if not, and 77 (skipped) without a CUDA device. After its
seconds have passed, `follow` reports on finished parts. A finished run prints a block to paste into an issue.
Without `start` or `follow` the last line is one JSON object, as for every benchmark (`harness.report`).
"""

import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # for `fork_server`

from benchmarks.gpu import PARTS, SHORT, record
from benchmarks.gpu.issue import block
from benchmarks.gpu.page import PAGE, page, records_of
from benchmarks.harness import Found, Goal, Table, cpu_name
from benchmarks.harness import report as report_of
from megatron_mtp.common.errors import sentences
from megatron_mtp.common.files import written_beside

SKIPPED = 77
FOLLOWED = "followed"
"""The file that stores how many events have been shown."""
PACK_EVERY = 20.0
HAS_CUDA = """
import ctypes, sys
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
sys.exit(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value)
"""


def main() -> int:
    """Run the parts and print their results, start or follow a run, or merge the results of several runs."""
    args = parse(sys.argv[1:])
    with sentences("gpu_check"):
        if args.list:
            return list_parts(chosen_parts(args.parts, args.short), args.short)
        if args.merge:
            return merge(args.merge, PAGE)
        if args.verb == "follow":
            records = follow(args.out, args.seconds, args.pack)
            if has_ended(args.out):
                print(block(args.out))
            return status_of(args.out, records)
        chosen = chosen_parts(args.parts, args.short)
        if args.device == "cuda" and not has_cuda():
            print("gpu_check: skipped, since there is no CUDA device here; --device cpu --quick tries its parts.")
            return SKIPPED
        process = start(args, chosen)
        if args.verb == "start":
            print(f"gpu_check: process {process} runs {len(chosen)} parts; `follow --out {args.out}` shows them.")
            return 0
        try:
            records = follow(args.out, float("inf"), args.pack)
        except BaseException:
            os.kill(process, signal.SIGKILL)
            raise
    report(records, block(args.out))
    return status_of(args.out, records)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("verb", nargs="?", choices=("start", "follow"), help="begin a run that outlives this call, or watch one")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    some = parser.add_mutually_exclusive_group().add_argument
    some("--parts", nargs="+", default=[], metavar="PART", help="default: all, in the order of --list")
    some("--short", action="store_true", help=f"parity, a first step and a timed one, in {SHORT:.0f} s at most")
    add("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    add("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: runs/gpu")
    add("--minutes", type=float, default=float("inf"), metavar="M", help="of the run; parts that are left do not run")
    add("--seconds", type=float, default=float("inf"), metavar="S", help="how long to follow; default: to the end")
    add("--pack", type=Path, metavar="FILE", help=f"an archive (.tgz) of DIR, made anew every {PACK_EVERY:.0f} s")
    add("--list", action="store_true", help="print the parts, their kinds and limits")
    add(
        "--merge",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="write docs/explanation/evidence_gpu.md, run nothing",
    )
    return parser.parse_args(argv)


def list_parts(chosen: list[str], short: bool) -> int:
    """List all parts in the order in which they run."""
    for name in chosen:
        part = PARTS[name]
        given = " ".join(f"{key}={value}" for key, value in part.given.items())
        kind = "alone" if part.alone else "together"
        print(f"{name:15} {kind:8} {part.limit(short):4.0f} s  {part.line:5}  {part.function.split(':')[1]} {given}")
    return 0


def chosen_parts(names: list[str], short: bool) -> list[str]:
    """Return the parts of a short run, or with these names, or all; in the table's order.

    Raises:
        ValueError: no part has such a name.
    """
    if short:
        return [name for name, part in PARTS.items() if part.short]
    if unknown := sorted(set(names) - set(PARTS)):
        raise ValueError(f"--parts names {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    return [name for name in PARTS if name in names or not names]


def has_cuda() -> bool:
    """Return whether there is a CUDA device: ask the driver in a separate process, since importing torch takes a
    minute.
    """
    return subprocess.run([sys.executable, "-c", HAS_CUDA], capture_output=True).returncode == 0


# A detached run: a separate process that holds a lock on the folder's events.


def start(args: argparse.Namespace, chosen: list[str]) -> int:
    """Start a run and return its process; when it ends, so does everything that it started."""
    args.out.mkdir(parents=True, exist_ok=True)
    begun, command = time.monotonic(), shlex.join(["scripts/gpu_check.sh", *sys.argv[1:]])
    with open(args.out / record.EVENTS, "a") as events:
        if not locked(events, fcntl.LOCK_EX):
            raise ValueError(f"--out is {args.out}, where a run goes on; follow it, or give another folder.")
        events.truncate(0)
        (args.out / FOLLOWED).unlink(missing_ok=True)
        tried = {"figures": "mean nothing"} if args.quick or args.device == "cpu" else {}
        record.event(args.out, "starts", parts=" ".join(chosen), command=command, **tried)
        sys.stdout.flush()
        if process := os.fork():
            return process
        os.setsid()  # the lock stays with this process and its forks
        with open(args.out / "run.log", "wb") as log, open(os.devnull) as nothing:
            for number, stream in enumerate((nothing, log, log)):
                os.dup2(stream.fileno(), number)
        try:
            from benchmarks.gpu.run import Run

            until = begun + min(60 * args.minutes, SHORT if args.short else float("inf"))
            sizes = args.quick, args.short, args.device == "cpu"
            Run(args.out.resolve(), tuple(chosen), command, *sizes, until).carry_out()
        except BaseException as error:
            traceback.print_exc()
            record.event(args.out, "failed", why=f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            os._exit(0)


def locked(events: IO[str], kind: int) -> bool:
    """Take the lock on a run's events, unless the run is still going."""
    try:
        fcntl.flock(events, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def follow(folder: Path, seconds: float, archive: Path | None) -> list[dict[str, Any]]:
    """Print events since the last call, until the run or the time ends; return the records of finished parts."""
    if not (folder / record.EVENTS).exists():
        raise ValueError(f"--out is {folder}, where no run has begun; give the folder of a start.")
    until, packed = time.monotonic() + seconds, 0.0
    with open(folder / record.EVENTS) as events, open(folder / FOLLOWED, "a+") as followed:
        followed.seek(0)
        events.seek(int(followed.read() or 0))
        while True:
            ended = locked(events, fcntl.LOCK_SH)
            if ended:
                settle(folder)
            while (line := events.readline()).endswith("\n"):
                print(in_words(**json.loads(line)), flush=True)
                followed.truncate(0)
                followed.write(f"{events.tell()}")
                followed.flush()
            over = ended or time.monotonic() > until
            if archive and (over or time.monotonic() - packed > PACK_EVERY):
                packed = time.monotonic()
                pack(folder, archive)
            if over:
                return [record.read(folder / f"{name}.json") for name in record.parts_of(folder, "ended")]
            time.sleep(0.2)


def settle(folder: Path) -> None:
    """Complete the records of a run that was killed, along with its parts."""
    if has_ended(folder):
        return
    for name in [name for name in record.parts_of(folder, "begins") if name not in record.parts_of(folder, "ended")]:
        found = record.read(folder / f"{name}.json")
        if found["status"] == "running":
            found |= {"status": "killed", "why": "the run was ended from outside"}
        record.end(folder, found)
    for left in folder.glob(f"*{record.SCRATCH}"):
        shutil.rmtree(left)
    record.event(folder, "failed", why="the run was ended from outside")


def has_ended(folder: Path) -> bool:
    """Return whether the run has recorded its end."""
    return any(each["what"] in ("all ended", "failed") for each in record.events(folder))


def in_words(at: float, what: str, part: str = "", status: str = "", why: str | None = None, **more: Any) -> str:
    """Return an event as a line: time, event, and results that have goals."""
    goals = [Goal(one["what"], one["value"], one["goal"], one["op"]) for one in more.pop("goals", [])]
    said = [time.strftime("%H:%M:%S", time.localtime(at)), what, part, status]
    said += [f"{key} {value}" for key, value in more.items()]
    return "  ".join(filter(None, [*said, why and f"({why})", "; ".join(map(str, goals))]))


def pack(folder: Path, archive: Path) -> None:
    """Write all files of the run into one archive, through a temporary file."""
    with written_beside(archive) as beside, tarfile.open(beside, "w:gz") as packed:
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.suffix != ".partial" and file.resolve() != archive.resolve():
                packed.add(file, file.name)


def status_of(folder: Path, records: list[dict[str, Any]]) -> int:
    """Return 1 if a part has failed or not met its goals, which do not count on a CPU."""
    failed = any(each["what"] in ("failed", "line failed") for each in record.events(folder))
    on_cpu = any(each["hardware"]["on the CPU"] for each in records if each["hardware"])
    missed = any(not goal["met"] for each in records for goal in each["goals"])
    ended_well = all(each["status"] in record.ENDED_WELL for each in records)
    return int(failed or not ended_well or (missed and not on_cpu))


def report(records: list[dict[str, Any]], ending: str) -> None:
    """Print all tables and goals, and the block."""
    found = [Found.of(one) for one in records]
    machine = next((one["hardware"] for one in records if one["hardware"]), None) or {"device": cpu_name()}
    rows = [(one["part"], one["status"], one["seconds"], one["why"] or "") for one in records]
    tables = [*(table for one in found for table in one.tables), Table("Parts", ("part", "outcome", "s", "why"), rows)]
    left_out = {f"{one['part']}: {piece}": why for one in records for piece, why in one["not run"].items()}
    results = {one["part"]: {key: one[key] for key in ("status", "why", "results", "not run")} for one in records}
    whole = Found(results, [goal for one in found for goal in one.goals], tables, left_out)
    report_of("gpu_check", machine, whole, ending)


def merge(folders: list[Path], target: Path) -> int:
    """Write the page of several runs, through a temporary file."""
    text = page(records_of(folders))
    with written_beside(target) as beside:
        beside.write_text(text, encoding="utf-8")
    print(f"gpu_check: wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
