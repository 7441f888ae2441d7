"""Audit of two equal folders against reading both once, and the peak of memory; a pair that differs beside it.

    python benchmarks/audit.py [--gigabytes 2] [--repeats 5] [--folder DIR]
    python benchmarks/audit.py --quick     does it run? (small experts; the figures mean nothing)

`read` reads every file of both folders once, from front to end. `audit` compares the folders, which are copies, and
looks at every number. `differing` is the audit of a folder with other numbers in the middle of its last file, for which
an explanation is sought. All sides run in one process, in turns, and the files are in the system's cache where memory
allows. The peak is that of a process that audits alone, above what importing needs.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch

from benchmarks.convert import EXPERTS, HIDDEN, VOCABULARY, WIDTH, write_experts, write_model
from benchmarks.harness import MIB, Goal, add_common_flags, compare, hardware, interleave, limit_threads, report

LARGEST = 2 * max(VOCABULARY, WIDTH) * HIDDEN
"""Bytes of the largest tensor, the embedding."""
PIECE = 2**23
ALLOWANCE = 256.0
"""MiB that a process may hold beside two tensors."""


def main() -> None:
    args = parse_args()
    if args.side:
        print(json.dumps(run_alone(args.folder)))
        return
    limit_threads(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    size = write_folders(args.folder, None if args.quick else args.gigabytes)
    sides = work(args.folder)
    spent = interleave(sides, args.repeats or (1 if args.quick else 5), warm_up=1)
    seconds = {name: [one.wall for one in values] for name, values in spent.items()}
    peak = (run_alone if args.quick else in_own_process)(args.folder)
    results = {
        "bytes of a folder": size,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "CPU seconds": {name: statistics.median(one.cpu for one in values) for name, values in spent.items()},
        "bytes per second of an audit": round(2 * size / statistics.median(seconds["audit"])),
        "peak_mib": peak,
        "two largest tensors, MiB": 2 * LARGEST / MIB,
    }
    two = 2 * LARGEST / MIB
    ratio = compare(seconds["audit"], seconds["read"])
    goals = [
        Goal("audit of two equal folders over reading both once, seconds", ratio.paired_ratio, 1.5),
        *(Goal(f"peak, {kind} folders, over two tensors, MiB", held - two, ALLOWANCE) for kind, held in peak.items()),
    ]
    shutil.rmtree(args.folder)
    report("audit", hardware(on_cpu=True), results, goals)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_common_flags(parser, {"any": 5})
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of a folder (default: 2)")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-audit"), help="scratch, removed at the end")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_folders(folder: Path, gigabytes: float | None) -> int:
    """A folder, its copy, and a copy in which one tensor has other numbers; returns the bytes of one.

    The folder is a model of that size, or many small experts.
    """
    if gigabytes is None:
        write_experts(folder / "a", 1, EXPERTS)
    else:
        write_model(folder / "a", gigabytes)
    for name in ("b", "c"):
        shutil.copytree(folder / "a", folder / name)
    file = sorted((folder / "c").glob("*.safetensors"))[-1]
    with open(file, "r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(bytes(torch.randint(0, 100, (2**22 if gigabytes else 2**12,), dtype=torch.uint8).numpy()))
    return sum(file.stat().st_size for file in (folder / "a").iterdir())


def work(folder: Path) -> dict[str, Callable[[], object]]:
    from megatron_mtp.runtime import quieten

    quieten()
    from megatron_mtp.checkpoint.audit.auditing import audit

    return {
        "read": partial(read, folder / "a", folder / "b"),
        "audit": partial(audit, folder / "a", folder / "b"),
        "differing": partial(audit, folder / "a", folder / "c"),
    }


def read(*folders: Path) -> None:
    """Every byte of every file of tensors, once."""
    buffer = bytearray(PIECE)
    for folder in folders:
        for file in sorted(folder.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass


def in_own_process(folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run_alone(folder: Path) -> dict[str, Any]:
    """MiB of resident memory at most, above what was there before."""
    sides = work(folder)
    before, peaks = _status("VmRSS"), {}
    for name, side in (("equal", "audit"), ("differing", "differing")):
        sides[side]()
        peaks[name] = (_status("VmHWM") - before) / 1024
    return peaks


def _status(field: str) -> int:
    """Kilobytes, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


if __name__ == "__main__":
    main()
