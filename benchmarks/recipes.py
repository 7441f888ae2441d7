"""Which recipe drafts best? Recipes and losses on small trunks, several texts and contexts, with states computed once.

    python benchmarks/recipes.py --folder runs/recipes    three trunks that are trained here
    python benchmarks/recipes.py --trunk NAME=DIR         a Hugging Face model in their place, such as SmolLM2-135M
    python benchmarks/recipes.py --conditions "16,384 tokens"    one of the conditions below
    python benchmarks/recipes.py --quick                  does it run? (the figures mean nothing)

A cell trains a head on a frozen trunk by one recipe. All cells train on equally many tokens. Its result is the expected
accepted length with three drafts on text that no training has seen. Finished cells are kept in FOLDER/PLACE/cells.json:
the same command continues an interrupted run, and --seeds N adds the seeds that are missing.

recipes     Those of `megatron-mtp recipes` that suit a frozen trunk, and plain losses and drafters to compare with.
            Learning rate, schedule, optimizer, number of drafts and drafter sizes are the same for all, so a recipe
            stands for its loss, its hidden states and its loss weights.
conditions  The dense trunk on text like its training text, 256 tokens long; and one change at a time: a trunk with
            experts, a hybrid trunk, code of other authors, chats, and contexts of 64 and 1,024 tokens. The last one is
            a context of 16,384 tokens, for heads that are trained on 1,024, on a trunk with windows of 256 tokens,
            which is as good there as at 1,024.

The trunks have four layers and are trained here, on Python source. Heads of a model given by --trunk draft its 8,192
most frequent tokens, those of dflash2 and domino all of them. A published order holds where the difference has its sign
and exceeds twice its standard error, over documents and over seeds; within that it is undecided.
"""

import json
import math
import statistics
import sys
from argparse import ArgumentTypeError, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from benchmarks.harness import Found, Goal, Table, count, main
from benchmarks.head_life import Trunk, make_texts
from benchmarks.verbs import VerbError, run
from megatron_mtp.cli.attach_probe import RATE
from megatron_mtp.common.acceptance import EXPECTED_LENGTH, AcceptanceStats, gain_of
from megatron_mtp.common.files import remove, written_beside
from megatron_mtp.megatron.machine import multiplies_bfloat16
from megatron_mtp.training.read_runs import read_documents, read_rows

DRAFTS = 3
MTP = f"--mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll {DRAFTS} --mtp-init last-layer --mtp-train-only "
MTP += "--mtp-loss-scaling-factor 1"
BLOCKS = f"--drafter-steps {DRAFTS} --drafter-num-layers 2"
RECIPES = {
    "ce": f"{MTP} --mtp-loss ce",
    "kd": f"{MTP} --mtp-loss kd",
    "lk": f"{MTP} --mtp-loss lk",
    "e2e_tv": f"{MTP} --mtp-loss e2e_tv",
    "nemotron-mtp-boost": f"--recipe nemotron-mtp-boost --mtp-init last-layer --mtp-unroll {DRAFTS}",
    "glm-5.2": f"--recipe glm-5.2 --mtp-init last-layer --mtp-unroll {DRAFTS}",
    "angelspec": f"--recipe angelspec --mtp-init last-layer --mtp-unroll {DRAFTS}",
    "eagle3": f"--recipe eagle3 --drafter-steps {DRAFTS}",
    "peagle": f"--drafter peagle {BLOCKS}",
    "dflash": f"--drafter dflash {BLOCKS}",
    "dflash, dpace": f"--drafter dflash --mtp-loss dpace {BLOCKS}",
    "dspark": f"--recipe dspark {BLOCKS} --drafter-markov-rank 32",
    "dflash2": f"--recipe dflash2 {BLOCKS}",
    "domino": f"--drafter domino {BLOCKS} --drafter-markov-rank 32 --drafter-gru-size 64",
}
SAME_RATES = "--optimizer adam --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 "
SAME_RATES += "--clip-grad 1.0 --weight-decay 0.01"
RATES_OF_MODELS = f"--lr {RATE} --min-lr 5e-5"
"""Learning rates for the heads of a given model: those of `attach`."""
PUBLISHED = (
    ("ce", "kd", "arXiv:2606.15007; Tencent/AngelSpec"),
    ("e2e_tv", "angelspec", "end-to-end TV late, after LK: Tencent/AngelSpec"),
    ("dflash", "dflash, dpace", "NVIDIA/Model-Optimizer#1971"),
    ("dflash, dpace", "dspark", "NVIDIA/Model-Optimizer#1971"),
    ("dspark", "domino", "NVIDIA/Model-Optimizer#1971"),
    ("dspark", "dflash2", "vllm-project/speculators#1014"),
)
"""The worse recipe, the better one, and the source of the claim."""

SHARED = (
    "--num-attention-heads 4 --max-position-embeddings 1024 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--no-create-attention-mask-in-dataloader --tokenizer-type HuggingFaceTokenizer"
).split()
HYBRID = "M-*-M-*-"
DENSE = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --untie-embeddings-and-output-weights"
TRUNKS = {
    "dense": DENSE,
    "experts": (
        "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-experts 4 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 64 --moe-layer-freq [0,1,1,1] --moe-router-load-balancing-type none"
    ),
    "hybrid": (
        f"--hybrid-layer-pattern {HYBRID} --hidden-size 64 --ffn-hidden-size 176 --mamba-state-dim 16 "
        "--mamba-head-dim 16 --mamba-num-groups 2"
    ),
    "windowed": f"{DENSE} --window-size 255,0 --max-position-embeddings 16384",
}
Condition = tuple[str, str, int]
"""Trunk, domain and context."""

CONDITIONS: dict[str, Condition] = {
    "dense": ("dense", "same", 256),
    "experts": ("experts", "same", 256),
    "hybrid": ("hybrid", "same", 256),
    "code": ("dense", "code", 256),
    "chats": ("dense", "chat", 256),
    "64 tokens": ("dense", "same", 64),
    "1,024 tokens": ("dense", "same", 1024),
    "16,384 tokens": ("windowed", "same", 16384),
}
"""Each differs from the first one in one respect, and the last one in trunk and context."""

LONGEST_TRAINED = 1024
"""Longest sequences that heads are trained on; a training step on 16,384 tokens takes half a minute of a core."""

NOT_TRAINED = (("glm-5.2", "hybrid"), ("glm-5.2", "windowed"))
"""Combinations that cannot be trained: the passes attend to the first one's keys, which a hybrid trunk's MTP layers may
not have, and which leave a window.
"""

DRAFTED = 8192
"""Tokens that the heads of a given model draft; with all 49,152 of SmolLM2, a step takes four times as long."""

DRAFT_ALL_TOKENS = ("dflash2", "domino")
"""Recipes whose drafters cannot have a draft vocabulary."""

STEP_TOKENS = 512
TOKENS_PER_BLOCK = 4
"""Tokens per block of a block drafter, so that it trains on as many drafts as there are tokens."""

JUDGED_TOKENS = 8192
DEVIATIONS = 2
AS_TRAINED = "expected accepted length on sequences as long as in training"
COUNTS = ("accepted_at", "reached_at", "offered_at")
"""Fields of `AcceptanceStats` that a record stores per document."""


@dataclass(frozen=True)
class Cell:
    """One training by a recipe."""

    recipe: str
    trunk: str
    domain: str
    context: int
    seed: int

    @property
    def name(self) -> str:
        """Key of its record."""
        return f"{self.recipe}/{self.trunk}/{self.domain}/{self.context}/{self.seed}"

    @property
    def condition(self) -> Condition:
        return self.trunk, self.domain, self.context


class Bench:
    """Texts, trunks and cells in a folder.

    Args:
        place: the folder.
        model: a Hugging Face model instead of the trunks.
        steps: training steps of a head, of `STEP_TOKENS` each.
        documents: number of documents in each text.
    """

    def __init__(self, place: Path, model: Path | None, steps: int, documents: int) -> None:
        self.place, self.model, self.steps = place, model, steps
        self.tokenizer, self.texts = place / "texts" / "tokenizer", make_texts(place / "texts", documents, model)
        self._file = place / "cells.json"
        self.cells: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    @property
    def precision(self) -> list[str]:
        """Return the flag for bfloat16 if the model is given and this CPU multiplies matrices in it."""
        return ["--bf16"] if self.model is not None and multiplies_bfloat16() else []

    def train_trunk(self, trunk: str, steps: int) -> None:
        """Train the trunk, unless it exists."""
        folder = self.place / "trunks" / trunk
        if (folder / "finished").exists():
            return
        remove(folder)  # left by an interrupted run
        if self.model is not None:
            run("convert", "hf-to-mcore", self.model, folder)
        else:
            flags = [*SHARED, *TRUNKS[trunk].split(), "--data-path", self.texts["same"].trained, "--split", "1"]
            flags += ["--tokenizer-model", self.tokenizer, *SAME_RATES.split(), "--lr", "4e-3"]
            flags += "--seq-length 1024 --micro-batch-size 1 --global-batch-size 1 --eval-iters 0".split()
            run("train", *flags, *saved_at(steps, folder))
        (folder / "finished").touch()

    def record(self, cell: Cell) -> dict[str, Any]:
        """Return a cell's record; train it if there is none. A failed cell is retried; its record has the reason."""
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
        folder, text, context = self.place / "run", self.texts[cell.domain], min(cell.context, LONGEST_TRAINED)
        remove(folder)  # from the previous cell
        states = self.place / "states" / f"{cell.trunk}-{cell.domain}-{context}"
        batch = max(STEP_TOKENS // context, 1)
        steps = max(self.steps * STEP_TOKENS // (batch * context), 1)
        flags = ["--use-checkpoint-args", "--load", self.place / "trunks" / cell.trunk, "--finetune"]
        flags += ["--train-data-path", text.trained, "--valid-data-path", text.judged, *SHARED[-3:]]
        flags += ["--tokenizer-model", self.tokenizer, "--seq-length", context, "--seed", 1000 + cell.seed]
        flags += ["--micro-batch-size", batch, "--global-batch-size", batch, "--train-iters", steps]
        flags += ["--eval-interval", steps, "--eval-iters", max(JUDGED_TOKENS // context // batch, 1)]
        flags += ["--mtp-metrics-dir", folder, "--mtp-state-cache", states, "--mtp-draft-prompts", self._prompts(cell)]
        drafts_some = self.model is not None and cell.recipe not in DRAFT_ALL_TOKENS
        flags += [*self.precision, *(["--mtp-draft-vocab-size", DRAFTED] if drafts_some else [])]
        flags += ["--save", folder / "head", "--save-interval", steps] if context < cell.context else []
        rates = [*SAME_RATES.split(), *(RATES_OF_MODELS.split() if self.model is not None else [])]
        run("train", *flags, *recipe_flags(cell.recipe, cell.trunk, context), *rates)
        row = trained = read_rows(folder)[-1]
        if context < cell.context:
            folder = folder / "longer"
            judged = ["--load", folder.parent / "head", "--data-path", text.judged, "--eval-iters", 1]
            judged += ["--seq-length", cell.context, "--mtp-state-cache", f"{states}-judged"]
            run("evaluate", *judged, "--mtp-metrics-dir", folder)
            row = read_rows(folder)[-1]
        documents = {number: asdict(stats) for of in read_documents(folder).values() for number, stats in of.items()}
        counts = {number: {name: each[name] for name in COUNTS} for number, each in documents.items()}
        lengths = {EXPECTED_LENGTH: row[EXPECTED_LENGTH], AS_TRAINED: trained[EXPECTED_LENGTH]}
        return {**lengths, "tau_real": trained["tau_real"], "documents": counts}

    def _prompts(self, cell: Cell) -> Path:
        """Write prefixes of text that the training has not seen."""
        file = self.place / f"{cell.domain}-prompts.jsonl"
        if not file.exists():
            lines = (self.place / "texts" / f"{cell.domain}-judged.jsonl").read_text().splitlines()
            texts = [json.loads(line) for line in lines]
            prompts = [one["text"] if "text" in one else one["messages"][1]["content"] for one in texts]
            with written_beside(file) as beside:
                beside.write_text("".join(f"{json.dumps({'prompt': prompt[:80]})}\n" for prompt in prompts))
        return file


def saved_at(steps: int, folder: Path) -> list[object]:
    """Return flags of a training that only saves its last step."""
    return ["--train-iters", steps, "--eval-interval", steps, "--save-interval", steps, "--save", folder]


def recipe_flags(recipe: str, trunk: str, context: int) -> list[str]:
    """Return the flags of a recipe on one trunk, for sequences of `context` tokens."""
    flags = RECIPES[recipe].split()
    if BLOCKS in RECIPES[recipe]:
        flags += ["--drafter-blocks", str(context // TOKENS_PER_BLOCK)]
    if trunk == "hybrid" and "last-layer" in flags:
        flags += ["--hybrid-layer-pattern", f"{HYBRID}/*-"]
    return flags


Records = dict[Cell, dict[str, Any]]
Documents = dict[tuple[str, ...], AcceptanceStats]
"""The documents of a recipe, by trunk, domain, context and number, summed over its seeds."""


def recipes(wanted: Namespace) -> Found:
    """Train all cells and compare them."""
    quick = wanted.place == "quick"
    model = wanted.trunk.model if wanted.trunk else None
    steps = wanted.steps or (4 if quick else 200)
    known = CONDITIONS
    if wanted.trunk:
        name = wanted.trunk.name
        known = {called: (name, *rest) for called, (trunk, *rest) in CONDITIONS.items() if trunk == "dense"}
    conditions = {name: known[name] for name in wanted.conditions or [*known][: 1 if quick else None] if name in known}
    if not conditions:
        possible = "; ".join(known)
        sys.exit(f"recipes.py: error: --conditions names other trunks, and --trunk is given; name some of: {possible}.")
    place = wanted.folder / wanted.place / (wanted.trunk.name if model else "")
    bench = Bench(place, model, steps, 24 if quick else 640)
    for trunk in dict.fromkeys(trunk for trunk, *_ in conditions.values()):
        bench.train_trunk(trunk, 4 if quick else 1200)
    seeds = range(1 if quick else wanted.seeds or 5)
    cells = [
        Cell(recipe, *each, seed)
        for seed in seeds
        for each in conditions.values()
        for recipe in RECIPES
        if (recipe, each[0]) not in NOT_TRAINED
    ]
    records = {cell: bench.record(cell) for cell in cells}
    failed = {cell.name: found["failed"] for cell, found in records.items() if "failed" in found}
    finished = {cell: found for cell, found in records.items() if "failed" not in found}
    orders = [order_of(worse, better, source, finished) for worse, better, source in PUBLISHED]
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
    tables = [ranks_table(finished, conditions), orders_table(orders), long_table(finished)]
    return Found(results, goals, [table for table in tables if table.rows])


def documents_of(records: Records) -> Documents:
    """Return the documents of these cells."""
    found: Documents = {}
    for cell, record in records.items():
        for number, counts in record["documents"].items():
            key = cell.trunk, cell.domain, str(cell.context), str(number)
            found[key] = found.get(key, AcceptanceStats()) + AcceptanceStats(**counts)
    return found


def length_of(records: Records) -> float:
    """Return the expected accepted length of these cells: the mean over conditions and seeds."""
    of_cells = [documents_of({cell: found}).values() for cell, found in records.items()]
    return statistics.fmean(sum(of, AcceptanceStats()).expected_length for of in of_cells)


def error_of_mean(values: list[float]) -> float:
    """Return the standard error of a mean, 0 for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def error_over_seeds(values: list[float]) -> float | None:
    """Return the error of a table: twice the standard error of the mean over seeds; None for a single seed."""
    return round(DEVIATIONS * error_of_mean(values), 3) if len(values) > 1 else None


def of_recipe(recipe: str, records: Records) -> Records:
    """Return the cells of a recipe."""
    return {cell: found for cell, found in records.items() if cell.recipe == recipe}


def lengths_by_seed(records: Records) -> list[float]:
    """Return `length_of` the cells of each seed, in the order of seeds, so that two recipes' can be paired."""
    seeds = sorted({cell.seed for cell in records})
    return [length_of({cell: found for cell, found in records.items() if cell.seed == seed}) for seed in seeds]


def order_of(worse: str, better: str, source: str, records: Records) -> dict[str, Any]:
    """Compare a published order with the cells: the gain, its error, and whether the order holds.

    The error is twice the standard error, over documents (bootstrap) and over seeds together.
    """
    ones, others = of_recipe(worse, records), of_recipe(better, records)
    both = {(cell.condition, cell.seed) for cell in ones} & {(cell.condition, cell.seed) for cell in others}
    ones, others = (
        {cell: found for cell, found in of.items() if (cell.condition, cell.seed) in both} for of in (ones, others)
    )
    gain, error = 0.0, 0.0
    if both:
        before, after = documents_of(ones), documents_of(others)
        keys = sorted(before.keys() & after.keys())
        _, of_documents = gain_of([before[key] for key in keys], [after[key] for key in keys])
        pairs = zip(lengths_by_seed(ones), lengths_by_seed(others), strict=True)
        gains = [there - here for here, there in pairs]
        gain, error = statistics.fmean(gains), DEVIATIONS * math.hypot(of_documents, error_of_mean(gains))
    holds = ("holds" if gain > 0 else "contradicted") if abs(gain) > error else "undecided"
    return {"worse": worse, "better": better, "source": source, "gain": gain, "error": error, "holds": holds}


def ranks_table(records: Records, conditions: dict[str, Condition]) -> Table:
    """Return a row per recipe, best first by the mean over those conditions that all recipes have."""
    found = {
        (recipe, one): {cell: each for cell, each in of_recipe(recipe, records).items() if cell.condition == one}
        for recipe in RECIPES
        for one in conditions.values()
    }
    shared = [one for one in conditions.values() if all(found[recipe, one] for recipe in RECIPES)]
    pooled = {recipe: {cell: each for one in shared for cell, each in found[recipe, one].items()} for recipe in RECIPES}
    best_first = sorted((recipe for recipe in RECIPES if pooled[recipe]), key=lambda recipe: -length_of(pooled[recipe]))
    rows: list[tuple[Any, ...]] = []
    for rank, recipe in enumerate(best_first, 1):
        of_conditions = [found[recipe, one] for one in conditions.values()]
        lengths = [round(length_of(of), 3) if of else None for of in of_conditions]
        error = error_over_seeds(lengths_by_seed(pooled[recipe]))
        tau = statistics.fmean(each["tau_real"] for each in pooled[recipe].values())
        rows.append((rank, recipe, round(length_of(pooled[recipe]), 3), error, round(tau, 3), *lengths))
    header = ("rank", "recipe", "accepted length", "error", "drafted", *conditions)
    return Table(f"{DRAFTS} drafts, on text that no training has seen", header, rows)


def orders_table(orders: list[dict[str, Any]]) -> Table:
    """Return a row for each published order."""
    rows = [
        (each["worse"], each["better"], round(each["gain"], 3), round(each["error"], 3), each["holds"], each["source"])
        for each in orders
    ]
    return Table("published orders", ("worse", "better", "gain", "error", "here", "published by"), rows)


def long_table(records: Records) -> Table:
    """Return a row for each recipe whose heads were evaluated on longer sequences than they were trained on."""
    rows: list[tuple[Any, ...]] = []
    for recipe in RECIPES:
        of = [each for cell, each in of_recipe(recipe, records).items() if cell.context > LONGEST_TRAINED]
        if of:
            kept = [each[EXPECTED_LENGTH] / each[AS_TRAINED] for each in of]
            lengths = [statistics.fmean(each[name] for each in of) for name in (AS_TRAINED, EXPECTED_LENGTH)]
            figures = [round(figure, 3) for figure in (*lengths, statistics.fmean(kept))]
            rows.append((recipe, *figures, error_over_seeds(kept)))
    header = ("recipe", f"{LONGEST_TRAINED:,} tokens, as trained", "16,384 tokens", "of that", "error")
    return Table("accepted length of the same heads on longer sequences", header, rows)


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
    "--steps": {"type": count, "metavar": "N", "help": "training steps of 512 tokens for each cell; default: 200"},
    "--seeds": {"type": count, "metavar": "N", "help": "seeds of each recipe and condition; default: 5"},
    "--conditions": {
        "choices": [*CONDITIONS],
        "nargs": "+",
        "metavar": "NAME",
        "help": f"some of: {'; '.join(CONDITIONS)}; default: all",
    },
    "--trunk": TRUNK_FLAG,
}

if __name__ == "__main__":
    main(recipes, __doc__, flags=FLAGS)
