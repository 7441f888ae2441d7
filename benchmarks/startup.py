"""How long a user waits for `--help` of every verb, and for the doctor: whole processes, from a warm disk cache.

    python benchmarks/startup.py [--repeats 5]

A figure is the median of the repeats, in which the commands take turns. `doctor` imports torch, to ask it for devices.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from statistics import median

from benchmarks.harness import Goal, count, hardware, interleave, report, table
from megatron_mtp.cli.verbs import VERBS

LONGEST = 2.0
"""Seconds on a quiet machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="of every command (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one verb, once: a smoke test")
    args = parser.parse_args()
    verbs = ["report"] if args.quick else list(VERBS)
    commands = {f"{verb} --help": [verb, "--help"] for verb in verbs} | ({} if args.quick else {"doctor": ["doctor"]})
    sides = {name: partial(start, words) for name, words in commands.items()}
    spent = interleave(sides, 1 if args.quick else args.repeats, warm_up=1)
    seconds = {name: round(median(one.wall for one in rounds), 3) for name, rounds in spent.items()}
    goals = [Goal(f"{name}: seconds", value, LONGEST) for name, value in seconds.items()]
    rows = table(("command", "seconds"), list(seconds.items()))
    report("startup", hardware(on_cpu=True), {"seconds": seconds}, goals, [rows])


def start(words: list[str]) -> None:
    """One process, from nothing to its end; what it prints is not shown."""
    subprocess.run([sys.executable, "-m", "megatron_mtp", *words], stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
