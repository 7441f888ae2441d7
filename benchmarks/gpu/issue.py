"""Final output of a run, to paste into an issue: card, versions, outcome of each part, and the ratios."""

from collections import Counter
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.gpu import record
from benchmarks.harness import Found, versions

WIDTH = 110


def block(folder: Path) -> str:
    """Return the record of a run that has ended, in a code fence."""
    happened = record.events(folder)
    begun = next(each for each in happened if each["what"] == "starts")
    records = {name: record.read(folder / f"{name}.json") for name in record.parts_of(folder, "ended")}
    outcomes = [(name, *outcome(records.get(name))) for name in begun["parts"].split()]
    count = Counter(word for _, word, _ in outcomes)
    lines = [
        "gpu_check of megatron-mtp: " + ", ".join(f"{count[word]} {word}" for word in ("passed", "failed", "skipped")),
        *(["This was a try, whose figures mean nothing."] if "figures" in begun else []),
        *beside("card", card([*records.values()])),
        *beside("versions", named(next((one["versions"] for one in records.values()), {}) or versions())),
        *beside("command", begun["command"]),
        "",
    ]
    for name, word, why in outcomes:
        lines += beside(word, f"{name:14}  {why}")
    for each in happened:
        if each["what"] in ("failed", "line failed"):
            lines += beside("failed", f"{each.get('line', 'the run'):14}  {each['why']}")
    goals = [(name, goal) for name, *_ in outcomes if name in records for goal in Found.of(records[name]).goals]
    lines += ["", *(f"{name:14}  {goal}" for name, goal in goals)]
    text = "\n".join(lines).rstrip().replace("`", "'")  # no backquote may close the fence
    return f"\nTo help, paste this block into an issue:\n\n```text\n{text}\n```"


def outcome(one: dict[str, Any] | None) -> tuple[str, str]:
    """Return a part's result from its record, if it began: passed, failed or skipped.

    And its seconds, or the reason.
    """
    if one is None:
        return "skipped", "the run ended before it"
    if one["status"] == "not run":
        return "skipped", one["why"]
    if one["status"] != "ran":
        return "failed", one["why"]
    missed = any(not goal.met for goal in Found.of(one).goals) and not one["hardware"]["on the CPU"]
    return ("failed", "a goal was missed, see below") if missed else ("passed", f"{one['seconds']} s")


def card(records: list[dict[str, Any]]) -> str:
    """Return the device and its driver."""
    found = next((one["hardware"] for one in records if one["hardware"] is not None), None)
    if found is None:
        return "no part has found one"
    return ", ".join([found["device"], *(f"{name} {found[name]}" for name in ("driver", "CUDA") if found.get(name))])


def named(found: dict[str, str | None]) -> str:
    """Return versions in one line."""
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())


def beside(word: str, text: str) -> list[str]:
    """Return the text in lines after a word."""
    return wrap(text, WIDTH, initial_indent=f"{word:10}", subsequent_indent=" " * 10, break_on_hyphens=False)
