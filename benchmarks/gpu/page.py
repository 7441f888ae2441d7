"""Write docs/explanation/evidence_gpu.md from the records of several runs: card, versions, date and command."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import PARTS, record
from benchmarks.harness import Found, Table

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/evidence_gpu.md"


def records_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return all records, parts in the order of `PARTS`, those of one part by date.

    Raises:
        ValueError: a folder has none, or a part ran on a CPU.
    """
    found = []
    for folder in folders:
        files = sorted(folder.glob("*.json"))
        if not files:
            raise ValueError(f"--merge names {folder}, which has no record of a part; give a folder of --out.")
        found += [record.read(file) for file in files]
    for one in found:
        if one["hardware"] is not None and one["hardware"]["on the CPU"]:
            raise ValueError(
                f"{one['part']} of {one['date']} ran on a CPU, and the page is about GPUs; run it with --device cuda."
            )
    order = {name: place for place, name in enumerate(PARTS)}
    return sorted(found, key=lambda one: (order.get(one["part"], len(order)), one["part"], one["date"]))


def page(records: Sequence[dict[str, Any]]) -> str:
    """Return the page as Markdown; text above its records is kept."""
    ran = [(one["part"], _card(one), one["date"], one["seconds"], _outcome(one)) for one in records]
    never = [f"`{name}`" for name in PARTS if name not in {one["part"] for one in records}]
    header = ("part", "card", "date", "seconds", "outcome")
    head = PAGE.read_text(encoding="utf-8").split("## Parts\n")[0]
    lines = [*head.splitlines(), "## Parts", "", *Table("Parts", header, ran).markdown()]
    lines += ["", f"Without a record: {', '.join(never)}."] if never else []
    for one in records:
        found = Found.of(one)
        lines += ["", f"## {one['part']}", "", *_about(one)]
        for table in found.tables:
            lines += ["", f"{table.title}:", "", *table.markdown()]
        if found.goals:
            rows = [
                (goal.what, goal.value, f"{goal.op} {goal.goal}", "yes" if goal.met else "no") for goal in found.goals
            ]
            lines += ["", *Table("Goals", ("goal", "measured", "wanted", "met"), rows).markdown()]
        lines += ["", *(f"Not run: {piece}: {why}" for piece, why in one["not run"].items())] if one["not run"] else []
    return "\n".join(lines) + "\n"


def _about(one: dict[str, Any]) -> list[str]:
    named = ", ".join(f"{name} {version}" for name, version in one["versions"].items() if version is not None)
    return [f"{_card(one)}; {one['date']}; {named}.", "", f"`{one['command']}`", "", f"Outcome: {_outcome(one)}."]


def _card(one: dict[str, Any]) -> str:
    return one["hardware"]["device"] if one["hardware"] is not None else "no device found"


def _outcome(one: dict[str, Any]) -> str:
    return one["status"] + ("" if one["why"] is None else f": {one['why']}".replace("|", "/"))
