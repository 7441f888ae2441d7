"""The page at /: a prompt in, its text out with accepted drafts in colour, acceptance by position while it grows.

One HTML file with its style sheet and script in it, in the look of the page of runs; it asks this server alone.
"""

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files

from megatron_mtp.report.page import STYLE

OWN_STYLE = (files("megatron_mtp.serving") / "page.css").read_text(encoding="utf-8")
SCRIPT = (files("megatron_mtp.serving") / "page.js").read_text(encoding="utf-8")
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{b64encode(sha256(SCRIPT.encode()).digest()).decode()}'"
)

FORM = """
<form>
  <label>Prompt <textarea name="prompt" required aria-describedby="keys">def </textarea></label>
  <div class="row">
    <label>New tokens <input name="max_tokens" type="number" min="1" value="64" required></label>
    <label>Temperature <input name="temperature" type="number" min="0" max="2" step="0.1" value="0" required></label>
    {key}
    <button type="submit">Generate</button> <button type="button" disabled>Stop</button>
  </div>
  <small id="keys">Ctrl+Enter generates, Escape stops.</small>
</form>
<p class="error" role="alert"></p>
<h2>Text</h2>
<p class="key"><span class="accepted">accepted draft</span> the trunk's own token</p>
<div class="tokens" role="region" aria-label="text" tabindex="0"></div>
<h2>Drafts</h2>
<p id="figures" role="status"></p>
<div class="scroll"><table>
  <thead><tr><th scope="col">position</th><th scope="col">acceptance</th><th scope="col">accepted</th><td></td></tr>
  </thead>
  <tbody id="positions"></tbody>
</table></div>
"""
KEY = '<label>API key <input name="key" type="password" autocomplete="off" required></label>'


def page(name: str, keyed: bool) -> str:
    """The whole document, of a model with this name; with a field for the API key where one is needed."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(name)} - megatron-mtp</title><style>{STYLE}{OWN_STYLE}</style></head>\n"
        f"<body><main><h1>{escape(name)}</h1>{FORM.format(key=KEY if keyed else '')}</main>\n"
        f"<script>{SCRIPT}</script></body></html>\n"
    )
