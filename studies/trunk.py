"""Whether depths make the trunk better: the quickstart's model trained with two depths and without any.

    python studies/trunk.py                                  factors 0, 0.1 and 0.3, three seeds
    python studies/trunk.py --factors 0,0.3 --seeds 1 --steps 280 --equal steps
    python studies/trunk.py --quick                          does it run? (the figures mean nothing)

A factor is `--mtp-loss-scaling-factor`; with 0 there are no depths. Every trunk is measured alone, on documents that no
training sees:

    loss         of the next token, in nats
    accuracy     positions whose most likely next token is the text's
    completed    positions from which greedy decoding gives the text's next 8 tokens

With `--equal seconds` a run has as many steps as fit into the time of the one without depths, by the seconds of its own
steps in the run of equal steps. Finished runs are kept in --out, and the same command continues after an interruption.

Run at fc5bef1.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

import torch

from benchmarks.harness import Goal, count, hardware, report, some_of, Table
from megatron_mtp.drafting import load_runner
from studies.accepted import trunk_logits
from studies.drafting import held_out
from studies.losses import ON_CPU, ROOT
from studies.study import EQUAL, Result, Study, step_seconds, steps_in_the_time

MODEL = (
    "--num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--init-method-std 0.06 --embedding-init-method-std 1.0"
).split()
TRAINING = (
    "--micro-batch-size 8 --global-batch-size 8 --lr 4e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 "
    "--clip-grad 1.0 --adam-beta2 0.95 --split 98,2,0 --make-vocab-size-divisible-by 128 --eval-iters 0 "
    "--no-create-attention-mask-in-dataloader --log-interval 20 --no-save-optim"
).split()
"""Model and training of scripts/quickstart.sh."""

FACTORS = ("0", "0.1", "0.3")
DEPTHS = 2
WINDOW, COMPLETED = 256, 8
MEASURES = {"loss": "<=", "accuracy": ">=", "completed": ">="}
"""Of a trunk, and whether less or more is better."""


@dataclass(frozen=True)
class Run:
    """A training; `equal` is what it has in common with the others."""

    equal: str
    factor: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.equal}-{self.factor}-{self.seed}"


Results = Mapping[Run, Result]


def main() -> None:
    """Train, measure, report."""
    wanted = parse(sys.argv[1:])
    study = Study[Run]("trunk", wanted.out, settings(wanted))
    results = study.results(all_runs(wanted), lambda run, before: measured(run, before, wanted))
    summary = {"settings": settings(wanted), "runs": {run.name: one for run, one in results.items()}}
    report("trunk", hardware(ON_CPU), summary, goals(results, wanted), [rows(results, wanted)])


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a value makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/quickstart/data/corpus"), help="its .bin/.idx prefix")
    parser.add_argument("--out", type=Path, default=Path("runs/trunk"), help="default: runs/trunk")
    parser.add_argument("--factors", type=some_of(FACTORS), default=list(FACTORS), metavar="FACTOR,...")
    parser.add_argument("--equal", type=some_of(EQUAL), default=list(EQUAL), metavar="NAME,...")
    parser.add_argument("--seeds", type=count, default=3, help="seeds 1 .. N; default: 3")
    parser.add_argument("--steps", type=count, default=560, help="of runs of equal steps; default: 560")
    parser.add_argument("--windows", type=count, default=128, help=f"of {WINDOW} held-out tokens; default: 128")
    parser.add_argument("--quick", action="store_true", help="3 steps and 2 windows: whether it runs")
    wanted = parser.parse_args(argv)
    if not wanted.data.with_suffix(".idx").is_file():
        parser.error(f"there is no {wanted.data}.idx; make it with scripts/quickstart.sh, or give --data.")
    if "0" not in wanted.factors:
        parser.error("factor 0, without depths, is what the others are compared with; add it to --factors.")
    if wanted.quick:
        wanted.steps, wanted.windows, wanted.out = 3, 2, wanted.out / "quick"
    return wanted


def all_runs(wanted: argparse.Namespace) -> list[Run]:
    """Those of equal steps first, whose seconds the others need; seed by seed, as a study may be interrupted."""
    equal = [one for one in EQUAL if one in wanted.equal or one == "steps"]
    return [Run(*each) for each in product(equal, wanted.factors, range(1, wanted.seeds + 1))]


def settings(wanted: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a study share."""
    return {"data": str(wanted.data), "steps": wanted.steps, "windows": wanted.windows}


def measured(run: Run, results: Results, wanted: argparse.Namespace) -> Result:
    """Train and measure; a run of as many steps as another is that one."""
    steps = wanted.steps
    if run.equal == "seconds":
        of, own = (results[Run("steps", factor, run.seed)]["step_seconds"] for factor in ("0", run.factor))
        steps = steps_in_the_time(steps, of, own)
        if steps == wanted.steps:
            return results[replace(run, equal="steps")]
    folder = wanted.out / f"{run.name}.partial"
    train(run, steps, folder, wanted)
    spent = {"steps": steps, "step_seconds": step_seconds(folder)}
    found = {**asdict(run), **spent, **measures(folder / "checkpoint", wanted)}
    shutil.rmtree(folder)
    return found


def train(run: Run, steps: int, folder: Path, wanted: argparse.Namespace) -> None:
    """One run of `pretrain_gpt.py`, from its start; checkpoint and metrics are in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = json.loads(wanted.data.with_name(wanted.data.name + ".json").read_text())["tokenizer"]
    flags: list[Any] = ["--data-path", wanted.data, "--tokenizer-type", "HuggingFaceTokenizer"]
    flags += ["--tokenizer-model", tokenizer, "--seed", run.seed, "--train-iters", steps]
    flags += ["--lr-warmup-iters", min(20, steps - 1), "--save", folder / "checkpoint", "--save-interval", steps]
    flags += ["--eval-interval", steps, "--mtp-metrics-dir", folder]
    if run.factor != "0":
        flags += ["--mtp-num-layers", DEPTHS, "--mtp-loss-scaling-factor", run.factor]
    with open(folder / "listing.txt", "w") as listing:
        words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *MODEL, *TRAINING, *map(str, flags)]
        subprocess.run(words, check=True, stdout=listing, stderr=sys.stderr)


@torch.inference_mode()
def measures(checkpoint: Path, wanted: argparse.Namespace) -> dict[str, float]:
    """Of the trunk, over all positions of all windows. A position counts as completed where its own next token and
    those of the 7 positions after it are the most likely ones: greedy decoding would then have emitted them."""
    runner = load_runner(checkpoint)
    losses, right, completed = [], [], []
    for text in held_out(wanted.data, wanted.windows, WINDOW):
        logits_SV, next_S = trunk_logits(runner, text)[:-1], torch.tensor(text[1:], device=runner.device)
        losses.append(torch.nn.functional.cross_entropy(logits_SV, next_S))
        right_S = (logits_SV.argmax(-1) == next_S).float()
        right.append(right_S.mean())
        completed.append(right_S.unfold(0, COMPLETED, 1).amin(1).mean())
    pairs = zip(MEASURES, (losses, right, completed), strict=True)
    return {name: float(torch.stack(values).mean()) for name, values in pairs}


def mean(results: Results, equal: str, factor: str, measure: str) -> float | None:
    """Over the seeds that have finished; None without one."""
    found = [one[measure] for run, one in results.items() if (run.equal, run.factor) == (equal, factor)]
    return statistics.mean(found) if found else None


def goals(results: Results, wanted: argparse.Namespace) -> list[Goal]:
    """Depths make the trunk better: each factor less none, in what is measured."""
    found = []
    for equal, factor, (measure, op) in product(wanted.equal, wanted.factors, MEASURES.items()):
        with_depths, without = (mean(results, equal, one, measure) for one in (factor, "0"))
        if factor != "0" and with_depths is not None and without is not None:
            what = f"{measure} of the trunk, factor {factor} less none, equal {equal}"
            found.append(Goal(what, with_depths - without, 0.0, op))
    return found


def rows(results: Results, wanted: argparse.Namespace) -> str:
    """Means over seeds."""
    header = ("equal", "factor", "steps", *MEASURES)
    cells = [
        (equal, factor, *(mean(results, equal, factor, one) for one in ("steps", *MEASURES)))
        for equal, factor in product(wanted.equal, wanted.factors)
    ]
    return Table(header, cells)


if __name__ == "__main__":
    main()
