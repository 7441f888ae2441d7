"""Where the second depth has to look back: a model trained on passages that are repeated, as code that is being edited.

    python studies/repeated.py            makes the text, trains for some 6 minutes (runs/repeated), and measures
    python studies/repeated.py --quick    does it run? (the figures mean nothing)

Every document is a passage of transformers' Python source, given twice. The prompts end 12 tokens into the repetition,
so that what is drafted stands earlier in the prompt. The exact recursion of training (`mtp`) is compared with the mix
of trunk states. Needs the tokenizer of scripts/quickstart.sh.

Run at db398ab.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch
import transformers
from megatron.core.datasets.indexed_dataset import IndexedDataset

from benchmarks.harness import Goal, count, hardware, report
from megatron_mtp.drafting import load_runner
from megatron_mtp.model.build import join_world
from megatron_mtp.platform import prepare
from studies.accepted import VANILLA, Trained, accepted_table, identical
from studies.accepted import figures as figures_of

ON_CPU = prepare()

ROOT = Path(__file__).resolve().parents[1]

MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.06 "
    "--embedding-init-method-std 1.0 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
).split()
TRAINING = (
    "--micro-batch-size 8 --global-batch-size 8 --lr 4e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 40 "
    "--weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --split 98,2,0 --make-vocab-size-divisible-by 128 "
    "--tokenizer-type HuggingFaceTokenizer --no-create-attention-mask-in-dataloader --eval-interval 100000 "
    "--eval-iters 1 --log-interval 100"
).split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/repeated"))
    parser.add_argument("--tokenizer", type=Path, default=Path("runs/quickstart/data/corpus-tokenizer"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=count, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.tokenizer.is_dir():
        parser.error(f"there is no {args.tokenizer}; make it with scripts/quickstart.sh, or give --tokenizer.")
    run = args.run / "quick" if args.quick else args.run
    corpus = make_corpus(run, args.tokenizer, 500 if args.quick else 60_000)
    train(run, corpus, args.tokenizer, 60 if args.quick else 1200)
    join_world()
    model = Trained(load_runner(run / "checkpoint"), prompts_of(corpus, 4 if args.quick else 24), 60)
    methods = {"mtp": VANILLA, "mtp_trunk_states": {**VANILLA, "method": "mtp_trunk_states"}}
    results = {name: figures_of(stats) for name, stats in identical(model, 8, methods).items()}
    exact, mixed = (results[name]["accepted_given_the_earlier"][1] for name in methods)
    goals = [Goal("repeated, second draft: mtp less the trunk's states, points", 100 * (exact - mixed), 8, ">=")]
    report("repeated", hardware(ON_CPU), results, goals, [accepted_table(results)])


def make_corpus(run: Path, tokenizer: Path, documents: int) -> Path:
    """The prefix of a tokenized corpus; made unless it is there."""
    prefix = run / "corpus"
    if not prefix.with_suffix(".idx").exists():
        run.mkdir(parents=True, exist_ok=True)
        text = run / "passages.jsonl"
        with open(text, "w") as lines:
            lines.writelines(json.dumps({"text": f"{one}# again\n{one}"}) + "\n" for one in passages(documents))
        command = ["--input", str(text), "--tokenizer", str(tokenizer), "--output-prefix", str(prefix)]
        subprocess.run([sys.executable, str(ROOT / "tools/data/preprocess.py"), *command], check=True)
    return prefix


def passages(count: int) -> list[str]:
    """Whole lines of 90 to some 400 characters, from anywhere in the source."""
    generator, found = random.Random(0), list[str]()
    files = [path.read_text().split("\n") for path in sorted(Path(transformers.__file__).parent.rglob("*.py"))]
    files = [lines for lines in files if len(lines) >= 60]
    while len(found) < count:
        lines = generator.choice(files)
        start, wanted, passage = generator.randrange(len(lines) - 30), generator.randint(90, 330), ""
        while len(passage) < wanted and start < len(lines):
            passage, start = f"{passage}{lines[start]}\n", start + 1
        if len(passage.strip()) >= 60:
            found.append(passage[:400])
    return found


def train(run: Path, corpus: Path, tokenizer: Path, steps: int) -> None:
    """With `pretrain_gpt.py`; a finished run is not repeated."""
    if (run / "checkpoint" / "latest_checkpointed_iteration.txt").exists():
        return
    where: list[Any] = ["--data-path", corpus, "--tokenizer-model", tokenizer, "--save", run / "checkpoint"]
    often = ["--train-iters", str(steps), "--save-interval", str(steps)]
    command = [sys.executable, ROOT / "pretrain_gpt.py", *MODEL, *TRAINING, *where, *often]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def prompts_of(corpus: Path, count: int) -> list[list[int]]:
    """Held-out documents of 141 to 239 tokens, up to 12 tokens into the repetition."""
    data = IndexedDataset(str(corpus))
    held_out = (data[number].tolist() for number in range(int(0.98 * len(data)), len(data)))
    return [tokens[: len(tokens) // 2 + 12] for tokens in held_out if 140 < len(tokens) < 240][:count]


if __name__ == "__main__":
    main()
