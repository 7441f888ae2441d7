"""What training data changes: new depths on a frozen trunk, trained on a corpus or on the model's own texts.

    python studies/self_generated.py                  the quickstart's model, 200 steps by kd and by ce
    python studies/self_generated.py --losses kd --steps 400 --texts 3300
    python studies/self_generated.py --checkpoint trunk --data data/corpus --init last-layer --token-fraction 0.25 \\
        --out runs/own                               a model of Hugging Face's, converted by hf-to-mcore
    python studies/self_generated.py --quick          does it run? (the figures mean nothing)

The depths of --checkpoint are dropped, and new ones attached. Both sides see as many steps of as many tokens, by the
same seed and settings. The own texts continue pieces of the training documents by `megatron-mtp sample`. Acceptance of
each side is measured by `megatron-mtp evaluate` on documents that nothing was trained on, and on continuations of
pieces of these: greedy, and at the temperature of the training's texts. Every step is kept in --out, and the same
command continues after an interruption.

Run at 7c07fc3.
"""

import argparse
import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from benchmarks.harness import Goal, count, hardware, report, Table
from megatron_mtp.checkpoint.mcore.iterations import iteration_folder
from megatron_mtp.checkpoint.mcore.reader import stored_depths
from studies.losses import ON_CPU, ROOT, TRAINING

OWN, CORPUS = "own texts", "corpus"
LENGTH, PROMPT = "expected accepted length", 32
SPLIT = "98,2,0"


def main() -> None:
    """Sample, train, measure, report."""
    wanted = parse(sys.argv[1:])
    start = untrained(wanted)
    data = {CORPUS: wanted.data, OWN: sampled("train", wanted)}
    tests = {
        CORPUS: (wanted.data, SPLIT),
        "own, greedy": (sampled("greedy", wanted), "0,1,0"),
        "own, sampled": (sampled("sampled", wanted), "0,1,0"),
    }
    results: dict[str, dict[str, Any]] = {}
    for loss, side in product(wanted.losses.split(","), data):
        trained = finished(f"{loss}-{side.split()[0]}", loss, data[side], start, wanted)
        results[f"{loss}, {side}"] = {
            test: accepted(trained, prefix, split, test, wanted) for test, (prefix, split) in tests.items()
        }
    report("self_generated", hardware(ON_CPU), results, goals(results, wanted), [shown(results)])


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a value makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    add("--data", type=Path, default=Path("runs/quickstart/data/corpus"), help="its .bin/.idx prefix")
    add("--out", type=Path, default=Path("runs/self_generated"), help="default: runs/self_generated")
    add("--init", choices=("random", "last-layer"), default="random", help="of the new depths; default: random")
    add("--losses", default="kd,ce", help="default: kd,ce")
    add("--steps", type=count, default=200, help="of each training; default: 200")
    add("--texts", type=count, default=1650, help="own texts to train on; default: 1650")
    add("--test-texts", type=count, default=130, help="own texts to measure on, of each kind; default: 130")
    add("--temperature", default="0.7", help="of sampled texts; default: 0.7")
    add("--batch", type=count, default=8, help="sequences a step; default: 8")
    add("--seq-length", type=count, default=256, help="default: 256")
    add("--lr", default="2e-3", help="at the start of the cosine; default: 2e-3")
    add("--token-fraction", default="1", help="part of the positions in the depths' loss; default: 1")
    add("--quick", action="store_true", help="3 steps and a few short texts: whether it runs")
    wanted = parser.parse_args(argv)
    if not wanted.checkpoint.is_dir():
        parser.error(f"there is no {wanted.checkpoint}; make it with scripts/quickstart.sh, or give --checkpoint.")
    if wanted.quick:
        wanted.steps, wanted.texts, wanted.test_texts, wanted.out = 3, 60, 9, wanted.out / "quick"
    return wanted


def run(*words: object) -> str:
    """What a verb printed."""
    command = [sys.executable, "-m", "megatron_mtp", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def untrained(wanted: argparse.Namespace) -> Path:
    """The trunk with two new depths; the trunk alone lies beside it."""
    trunk, start = trunk_of(wanted), wanted.out.resolve() / "start"
    if not start.is_dir():
        run("convert", "attach-mtp", trunk, start, "--mtp-num-layers", 2, "--mtp-init", wanted.init)
    return start


def trunk_of(wanted: argparse.Namespace) -> Path:
    """--checkpoint, or a copy without its depths."""
    given, trunk = wanted.checkpoint.resolve(), wanted.out.resolve() / "trunk"
    stored = stored_depths(iteration_folder(given))
    if stored is not None and not stored.layers:
        return given
    if not trunk.is_dir():
        run("convert", "drop-mtp", given, trunk)
    return trunk


def tokenizer(wanted: argparse.Namespace) -> str:
    found: str = json.loads(wanted.data.with_name(f"{wanted.data.name}.json").read_text())["tokenizer"]
    return found


def sampled(kind: str, wanted: argparse.Namespace) -> Path:
    """Texts of the trunk; those to measure on continue documents that nothing was trained on."""
    prefix = wanted.out.resolve() / "data" / kind
    flags = ["--load", trunk_of(wanted), "--data-path", wanted.data.resolve(), "--split", SPLIT]
    flags += ["--tokenizer", tokenizer(wanted), "--output-prefix", prefix, "--anywhere", "--prompt-tokens", PROMPT]
    flags += ["--part", "training" if kind == "train" else "validation"]
    flags += ["--texts", wanted.texts if kind == "train" else wanted.test_texts]
    flags += ["--temperature", 0 if kind == "greedy" else wanted.temperature]
    run("sample", *flags, "--max-new-tokens", wanted.seq_length - PROMPT)
    return prefix


def finished(name: str, loss: str, data: Path, start: Path, wanted: argparse.Namespace) -> Path:
    """The checkpoint of a training, made unless it is there."""
    folder = wanted.out.resolve() / name
    tracker = folder / "checkpoint" / "latest_checkpointed_iteration.txt"
    if not tracker.exists() or int(tracker.read_text()) < wanted.steps:
        shutil.rmtree(folder, ignore_errors=True)
        flags = ["--load", start, "--data-path", data.resolve(), "--mtp-loss", loss, "--train-iters", wanted.steps]
        flags += ["--split", SPLIT, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer(wanted)]
        flags += ["--micro-batch-size", wanted.batch, "--global-batch-size", wanted.batch]
        flags += ["--seq-length", wanted.seq_length, "--lr", wanted.lr, "--lr-warmup-iters", wanted.steps // 20 + 1]
        flags += ["--mtp-token-fraction", wanted.token_fraction]
        flags += ["--eval-interval", wanted.steps, "--eval-iters", 1, "--save", folder / "checkpoint"]
        run("train", *TRAINING, *flags, "--save-interval", wanted.steps)
    return folder / "checkpoint"


def accepted(checkpoint: Path, data: Path, split: str, test: str, wanted: argparse.Namespace) -> dict[str, float]:
    """The row of an evaluation, kept beside the checkpoint."""
    file = checkpoint.with_name(f"{test.replace(', ', '-')}.json")
    if not file.exists():
        batches = max(1, wanted.test_texts * (wanted.seq_length + 1) // (wanted.seq_length * wanted.batch))
        flags = ["--load", checkpoint, "--data-path", data.resolve(), "--split", split, "--eval-iters", batches]
        flags += ["--micro-batch-size", wanted.batch, "--global-batch-size", wanted.batch, "--json"]
        file.write_text(run("evaluate", *flags).splitlines()[-1])
    row = json.loads(file.read_text())
    names = (name for name in row if name.endswith(" acceptance") and "conditional" not in name)
    return {**{name: row[name] for name in names}, LENGTH: row[LENGTH]}


def shown(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, tests in results.items():
        for test, figures in tests.items():
            rates = [round(100 * rate, 1) for key, rate in figures.items() if key != LENGTH]
            rows.append((name, test, *rates, round(figures[LENGTH], 3)))
    return Table(("loss, trained on", "measured on", "depth 1, %", "depth 2, %", LENGTH), rows)


def goals(results: dict[str, dict[str, Any]], wanted: argparse.Namespace) -> list[Goal]:
    """Own texts have to help on own texts."""
    found = []
    for loss in wanted.losses.split(","):
        own, corpus = (results[f"{loss}, {side}"]["own, greedy"][LENGTH] for side in (OWN, CORPUS))
        found.append(Goal(f"{loss}, greedy own texts: accepted length, own texts / corpus", own / corpus, 1.0, ">="))
    return found


if __name__ == "__main__":
    main()
