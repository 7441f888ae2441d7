"""Write the tables of methods, verifiers and vLLM's keys in docs/reference/methods.md from their declared facts.

python tools/docs/method_tables.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mtp.decoding.config import FOREIGN_KEYS, FOREIGN_METHODS, PROPOSERS, VERIFIERS, Foreign, Settings, keys

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/methods.md"
BEGIN, END = "<!-- written by tools/docs/method_tables.py -->\n", "\n<!-- end -->"


def updated(page: str) -> str:
    """Return the page with new tables between the two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END, 1)
    return before + BEGIN + tables() + END + after


def tables() -> str:
    """Return tables of all methods, of all verifiers, and of vLLM's other names."""
    methods = [
        f"| `{name}` | {one.line} | {one.depths or ''} | {one.recurrent_layers()} | {_keys(one.settings_kind)} |"
        for name, one in PROPOSERS.items()
    ]
    verifiers = [
        f"| `{name}` | {one.line} | {'kept' if one.lossless else 'changed'} | {_keys(one.settings_kind)} |"
        for name, one in VERIFIERS.items()
    ]
    names = ", ".join(f"`{name}`" for name, method in FOREIGN_METHODS.items() if method == "mtp")
    others = "; ".join(f"`{name}`: `{method}`" for name, method in FOREIGN_METHODS.items() if method != "mtp")
    renamed = [
        f"| {', '.join(f'`{name}`' for name in alike)} | {_taken(key.values)} | {key.meaning} |"
        for key, alike in _alike(FOREIGN_KEYS).items()
    ]
    heads = (
        "| method | drafts from | needs MTP layers | recurrent layers | keys (default; range) |\n|---|---|---|---|---|",
        "| verifier | rule | distribution | keys (default; range) |\n|---|---|---|---|",
        f"vLLM's method names are accepted: {names} mean `mtp`; {others}. So are its keys:\n\n"
        "| vLLM key | values, and `null` | effect |\n|---|---|---|",
    )
    return "\n".join([heads[0], *methods, "", heads[1], *verifiers, "", heads[2], *renamed])


def _alike(keys: Mapping[str, Foreign]) -> dict[Foreign, list[str]]:
    """Return the names of equal keys."""
    made: dict[Foreign, list[str]] = {}
    for name, key in keys.items():
        made.setdefault(key, []).append(name)
    return made


def _taken(values: tuple[Any, ...] | None) -> str:
    if values is None:
        return "all"
    return ", ".join(f"`{json.dumps(one)}`" for one in values) or "`null`"


def _keys(kind: type[Settings]) -> str:
    return "; ".join(f"`{key.name}`: {key.meaning}{key.limits}" for key in keys(kind))


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
