"""The page: charts, table and drafts in one HTML file that asks nothing of a network and runs no script."""

import os
from html import escape
from pathlib import Path

from megatron_mtp.report import drafts
from megatron_mtp.report.charts import legend, svg
from megatron_mtp.report.panels import charts, table
from megatron_mtp.report.runs import Run

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1a; --soft: #5f5e58; --paper: #fcfcfa; --line: #dcdbd3; --good: #cfe9cf;
  --s0: #2a6fdb; --s1: #c2571a; --s2: #178a63; --s3: #a1428a; --s4: #7a6a00; --s5: #c03a45;
  --s6: #5a55c8; --s7: #4d6b7a }
@media (prefers-color-scheme: dark) { :root { --ink: #ecebe6; --soft: #a8a79f; --paper: #191918; --line: #3b3b37;
  --good: #24492a; --s0: #6fa3f5; --s1: #ef9257; --s2: #4fc497; --s3: #d987c5; --s4: #cbb94a; --s5: #f0838c;
  --s6: #a09cf5; --s7: #93b4c4 } }
body { margin: 0 auto; padding: 1.5rem; max-width: 84rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1, h2, h3 { line-height: 1.2 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); gap: 1.5rem }
figure { margin: 0 0 1rem } figcaption { font-weight: 600 }
svg { width: 100%; height: auto } svg text { font-size: 12px; fill: var(--soft) }
.grid { stroke: var(--line) } polyline { fill: none; stroke: var(--c); stroke-width: 2 }
circle { fill: var(--c) } circle:hover { stroke: var(--ink); stroke-width: 6 }
.faint { opacity: .45 } .faint polyline { stroke-width: 1 } .dashed polyline { stroke-dasharray: 6 4 }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .25rem 0; padding: 0 }
.legend li { overflow-wrap: anywhere }
.swatch { display: inline-block; width: 1.2em; height: .6em; margin-right: .4em; background: var(--c); opacity: 1 }
.swatch.dashed { background: repeating-linear-gradient(90deg, var(--c) 0 .4em, transparent .4em .6em) }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: 0 0 1rem }
caption { text-align: left; font-weight: 600; padding: .25rem 0 }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: left; font-weight: 400 }
td { font-variant-numeric: tabular-nums; text-align: right } th[scope=col] { text-align: right; font-weight: 600 }
th[scope=col]:first-child { text-align: left }
.tokens, .key { font-family: ui-monospace, monospace; font-size: 14px; line-height: 1.7 }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere }
.prompt { color: var(--soft) } .accepted { background: var(--good); border-radius: 2px }
.own { border-bottom: 2px solid var(--soft) } del { color: var(--s5); font-size: .85em }
""" + "".join(f".s{number} {{ --c: var(--s{number}) }}\n" for number in range(8))

ABOUT = (
    "Marked points are evaluations, faint lines training. Acceptance of a depth is given that the earlier depths were "
    "accepted; the expected accepted length is the tokens that one forward of the trunk would yield. Values stand "
    "under the pointer."
)


def page(runs: list[Run]) -> str:
    """The whole document."""
    names = ", ".join(run.name for run in runs)
    figures = (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg(chart, number)}{legend(chart)}</figure>"
        for number, chart in enumerate(charts(runs))
    )
    drafted = "".join(drafts.section(run.name, run.drafts) for run in runs if run.drafts is not None)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(names)} - megatron-mtp</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(names)}</h1>\n<h2>Training</h2><p>{ABOUT}</p>"
        f'<div class="charts">{"".join(figures)}</div>\n<h2>Final figures</h2><div class="scroll">{table(runs)}</div>\n'
        f"{f'<h2>Drafting</h2>{drafted}' if drafted else ''}</main></body></html>\n"
    )


def write_page(text: str, target: Path) -> None:
    """Beside and renamed, so that a page is whole or not there.

    Raises:
        ValueError: it cannot be written.
    """
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error.strerror}); name another file with --output.") from error
