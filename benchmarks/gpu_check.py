"""What only a CUDA device can show: every part is a process of its own, with its own limit, log and figures.

    scripts/gpu_check.sh --out DIR                        all parts on a CUDA device; DIR/PART.json and DIR/PART.log
    scripts/gpu_check.sh --parts losses graphs --out DIR  some, of those that `gpu.PARTS` lists
    scripts/gpu_check.sh --merge DIR [DIR ...]            docs/gpu.md from the figures of several runs
    python benchmarks/gpu_check.py --device cpu --quick   does it run? (the figures mean nothing; no page)

A part that fails, crashes or takes longer than --limit loses no other part's figures, nor those that it had until then.
A part that lacks a package says so and is not run.

Ends with status 0 if every part ran and met its goals, 1 if not, and 77, which test runners take for "skipped", without
a CUDA device. As every benchmark it prints one JSON object in its last line (`harness.report`).
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from benchmarks.gpu import PARTS, Part, record

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 77
LIMIT, SPARE = 150.0, 10.0
"""Seconds that a part may take, and how much earlier it should end by itself."""


def main() -> int:
    """Run the parts and print what they found, or merge what they have found."""
    from megatron_mtp.errors import sentences

    args = parse(sys.argv[1:])
    with sentences("gpu_check"):
        if args.merge:
            return merge(args.merge, args.page)
        chosen = chosen_parts(args.parts)
        if args.device == "cuda" and not has_cuda():
            print("gpu_check: skipped, since there is no CUDA device here; --device cpu --quick tries its parts.")
            return SKIPPED
        args.out.mkdir(parents=True, exist_ok=True)
        if args.device == "cuda":
            read_once()
        found = [run(name, part, args) for name, part in chosen.items()]
    return report_of(found, args.device == "cpu")


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", default=[], metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default: runs/gpu")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help=f"of a part; default: {LIMIT:.0f}"
    )
    parser.add_argument("--merge", nargs="+", type=Path, default=[], metavar="DIR", help="write the page, run nothing")
    parser.add_argument("--page", type=Path, default=Path("docs/gpu.md"), metavar="FILE", help="default: docs/gpu.md")
    return parser.parse_args(argv)


def chosen_parts(names: list[str]) -> dict[str, Part]:
    """Raises ValueError at a name that no part has."""
    if unknown := sorted(set(names) - set(PARTS)):
        raise ValueError(f"--parts names {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    return {name: PARTS[name] for name in names or PARTS}


def has_cuda() -> bool:
    """Asked by another process, so that this one keeps no memory of the device."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def read_once() -> None:
    """Import what all parts do: a disk that has not read it before took a minute, which is no part's own time."""
    print("gpu_check: reading torch, CUDA and Megatron once", file=sys.stderr, flush=True)
    code = "import benchmarks.gpu.part, torch; torch.ones(1, device='cuda')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment("cuda"), capture_output=True)


def run(name: str, part: Part, args: argparse.Namespace) -> dict[str, Any]:
    """The record of a part, whatever became of it."""
    started = record.begin(name, shlex.join(["python", *sys.argv]))
    why = part.missing(args.device == "cpu")
    record.write(args.out, started if why is None else started | {"status": "not run", "why": why})
    if why is None:
        print(f"gpu_check: {name}, at most {args.limit:.0f} s", file=sys.stderr, flush=True)
        status, seconds = outcome(name, part, args)
        ended = record.read(args.out / f"{name}.json")
        if ended["status"] == "running":
            ended |= {"status": "failed" if isinstance(status, int) else "killed", "seconds": seconds}
            ended["why"] = f"{_in_words(status)}: {_end_of(args.out / f'{name}.log')}"
            record.write(args.out, ended)
    return record.read(args.out / f"{name}.json")


def outcome(name: str, part: Part, args: argparse.Namespace) -> tuple[int | str, float]:
    """The part's exit status, or that it was killed, and how long it took; nothing that it started is left behind."""
    own_time = max(args.limit - SPARE, args.limit / 2)
    words = [part.function, name, str(args.out.resolve()), str(own_time), *(["quick"] if args.quick else [])]
    begun = time.monotonic()
    with open(args.out / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker", *words],
            cwd=ROOT,
            env=environment(args.device),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            status = f"killed after {args.limit:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, round(time.monotonic() - begun, 1)


def environment(device: str) -> Mapping[str, str]:
    """A part finds this checkout's packages, and with `cpu` no device."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **hidden}


def _in_words(status: int | str) -> str:
    if isinstance(status, str):
        return status
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _end_of(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-300:] or "it printed nothing"


def report_of(found: list[dict[str, Any]], on_cpu: bool) -> int:
    """Print all tables and goals; 1 if a part has not ended well, or not met its goals."""
    from benchmarks.harness import Table, cpu_name, report

    machine = next((one["hardware"] for one in found if one["hardware"]), None) or {"device": cpu_name()}
    goals = [goal for one in found for goal in record.goals_of(one)]
    tables = [f"{one['title']}\n{Table(one['header'], one['rows'])}" for each in found for one in each["tables"]]
    rows = [(one["part"], one["status"], one["seconds"], one["why"] or "") for one in found]
    tables.append(str(Table(("part", "outcome", "s", "why"), rows)))
    tables += [f"not run: {each['part']}: {piece}: {why}" for each in found for piece, why in each["not run"].items()]
    results = {one["part"]: {key: one[key] for key in ("status", "why", "results", "not run")} for one in found}
    report("gpu_check", machine, results, goals, tables)
    ended_well = all(one["status"] in record.ENDED_WELL for one in found)
    return int(not ended_well or not (on_cpu or all(goal.met for goal in goals)))


def merge(folders: list[Path], target: Path) -> int:
    """Write the page of several runs, beside and renamed."""
    from benchmarks.gpu.page import page, records_of

    text = page(records_of(folders))
    beside = target.with_name(f"{target.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(target)
    print(f"gpu_check: wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
