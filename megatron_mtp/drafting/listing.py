"""What a speculative config may choose, in words: `generate --list-methods`, and the tables of docs/drafting.md."""

from math import inf

from megatron_mtp.drafting.proposers import PROPOSERS
from megatron_mtp.drafting.proposers.base import Proposer
from megatron_mtp.drafting.settings import Key, Settings, keys
from megatron_mtp.drafting.verifiers import VERIFIERS


def listing() -> str:
    """All methods and verifiers, those of other packages included, with their keys."""
    lossy = [name for name, one in VERIFIERS.items() if not one.lossless]
    lines = ["methods, which draft from"]
    for name, method in PROPOSERS.items():
        lines += [f"  {name:<18}{_unmarked(method.line)}{_needs(method)}", *_key_lines(method.settings_kind)]
    lines += ["", "verifiers"]
    for name, verifier in VERIFIERS.items():
        lines += [f"  {name:<18}{_unmarked(verifier.line)}", *_key_lines(verifier.settings_kind)]
    changed = " and ".join([", ".join(lossy[:-1]), lossy[-1]] if len(lossy) > 1 else lossy)
    return "\n".join([*lines, f"{changed} change the distribution; the others keep it."])


def markdown() -> str:
    """The two tables of the page."""
    methods = [
        f"| `{name}` | {one.line} | {one.depths or ''} | {_recurrent(one)} | {_cells(one.settings_kind)} |"
        for name, one in PROPOSERS.items()
    ]
    verifiers = [
        f"| `{name}` | {one.line} | {'kept' if one.lossless else 'changed'} | {_cells(one.settings_kind)} |"
        for name, one in VERIFIERS.items()
    ]
    return "\n".join(
        [
            "| method | drafts from | needs depths | recurrent layers | keys (default; range) |",
            "|---|---|---|---|---|",
            *methods,
            "",
            "| verifier | rule | distribution | keys (default; range) |",
            "|---|---|---|---|",
            *verifiers,
        ]
    )


def _needs(method: type[Proposer]) -> str:
    """In brackets: what a model must have, and may not have."""
    states = _recurrent(method)
    notes = [f"{method.depths} depths"] if method.depths else []
    notes += [] if states == "yes" else [f"recurrent layers: {states}"]
    return f" ({'; '.join(notes)})" if notes else ""


def _recurrent(method: type[Proposer]) -> str:
    """Where a hybrid may have recurrent layers: trees branch, and so do some rows of a depth."""
    trunk, depths = not method.drafts_trees, method.depths is None or method.keeps_states
    return {(True, True): "yes", (True, False): "in the trunk", (False, True): "in depths"}.get((trunk, depths), "no")


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
