"""One self-contained HTML page of runs: what training measured, how it was started, and what drafting drafted.

runs.py      metrics.jsonl, run.json and drafts.json, read with checks
panels.py    which charts a page has, and the table of final figures
charts.py    how a chart is drawn
settings.py  how runs were started: dates, commands, hyperparameters
drafts.py    drafts token by token
page.py      the page, with page.css and page.js in it, written beside and renamed
audited.py   the page of an audit
tabulated.py  the page of a table of acceptance
command.py   megatron-mtp report
"""
