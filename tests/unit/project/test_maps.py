"""Each subpackage's docstring lists all of its files."""

import ast
import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT

PACKAGE = ROOT / "megatron_mtp"
ROOMS = sorted(file.parent for file in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_the_map_of_a_room_names_its_files_and_no_other(room: Path) -> None:
    files = {file.name for file in room.glob("*.py")} - {"__init__.py"}
    inner = {f"{file.parent.name}/" for file in room.glob("*/__init__.py")}
    assert sorted(mapped(room)) == sorted(files | inner)


def test_the_map_names_every_room() -> None:
    rooms = [file.parent.name for file in PACKAGE.glob("*/__init__.py")]
    page = DOCUMENTS["CONTRIBUTING.md"].read_text()
    assert [room for room in rooms if f"(megatron_mtp/{room}/__init__.py)" not in page] == []


def test_the_readme_stays_short() -> None:
    assert len(DOCUMENTS["README.md"].read_text().splitlines()) < 120


def mapped(room: Path) -> dict[str, str]:
    """Return the files and folders in a subpackage's docstring (`file.py  what it is for`), with their lines."""
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    return dict(re.findall(r"^ *(\w+(?:\.py|/))  +(\S.*)", docstring, flags=re.MULTILINE))
