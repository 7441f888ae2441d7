"""Kill the creation of a run's page, with and without an existing page.

    python killed_reports.py RUN_DIR KILLS SEED

Prints JSON: how many were killed, and what was wrong.
"""

import json
import sys
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[2] / "support"))  # a separate process, without pytest's path

from killing import Killer

from megatron_mtp.extensions.report import command as report

OLDER = "an older page"


def main(run: Path, kills: int, seed: int) -> dict[str, object]:
    target = run / report.PAGE
    killer = Killer(kills, Random(seed), run / "log")

    def make() -> int:
        return report.main([str(run)], "report")

    killer.measure(make)
    whole = target.read_text()
    wrong: list[str] = []
    while not killer.enough:
        older = bool(killer.done % 2)
        target.write_text(OLDER) if older else target.unlink(missing_ok=True)
        killer.end_or_kill(make)
        found = target.read_text() if target.exists() else None
        if found not in (whole, OLDER if older else None):
            wrong.append(f"the page of kill {killer.done} ends with {found[-80:] if found else found!r}")
    killer.end(make)
    if target.read_text() != whole:
        wrong.append("the page after all kills is another one")
    return {"killed": killer.done, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
