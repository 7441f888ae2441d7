"""Write the tables of docs/numbers.md from the records in benchmarks/results: the last line that a benchmark prints.

    python benchmarks/train_step.py | tail -n 1 > benchmarks/results/train_step.json
    python tools/docs/number_tables.py

A table of the page stands between `<!-- benchmarks/results/NAME.json, table 1 -->` and `<!-- end -->`.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/numbers.md"
MARKS = re.compile(r"(<!-- (benchmarks/results/\w+\.json), table (\d+) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str) -> str:
    """The page with the records' tables between the marks."""
    return MARKS.sub(lambda mark: f"{mark[1]}{written(mark[2], int(mark[3]))}\n{mark[4]}", page)


def written(record: str, number: int) -> str:
    """A table of a record, counted from 1, as Markdown."""
    sys.path.append(str(ROOT))
    from benchmarks.harness import Table

    found = json.loads((ROOT / record).read_text(encoding="utf-8"))["tables"][number - 1]
    return "\n".join(Table("", found["header"], found["rows"]).markdown())


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
