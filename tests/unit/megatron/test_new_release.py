"""Code that depends on a Megatron release is in `megatron/` and nowhere else.

Flags and settings that a release adds are caught by test_unsupported.py, test_megatron_args.py and test_dense_layer.py.
"""

import ast
import re
from pathlib import Path

import pytest

from megatron_mtp.megatron.patches import loop, patch, table
from megatron_mtp.megatron.patches.patch import State, is_known, state_of

PACKAGE = Path(table.__file__).parents[2]
OF_A_RELEASE = {
    "CORE", "MODEL_ARGUMENTS", "OTHER_PARTS", "PHASES", "RANGES", "SENTENCES", "UNSUPPORTED", "WITHOUT_EFFECT",
}  # fmt: skip
BOUND = re.compile(r"[\"'][<>=]*0\.(1[6-9]|2\d)(\.\d+)?[,\"']")
"""A version of megatron-core, or a bound on it, as a string in code."""


def places(source: str) -> list[str]:
    """Return lists of Megatron's names that the source assigns, and lines that compare with a version."""
    targets = [
        target
        for node in ast.parse(source).body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
    ]
    named = [one.id for one in targets if isinstance(one, ast.Name) and one.id in OF_A_RELEASE]
    return named + [line.strip() for line in source.splitlines() if BOUND.search(line)]


def test_release_dependent_code_is_only_in_the_megatron_folder() -> None:
    found = {
        str(path.relative_to(PACKAGE)): found
        for path in PACKAGE.rglob("*.py")
        if (found := places(path.read_text(encoding="utf-8")))
    }
    assert [name for name in found if not name.startswith("megatron/")] == []
    assert {one for names in found.values() for one in names} >= OF_A_RELEASE


@pytest.mark.parametrize("planted", ['UNSUPPORTED: tuple = ("--x",)', 'if version >= "0.20.0": pass'])
def test_a_list_or_a_bound_elsewhere_is_seen(planted: str) -> None:
    assert len(places(f"import re\n{planted}\n")) == 1


def test_the_next_release_is_unknown_to_every_row_until_its_bound_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose probe answers is applied or skipped accordingly; the others are reported for review."""
    rows = [row for row in (*table.PATCHES, *loop.LOOP) if row.versions == patch.CORE]
    before = {row.target: state_of(row) for row in rows}
    monkeypatch.setattr(patch, "installed", lambda package: "0.20.0")
    assert not any(map(is_known, rows))
    unanswered = [row.target for row in rows if state_of(row) is State.UNKNOWN]
    assert all(before[target] is State.APPLIED for target in unanswered)
