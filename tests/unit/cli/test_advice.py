"""No text of this package advises deleting MTP weights, or counting none: a head that took training would be lost.

Reads all strings of the code, adjacent ones joined, and the prose of the pages. `drop-mtp` writes a copy, so a text may
mention it together with that.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import strings

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WEIGHTS = r"(tensors?|weights?|layers?|depths?|heads?|mtp|scales?|others?)"
VERBS = r"(remove|delete|drop|discard|strip|erase|omit)"
BETWEEN = r"(\s+(out|that|the|these|those|all|any|its|one|wrong|other|stored))*\s+\W*"
HARMFUL = {
    "delete weights": rf"\b{VERBS}\b{BETWEEN}{WEIGHTS}\b",
    "delete them": rf"\b({WEIGHTS}\b.*|mtp.*)\b{VERBS} (it|them)\b(?!.*--)",
    "take them out": r"\btake\s+([\w`'*.]+\s+){1,4}out\b",
    "count none": r"\bput (a |in )?0\b|\bset\b[^.;]*\b(to|at) (0|zero|what the files hold)\b|\bzero (it|them|the)\b",
    "drop-mtp": r"\bdrop-mtp\b",
}
"""Harmful advice, and patterns of its wording."""
MAYBE = re.compile("remove|delete|drop|discard|strip|erase|omit|take|put|set|zero", re.I)
CONCERNS = re.compile(r"mtp|depth|head|tensor|weight|nextn|layer|config", re.I)
COPIES = re.compile(r"\b(copy|copies|another checkpoint)\b", re.I)
MEANT = {
    "remove the wrong one": "one of two scales of a weight, of which a loader takes either",
    "remove the scale if the weight was replaced": "of a whole weight, which some loaders would multiply",
    "take them out of the call": "arguments of a function",
    "attach, drop | add MTP layers to a checkpoint; remove them": "the glossary's words for two verbs",
}
"""Sentences that are not such advice, by a part of each, and why."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield place and text of every string in the code except docstrings, and of every paragraph of a page."""
    for path in sorted((ROOT / "megatron_mtp").rglob("*.py")):
        yield from ((f"{path.relative_to(ROOT)}:{line}", text) for line, text in strings(path.read_text("utf-8")))
    for path in PAGES:
        prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S)
        yield from ((str(path.relative_to(ROOT)), text) for text in re.split(r"\n\s*\n|\n(?=[|-])", prose))


def harmful(text: str) -> list[str]:
    """Return harmful advice about MTP weights in a text."""
    found = []
    if not MAYBE.search(text):
        return []
    for sentence in re.split(r"(?<=[.:])\s+", re.sub(r"\s+", " ", text)):
        if " " not in sentence or not CONCERNS.search(sentence) or any(part in sentence for part in MEANT):
            continue
        kinds = [kind for kind, pattern in HARMFUL.items() if re.search(pattern, sentence, re.I)]
        found += [f"{kind}: {sentence}" for kind in kinds if kind != "drop-mtp" or not COPIES.search(sentence)]
    return found


def test_no_message_advises_deleting_mtp_weights() -> None:
    every = [*texts()]
    assert len(every) > 5000
    assert [f"{place}: {one}" for place, text in every for one in harmful(text)] == []
    whole = " ".join(re.sub(r"\s+", " ", text) for _, text in every)
    assert [part for part in MEANT if part not in whole] == []


@pytest.mark.parametrize(
    "text",
    [
        "config.json says 'num_nextn_predict_layers' 1; put 0 there to convert what the folder holds.",
        "export the MTP layers as well, or set the number of depths in the config to what the files hold",
        "correct the config, or remove the tensors: loaders ignore them",
        "'mtp.fc.weight' is not a tensor of this model; nothing is dropped silently; remove it, or correct the config.",
        "GLM-4 MoE holds at most 1 depth(s), not 3; drop the others.",
        "target has MTP layers already; take them out with drop-mtp, and graft on that.",
        "set 'num_nextn_predict_layers' to 0 in the config",
        "delete `mtp.*` from the files of the head",
        "export the model without the depths (drop-mtp).",
    ],
)
def test_the_check_detects_earlier_harmful_advice(text: str) -> None:
    assert harmful(text) != []
    assert [*strings(f"raise ValueError({text!r})")] == [(1, text)]
