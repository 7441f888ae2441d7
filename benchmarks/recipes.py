"""Which recipe drafts best? Recipes x trunks x domains x contexts x seeds, on states that are computed once.

    python benchmarks/recipes.py --folder runs/recipes    three trunks that are trained here
    python benchmarks/recipes.py --trunk NAME=DIR         a Hugging Face model in their place, such as SmolLM2-135M
    python benchmarks/recipes.py --quick                  does it run? (the figures mean nothing)

A cell is a training on a frozen trunk, by a recipe, for as many steps as all others, and its expected accepted length
on text that it has not seen, with three drafts. Finished cells are kept in FOLDER/PLACE/cells.json; the same command
goes on where it was cut, and with more --seeds it adds those.

recipes   those of `megatron-mtp recipes` that a frozen trunk can have, and what they are compared with. Learning rate,
          schedule, optimizer, number of drafts and sizes of a drafter are the same for all, so that a recipe is its
          loss, its states and its weights.
trunks    dense, with experts, and hybrid, of four layers, trained here on Python.
domains   Python as in the trunk's training, code of other authors, and chats.
contexts  tokens of a sequence, in training and evaluation.

Ranks are by the mean over cells. A published order holds where the difference of the means has its sign, beyond twice
the error of a bootstrap over the documents of all cells; it is undecided within that.
"""

import json
import statistics
import sys
from argparse import ArgumentTypeError, Namespace
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from benchmarks.harness import Found, Goal, Table, count, main
from benchmarks.head_life import Trunk, make_texts
from benchmarks.verbs import VerbError, run
from megatron_mtp.common.acceptance import EXPECTED_LENGTH, AcceptanceStats, error_of, gain_of
from megatron_mtp.common.files import remove, written_beside
from megatron_mtp.training.run_files import read_documents, read_rows

DRAFTS = 3
MTP = f"--mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll {DRAFTS} --mtp-init last-layer --mtp-train-only "
MTP += "--mtp-loss-scaling-factor 1"
BLOCKS = f"--drafter-steps {DRAFTS} --drafter-num-layers 2 --drafter-blocks 16"
RECIPES = {
    "ce": f"{MTP} --mtp-loss ce",
    "kd": f"{MTP} --mtp-loss kd",
    "lk": f"{MTP} --mtp-loss lk",
    "e2e_tv": f"{MTP} --mtp-loss e2e_tv",
    "nemotron-mtp-boost": f"--recipe nemotron-mtp-boost --mtp-init last-layer --mtp-unroll {DRAFTS}",
    "glm-5.2": f"--recipe glm-5.2 --mtp-init last-layer --mtp-unroll {DRAFTS}",
    "angelspec": f"--recipe angelspec --mtp-init last-layer --mtp-unroll {DRAFTS}",
    "eagle3": f"--recipe eagle3 --drafter-steps {DRAFTS}",
    "dflash": f"--drafter dflash {BLOCKS}",
    "dflash, dpace": f"--drafter dflash --mtp-loss dpace {BLOCKS}",
    "dspark": f"--recipe dspark {BLOCKS} --drafter-markov-rank 32",
    "dflash2": f"--recipe dflash2 {BLOCKS}",
}
SAME_RATES = "--optimizer adam --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 "
SAME_RATES += "--clip-grad 1.0 --weight-decay 0.01"
PUBLISHED = (
    ("ce", "kd", "arXiv:2606.15007; Tencent/AngelSpec"),
    ("e2e_tv", "angelspec", "end-to-end TV late, after LK: Tencent/AngelSpec"),
    ("dflash", "dflash, dpace", "NVIDIA/Model-Optimizer#1971"),
    ("dflash, dpace", "dspark", "NVIDIA/Model-Optimizer#1971"),
    ("dspark", "dflash2", "vllm-project/speculators#1014"),
)
"""The worse, the better, and who says so."""

SHARED = (
    "--num-attention-heads 4 --max-position-embeddings 512 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--no-create-attention-mask-in-dataloader --tokenizer-type HuggingFaceTokenizer"
).split()
TRUNKS = {
    "dense": "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --untie-embeddings-and-output-weights",
    "experts": (
        "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-experts 4 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 64 --moe-layer-freq [0,1,1,1] --moe-router-load-balancing-type none"
    ),
    "hybrid": (
        "--hybrid-layer-pattern M-*-M-*- --hidden-size 64 --ffn-hidden-size 176 --mamba-state-dim 16 "
        "--mamba-head-dim 16 --mamba-num-groups 2"
    ),
}
DOMAINS, CONTEXTS = ("same", "code", "chat"), (64, 256)
DEVIATIONS = 2
COUNTS = ("accepted_at", "reached_at", "offered_at")
"""Of `AcceptanceStats`: what a record keeps of a document."""


@dataclass(frozen=True)
class Cell:
    """A training of a recipe."""

    recipe: str
    trunk: str
    domain: str
    context: int
    seed: int

    @property
    def name(self) -> str:
        """The key of its record."""
        return f"{self.recipe}/{self.trunk}/{self.domain}/{self.context}/{self.seed}"


class Bench:
    """Texts, trunks and cells in a folder.

    Args:
        place: the folder.
        model: a Hugging Face model in the place of the trunks.
        steps: of a training of a head.
        documents: of every text.
    """

    def __init__(self, place: Path, model: Path | None, steps: int, documents: int) -> None:
        self.place, self.model, self.steps = place, model, steps
        self.tokenizer, self.texts = place / "texts" / "tokenizer", make_texts(place / "texts", documents, model)
        self._file = place / "cells.json"
        self.cells: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def train_trunk(self, trunk: str, steps: int) -> None:
        """Make the trunk, unless it has been."""
        folder = self.place / "trunks" / trunk
        if (folder / "finished").exists():
            return
        remove(folder)  # of a run that was cut
        if self.model is not None:
            run("convert", "hf-to-mcore", self.model, folder)
        else:
            flags = [*SHARED, *TRUNKS[trunk].split(), "--data-path", self.texts["same"].trained, "--split", "1"]
            flags += ["--tokenizer-model", self.tokenizer, *SAME_RATES.split(), "--lr", "4e-3"]
            flags += "--seq-length 64 --micro-batch-size 8 --global-batch-size 8 --eval-iters 0".split()
            flags += ["--train-iters", steps, "--eval-interval", steps, "--save-interval", steps, "--save", folder]
            run("train", *flags)
        (folder / "finished").touch()

    def record(self, cell: Cell) -> dict[str, Any]:
        """Return a cell's record; train it if there is none. A cell that failed is tried again, and says why."""
        if "failed" in self.cells.get(cell.name, {"failed": "never tried"}):
            try:
                self.cells[cell.name] = self._trained(cell)
            except VerbError as error:
                self.cells[cell.name] = {"failed": str(error).splitlines()[-1]}
            with written_beside(self._file) as beside:
                beside.write_text(json.dumps(self.cells))
        found: dict[str, Any] = self.cells[cell.name]
        return found

    def _trained(self, cell: Cell) -> dict[str, Any]:
        folder, text = self.place / "run", self.texts[cell.domain]
        remove(folder)  # of the cell before
        states = self.place / "states" / f"{cell.trunk}-{cell.domain}-{cell.context}"
        batch = max(512 // cell.context, 1)
        flags = ["--use-checkpoint-args", "--load", self.place / "trunks" / cell.trunk, "--finetune"]
        flags += ["--train-data-path", text.trained, "--valid-data-path", text.judged, *SHARED[-3:]]
        flags += ["--tokenizer-model", self.tokenizer, "--seq-length", cell.context, "--seed", 1000 + cell.seed]
        flags += ["--micro-batch-size", batch, "--global-batch-size", batch, "--train-iters", self.steps]
        flags += ["--eval-interval", self.steps, "--eval-iters", max(4096 // cell.context // batch, 1)]
        flags += ["--mtp-metrics-dir", folder, "--mtp-state-cache", states, "--mtp-draft-prompts", self._prompts(cell)]
        flags += ["--bf16"] if self.model is not None else []
        run("train", *flags, *RECIPES[cell.recipe].split(), *SAME_RATES.split())
        row = read_rows(folder)[-1]
        documents = {number: asdict(stats) for of in read_documents(folder).values() for number, stats in of.items()}
        counts = {number: {name: each[name] for name in COUNTS} for number, each in documents.items()}
        return {EXPECTED_LENGTH: row[EXPECTED_LENGTH], "tau_real": row["tau_real"], "documents": counts}

    def _prompts(self, cell: Cell) -> Path:
        """Beginnings of text that the training has not seen."""
        file = self.place / f"{cell.domain}-prompts.jsonl"
        if not file.exists():
            lines = (self.place / "texts" / f"{cell.domain}-judged.jsonl").read_text().splitlines()
            texts = [json.loads(line) for line in lines]
            prompts = [one["text"] if "text" in one else one["messages"][1]["content"] for one in texts]
            with written_beside(file) as beside:
                beside.write_text("".join(f"{json.dumps({'prompt': prompt[:80]})}\n" for prompt in prompts))
        return file


Documents = dict[tuple[str, ...], AcceptanceStats]
"""Documents of all cells of a recipe, by trunk, domain, context and number; those of all seeds are added up."""


def recipes(wanted: Namespace) -> Found:
    """All cells."""
    quick = wanted.place == "quick"
    model = wanted.trunk.model if wanted.trunk else None
    trunks = [wanted.trunk.name] if wanted.trunk else [*TRUNKS][: 1 if quick else None]
    steps, least = wanted.steps or (4 if quick else 300), 1 if quick else None
    domains, contexts = DOMAINS[:least], CONTEXTS[:least]
    place = wanted.folder / wanted.place / (wanted.trunk.name if model else "")
    bench = Bench(place, model, steps, 24 if quick else 160)
    for trunk in trunks:
        bench.train_trunk(trunk, 4 if quick else 600)
    seeds = range(1 if quick else wanted.seeds or 3)
    cells = [Cell(*each) for each in product(RECIPES, trunks, domains, contexts, seeds)]
    cells.sort(key=lambda cell: (cell.seed, cell.trunk, cell.domain, cell.context))  # a cut run has whole comparisons
    records = {cell: bench.record(cell) for cell in cells}
    failed = {cell.name: found["failed"] for cell, found in records.items() if "failed" in found}
    finished = {cell: found for cell, found in records.items() if "failed" not in found}
    of_recipes = {recipe: documents_of(recipe, finished) for recipe in RECIPES}
    lengths = {recipe: length_of(of) for recipe, of in of_recipes.items() if of}
    orders = [order_of(worse, better, source, of_recipes) for worse, better, source in PUBLISHED]
    results = {
        "steps": steps,
        "seeds": len(seeds),
        "cells": {
            cell.name: {name: found[name] for name in (EXPECTED_LENGTH, "tau_real")} for cell, found in finished.items()
        },
        "orders": orders,
        "failed": failed,
    }
    goals = [Goal("cells that failed", float(len(failed)), 0)]
    return Found(results, goals, [ranks_table(lengths, finished, domains), orders_table(orders)])


def documents_of(recipe: str, records: dict[Cell, dict[str, Any]]) -> Documents:
    """The documents of a recipe."""
    found: Documents = {}
    for cell, record in records.items():
        if cell.recipe != recipe:
            continue
        for number, counts in record["documents"].items():
            key = cell.trunk, cell.domain, str(cell.context), str(number)
            found[key] = found.get(key, AcceptanceStats()) + AcceptanceStats(**counts)
    return found


def length_of(documents: Documents) -> tuple[float, float]:
    """The expected accepted length of all documents, and its error."""
    stats = [*documents.values()]
    return sum(stats, AcceptanceStats()).expected_length, error_of(stats)


def order_of(worse: str, better: str, source: str, of: dict[str, Documents]) -> dict[str, Any]:
    """A published order, here: the gain on documents of both, its error, and whether it holds."""
    both = sorted(of[worse].keys() & of[better].keys())
    gain, error = gain_of([of[worse][key] for key in both], [of[better][key] for key in both]) if both else (0.0, 0.0)
    is_apart = abs(gain) > DEVIATIONS * error and bool(both)
    holds = ("holds" if gain > 0 else "contradicted") if is_apart else "undecided"
    return {
        "worse": worse,
        "better": better,
        "source": source,
        "gain": gain,
        "error": DEVIATIONS * error,
        "holds": holds,
    }


def ranks_table(
    lengths: dict[str, tuple[float, float]], records: dict[Cell, dict[str, Any]], domains: tuple[str, ...]
) -> Table:
    """A row for each recipe, the best first."""
    rows: list[tuple[Any, ...]] = []
    for recipe in sorted(lengths, key=lambda name: -lengths[name][0]):
        length, error = lengths[recipe]
        own = {cell: found for cell, found in records.items() if cell.recipe == recipe}
        tau = statistics.fmean(found["tau_real"] for found in own.values())
        by_domain = [
            length_of(documents_of(recipe, {cell: found for cell, found in own.items() if cell.domain == domain}))[0]
            for domain in domains
        ]
        rows.append((len(rows) + 1, recipe, length, DEVIATIONS * error, tau, *by_domain))
    header = ("rank", "recipe", "expected accepted length", "error", "tau_real", *domains)
    return Table(f"{DRAFTS} drafts, on text that no training has seen", header, rows)


def orders_table(orders: list[dict[str, Any]]) -> Table:
    """A row for each published order."""
    rows = [[order[name] for name in ("worse", "better", "gain", "error", "holds", "source")] for order in orders]
    return Table("published orders", ("worse", "better", "gain", "error", "here", "published by"), rows)


def given_model(text: str) -> Trunk:
    """Parse a Hugging Face model from the command line. Raise ArgumentTypeError if it does not exist."""
    trunk = Trunk.parse(text)
    if trunk.model is None:
        raise ArgumentTypeError(f"{text} was given; give a name, = and the folder of a Hugging Face model.")
    return trunk


TRUNK_FLAG = {
    "type": given_model,
    "metavar": "NAME=DIR",
    "help": "the folder of a Hugging Face model in the place of what is trained here, under this name",
}
FLAGS: dict[str, dict[str, Any]] = {
    "--steps": {"type": count, "metavar": "N", "help": "of a training; default: 300"},
    "--seeds": {"type": count, "metavar": "N", "help": "trainings of every cell; default: 3"},
    "--trunk": TRUNK_FLAG,
}

if __name__ == "__main__":
    main(recipes, __doc__, flags=FLAGS)
