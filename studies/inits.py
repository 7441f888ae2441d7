"""How new depths begin: each --mtp-init of `attach-mtp` before any training, and after equal steps by each loss.

    python studies/inits.py                  the quickstart's trunk, two new depths, 150 steps by kd, lk and e2e_tv
    python studies/inits.py --checkpoint runs/attached/trunk --data runs/attached/data/corpus --batch 1 \\
        --seq-length 512 --more=--bf16          a trunk that scripts/attach_mtp.sh has converted
    python studies/inits.py --quick          does it run? (the figures mean nothing)

The depths of --checkpoint are dropped, and new ones attached to the frozen trunk. All runs read the same batches in the
same order. Compared is the expected accepted length on held-out text: tokens of a forward of the trunk, with greedy
drafts. What is finished is kept in --out and not repeated.

Run at 917027e.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from benchmarks.harness import Goal, count, hardware, report, some_of, Table
from studies.losses import ON_CPU, trained
from studies.self_generated import LENGTH, SPLIT, run, trunk_of

INITS = ("random", "last-layer", "fitted")
LOSSES = ("kd", "lk", "e2e_tv")
ALL_LOSSES = ("ce", "kd", "tv", "nla", "lk", "e2e_tv")
BEFORE = "before"


def main() -> None:
    """Attach, train, compare, report."""
    wanted = parse(sys.argv[1:])
    lengths = {BEFORE: {init: before(init, wanted) for init in INITS}}
    for loss, init in product(wanted.losses, INITS):
        lengths.setdefault(loss, {})[init] = after(loss, init, wanted)
    results = {"steps": wanted.steps, "checkpoint": str(wanted.checkpoint), "expected accepted length": lengths}
    rows = [(when, *each.values()) for when, each in lengths.items()]
    report("inits", hardware(ON_CPU), results, goals(lengths), [Table(("", *INITS), rows)])


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a value makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    add("--data", type=Path, default=Path("runs/quickstart/data/corpus"), help="its .bin/.idx prefix")
    add("--out", type=Path, default=Path("runs/inits"), help="default: runs/inits")
    add("--losses", type=some_of(ALL_LOSSES), default=list(LOSSES), metavar="NAME,...", help="default: kd,lk,e2e_tv")
    add("--steps", type=count, default=150, help="of each run; default: 150")
    add("--batch", type=count, default=4, help="sequences a step; default: 4")
    add("--seq-length", type=count, default=256, help="default: 256")
    add("--lr", default="1e-3", help="at the start of the cosine; default: 1e-3")
    add("--more", default="", metavar="FLAGS", help="more flags of pretrain_gpt.py")
    add("--quick", action="store_true", help="3 steps: whether it runs")
    wanted = parser.parse_args(argv)
    if not wanted.checkpoint.is_dir():
        parser.error(f"there is no {wanted.checkpoint}; make it with scripts/quickstart.sh, or give --checkpoint.")
    if wanted.quick:
        wanted.steps, wanted.out = 3, wanted.out / "quick"
    return wanted


def attached(init: str, wanted: argparse.Namespace) -> Path:
    """The trunk with two new depths, made unless it is there."""
    start = wanted.out.resolve() / init / "start"
    if not start.is_dir():
        text = ["--data-path", wanted.data.resolve(), "--split", SPLIT] if init == "fitted" else []
        run("convert", "attach-mtp", trunk_of(wanted), start, "--mtp-num-layers", 2, "--mtp-init", init, *text)
    return start


def before(init: str, wanted: argparse.Namespace) -> float:
    """Expected accepted length of untrained depths."""
    file = wanted.out / init / "before.json"
    if not file.exists():
        batch = (
            "--micro-batch-size",
            wanted.batch,
            "--global-batch-size",
            wanted.batch,
            "--seq-length",
            wanted.seq_length,
        )
        flags = ["--load", attached(init, wanted), "--data-path", wanted.data.resolve(), "--split", SPLIT, *batch]
        said = run("evaluate", *flags, "--eval-iters", 2 if wanted.quick else 32, "--json")
        file.write_text(said.splitlines()[-1])
    length: float = json.loads(file.read_text())[LENGTH]
    return length


def after(loss: str, init: str, wanted: argparse.Namespace) -> float:
    """Expected accepted length of trained depths."""
    more = {"checkpoint": attached(init, wanted), "run": wanted.out / init, "more": f"--mtp-num-layers 2 {wanted.more}"}
    length: float = trained(loss, argparse.Namespace(**{**vars(wanted), **more}))[LENGTH]
    return length


def goals(lengths: dict[str, dict[str, float]]) -> list[Goal]:
    """The fit helps before the training and after it."""
    return [
        Goal(f"expected accepted length, {when}: fitted / last-layer", each["fitted"] / each["last-layer"], 1.0, ">=")
        for when, each in lengths.items()
    ]


if __name__ == "__main__":
    main()
