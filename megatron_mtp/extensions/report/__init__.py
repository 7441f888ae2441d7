"""One self-contained HTML page of runs and of their drafts, drawn with plotly.

runs.py      metrics.jsonl, run.json and drafts.json of each folder
charts.py    which charts a page has, and how they are drawn
page.py      the page: charts, tables, drafts token by token
command.py   megatron-mtp report
"""

from megatron_mtp.cli.verbs import Verb

VERB = Verb("render one or more runs as an HTML page", "megatron_mtp.extensions.report.command")
