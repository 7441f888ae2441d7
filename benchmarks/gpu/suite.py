"""Run the repository's unit tests on this device."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.part import Setting
from benchmarks.harness import Found, Goal, Table

PYTEST = "-m pytest -q -o addopts= -p no:cacheprovider -p no:xdist --continue-on-collection-errors".split()


def unit_tests(setting: Setting, names: str) -> Found:
    """Return pytest's counts for the files `test_NAME.py` in tests/unit; a quick run counts only the first one."""
    file = setting.folder / "tests.xml"
    files = [str(next(Path("tests/unit").rglob(f"test_{name}.py"))) for name in names.split()]
    chosen = files[:1] if setting.quick else files
    command = setting.start("tests", [*PYTEST, f"--junitxml={file}", *chosen])
    print(command.printed(setting.left, well=(0, 1)))
    found = counts(file)
    rows = [
        tuple(found[name] for name in ("tests", "skipped", "failed")),
        *((name, "", "failed") for name in found["names"]),
    ]
    return Found(
        found,
        [Goal(f"{setting.name}: tests that fail on this device", found["failed"], 0)],
        [Table(f"Tests: {' '.join(chosen)}", ("tests", "skipped", "failed"), rows)],
    )


def counts(file: Path) -> dict[str, Any]:
    """Read a JUnit file: tests, skipped, failed, and the names of the first twenty failures."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": len(failed),
        "names": [f"{case.get('classname')}::{case.get('name')}" for case in failed[:20]],
    }
