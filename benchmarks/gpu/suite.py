"""The repository's own tests on this device: all unit tests, and those that compare with Megatron's own MTP."""

import importlib.util
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.part import Found, Setting, Table, finish, start
from benchmarks.harness import Goal

PARITY = ("tests/unit/test_mtp_parity.py", "tests/unit/test_mtp_loss.py")
NOT_HERE = ("--ignore-glob=*/test_killed_*", "--ignore-glob=*/test_benchmarks.py", "--ignore-glob=*/test_gpu_check.py")
"""Tests of whole commands, which train on the CPU or are parts of this check."""


def unit_tests(setting: Setting) -> Found:
    """What pytest counts of all unit tests."""
    return counted(setting, ["tests/unit/test_shift.py"] if setting.quick else ["tests/unit", *NOT_HERE])


def megatron_parity(setting: Setting) -> Found:
    """Losses and every gradient against Megatron's own MTP and plain torch, in float32."""
    return counted(setting, [*PARITY, *(["-k", "repeated"] if setting.quick else [])])


def counted(setting: Setting, chosen: list[str]) -> Found:
    """What pytest counts."""
    file, log = setting.folder / "tests.xml", setting.folder / "tests.log"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={file}"]
    if importlib.util.find_spec("xdist") is not None and not setting.quick:
        command += ["-n", "8", "--dist", "loadfile"]
    print(finish(start([*command, *chosen], log, OMP_NUM_THREADS="1"), log, setting.left, well=(0, 1)))
    found = counts(file)
    rows = [
        tuple(found[name] for name in ("tests", "skipped", "failed")),
        *((name, "", "failed") for name in found["names"]),
    ]
    return Found(
        found,
        [Goal("tests that fail on this device", found["failed"], 0)],
        [Table(f"Tests: {' '.join(chosen)}", ("tests", "skipped", "failed"), rows)],
    )


def counts(file: Path) -> dict[str, Any]:
    """Of a JUnit file: tests, skipped, failed, and the names of the first twenty that failed."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": len(failed),
        "names": [f"{case.get('classname')}::{case.get('name')}" for case in failed[:20]],
    }
