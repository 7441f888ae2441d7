"""What a graft keeps: the MTP layer of a small model on its trunk after more training, and then trained on.

    python studies/grafts.py                      a trunk trained on the documents after the tests' source
    python studies/grafts.py --tuned-lr 4e-2      the same, moved much further
    python studies/grafts.py --muon --tuned-on megatron_mtp --tuned-lr 2e-2 --lr 1e-2   other Python, layers by Muon
    python studies/grafts.py --quick              does it run? (the figures mean nothing)

A trunk of 2 layers and its MTP layer learn Python source (the donor). The trunk alone then learns Markdown. The donor's
layer is grafted on it and trained by kd on the frozen trunk, beside a layer of random weights. Acceptance is that of the
first draft on held-out Markdown. What is finished is kept in --out and not repeated.

Run at 107659a, by Muon at e0c6525.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 8 "
    "--global-batch-size 8 --eval-interval 10000 --eval-iters 0 --lr-decay-style cosine --min-lr 1e-5 "
    "--lr-warmup-iters 2 --tokenizer-type HuggingFaceTokenizer"
)
HEAD = "--mtp-num-layers 1 --mtp-train-only --mtp-loss kd --mtp-loss-scaling-factor 1 --finetune"
MUON = "--optimizer muon --muon-extra-scale-factor 0.2 --muon-nesterov --lr-decay-style linear --min-lr 0"
SPLIT = ("--split", "90,10,0")


def main() -> None:
    """Train, graft, train on, and print acceptance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/grafts"), help="default: runs/grafts")
    add("--tuned-lr", default="3e-3", help="of the trunk's further training; default: 3e-3")
    add("--lr", default="1e-3", help="of the MTP layers; default: 1e-3")
    add("--tuned-on", default="docs", help="folder of the trunk's further training; default: docs, Markdown")
    add("--muon", action="store_true", help="train the MTP layers by Muon")
    add("--quick", action="store_true", help="a few steps: whether it runs")
    wanted = parser.parse_args()
    out = (wanted.out / ("quick" if wanted.quick else f"{wanted.tuned_on}-{wanted.tuned_lr}-{wanted.lr}{'-muon' * wanted.muon}")).resolve()
    head = [*HEAD.split(), *(MUON.split() if wanted.muon else [])]
    pretrain, tune, few, many = (4, 4, 4, 8) if wanted.quick else (1500, 400, 200, 1000)
    tokens = ["--vocab-size", "512", "--tokenizer-output", out / "tokenizer"]
    make(out / "source.idx", "preprocess", "--input", ROOT / "tests/unit", *tokens, "--output-prefix", out / "source")
    pages = ["--input", ROOT / wanted.tuned_on, "--tokenizer", out / "tokenizer", "--output-prefix", out / "pages"]
    make(out / "pages.idx", "preprocess", *pages)
    train(out, "donor", "source", pretrain, "3e-3", "--mtp-num-layers", 1)
    make(out / "trunk", "convert", "drop-mtp", out / "donor", out / "trunk")
    train(out, "tuned", "pages", tune, wanted.tuned_lr, "--load", out / "trunk", "--finetune")
    make(out / "graft", "convert", "graft", out / "donor", out / "tuned", out / "graft")
    new = ["--mtp-num-layers", 1, "--mtp-init", "random"]
    make(out / "random", "convert", "attach-mtp", out / "tuned", out / "random", *new)
    print(f"donor on its own trunk: {acceptance(out, 'donor'):.1%}")
    for name in ("graft", "random"):
        found = {0: acceptance(out, name)}
        for steps in (few, many):
            train(out, f"{name}-{steps}", "pages", steps, wanted.lr, "--load", out / name, *head)
            found[steps] = acceptance(out, f"{name}-{steps}")
        print(f"{name}: " + ", ".join(f"{rate:.1%} after {steps} steps" for steps, rate in found.items()))


def train(out: Path, name: str, data: str, steps: int, rate: str, *flags: object) -> None:
    """Train a checkpoint of this name on a corpus."""
    given = [*MODEL.split(), "--tokenizer-model", out / "tokenizer", "--data-path", out / data, *SPLIT, "--lr", rate]
    saves = ["--train-iters", steps, "--save", out / name, "--save-interval", steps]
    make(out / name / "latest_checkpointed_iteration.txt", "train", *given, *saves, *flags)


def acceptance(out: Path, name: str) -> float:
    """Of the first draft on the held-out part of the pages."""
    data = ["--data-path", out / "pages", *SPLIT, "--micro-batch-size", 8, "--eval-iters", 32]
    found = json.loads(run("evaluate", "--load", out / name, *data, "--json").splitlines()[-1])
    return float(found["mtp_1 acceptance"])


def make(result: Path, *words: object) -> None:
    """Run a verb unless its result is there."""
    if not result.exists():
        run(*words)


def run(*words: object) -> str:
    """What a verb prints; its errors end the study."""
    command = [sys.executable, "-m", "megatron_mtp", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
