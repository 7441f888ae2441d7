"""Accepted length by context length, for drafters with and without an attention window.

    python benchmarks/windows.py                      one trunk, two EAGLE-3 drafters, sequences of 16,384 tokens
    python benchmarks/windows.py --folder DIR         keep trunk and drafters there; resumes an interrupted run
    python benchmarks/windows.py --quick              does it run? (the figures mean nothing)

text      The corpus of scripts/quickstart.sh. A sequence continues from one file to the next.
trunk     Four layers with windows of 256 positions. Its quality does not depend on the position, so a change in
          acceptance is due to the drafter.
drafters  Trained on sequences of 512 tokens, on the frozen trunk: one attends to all positions, one to the last 64.

`evaluate --context-lengths` measures both on documents that no training has seen.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from benchmarks.harness import Found, Goal, Table, main
from benchmarks.verbs import run
from megatron_mtp.common.acceptance import EXPECTED_LENGTH

ROOT = Path(__file__).resolve().parents[1]
DATA = Path("runs/quickstart/data/corpus")
WINDOW = 64
DRAFTERS = {"all positions": [], f"window of {WINDOW}": ["--drafter-window-size", WINDOW]}
TRUNK = (
    "--num-layers 4 --hidden-size 96 --num-attention-heads 3 --window-size 255,0 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--init-method-std 0.06 --embedding-init-method-std 1.0 --mtp-num-layers 0"
).split()
DRAFTER = "--use-checkpoint-args --drafter eagle3 --drafter-steps 3".split()
TRAINING = (
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 8 --global-batch-size 8 --optimizer muon "
    "--muon-extra-scale-factor 0.2 --muon-nesterov --lr 1e-2 --min-lr 0 --lr-decay-style linear --weight-decay 0.1 "
    "--clip-grad 1.0 --adam-beta2 0.95 --eval-iters 0 --tokenizer-type HuggingFaceTokenizer "
    "--no-create-attention-mask-in-dataloader"
).split()


def windows(wanted: Namespace) -> Found:
    """Train the trunk and its drafters, and measure acceptance."""
    quick = wanted.quick
    lengths = [16, 32, 64, 128] if quick else [512, 1024, 2048, 4096, 8192, 16384]
    split = "80,20,0" if quick else "98,2,0"
    trained, trunk_steps, steps, sequences = (32, 4, 4, 2) if quick else (512, 240, 120, 6)
    place = wanted.folder
    corpus = small_corpus(place) if quick else wanted.data
    data = ["--data-path", corpus, "--tokenizer-model", f"{corpus}-tokenizer", "--split", split]
    of_training = [*TRAINING, *data, "--seq-length", trained]
    train(place / "trunk", [*TRUNK, "--max-position-embeddings", lengths[-1], *of_training], trunk_steps)
    found = {}
    for name, flags in DRAFTERS.items():
        folder = place / name.replace(" ", "-")
        train(folder, [*DRAFTER, "--load", place / "trunk", *flags, *of_training], steps)
        given = [*data, "--context-lengths", *lengths, "--eval-iters", sequences, "--json"]
        found[name] = json.loads(run("evaluate", "--load", folder, *given))
    names = list(next(iter(found.values()))["contexts"])
    by_context = {name: [one["contexts"][context] for context in names] for name, one in found.items()}
    rows = [
        (context, *(f"{each[row][EXPECTED_LENGTH]:.3f} ± {each[row]['error']:.3f}" for each in by_context.values()))
        for row, context in enumerate(names)
    ]
    return Found(
        {"contexts": by_context},
        goals(*([one[EXPECTED_LENGTH] for one in each] for each in by_context.values())),
        [Table("Expected accepted length, three drafts", ("context", *DRAFTERS), rows)],
    )


def goals(full: list[float], windowed: list[float]) -> list[Goal]:
    """Check how much acceptance longer contexts keep relative to 2k, and the cost of the window in the first."""
    return [
        Goal("with a window, the least of longer contexts over 1k to 2k", min(windowed[3:]) / windowed[2], 0.95, ">="),
        Goal("without one, 8k to 16k over 1k to 2k", full[-1] / full[2], 0.95),
        Goal("with a window over without one, up to 512", windowed[0] / full[0], 0.95, ">="),
    ]


def small_corpus(place: Path) -> Path:
    """Return the prefix of a corpus of our pages."""
    prefix = place / "corpus"
    run("preprocess", "--input", ROOT / "docs", "--vocab-size", 300, "--output-prefix", prefix, "--workers", 1)
    return prefix


def train(folder: Path, flags: list[Any], steps: int) -> None:
    """Train once, and return a checkpoint after this many steps."""
    if not (folder / "latest_checkpointed_iteration.txt").exists():
        ends = ["--train-iters", steps, "--lr-warmup-iters", steps // 20, "--eval-interval", steps]
        run("train", *flags, *ends, "--save", folder, "--save-interval", steps)


FLAGS = {"--data": {"type": Path, "default": DATA, "metavar": "PREFIX", "help": f"the corpus; default: {DATA}"}}

if __name__ == "__main__":
    main(windows, __doc__, flags=FLAGS)
