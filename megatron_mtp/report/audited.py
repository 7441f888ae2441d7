"""The page of an audit (`megatron-mtp audit --html`): what each side holds, what was found, what both compute.

In:  the JSON of the audit.
Out: one HTML file with the look of a run's page, and no script.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

from megatron_mtp.report.page import STYLE
from megatron_mtp.report.panels import scrolled

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MARKS = {"error": "s5", "warning": "s1", "note": "s7"}
"""The colour of each severity."""


def page(result: dict[str, Any]) -> str:
    """The whole document."""
    title = " and ".join(escape(side["path"]) for side in result["sides"])
    parts = [f"<h1>Audit of {title}</h1><p>{escape(_verdict(result))}</p>", _sides(result["sides"])]
    parts += [_findings(result["findings"]), _logits(result.get("logits"))]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit of {title} - megatron-mtp</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _verdict(result: dict[str, Any]) -> str:
    equal = f"{result['compared']['equal']} tensors are equal bit by bit. " if "compared" in result else ""
    wrong = sum(one["severity"] != "note" for one in result["findings"])
    return equal + (f"{wrong} finding(s)." if wrong else "Nothing that matters was found.")


def _sides(sides: list[dict[str, Any]]) -> str:
    """A table of facts with a column a side; facts that differ are marked."""
    names = dict.fromkeys(name for side in sides for name in side if name != "side")
    rows = [_fact(name, [_shown(side.get(name)) for side in sides]) for name in names]
    head = "".join(f'<th scope="col">{side["side"]}</th>' for side in sides)
    table = f'<table class="settings"><caption>What is there</caption><tr><th scope="col">fact</th>{head}</tr>'
    return f"<h2>Contents</h2>{scrolled('contents', table + ''.join(rows) + '</table>')}"


def _fact(name: str, values: list[str]) -> str:
    differs = len(set(values)) > 1 and name != "path"
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f'<tr{" class=differs" if differs else ""}><th scope="row">{escape(name)}</th>{cells}</tr>'


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return "" if value is None else f"{value:,}" if isinstance(value, int) and value is not True else str(value)


def _findings(findings: list[dict[str, Any]]) -> str:
    if not findings:
        return "<h2>Findings</h2><p>None.</p>"
    rows = "".join(_row(_mark(one), one["side"], one["guess"], one["says"], one["advice"]) for one in findings)
    head = _head("severity", "side", "explanation", "what was found", "what to do")
    return f"<h2>Findings</h2>{scrolled('findings', f'<table>{head}{rows}</table>')}"


def _mark(finding: dict[str, Any]) -> str:
    severity = finding["severity"]
    return f'<span class="swatch {MARKS[severity]}"></span>{escape(severity)}'


def _head(*names: str) -> str:
    return f"<tr>{''.join(f'<th scope=col>{name}</th>' for name in names)}</tr>"


def _row(first: str, *cells: str) -> str:
    rest = "".join(f'<td style="text-align: left">{escape(cell)}</td>' for cell in cells)
    return f'<tr><th scope="row">{first}</th>{rest}</tr>'


def _logits(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = [_row(escape(row["name"]), f"{row['figure']:.3g}", _word(row["ok"])) for row in found.get("differences", ())]
    rows += [_row(f"acceptance of {side['side']}", _rates(side["acceptance"]), "") for side in found["sides"]]
    table = f"<table>{_head('what', 'figure', 'equal')}{''.join(rows)}</table>"
    return f"<h2>Logits on {found['tokens']} tokens</h2>{scrolled('logits', table)}"


def _word(ok: bool) -> str:
    return "yes" if ok else "no"


def _rates(rates: Iterable[float]) -> str:
    return ", ".join(f"depth {number}: {rate:.4f}" for number, rate in enumerate(rates, start=1)) or "no depths"
