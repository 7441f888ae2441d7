"""Which head drafts most after equal time on one frozen trunk: MTP in two passes, EAGLE-3, DFlash and DSpark.

    python studies/heads.py --checkpoint runs/quickstart/checkpoint --data runs/quickstart/data/corpus
    python studies/heads.py ... --seconds 300 --heads mtp,dspark-fast

Each head is trained for as many steps as fit into the same CPU seconds of one thread, by the seconds of its own steps
in two short runs. Acceptance is measured teacher-forced on held-out text; the accepted length of K drafts is 1 and the
sum of the acceptance of drafts 1 .. K. Results are kept in --out, a file a head, and are not made again.

Run at 3da38f7.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

COUNTS = (3, 5, 7)
LAYERS = "--drafter-layers 1 2 3"
HEADS = {
    "mtp": "--mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll 2 --mtp-train-only --mtp-loss kd",
    "eagle3": f"--drafter eagle3 --drafter-steps 7 {LAYERS}",
    "dspark": f"--drafter dspark --drafter-steps 7 --drafter-num-layers 2 --drafter-blocks 64 {LAYERS}",
    "dflash": f"--drafter dflash --drafter-steps 7 --drafter-num-layers 2 --drafter-blocks 64 {LAYERS}",
    "dspark-fast": f"--drafter dspark --drafter-steps 7 --drafter-num-layers 1 --drafter-blocks 64 {LAYERS} --lr 6e-3",
    "eagle3-fast": f"--drafter eagle3 --drafter-steps 2 {LAYERS} --lr 6e-3",
}
"""Flags of training; the names before a hyphen are kinds."""

AS_SEVEN = {
    "mtp": "--mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll 7",
    "eagle3": f"--drafter eagle3 --drafter-steps 7 {LAYERS}",
}
"""Flags of an evaluation of seven drafts, where they are not those of training."""


def main() -> None:
    """Train and evaluate every head, and print the table."""
    wanted = parse()
    wanted.out.mkdir(parents=True, exist_ok=True)
    trunk, start = wanted.out / "trunk", wanted.out / "fitted"
    if not trunk.is_dir():
        run("convert", "drop-mtp", wanted.checkpoint, trunk)
    if not start.is_dir():
        of = ("--mtp-num-layers", 1, "--mtp-init", "fitted", "--data-path", wanted.data)
        run("convert", "attach-mtp", trunk, start, *of)
    rows = []
    for head in wanted.heads:
        kept = wanted.out / f"{head}.json"
        if not kept.exists():
            kept.write_text(json.dumps(measured(head, start if head == "mtp" else trunk, wanted)) + "\n")
        rows.append(json.loads(kept.read_text()))
        print(f"{head:14}", rows[-1]["steps"], *(f"{rows[-1][str(count)]:.2f}" for count in COUNTS), flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="its .bin/.idx prefix")
    parser.add_argument("--out", type=Path, default=Path("runs/heads"))
    parser.add_argument("--seconds", type=float, default=120.0, help="of a head's training, by the CPU's clock")
    parser.add_argument("--heads", type=lambda text: text.split(","), default=["mtp", "eagle3", "dspark", "dflash"])
    return parser.parse_args()


def measured(head: str, load: Path, wanted: argparse.Namespace) -> dict[str, float]:
    """The steps that fit into the time, their seconds, the acceptance of every draft, and accepted lengths."""
    short, longer = (train(head, load, steps, None, wanted) for steps in (2, 10))
    step = (longer - short) / 8
    steps, saved = max(1, round(wanted.seconds / step)), wanted.out / f"{head}.checkpoint"
    shutil.rmtree(saved, ignore_errors=True)
    spent = train(head, load, steps, saved, wanted)
    flags = AS_SEVEN.get(head.partition("-")[0], HEADS[head]).split()
    seen = run(
        *("evaluate", "--load", saved, "--data-path", wanted.data, "--split", "98,2,0", "--micro-batch-size", 8),
        *("--eval-iters", 16, "--json", *flags, *tokenizer(wanted)),
    )
    row = json.loads(seen.splitlines()[-1])
    accepted = [row[f"mtp_{number} acceptance"] for number in range(1, COUNTS[-1] + 1)]
    lengths = {str(count): 1 + sum(accepted[:count]) for count in COUNTS}
    return {"steps": steps, "seconds a step": step, "seconds with start": spent, "acceptance": accepted, **lengths}


def tokenizer(wanted: argparse.Namespace) -> list[str]:
    """Flags of the tokenizer that the data was made with."""
    named = json.loads(wanted.data.with_name(wanted.data.name + ".json").read_text())["tokenizer"]
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", named]


def train(head: str, load: Path, steps: int, saved: Path | None, wanted: argparse.Namespace) -> float:
    """CPU seconds of a training, with its start."""
    flags = "--use-checkpoint-args --finetune --mtp-loss-scaling-factor 1 --seq-length 256 "
    flags += f"--micro-batch-size 4 --global-batch-size 4 --train-iters {steps} --lr 2e-3 --min-lr 1e-4 "
    flags += f"--lr-decay-style cosine --lr-warmup-iters {steps // 20 + 1} --clip-grad 1.0 --weight-decay 0.01 "
    flags += "--adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 --split 98,2,0 --eval-iters 0 --no-save-optim "
    flags += f"--eval-interval {steps} --no-create-attention-mask-in-dataloader --log-interval 20 {HEADS[head]} "
    if saved is not None:
        flags += f"--save {saved} --save-interval {steps} "
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("train", *flags.split(), "--load", load, "--data-path", wanted.data, *tokenizer(wanted))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(*words: object) -> str:
    """What a verb prints."""
    command = [sys.executable, "-m", "megatron_mtp", *map(str, words)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=one_thread, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    return ended.stdout


if __name__ == "__main__":
    main()
