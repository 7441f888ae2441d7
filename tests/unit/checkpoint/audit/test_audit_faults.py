"""Every planted fault is found, most with the right explanation first; intact pairs raise no alarm."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from audit_faults import Fault, faults, sound, spoiled
from judged_models import QUIET

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore

FAULTS = faults()
LEAST_RIGHT = 0.95
"""Required fraction; 68 of 70 are right when a folder is compared with its copy and with a checkpoint."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return sound(tmp_path_factory.mktemp("sound"))


def first(result: dict[str, Any]) -> str:
    return result["findings"][0]["guess"] if result["findings"] and not result["ok"] else "nothing"


@pytest.fixture(scope="module")
def found(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the audit's findings by fault; computed once."""
    root = tmp_path_factory.mktemp("spoiled")

    @cache
    def result(fault: Fault) -> str:
        return first(audit(folders[fault.family], spoiled(fault, folders[fault.family], root / str(fault))))

    return result


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(fault: Fault, found: Any) -> None:
    assert found(fault) != "nothing"


def test_most_faults_are_explained_correctly(found: Any) -> None:
    rows = [(fault.family, fault.kind, fault.what, fault.guess, found(fault)) for fault in FAULTS]
    assert len(rows) >= 60
    assert len(Counter(fault.kind for fault in FAULTS)) == 6
    assert_right(rows)


@pytest.mark.matrix
@pytest.mark.usefixtures("megatron")
def test_the_same_faults_are_found_against_a_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    saved = {name: tmp_path / f"{name}-saved" for name in folders}
    for name, folder in folders.items():
        hf_to_mcore(folder, saved[name], QUIET)
    rows = []
    for fault in FAULTS:
        folder = spoiled(fault, folders[fault.family], tmp_path / str(fault))
        rows.append((fault.family, fault.kind, fault.what, fault.guess, first(audit(saved[fault.family], folder))))
    assert [row for row in rows if row[-1] == "nothing"] == []
    assert_right(rows)


def assert_right(rows: list[tuple[str, str, str, str, str]]) -> None:
    """Print the table, and count the correct explanations."""
    for family, kind, what, owed, said in rows:
        print(f"{family:<12} {kind:<14} {what:<34} {said}{'' if said == owed else f' (not: {owed})'}")
    right = sum(owed == said for *_, owed, said in rows)
    print(f"{len(rows)} faults, {right} with the right explanation first")
    assert right >= LEAST_RIGHT * len(rows)
