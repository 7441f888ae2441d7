"""Which head drafts most after equal time on one frozen trunk: MTP in two passes, EAGLE-3, DFlash and DSpark.

    python studies/heads.py --checkpoint runs/quickstart/checkpoint --data runs/quickstart/data/corpus
    python studies/heads.py ... --seconds 300 --heads mtp,dspark-fast
    python studies/heads.py --trunk runs/smollm2/trunk --data runs/smollm2/data/corpus --out runs/smollm2/heads \
        --seconds 300 --heads mtp,eagle3-fitted,eagle3-three,dspark-kd --batch 1 --sequence 512 --eval-iters 32 \
        --layers '2 15 29' --lr 1e-3 --compared 1 --flags '--bf16 --mtp-draft-vocab-size 4096'

Each head is trained for as many steps as fit into the same CPU seconds of one thread, by the seconds of its own steps
in two short runs. Acceptance is measured teacher-forced on held-out text; the accepted length of K drafts is 1 and the
sum of the acceptance of drafts 1 .. K. Results are kept in --out, a file a head, and are not made again.

Run at 3da38f7, with SmolLM2-135M at 4cbb289, and for 1,200 seconds at 0f338fc.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

COUNTS = (3, 5, 7)
BLOCKS = "--drafter-steps 7 --drafter-blocks 64 --drafter-num-layers"
HEADS = {
    "mtp": "--mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll 2 --mtp-train-only --mtp-loss kd",
    "eagle3": "--drafter eagle3 --drafter-steps 7",
    "dspark": f"--drafter dspark {BLOCKS} 2",
    "dflash": f"--drafter dflash {BLOCKS} 2",
    "dspark-fast": f"--drafter dspark {BLOCKS} 1 --lr 6e-3",
    "dspark-kd": f"--drafter dspark {BLOCKS} 1 --mtp-loss mix --mtp-loss-mix kd=0.9,tv=0.1",
    "eagle3-fast": "--drafter eagle3 --drafter-steps 2 --lr 6e-3",
    "eagle3-three": "--drafter eagle3 --drafter-steps 3",
    "eagle3-fitted": "--drafter eagle3 --drafter-steps 3",
}
"""Flags of training; the names before a hyphen are kinds."""

AS_SEVEN = {
    "mtp": "--mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll 7",
    "eagle3": "--drafter eagle3 --drafter-steps 7",
}
"""Flags of an evaluation of seven drafts, where they are not those of training."""


def main() -> None:
    """Train and evaluate every head, and print the table."""
    wanted = parse()
    wanted.out.mkdir(parents=True, exist_ok=True)
    trunk, start = wanted.trunk or wanted.out / "trunk", wanted.out / "fitted"
    if not trunk.is_dir():
        run("convert", "drop-mtp", wanted.checkpoint, trunk)
    if not start.is_dir():
        of = ("--mtp-num-layers", 1, "--mtp-init", "fitted", "--data-path", wanted.data)
        run("convert", "attach-mtp", trunk, start, *of)
    begun = wanted.out / "eagle3-start"
    if "eagle3-fitted" in wanted.heads and not begun.is_dir():
        size = re.findall("--mtp-draft-vocab-size [0-9]+", wanted.flags)
        read = f"--drafter-layers {wanted.layers} {' '.join(size)}".split()
        run("convert", "fit-drafter", trunk, begun, "--data-path", wanted.data, *read)
    rows = []
    for head in wanted.heads:
        kept = wanted.out / f"{head}.json"
        if not kept.exists():
            begins = {"mtp": start, "eagle3-fitted": begun}.get(head, trunk)
            kept.write_text(json.dumps(measured(head, begins, wanted)) + "\n")
        rows.append(json.loads(kept.read_text()))
        print(f"{head:14}", rows[-1]["steps"], *(f"{rows[-1][str(count)]:.2f}" for count in COUNTS), flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"), help="with MTP layers")
    parser.add_argument("--trunk", type=Path, help="a checkpoint without any, in its place")
    parser.add_argument("--data", type=Path, required=True, help="its .bin/.idx prefix")
    parser.add_argument("--out", type=Path, default=Path("runs/heads"))
    parser.add_argument("--seconds", type=float, default=120.0, help="of a head's training, by the CPU's clock")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--eval-iters", type=int, default=16, help="held-out batches")
    parser.add_argument("--layers", default="1 2 3", help="of the trunk, that drafters read")
    parser.add_argument("--lr", default="2e-3", help="learning rate, where a head has none of its own")
    parser.add_argument("--compared", type=int, default=0, help="compare drafting with plain decoding for so many K")
    parser.add_argument("--flags", default="", help="more flags of training and evaluation")
    parser.add_argument("--heads", type=lambda text: text.split(","), default=["mtp", "eagle3", "dspark", "dflash"])
    return parser.parse_args()


def measured(head: str, load: Path, wanted: argparse.Namespace) -> dict[str, float]:
    """The steps that fit into the time, their seconds, the acceptance of every draft, and accepted lengths."""
    short, longer = (train(head, load, steps, None, wanted) for steps in (2, 10))
    step = (longer - short) / 8
    steps, saved = max(1, round(wanted.seconds / step)), wanted.out / f"{head}.checkpoint"
    shutil.rmtree(saved, ignore_errors=True)
    spent = train(head, load, steps, saved, wanted)
    flags = [*AS_SEVEN.get(head.partition("-")[0], HEADS[head]).split(), *of_all(head, wanted)]
    seen = run(
        *("evaluate", "--load", saved, "--data-path", wanted.data, "--split", "98,2,0", "--json"),
        *("--eval-iters", wanted.eval_iters, *flags, *tokenizer(wanted)),
    )
    row = json.loads(seen.splitlines()[-1])
    accepted = [row[f"mtp_{number} acceptance"] for number in range(1, COUNTS[-1] + 1)]
    lengths = {str(count): 1 + sum(accepted[:count]) for count in COUNTS}
    over_plain = {f"drafting, K = {count}": drafting(head, saved, count, wanted) for count in COUNTS[:wanted.compared]}
    seconds = {"seconds a step": step, "seconds with start": spent}
    return {"steps": steps, **seconds, "acceptance": accepted, **lengths, **over_plain}


def drafting(head: str, saved: Path, count: int, wanted: argparse.Namespace) -> dict[str, float]:
    """Accepted length, and speed over plain decoding in bfloat16 by the CPU's clock, on beginnings of held-out documents."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(wanted.data))
    last = [document for document in range(int(0.98 * len(data)), len(data)) if data.sequence_lengths[document] > 64]
    prompts = [",".join(map(str, data.get(document)[:64])) for document in last[:: len(last) // 6][:6]]
    kind = head.partition("-")[0]
    config = {"method": "mtp_eagle" if kind == "mtp" else kind, "num_speculative_tokens": count}
    flags = ["--load", saved, "--dtype", "bfloat16", "--speculative-config", json.dumps(config), "--max-new-tokens", 64]
    words = ["generate", *flags, "--compare", "--json", *(word for ids in prompts for word in ("--prompt-ids", ids))]
    by_the_cpu = "import time; time.perf_counter = time.process_time; from megatron_mtp.cli.main import main; main()"
    found = json.loads(run(*words, command=["-c", by_the_cpu]).splitlines()[-1])
    return {name: found[name] for name in ("accepted_length", "speed_up", "plain_tokens_per_second")}


def of_all(head: str, wanted: argparse.Namespace) -> list[str]:
    """Flags that all trainings and evaluations of a head have in common."""
    layers = "" if head == "mtp" else f"--drafter-layers {wanted.layers}"
    return f"--seq-length {wanted.sequence} --micro-batch-size {wanted.batch} {layers} {wanted.flags}".split()


def tokenizer(wanted: argparse.Namespace) -> list[str]:
    """Flags of the tokenizer that the data was made with."""
    named = json.loads(wanted.data.with_name(wanted.data.name + ".json").read_text())["tokenizer"]
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", named]


def train(head: str, load: Path, steps: int, saved: Path | None, wanted: argparse.Namespace) -> float:
    """CPU seconds of a training, with its start."""
    flags = "--use-checkpoint-args --finetune --mtp-loss-scaling-factor 1 "
    flags += f"--global-batch-size {wanted.batch} --train-iters {steps} --lr {wanted.lr} --min-lr 1e-4 "
    flags += f"--lr-decay-style cosine --lr-warmup-iters {steps // 20 + 1} --clip-grad 1.0 --weight-decay 0.01 "
    flags += "--adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 --split 98,2,0 --eval-iters 0 --no-save-optim "
    flags += f"--eval-interval {steps} --no-create-attention-mask-in-dataloader --log-interval 20 {HEADS[head]} "
    if saved is not None:
        flags += f"--save {saved} --save-interval {steps} "
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("train", *flags.split(), *of_all(head, wanted), "--load", load, "--data-path", wanted.data, *tokenizer(wanted))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(*words: object, command: list[str] | None = None) -> str:
    """What a verb prints."""
    command = [sys.executable, *(command or ["-m", "megatron_mtp"]), *map(str, words)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=one_thread, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    return ended.stdout


if __name__ == "__main__":
    main()
