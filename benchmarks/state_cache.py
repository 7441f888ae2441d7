"""Cost of a second training on states that the first has cached (--mtp-state-cache).

    python benchmarks/state_cache.py                     a dense trunk of four layers, trained here
    python benchmarks/state_cache.py --trunk NAME=DIR    a Hugging Face model in its place, such as SmolLM2-135M
    python benchmarks/state_cache.py --quick             does it run? (the figures mean nothing)

CPU seconds of whole processes, loading included, and of the median step: without the flag, with states that are
computed and kept, with those that are read, and the last with a draft vocabulary. Losses of the second and the third
are the same to the last bit. The goal is a fifth.

A second table has what matrix products alone would cost: those of a step with states that are read over those of a step
without. A layer's forward pass is one product for each of its matrices, its training three. The output layer is frozen,
so a draft's logits are two products: the logits, and the gradient of its state. The trunk's logits, for its own loss
and as a teacher, are one each; the cache keeps the loss.

    without   L l + v + T v + 3 h + 2 D v     L layers of l weights, v weights of the output layer; of a position: h
    second              T v + 3 h + 2 D v     weights that are trained, counted in every pass, D drafts, T teachers

Norms, softmax and attention's own products are not counted. The trunk has most of them, so a measured ratio may be
smaller.
"""

import resource
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from benchmarks.harness import Found, Goal, Table, count, main
from benchmarks.recipes import DRAFTS, SAME_RATES, SHARED, TOKENS_PER_BLOCK, TRUNK_FLAG, Bench, recipe_flags
from benchmarks.verbs import run
from megatron_mtp.common.files import remove
from megatron_mtp.training import metrics
from megatron_mtp.training.read_runs import read_rows

HEADS = {
    "kd, 3 passes": ("kd", ""),
    "kd, 1 pass": ("kd", "--mtp-unroll 1"),
    "ce, 1 pass": ("ce", "--mtp-unroll 1"),
    "eagle3, 3 steps": ("eagle3", ""),
    "dflash, 3 drafts": ("dflash", ""),
    "dspark, 3 drafts": ("dspark", ""),
}
"""Recipe of the bench and flags that change it."""
GOAL = 0.2


class Sizes(NamedTuple):
    """A dense model: layers, hidden size, sizes of all queries, of all keys and of the MLP, and tokens."""

    layers: int
    hidden: int
    queries: int
    keys: int
    ffn: int
    tokens: int

    @property
    def layer(self) -> int:
        """Weights of a layer's matrices."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.ffn)

    def kinds(self) -> dict[str, tuple[float, float, float]]:
        """Trained weights, drafts and teachers of a position for each of `HEADS`, without small terms."""
        square, share = self.hidden**2, DRAFTS / TOKENS_PER_BLOCK
        mtp, eagle = self.layer + 2 * square, self.layer + self.hidden * (self.queries + 2 * self.keys)
        block = 2 * (share * self.layer + 2 * self.hidden * self.keys)  # two layers, and the keys of the text
        return {
            "kd, 3 passes": (3 * mtp, 3, 1),
            "kd, 1 pass": (mtp, 1, 1),
            "ce, 1 pass": (mtp, 1, 0),
            "eagle3, 3 steps": (3 * eagle + 3 * square, 3, 1),
            "dflash, 3 drafts": (block, share, 0),
            "dspark, 3 drafts": (block, share, share),
        }

    def ratio(self, head: str, drafted: int | None = None) -> float:
        """Products of a second step over those of one without the cache; `drafted` tokens, or all."""
        logits, (weights, drafts, teachers) = self.hidden * (drafted or self.tokens), self.kinds()[head]
        of_draft = 2 if drafted is None or head.endswith(("pass", "passes")) else 3  # a drafter's own rows are trained
        of_teacher = self.hidden * self.tokens if head.startswith("dspark") else logits  # tv reads all of them
        second = teachers * of_teacher + 3 * weights + of_draft * drafts * logits
        return second / (second + self.layers * self.layer + self.hidden * self.tokens)

    def layers_needed(self, head: str) -> int:
        """The fewest layers of this width with which a second step can cost `GOAL`."""
        return next(layers for layers in range(1, 10_000) if self._replace(layers=layers).ratio(head) <= GOAL)


MODELS = {
    "SmolLM2-135M": Sizes(30, 576, 576, 192, 1536, 49_152),
    "Qwen3-0.6B": Sizes(28, 1024, 2048, 1024, 3072, 151_936),
    "Qwen3-8B": Sizes(36, 4096, 4096, 1024, 12_288, 151_936),
    "Qwen3-32B": Sizes(64, 5120, 8192, 1024, 25_600, 151_936),
    "Llama-3-70B": Sizes(80, 8192, 8192, 1024, 28_672, 128_256),
}
DRAFTED = dict.fromkeys(MODELS, 32_000) | {"SmolLM2-135M": 8192}
"""Sizes of draft vocabularies."""


@dataclass(frozen=True)
class Cost:
    """A training: CPU seconds of its process and of its median step, and its last loss."""

    cpu: float
    step: float
    loss: float


def state_cache(wanted: Namespace) -> Found:
    """All trainings of every kind of head."""
    quick = wanted.place == "quick"
    model, name = (wanted.trunk.model, wanted.trunk.name) if wanted.trunk else (None, "dense")
    steps, context = wanted.steps or (2 if quick else 20), 64 if model is None else 256
    bench = Bench(wanted.folder / wanted.place / name, model, steps, 24 if quick else 160)
    bench.train_trunk(name, 4 if quick else 200)
    drafted = 128 if model is None else 8192
    costs: dict[str, dict[str, Cost]] = {}
    for head in list(HEADS)[: 1 if quick else None]:
        remove(bench.place / "states")
        kept = ["--mtp-state-cache", bench.place / "states"]
        sides: dict[str, list[Any]] = {
            "without": [],
            "first": kept,
            "second": kept,
            f"second, {drafted} drafted tokens": [*kept, "--mtp-draft-vocab-size", drafted],
        }
        costs[head] = {side: trained(bench, name, context, head, flags) for side, flags in sides.items()}
    same = all(of["first"].loss == of["second"].loss for of in costs.values())
    rows = [
        (head, side, cost.cpu, cost.step, cost.cpu / of["without"].cpu, cost.step / of["without"].step)
        for head, of in costs.items()
        for side, cost in of.items()
    ]
    header = ("head", "training", "CPU seconds", "of a step", "over those without", "step over that without")
    goals = [
        Goal("losses of a second training that differ from the first one's", float(not same), 0),
        *(
            Goal(f"a second step of {head} over one without states", of["second"].step / of["without"].step, GOAL)
            for head, of in costs.items()
        ),
    ]
    results = {
        "steps": steps,
        "tokens of a step": 512,
        "costs": {head: {side: asdict(cost) for side, cost in of.items()} for head, of in costs.items()},
    }
    measured = Table(f"trainings of {steps} steps on {name}", header, rows)
    return Found(results, goals, [measured, products_table()])


def products_table() -> Table:
    """A row for each model and head."""
    rows = [
        (name, sizes.layers, head, sizes.ratio(head), sizes.ratio(head, DRAFTED[name]), sizes.layers_needed(head))
        for name, sizes in MODELS.items()
        for head in HEADS
    ]
    header = ("model", "layers", "head", "second over without", "both with a draft vocabulary", f"layers for {GOAL}")
    return Table("by matrix products alone", header, rows)


def trained(bench: Bench, trunk: str, context: int, head: str, more: list[Any]) -> Cost:
    """The cost of a training of the bench's steps."""
    folder, text = bench.place / "run", bench.texts["same"]
    remove(folder)  # of the training before
    batch = 512 // context
    flags = ["--use-checkpoint-args", "--load", bench.place / "trunks" / trunk, "--finetune", *SHARED[-3:]]
    flags += ["--data-path", text.trained, "--split", "1", "--tokenizer-model", bench.tokenizer]
    flags += ["--seq-length", context, "--micro-batch-size", batch, "--global-batch-size", batch, "--eval-iters", 0]
    flags += ["--train-iters", bench.steps, "--eval-interval", bench.steps, "--mtp-metrics-dir", folder]
    recipe, more_of_head = HEADS[head]
    flags += ["--log-interval", 1, *recipe_flags(recipe, trunk, context), *more_of_head.split(), *SAME_RATES.split()]
    flags += bench.precision
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with mock.patch.object(metrics, "time", SimpleNamespace(perf_counter=time.process_time)):  # of steps, in the fork
        run("train", *flags, *more)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = read_rows(folder)
    return Cost(cpu, statistics.median(row["step seconds"] for row in rows), rows[-1]["mtp_1 loss"])


FLAGS: dict[str, dict[str, Any]] = {
    "--steps": {"type": count, "metavar": "N", "help": "of a training; default: 20"},
    "--trunk": TRUNK_FLAG,
}

if __name__ == "__main__":
    main(state_cache, __doc__, flags=FLAGS)
