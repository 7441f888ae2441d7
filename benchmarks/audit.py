"""Time an audit of two equal folders against reading both once, with peak memory; then a pair that differs.

    python benchmarks/audit.py --folder DIR    two folders of 2 GB
    python benchmarks/audit.py --quick         does it run? (small experts; the figures mean nothing)

`read` reads every file of both folders once, from start to end. `audit` compares the folders, which are copies, and
looks at every number. `differing` audits a folder with different numbers in the middle of its last file, and looks for
an explanation. All sides run in one process, in turns, and the files are in the page cache if memory allows. The peak
is that of a process that only audits, in addition to what imports need.
"""

import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

import torch

from benchmarks.convert import EXPERTS, HIDDEN, VOCABULARY, WIDTH, write_experts, write_model
from benchmarks.harness import MIB, Found, Goal, Table, in_own_process, interleave, main, resident

LARGEST = 2 * max(VOCABULARY, WIDTH) * HIDDEN
"""Bytes of the largest tensor, the embedding."""
PIECE = 2**23
ALLOWANCE = 256.0
"""MiB that a process may hold in addition to two tensors."""

GIGABYTES = 2.0
"""Default size of a folder."""


def audit(wanted: Namespace) -> Found:
    """Return seconds of every side, and peak memory of a process that only audits."""
    folder = wanted.folder / "audit"
    folder.mkdir()
    size = write_folders(folder, None if wanted.quick else GIGABYTES)
    timed = interleave(work(folder), wanted.repeats, warm_up=1)
    peak = run_alone(folder) if wanted.quick else in_own_process(run_alone, folder)
    shutil.rmtree(folder)
    two, seconds, cpu = 2 * LARGEST / MIB, timed.medians(), timed.medians("cpu")
    ratio = timed.compare("audit", "read").paired_ratio
    return Found(
        {"bytes of a folder": size, "MiB at most": peak, "MiB of two tensors": two},
        [
            Goal("audit of two equal folders over reading both once, seconds", ratio, 1.5),
            *(Goal(f"peak, {kind} folders, over two tensors, MiB", mib - two, ALLOWANCE) for kind, mib in peak.items()),
        ],
        [Table("Two folders", ("side", "s", "CPU s"), [(side, seconds[side], cpu[side]) for side in seconds])],
    )


def write_folders(folder: Path, gigabytes: float | None) -> int:
    """Write a folder, its copy, and a copy with one modified tensor; return the bytes of one.

    The folder is a model of that size, or has many small experts.
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
    from megatron_mtp.megatron.runtime import quieten

    quieten()
    from megatron_mtp.checkpoint.audit import auditing

    return {
        "read": partial(read, folder / "a", folder / "b"),
        "audit": partial(auditing.audit, folder / "a", folder / "b"),
        "differing": partial(auditing.audit, folder / "a", folder / "c"),
    }


def read(*folders: Path) -> None:
    """Read every byte of every tensor file once."""
    buffer = bytearray(PIECE)
    for folder in folders:
        for file in sorted(folder.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass


def run_alone(folder: Path) -> dict[str, Any]:
    """Return peak resident memory in MiB, above the initial amount."""
    sides = work(folder)
    before, peaks = resident("VmRSS"), {}
    for name, side in (("equal", "audit"), ("differing", "differing")):
        sides[side]()
        peaks[name] = (resident("VmHWM") - before) / MIB
    return peaks


if __name__ == "__main__":
    main(audit, __doc__, repeats={"cpu": 5, "quick": 1})
