"""Write the table of neutral fields in docs/reference/http_api.md from what the server accepts and ignores.

python tools/docs/neutral_fields.py
"""

import json
from collections import defaultdict
from pathlib import Path

from megatron_mtp.server.protocol import Body, ChatBody, CompletionBody

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/http_api.md"
BEGIN, END = "<!-- written by tools/docs/neutral_fields.py -->\n", "\n<!-- end -->"
HEAD = "| value | both endpoints | completions alone | chats alone |\n|---|---|---|---|"


def updated(page: str) -> str:
    """Return the page with a new table between the two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END, 1)
    return before + BEGIN + table() + END + after


def table() -> str:
    """Return a row for each value without effect, with the fields that may have it."""
    completions, chats = _fields(CompletionBody), _fields(ChatBody)
    rows = [
        " | ".join((f"| `{value}`", *map(_listed, (own & other, own - other, other - own)))) + " |"
        for value in sorted(completions.keys() | chats.keys())
        for own, other in [(completions[value], chats[value])]
    ]
    return "\n".join([HEAD, *rows])


def _fields(body: type[Body]) -> defaultdict[str, set[str]]:
    """Return the fields of each value, written as JSON."""
    found = defaultdict[str, set[str]](set)
    for name, values in body.neutral.items():
        for value in values if name not in body.model_fields else ():
            found[json.dumps(int(value) if value == 1.0 and value is not True else value)].add(name)
    return found


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
