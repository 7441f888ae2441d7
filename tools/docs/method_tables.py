"""Write the tables of methods and verifiers in docs/decoding.md from what each of them states in its own file.

python tools/docs/method_tables.py
"""

from pathlib import Path

from megatron_mtp.decoding.config import PROPOSERS, VERIFIERS, Settings, keys

PAGE = Path(__file__).resolve().parents[2] / "docs/decoding.md"
BEGIN, END = "<!-- written by tools/docs/method_tables.py -->\n", "\n<!-- end -->"


def updated(page: str) -> str:
    """The page with new tables between the two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END, 1)
    return before + BEGIN + tables() + END + after


def tables() -> str:
    """Of all methods, and of all verifiers."""
    methods = [
        f"| `{name}` | {one.line} | {one.depths or ''} | {one.recurrent_layers()} | {_keys(one.settings_kind)} |"
        for name, one in PROPOSERS.items()
    ]
    verifiers = [
        f"| `{name}` | {one.line} | {'kept' if one.lossless else 'changed'} | {_keys(one.settings_kind)} |"
        for name, one in VERIFIERS.items()
    ]
    heads = (
        "| method | drafts from | needs depths | recurrent layers | keys (default; range) |\n|---|---|---|---|---|",
        "| verifier | rule | distribution | keys (default; range) |\n|---|---|---|---|",
    )
    return "\n".join([heads[0], *methods, "", heads[1], *verifiers])


def _keys(kind: type[Settings]) -> str:
    return "; ".join(f"`{key.name}`: {key.meaning}{key.limits}" for key in keys(kind))


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
