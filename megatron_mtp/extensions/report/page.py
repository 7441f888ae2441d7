"""The page: charts, tables and drafts in one HTML file that needs no network.

It contains plotly's script and a short one of its own, and its content security policy allows only these two.
"""

import json
import re
import shlex
from base64 import b64encode
from hashlib import sha256
from html import escape
from typing import Any

from plotly.offline import get_plotlyjs

from megatron_mtp.extensions.report.charts import GIB, MEMORY, charts
from megatron_mtp.extensions.report.runs import DraftRecord, MetricsRow, RunFolder, figures

OF_A_PROCESS = {"rank", "local_rank", "mtp_metrics_dir", "tensorboard_dir", "save", "wandb_save_dir"}
"""Arguments of one process, whose differences do not matter."""

ABOUT = (
    "Charts are over training steps: lines with marks are evaluations, thin lines training. Acceptance of a depth: how "
    "often its draft and all earlier drafts are accepted; conditional acceptance: how often its draft is accepted "
    "where the earlier drafts were. Expected accepted length: the tokens of one forward pass of the trunk. Every depth "
    "has the true tokens before the one that it predicts, so a later depth's loss can be the lower one."
)
STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1a; --soft: #5f5e58; --paper: #fcfcfa; --line: #dcdbd3; --good: #cfe9cf;
  --bad: #b3323d }
@media (prefers-color-scheme: dark) { :root { --ink: #ecebe6; --soft: #a8a79f; --paper: #191918; --line: #3b3b37;
  --good: #24492a; --bad: #f0838c } }
body { margin: 0 auto; padding: .75rem; max-width: 84rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
.headline { font-size: 1.15rem; font-weight: 600; margin: .25rem 0 }
figure { margin: 0; min-width: 0 } figcaption { font-weight: 600 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); gap: 1.5rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: 0 0 1rem; overflow-wrap: normal }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: left; font-weight: 400;
  vertical-align: top } td, th[scope=col] { min-width: 6rem; overflow-wrap: anywhere }
th[scope=col], .differs td { font-weight: 600 } summary { padding: .5rem 0 }
pre, .tokens, .key { font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.prompt { color: var(--soft) } .accepted { background: var(--good); border-radius: 2px }
.own { border-bottom: 2px solid var(--soft) } del { color: var(--bad) }
"""
SCRIPT = """
const log = document.getElementById("log"), dark = matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const { color, backgroundColor } = getComputedStyle(document.body);
  for (const place of document.querySelectorAll(".chart")) {
    const { data, layout } = JSON.parse(place.nextElementSibling.textContent);
    layout.font = { color, size: 12 };
    layout.hoverlabel = { bgcolor: backgroundColor, font: { color } };
    layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom"; // a touch scrolls the page
    if (log.checked && "logarithmic" in place.dataset) {
      layout.yaxis.type = "log";
      const ends = layout.yaxis.range;
      layout.yaxis.range = ends && ends[0] > 0 ? ends.map(Math.log10) : null; // of zeros, plotly chooses
    }
    Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
  }
}
draw();
log.addEventListener("change", draw);
dark.addEventListener("change", draw);
"""
KEY = (
    '<p class="key"><span class="prompt">prompt</span> <span class="accepted">drafted and accepted</span> '
    '<span class="own">the trunk\'s own</span> <del>drafted and rejected</del></p>'
)
RECORD = (
    "<p>No drafts were recorded. This command adds a text with its drafts to the folder of a run:</p><pre>"
    "megatron-mtp generate --load RUN/checkpoint --prompt TEXT --speculative-config "
    """'{"method": "mtp"}' --compare --record RUN</pre>"""
)


def page(runs: list[RunFolder]) -> str:
    """Return the whole document."""
    plotly = get_plotlyjs()
    hashes = (b64encode(sha256(script.encode()).digest()).decode() for script in (plotly, SCRIPT))
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {' '.join(f"'sha256-{one}'" for one in hashes)}"
    )
    names = escape(", ".join(run.name for run in runs))
    drafted = "".join(_drafts(run.name, run.drafts) for run in runs if run.drafts is not None)
    parts = [
        f"<h1>{names}</h1>{''.join(_headline(run, len(runs) == 1) for run in runs)}",
        f'<p>{ABOUT}</p><label><input type="checkbox" id="log"> logarithmic axes</label>',
        f'<div class="charts">{_charts(runs)}</div>',
        f"<h2>Drafting</h2>{KEY + drafted if drafted else RECORD}",
        f"<h2>Final figures</h2>{_final(runs)}<h2>How it was run</h2>{_settings(runs)}",
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{names} - megatron-mtp</title><style>{STYLE}</style></head>\n<body><main>{''.join(parts)}</main>\n"
        f"<script>{plotly}</script><script>{SCRIPT}</script></body></html>\n"
    )


def _headline(run: RunFolder, is_alone: bool) -> str:
    """Summarize a run: loss and acceptance of its newest evaluation, and how fast it drafted."""
    step = max(row["iteration"] for row in run.rows)
    split = next((one for one in run.evaluations() if one.startswith("validation")), "training")
    newest = {key: list(points.values())[-1] for key in figures([run]) if (points := run.points(split, key))}
    parts = [f"trunk loss {newest['lm loss']:.3f}"] if "lm loss" in newest else []
    rates = [f"{100 * newest[key]:.1f} %" for key in newest if re.fullmatch(r"mtp_\d+ acceptance", key)]
    parts += [f"acceptance {', '.join(rates)} by depth"] if rates else []
    if "expected accepted length" in newest:
        parts.append(f"{newest['expected accepted length']:.2f} tokens expected per forward pass of the trunk")
    said = f"step {step}, {split}: {'; '.join(parts)}."
    if run.drafts is not None and "accepted_length" in (drafting := run.drafts.figures):
        method = "plain" if run.drafts.config is None else run.drafts.config.get("method")
        said += f" Decoding ({method}): {drafting['accepted_length']} tokens per forward pass"
        said += f", {drafting['speed_up']} times as fast as plain decoding." if "speed_up" in drafting else "."
    return f'<p class="headline">{escape(said if is_alone else f"{run.name}, {said}")}</p>'


def _charts(runs: list[RunFolder]) -> str:
    made = []
    for kind, title, figure in charts(runs):
        drawing = figure.to_json()  # contains no "<", so it cannot end the script element
        made.append(
            f"<figure><figcaption>{escape(title)}</figcaption>"
            f'<div class="chart" role="img" aria-label="{escape(title)} over training steps"'
            f"{' data-logarithmic' if kind.logarithmic else ''}></div>"
            f'<script type="application/json">{drawing}</script></figure>'
        )
    return "".join(made)


def _final(runs: list[RunFolder]) -> str:
    """Return the newest value of every metric, one column per run."""
    rows = [("last step", [str(max(row["iteration"] for row in run.rows)) for run in runs])]
    for split in [*dict.fromkeys(split for run in runs for split in run.evaluations()), "training"]:
        for key in figures(runs):
            found = [list(run.points(split, key).values())[-1:] for run in runs]
            if any(found):
                rows.append((f"{key} ({split})", [_written(key, *one) if one else "" for one in found]))
    return _table("figure", runs, rows)


def _written(key: str, value: float) -> str:
    return f"{value / GIB:.2f} GiB" if key == MEMORY else f"{value:.4g}"


def _settings(runs: list[RunFolder]) -> str:
    """Return dates, versions, arguments that differ, all arguments collapsed, and commands of the newest start."""
    known = [run for run in runs if run.started is not None]
    if not known:
        return "<p>No run has a run.json.</p>"
    records: list[dict[str, Any]] = [run.started or {} for run in known]
    starts = [record["starts"] for record in records]
    rows = [("first started", [_date(of[0]) for of in starts])]
    rows.append(("resumed", [", ".join(f"{_date(one)} at step {one['iteration']}" for one in of[1:]) for of in starts]))
    packages = dict.fromkeys(name for of in starts for name in of[-1]["versions"])
    rows += [(name, [str(of[-1]["versions"].get(name, "")) for of in starts]) for name in packages]
    names = dict.fromkeys(name for record in records for name in record["arguments"])
    every = [(name, [_shown(record["arguments"].get(name)) for record in records]) for name in names]
    differ = [row for row in every if len(set(row[1])) > 1 and row[0] not in OF_A_PROCESS]
    commands = (
        f"<figure><figcaption>{escape(run.name)}: command</figcaption>"
        f"<pre>{escape(shlex.join(of[-1]['command']))}</pre></figure>"
        for run, of in zip(known, starts, strict=True)
    )
    return (
        f"{_table('start', known, rows)}{_table('argument that differs', known, differ) if differ else ''}"
        f"<details><summary>All arguments</summary>{_table('argument', known, every)}</details>{''.join(commands)}"
    )


def _date(start: dict[str, Any]) -> str:
    return str(start["date"]).replace("T", " ")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _table(name: str, runs: list[RunFolder], rows: list[tuple[str, list[str]]]) -> str:
    """Return a table with one column per run, in a region that scrolls if the page is narrower."""
    heads = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    body = "".join(
        f'<tr><th scope="row">{escape(row)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for row, cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table: {name}"><table>'
        f'<tr><th scope="col">{name}</th>{heads}</tr>{body}</table></div>'
    )


def _drafts(name: str, drafts: DraftRecord) -> str:
    """Return metrics of drafting, and every text token by token."""
    method = "plain decoding" if drafts.config is None else str(drafts.config.get("method"))
    figures = (
        f'<tr><th scope="row">{escape(key.replace("_", " "))}</th><td>{escape(_shown(value))}</td></tr>'
        for key, value in drafts.figures.items()
        if value is not None
    )
    texts = (
        f"<figure><figcaption>text {number}: {len(text.steps)} forward passes of the trunk</figcaption>"
        f'<div class="tokens"><span class="prompt">{"".join(_piece(token, drafts) for token in text.prompt)}</span>'
        f"{''.join(_step(place, step, drafts) for place, step in enumerate(text.steps))}</div></figure>"
        for number, text in enumerate(drafts.texts, start=1)
    )
    return f"<h3>{escape(name)}: {escape(method)}</h3><table>{''.join(figures)}</table>{''.join(texts)}"


def _step(place: int, step: MetricsRow, drafts: DraftRecord) -> str:
    """Return the tokens of a forward pass: accepted, then rejected, then the trunk's own."""
    kinds = [("span class=accepted", "accepted", step.emitted[: step.accepted]), ("del", "rejected", step.rejected())]
    kinds.append(("span class=own", "the trunk's own", step.emitted[step.accepted :]))
    return "".join(
        f'<{tag} title="step {place}: {hint} (id {token})">{_piece(token, drafts)}</{tag.split()[0]}>'
        for tag, hint, tokens in kinds
        for token in tokens
    )


def _piece(token: int, drafts: DraftRecord) -> str:
    """Return the token's text, or its id without a text; a line break is shown as a symbol and as a break."""
    piece = drafts.pieces.get(str(token))
    return f"{token} " if piece is None else escape(piece).replace("\n", "⏎\n")
