"""Which loss heals a grafted MTP layer fastest? Accepted length by training steps, for each loss and start.

    python benchmarks/healing.py                     a dense trunk that is trained here, five seeds
    python benchmarks/healing.py --folder runs/heal  keep what is finished; the same command continues
    python benchmarks/healing.py --quick             does it run? (the figures mean nothing)

The donor, a trunk of four layers with one MTP layer, is trained on Python source. Its trunk is then fine-tuned on chats
without the layer, as happens to most published models, and `convert graft` puts the donor's layer on it. The layer is
trained on the chats with the trunk frozen, in three passes, by each loss; and, to compare, a new layer that starts from
the trunk's last one. The figure is the expected accepted length with three drafts on chats that no training has seen.
"""

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from benchmarks.harness import Found, Goal, Table, count, main
from benchmarks.head_life import Texts, judged, kept, make_texts
from benchmarks.recipes import DEVIATIONS, DRAFTS, SAME_RATES, SHARED, TRUNKS, error_of_mean, saved_at
from benchmarks.verbs import run
from megatron_mtp.common.acceptance import EXPECTED_LENGTH
from megatron_mtp.common.files import remove
from megatron_mtp.training.read_runs import read_rows

CONTEXT = 256
SIZES = ["--seq-length", CONTEXT, "--micro-batch-size", 4, "--global-batch-size", 4]
LOSSES = ("ce", "kd", "lk", "tv", "e2e_tv")
STARTS = {"graft": [], "new layer": ["--mtp-init", "last-layer"]}
UNROLLED = ["--mtp-use-repeated-layer", "--mtp-unroll", DRAFTS]
AT = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""The evaluations, as fractions of the steps."""


def healing(wanted: Namespace) -> Found:
    """Train every loss from every start, with every seed."""
    quick = wanted.place == "quick"
    steps = 16 if quick else wanted.steps or 320
    seeds = range(1 if quick else wanted.seeds or 5)
    place = wanted.folder / wanted.place
    texts = make_texts(place / "texts", 24 if quick else 640, None)
    trunks = made_trunks(place, texts, 4 if quick else 1200)
    ways = [(start, loss) for start in STARTS for loss in LOSSES]
    curves = {way: [curve(place, texts["chat"], *way, seed, steps) for seed in seeds] for way in ways}
    rows = []
    for start, loss in ways:
        columns = [*zip(*curves[start, loss], strict=True)]
        of_steps = [f"{statistics.fmean(one):.3f} ± {DEVIATIONS * error_of_mean([*one]):.3f}" for one in columns]
        rows.append((start, loss, *of_steps))
    before = f"before, the graft has {trunks['graft']:.3f}, and the donor on its own trunk {trunks['donor']:.3f}"
    table = Table(
        f"expected accepted length on chats; {before}",
        ("start", "loss", *(f"step {int(steps * part)}" for part in AT)),
        rows,
    )
    lengths = {f"{start}/{loss}": curves[start, loss] for start, loss in ways}
    below = sum(statistics.fmean(each[-1] for each in curves["graft", loss]) < trunks["graft"] for loss in LOSSES)
    goals = [Goal("losses that end below the graft", float(below), 0)]
    return Found({"steps": steps, "seeds": len(seeds), **trunks, "curves": lengths}, goals, [table])


def made_trunks(place: Path, texts: dict[str, Texts], steps: int) -> dict[str, float]:
    """Make the donor, the fine-tuned trunk and the graft; return the accepted lengths of donor and graft on chats."""

    def make() -> dict[str, float]:
        remove(place / "trunks")  # of an interrupted run
        donor, tuned, graft = (place / "trunks" / name for name in ("donor", "tuned", "graft"))
        shared = [*SHARED, *TRUNKS["dense"].split(), "--tokenizer-model", place / "texts" / "tokenizer", "--split", "1"]
        shared += [*SAME_RATES.split(), *SIZES, "--eval-iters", 0]
        made = [*saved_at(steps, donor), "--lr", "4e-3", "--mtp-num-layers", 1]
        run("train", *shared, *made, "--data-path", texts["same"].trained)
        tuning = ["--load", donor, "--finetune", "--mtp-num-layers", 0, *saved_at(max(steps // 4, 1), tuned)]
        run("train", *shared, *tuning, "--data-path", texts["chat"].trained)
        run("convert", "graft", donor, tuned, graft)
        judging = ["--seq-length", CONTEXT, "--micro-batch-size", 1, "--eval-iters", 64, *UNROLLED]
        chats = texts["chat"]
        return {each.name: judged(place, each, chats, judging)[EXPECTED_LENGTH] for each in (donor, graft)}

    return kept(place / "trunks.json", make)


def curve(place: Path, text: Texts, start: str, loss: str, seed: int, steps: int) -> list[float]:
    """Return the accepted lengths during a training at the steps `AT`; read them if it is finished."""

    def train() -> list[float]:
        folder = place / "run"
        remove(folder)  # from the previous training
        flags = ["--use-checkpoint-args", "--load", place / "trunks" / ("graft" if start == "graft" else "tuned")]
        flags += ["--finetune", *SHARED[-3:], "--tokenizer-model", place / "texts" / "tokenizer", *SIZES]
        flags += ["--train-data-path", text.trained, "--valid-data-path", text.judged, "--seed", 1000 + seed]
        flags += ["--train-iters", steps, "--eval-interval", int(steps * AT[0]), "--eval-iters", 16]
        flags += ["--mtp-metrics-dir", folder, "--mtp-state-cache", place / "states"]
        flags += ["--mtp-num-layers", 1, *UNROLLED, *STARTS[start], "--mtp-train-only"]
        flags += ["--mtp-loss-scaling-factor", 1, "--mtp-loss", loss, *SAME_RATES.split()]
        run("train", *flags)
        rows = {row["iteration"]: row for row in read_rows(folder) if row["split"] == "validation"}
        return [rows[int(steps * part)][EXPECTED_LENGTH] for part in AT]

    return kept(place / "curves" / f"{start.replace(' ', '-')}-{loss}-{seed}.json", train)


FLAGS: dict[str, dict[str, Any]] = {
    "--steps": {"type": count, "metavar": "N", "help": "training steps, a multiple of 16; default: 320"},
    "--seeds": {"type": count, "metavar": "N", "help": "seeds of each loss and start; default: 5"},
}

if __name__ == "__main__":
    main(healing, __doc__, flags=FLAGS)
