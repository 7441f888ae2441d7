"""The page of a table of acceptance (`megatron-mtp tabulate --html`).

In:  the JSON of the table.
Out: one HTML file with the look of a run's page, and no script.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

from megatron_mtp.report.audited import POLICY
from megatron_mtp.report.page import STYLE
from megatron_mtp.report.panels import scrolled

ABOUT = (
    "Acceptance of position k: how often drafts 1 .. k are all accepted. Accepted length: tokens per forward of the "
    "trunk, drafting greedily in float32 with the depths as they were trained. An engine's column has the accepted "
    "length that its rules are foretold to reach on the same prompts."
)
NONE = "-"


def page(result: dict[str, Any]) -> str:
    """The whole document."""
    rows, failed = result["rows"], result["failed"]
    parts = ["<h1>Acceptance</h1>", f"<p>{ABOUT}</p>", _table(rows), _measured(rows), _reasons(rows), _failed(failed)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Acceptance - megatron-mtp</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    positions = max((len(row["acceptance"]) for row in rows), default=0)
    engines = list(dict.fromkeys(name for row in rows for name in row["foretold"]))
    names = ["checkpoint", "family", "depths", "objective", "K"]
    names += [f"position {place}" for place in range(1, positions + 1)] + ["accepted length", *engines]
    body = "".join(_line(row["checkpoint"], _cells(row, positions, engines)) for row in rows)
    return scrolled("acceptance", f"<table>{_head(names)}{body}</table>")


def _cells(row: dict[str, Any], positions: int, engines: list[str]) -> list[str]:
    rates = [f"{100 * rate:.1f} %" for rate in row["acceptance"]]
    foretold = [row["foretold"].get(name, {}).get("accepted_length") for name in engines]
    cells = [row["family"] or NONE, str(row["depths"]), row["objective"], str(row["drafts"])]
    cells += [*rates, *[NONE] * (positions - len(rates)), f"{row['accepted_length']:.3f}"]
    return cells + [NONE if length is None else f"{length:.3f}" for length in foretold]


def _measured(rows: list[dict[str, Any]]) -> str:
    """How each row was measured, where rows differ in it."""
    keys = ("prompts", "prompt_tokens", "new_tokens", "digest", "tokenizer")
    lines = [_line(row["checkpoint"], [str(row["settings"].get(key, "")) for key in keys]) for row in rows]
    head = _head(["checkpoint", "prompts", "tokens of a prompt", "new tokens", "digest of the text", "tokenizer"])
    return f"<h2>How it was measured</h2>{scrolled('settings', f'<table>{head}{chr(10).join(lines)}</table>')}"


def _reasons(rows: list[dict[str, Any]]) -> str:
    """Why an engine's column is empty."""
    found = [
        _line(row["checkpoint"], [name, foretold["reason"]])
        for row in rows
        for name, foretold in row["foretold"].items()
        if "reason" in foretold
    ]
    table = scrolled("reasons", f"<table>{_head(['checkpoint', 'engine', 'reason'])}{''.join(found)}</table>")
    return f"<h2>Not foretold</h2>{table}" if found else ""


def _failed(failed: list[dict[str, str]]) -> str:
    lines = "".join(_line(one["checkpoint"], [one["reason"]]) for one in failed)
    table = scrolled("failed", f"<table>{_head(['checkpoint', 'reason'])}{lines}</table>")
    return f"<h2>Without a row</h2>{table}" if failed else ""


def _head(names: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<th scope=col>{escape(name)}</th>' for name in names)}</tr>"


def _line(first: str, cells: Iterable[str]) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(first)}</th>{rest}</tr>'
