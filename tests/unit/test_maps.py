"""The maps of the rooms: complete, and a newcomer finds a file in them by the words of the question."""

import ast
import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT

PACKAGE = ROOT / "megatron_mtp"
ROOMS = sorted(file.parent for file in PACKAGE.rglob("__init__.py"))
QUESTIONS = {
    "Where is lambda / D applied to the losses?": ("lambda / D", "losses/objective.py"),
    "Where is acceptance logged to W&B?": ("W&B|acceptance", "training/metrics.py"),
    "Where is the padding of the vocabulary removed at export?": (
        "pad|vocabulary|export",
        "checkpoint/convert/export_hf.py",
    ),
    "Where does auto choose K = 0?": ("K = 0", "decoding/method.py"),
    "What happens to an EOS inside a draft?": ("EOS|inside a draft", "decoding/batch.py"),
    "Where do shifts stop at the end of a document?": ("shift|end|document", "data/batch.py"),
    "Where are the scales of FP8 weights read?": ("FP8|scales", "checkpoint/hf/forms.py"),
    "What changes without TE?": ("changes|without TE", "model/arguments.py"),
    "Where are depths initialized from the trunk's last layer?": ("last layer", "model/initialize.py"),
    "Where are flags refused that Megatron would take in silence?": ("refused|silence", "training/checks.py"),
}
"""Question to the words that have to stand in the file's line, and the file."""


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_the_map_of_a_room_names_its_files_and_no_other(room: Path) -> None:
    files = {file.name for file in room.glob("*.py")} - {"__init__.py"}
    inner = {f"{file.parent.name}/" for file in room.glob("*/__init__.py")}
    assert sorted(mapped(room)) == sorted(files | inner)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomer_finds_the_file_of_a_question(question: str) -> None:
    words, file = QUESTIONS[question]
    lines = {str((room / name).relative_to(PACKAGE)): line for room in ROOMS for name, line in mapped(room).items()}
    assert [name for name, line in lines.items() if all(word.lower() in line.lower() for word in words.split("|"))] == [
        file
    ]


def test_the_map_names_every_room() -> None:
    rooms = [file.parent.name for file in PACKAGE.glob("*/__init__.py")]
    page = DOCUMENTS["CONTRIBUTING.md"].read_text()
    assert [room for room in rooms if f"(megatron_mtp/{room}/__init__.py)" not in page] == []


def test_the_readme_stays_short() -> None:
    assert len(DOCUMENTS["README.md"].read_text().splitlines()) < 120


def mapped(room: Path) -> dict[str, str]:
    """The files and rooms in the docstring of a room, one a line (`file.py  what it is for`), with their lines."""
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    return dict(re.findall(r"^ *(\w+(?:\.py|/))  +(\S.*)", docstring, flags=re.MULTILINE))
