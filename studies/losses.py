"""What the depths' loss changes: the same depths on the same frozen trunk, trained for equal steps by each loss.

    python studies/losses.py                         the quickstart's model: its depths go on for 200 steps by each
    python studies/losses.py --checkpoint runs/attached/start --data runs/attached/data/corpus --steps 300 \
        --batch 1 --seq-length 512 --more=--bf16        depths that scripts/attach_mtp.sh has attached, from their start
    python studies/losses.py --quick                 does it run? (the figures mean nothing)

Every run is one of `pretrain_gpt.py`, which reads the same batches in the same order, and ends with the evaluation that
is compared here: greedy acceptance of each depth given the earlier ones, and that of sampled drafts at temperature 1,
the mean of sum_v min(p, q) ("overlap"). Runs that have finished are kept in --run and not repeated.

Run at 1c8f248.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from benchmarks.harness import Goal, count, hardware, report, Table
from megatron_mtp.platform import prepare

ON_CPU = prepare()

ROOT = Path(__file__).resolve().parents[1]

LOSSES = ("ce", "kd", "tv")
GOAL = 3.0
"""Points of acceptance that a distilled depth is ahead of one that learns the labels."""

TRAINING = (
    "--use-checkpoint-args --finetune --mtp-train-only --mtp-loss-scaling-factor 1 --lr-decay-style cosine "
    "--min-lr 1e-5 --clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 "
    "--split 98,2,0 --no-create-attention-mask-in-dataloader --log-interval 50"
).split()


def main() -> None:
    """Train, compare, report."""
    wanted = parse(sys.argv[1:])
    rows = {loss: trained(loss, wanted) for loss in LOSSES}
    names = [name for name in rows["ce"] if name.endswith((" conditional acceptance", " overlap"))]
    points = {loss: {name: round(100 * row[name], 2) for name in names} for loss, row in rows.items()}
    ahead = {name: {loss: points[loss][name] - points["ce"][name] for loss in LOSSES[1:]} for name in names}
    greedy, sampled = ahead["mtp_1 conditional acceptance"], ahead["mtp_1 overlap"]
    report(
        "losses",
        hardware(ON_CPU),
        {"steps": wanted.steps, "checkpoint": str(wanted.checkpoint), "points": points},
        [
            Goal("first depth, greedy: the better of kd and tv less ce, points", max(greedy.values()), GOAL, ">="),
            Goal("first depth, sampled: tv less ce, points", sampled["tv"], GOAL, ">="),
        ],
        [Table(("loss", *names), [(loss, *one.values()) for loss, one in points.items()])],
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a value makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    parser.add_argument("--data", type=Path, default=Path("runs/quickstart/data/corpus"), help="its .bin/.idx prefix")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/losses"), help="folder of the runs; default: runs/losses"
    )
    parser.add_argument("--steps", type=count, default=200, help="of each run; default: 200")
    parser.add_argument("--batch", type=count, default=8, help="sequences a step; default: 8")
    parser.add_argument("--seq-length", type=count, default=256, help="default: 256")
    parser.add_argument("--lr", default="1e-3", help="at the start of the cosine; default: 1e-3")
    parser.add_argument("--more", default="", metavar="FLAGS", help="more flags of pretrain_gpt.py")
    parser.add_argument("--quick", action="store_true", help="3 steps: whether it runs")
    wanted = parser.parse_args(argv)
    if not wanted.checkpoint.is_dir():
        parser.error(f"there is no {wanted.checkpoint}; make it with scripts/quickstart.sh, or give --checkpoint.")
    if wanted.quick:
        wanted.steps, wanted.run = 3, wanted.run / "quick"
    return wanted


def trained(loss: str, wanted: argparse.Namespace) -> dict[str, Any]:
    """The evaluation at the end of a run, made unless it is there."""
    folder = wanted.run / loss
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or last_row(metrics)["iteration"] < wanted.steps:
        folder.mkdir(parents=True, exist_ok=True)
        metrics.unlink(missing_ok=True)
        subprocess.run(command(loss, folder, wanted), check=True, stdout=sys.stderr)
    return last_row(metrics)


def command(loss: str, folder: Path, wanted: argparse.Namespace) -> list[str]:
    """One run, which saves nothing."""
    tokenizer = json.loads(wanted.data.with_name(wanted.data.name + ".json").read_text())["tokenizer"]
    flags: list[Any] = ["--load", wanted.checkpoint, "--data-path", wanted.data, "--mtp-loss", loss]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
    flags += [
        "--micro-batch-size",
        wanted.batch,
        "--global-batch-size",
        wanted.batch,
        "--seq-length",
        wanted.seq_length,
    ]
    flags += ["--train-iters", wanted.steps, "--lr", wanted.lr, "--lr-warmup-iters", wanted.steps // 20 + 1]
    flags += ["--eval-interval", wanted.steps, "--eval-iters", 2 if wanted.quick else 32, "--mtp-metrics-dir", folder]
    return [sys.executable, str(ROOT / "pretrain_gpt.py"), *TRAINING, *map(str, flags), *wanted.more.split()]


def last_row(metrics: Path) -> dict[str, Any]:
    """The last evaluation that a run has written; iteration 0 if it has written none."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return next((row for row in reversed(rows) if row["split"] != "training"), {"iteration": 0})


if __name__ == "__main__":
    main()
