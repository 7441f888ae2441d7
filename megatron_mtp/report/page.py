"""The page: charts, tables and drafts in one HTML file that needs no network.

It contains its style sheet and its script (page.css and page.js), and its policy allows only this script.
"""

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path

from megatron_mtp.files import written_beside
from megatron_mtp.report import drafts, settings
from megatron_mtp.report.charts import figure
from megatron_mtp.report.panels import charts, table
from megatron_mtp.report.runs import Run

STYLE = (files("megatron_mtp.report") / "page.css").read_text(encoding="utf-8")
SCRIPT = (files("megatron_mtp.report") / "page.js").read_text(encoding="utf-8")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{b64encode(sha256(SCRIPT.encode()).digest()).decode()}'"
)

ABOUT = (
    "Lines with marks are evaluations, thin lines training. Acceptance of a depth: how often its draft and all earlier "
    "drafts are accepted. Conditional acceptance: how often its draft is accepted where the earlier drafts were. "
    "Expected accepted length: the tokens that one forward pass of the trunk would yield."
)
SWITCHES = (
    '<fieldset class="switches"><label><input type="checkbox" id="log"> logarithmic axes</label>'
    '<label><input type="checkbox" id="smooth"> smooth the lines of training</label></fieldset>'
)


def page(runs: list[Run]) -> str:
    """The whole document."""
    names = escape(", ".join(run.name for run in runs))
    drafted = "".join(drafts.section(run.name, run.drafts) for run in runs if run.drafts is not None)
    parts = [
        f"<h1>{names}</h1><h2>Training</h2><p>{ABOUT}</p>{SWITCHES}",
        f'<div class="charts">{"".join(map(figure, charts(runs)))}</div>',
        f"<h2>Final figures</h2>{table(runs)}",
        f"<h2>How it was run</h2>{settings.section(runs)}",
        f"<h2>Drafting</h2>{drafted}" if drafted else "",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{names} - megatron-mtp</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}</main>\n<script>{SCRIPT}</script></body></html>\n"
    )


def write_page(text: str, target: Path, flag: str = "--output") -> None:
    """Write the page whole, or not at all.

    Args:
        text: the page.
        target: the file.
        flag: the flag that names it, for messages.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        with written_beside(target, shared=True) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error.strerror}); name another file with {flag}.") from error
