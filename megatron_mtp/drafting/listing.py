"""What a speculative config may choose, in words: `generate --list-methods`, and the tables of docs/drafting.md."""

from math import inf

from megatron_mtp.drafting.proposers import PROPOSERS
from megatron_mtp.drafting.settings import Key, Settings, keys
from megatron_mtp.drafting.verifiers import VERIFIERS


def listing() -> str:
    """All methods and verifiers, those of other packages included, with their keys."""
    lossy = [name for name, one in VERIFIERS.items() if not one.lossless]
    lines = ["methods, which draft from"]
    for name, method in PROPOSERS.items():
        needs = f" ({method.depths} depths)" if method.depths else ""
        lines += [f"  {name:<18}{_unmarked(method.line)}{needs}", *_key_lines(method.settings_kind)]
    lines += ["", "verifiers"]
    for name, verifier in VERIFIERS.items():
        lines += [f"  {name:<18}{_unmarked(verifier.line)}", *_key_lines(verifier.settings_kind)]
    changed = " and ".join([", ".join(lossy[:-1]), lossy[-1]] if len(lossy) > 1 else lossy)
    return "\n".join([*lines, f"{changed} change the distribution; the others keep it."])


def markdown() -> str:
    """The two tables of the page."""
    methods = [
        f"| `{name}` | {one.line} | {one.depths or ''} | {_cells(one.settings_kind)} |"
        for name, one in PROPOSERS.items()
    ]
    verifiers = [
        f"| `{name}` | {one.line} | {'kept' if one.lossless else 'changed'} | {_cells(one.settings_kind)} |"
        for name, one in VERIFIERS.items()
    ]
    return "\n".join(
        [
            "| method | drafts from | needs depths | keys (default; range) |",
            "|---|---|---|---|",
            *methods,
            "",
            "| verifier | rule | distribution | keys (default; range) |",
            "|---|---|---|---|",
            *verifiers,
        ]
    )


def _key_lines(kind: type[Settings]) -> list[str]:
    return [f"    {key.name:<16}{_unmarked(key.meaning)}{_limits(key)}" for key in keys(kind)]


def _cells(kind: type[Settings]) -> str:
    return "; ".join(f"`{key.name}`: {key.meaning}{_limits(key)}" for key in keys(kind))


def _limits(key: Key) -> str:
    """Default and range in brackets, whichever there are."""
    parts = [key.shown_default, _shown_range(key)]
    shown = "; ".join(part for part in parts if part)
    return f" ({shown})" if shown else ""


def _shown_range(key: Key) -> str:
    if key.range is None:
        return ""
    low, high = key.range
    return f"{low} or more" if high == inf else f"{low} to {high}"


def _unmarked(line: str) -> str:
    return line.replace("`", "")
