"""What the depths' objective changes: one layer with K passes on a frozen trunk, trained by every loss, then drafting.

    python studies/objectives.py                                  the quickstart's model, all losses, three seeds
    python studies/objectives.py --losses ce,kd,lk --seeds 1 --variants plain,shared --steps 300
    python studies/objectives.py --checkpoint runs/attached/start --data runs/attached/data/corpus --counts 5 \\
        --variants single,plain,shared --losses kd,lk --token-fraction 0.25 --out runs/large   another model
    python studies/objectives.py --quick --losses kd,tv           does it run? (the figures mean nothing)

The first depth of --checkpoint becomes a repeated layer of --passes passes and goes on for --steps steps. Then texts
are drafted with K = 1 .. --passes, greedily and at temperature 1: by `mtp_eagle`, as engines reuse one layer, and by
the method that drafts as trained, with which a teacher-forced pass over the same texts has to agree (`forced.py`).

    plain    every pass attends to its own keys       mixed    the same with --mtp-hidden-state-mixing
    shared   --mtp-repeated-layer-shares-kv           both     shared and mixed
    single   trained for one pass, as depths are that are only reused when they draft; double, triple: for two, three

With `--equal seconds` a run has as many steps as fit into the time of `kd`, plain. How long a step takes is the median
of all seeds of equal steps, which run first. Timings differ by a tenth: where the steps would differ by less, the
run of equal steps counts. Finished runs are kept in --out, and trainings save every 250 steps: the same command
continues after an interruption.

Run at 461eb56.
"""

import argparse
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

from benchmarks.harness import Goal, count, hardware, report, some_of, Table
from megatron_mtp.checkpoint.mcore.iterations import TRACKER, iteration_folder
from megatron_mtp.checkpoint.mcore.model import load_model
from megatron_mtp.checkpoint.mcore.reader import StoredDepths
from megatron_mtp.checkpoint.mcore.reader import DistReader
from megatron_mtp.drafting import load_runner
from studies.drafting import held_out
from studies.forced import drafted, forced_length
from studies.losses import ON_CPU, ROOT, command
from studies.study import EQUAL, Result, Study, step_seconds, steps_in_the_time

LOSSES = ("ce", "kd", "tv", "nla", "lk", "e2e_tv")
BASE = "kd"
BASES = "plain", "single"
"""The loss that others are compared with, and how it was trained: for all passes, and for one."""

MIXES, SHARES = "--mtp-hidden-state-mixing", "--mtp-repeated-layer-shares-kv"
VARIANTS = {
    "single": "",
    "double": "",
    "triple": "",
    "plain": "",
    "mixed": MIXES,
    "shared": SHARES,
    "both": f"{SHARES} {MIXES}",
}
FEWER_PASSES = {"single": 1, "double": 2, "triple": 3}
"""Passes of the variants that are not trained for all of --passes."""
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
GOALS = {"greedy": 1.05, "sampled": 1.10}
TIMINGS_DIFFER = 0.1
"""Part of the steps in equal time that timings are not sure of."""
SAVED_EVERY = 250
"""Steps of a training, from which it goes on after an interruption."""


@dataclass(frozen=True)
class Run:
    """A training and what it drafts; `equal` is what it has in common with the others."""

    equal: str
    variant: str
    loss: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.equal}-{self.variant}-{self.loss}-{self.seed}"


Results = Mapping[Run, Result]


def main() -> None:
    """Train, draft, compare, report."""
    wanted = parse(sys.argv[1:])
    study = Study[Run]("objectives", wanted.out, settings(wanted))
    results = study.results(all_runs(wanted), lambda run, before: measured(run, before, wanted))
    report("objectives", hardware(ON_CPU), summary(results, wanted), goals(results, wanted), tables(results, wanted))


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a value makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/quickstart/checkpoint"))
    parser.add_argument("--data", type=Path, default=Path("runs/quickstart/data/corpus"), help="its .bin/.idx prefix")
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"), help="default: runs/objectives")
    for name, default, allowed in (
        ("losses", LOSSES, LOSSES),
        ("variants", VARIANTS, VARIANTS),
        ("equal", EQUAL, EQUAL),
    ):
        parser.add_argument(f"--{name}", type=some_of(allowed), default=list(default), metavar="NAME,...")
    parser.add_argument("--seeds", type=count, default=3, help="seeds 1 .. N; default: 3")
    parser.add_argument("--steps", type=count, default=400, help="of runs of equal steps; default: 400")
    parser.add_argument("--passes", type=count, default=5, help="K, at most; default: 5")
    parser.add_argument("--counts", type=count, nargs="+", metavar="K", help="drafts to measure with; default: all")
    parser.add_argument("--batch", type=count, default=8, help="sequences a step; default: 8")
    parser.add_argument("--seq-length", type=count, default=256, help="default: 256")
    parser.add_argument("--lr", default="1e-3", help="at the start of the cosine; default: 1e-3")
    parser.add_argument("--token-fraction", default="1", help="part of the positions in the loss; default: 1")
    parser.add_argument("--prompts", type=count, default=48, help="held-out prompts; default: 48")
    parser.add_argument("--new-tokens", type=count, default=128, help="of each; default: 128")
    parser.add_argument("--quick", action="store_true", help="3 steps and 2 short texts: whether it runs")
    wanted = parser.parse_args(argv)
    if not wanted.checkpoint.is_dir():
        parser.error(f"there is no {wanted.checkpoint}; make it with scripts/quickstart.sh, or give --checkpoint.")
    if "seconds" in wanted.equal and not (BASE in wanted.losses and {"plain"} <= {*wanted.variants}):
        parser.error(f"--equal seconds compares with {BASE}, plain; add them to --losses and --variants.")
    wanted.counts = wanted.counts or list(range(1, wanted.passes + 1))
    if max(wanted.counts) > wanted.passes:
        parser.error(f"--counts has {max(wanted.counts)}, and --passes is {wanted.passes}; give at most that.")
    if wanted.quick:
        wanted.steps, wanted.prompts, wanted.new_tokens, wanted.out = 3, 2, 12, wanted.out / "quick"
    return wanted


def all_runs(wanted: argparse.Namespace) -> list[Run]:
    """Those of equal steps first, whose seconds the others need; seed by seed, as a study may be interrupted."""
    equal = [one for one in EQUAL if one in wanted.equal or one == "steps"]
    seeds = range(1, wanted.seeds + 1)
    every = product(equal, seeds, wanted.variants, wanted.losses)
    return [Run(one, variant, loss, seed) for one, seed, variant, loss in every]


def first_depth(wanted: argparse.Namespace) -> Path:
    """The checkpoint with its first depth alone; made unless it is there, or the checkpoint has no other depth."""
    if StoredDepths.of(DistReader(iteration_folder(wanted.checkpoint)).keys).layers == 1:
        return Path(wanted.checkpoint)
    start = wanted.out / "start"
    if not start.exists():
        wanted.out.mkdir(parents=True, exist_ok=True)
        tool = [sys.executable, ROOT / "tools/checkpoint/convert.py", "drop-mtp", wanted.checkpoint, start, "--keep", 1]
        subprocess.run(list(map(str, tool)), check=True, stdout=sys.stderr)
    return start


def steps_of(run: Run, results: Results, wanted: argparse.Namespace) -> int:
    """Of equal seconds: as many of the run's own steps as fit into the time that kd takes."""
    if run.equal == "steps":
        return int(wanted.steps)
    base = _seconds("plain", BASE, results)
    steps = steps_in_the_time(wanted.steps, base, _seconds(run.variant, run.loss, results))
    return int(wanted.steps) if abs(steps / wanted.steps - 1) < TIMINGS_DIFFER else steps


def _seconds(variant: str, loss: str, results: Results) -> float:
    """Of a step; the median of the seeds."""
    seconds = [
        one["step_seconds"]
        for run, one in results.items()
        if (run.equal, run.variant, run.loss) == ("steps", variant, loss)
    ]
    return statistics.median(seconds)


def settings(wanted: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a study share."""
    names = "steps", "passes", "counts", "batch", "seq_length", "lr", "token_fraction", "prompts", "new_tokens"
    return {"checkpoint": str(wanted.checkpoint), **{name: getattr(wanted, name) for name in names}}


def measured(run: Run, results: Results, wanted: argparse.Namespace) -> Result:
    """Train and draft; a run of as many steps as another is that one."""
    steps = steps_of(run, results, wanted)
    if run.equal == "seconds" and steps == wanted.steps:
        return results[replace(run, equal="steps")]
    folder = train(run, steps, wanted)
    spent = {"steps": steps, "step_seconds": step_seconds(folder)}
    found = {**asdict(run), **spent, **lengths(folder, run, wanted)}
    shutil.rmtree(folder)
    return found


def train(run: Run, steps: int, wanted: argparse.Namespace) -> Path:
    """One run of `pretrain_gpt.py`, from where it was left; the folder with its metrics and checkpoint."""
    folder = wanted.out / f"{run.name}.partial"
    saved = folder / "checkpoint"
    goes_on = (saved / TRACKER).exists()
    if not goes_on:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    passes = _passes(run, wanted)
    unrolled = "" if passes == 1 else f"--mtp-use-repeated-layer --mtp-unroll {passes}"
    more = (
        f"--mtp-num-layers 1 {unrolled} --seed {run.seed} --eval-iters 2 --mtp-token-fraction {wanted.token_fraction} "
        f"--save {saved} --save-interval {min(steps, SAVED_EVERY)} --log-interval {min(steps, 20)} "
        f"{VARIANTS[run.variant]}"
    )
    flags = {**vars(wanted), "checkpoint": saved if goes_on else first_depth(wanted), "steps": steps, "more": more}
    words = command(run.loss, folder, argparse.Namespace(**flags))
    if goes_on:
        words.remove("--finetune")
    with open(folder / "listing.txt", "a") as listing:
        subprocess.run(words, check=True, stdout=listing, stderr=sys.stderr)
    return folder


def lengths(folder: Path, run: Run, wanted: argparse.Namespace) -> dict[str, Any]:
    """Accepted lengths by K, greedy and sampled, with the acceptance of every draft as trained.

    With more drafts than passes in training there is no teacher-forced figure: None.
    """
    runner, model = load_runner(folder / "checkpoint"), load_model(iteration_folder(folder / "checkpoint"))
    prompts = held_out(wanted.data, wanted.prompts, 64)
    found: dict[str, Any] = {}
    for kind, temperature in TEMPERATURES.items():
        for passes in wanted.counts:
            as_trained = "mtp_eagle" if SHARES in VARIANTS[run.variant] or passes > model.mtp.depths else "mtp"
            made = {
                name: drafted(runner, prompts, wanted.new_tokens, _method(name, passes), temperature, 1000 * run.seed)
                for name in dict.fromkeys(("mtp_eagle", as_trained))
            }
            eagle, trained = made["mtp_eagle"], made[as_trained]
            found.setdefault(kind, {})[str(passes)] = {
                "mtp_eagle": eagle.accepted_length,
                "trained": trained.accepted_length,
                "forced": forced_length(model, trained, temperature) if passes <= model.mtp.depths else None,
                "acceptance": trained.acceptance(passes),
            }
    return found


def _passes(run: Run, wanted: argparse.Namespace) -> int:
    """That the run is trained for."""
    return min(FEWER_PASSES.get(run.variant, wanted.passes), wanted.passes)


def _method(name: str, passes: int) -> dict[str, Any]:
    return {"method": name, "num_speculative_tokens": passes}


def mean_length(results: Results, equal: str, variant: str, loss: str, kind: str, passes: int) -> float | None:
    """Of `mtp_eagle`, over the seeds that have finished; None without one."""
    found = [
        one[kind][str(passes)]["mtp_eagle"]
        for run, one in results.items()
        if (run.equal, run.variant, run.loss) == (equal, variant, loss)
    ]
    return statistics.mean(found) if found else None


def summary(results: Results, wanted: argparse.Namespace) -> dict[str, Any]:
    """What the report's last line keeps."""
    return {"settings": settings(wanted), "runs": {run.name: one for run, one in results.items()}}


def goals(results: Results, wanted: argparse.Namespace) -> list[Goal]:
    """The best loss and variant against kd with all passes, and with one; and whether engine and training agree."""
    found = []
    for equal, (kind, goal) in product(wanted.equal, GOALS.items()):
        means = {
            (variant, loss): mean_length(results, equal, variant, loss, kind, max(wanted.counts))
            for variant, loss in product(wanted.variants, wanted.losses)
        }
        others = {name: one for name, one in means.items() if one is not None}
        best = max(others, key=lambda name: others[name])
        for variant in BASES:
            base = means.get((variant, BASE))
            what = f"K={max(wanted.counts)}, {kind}, equal {equal}: {' '.join(best)} / {variant} {BASE}"
            found.append(Goal(what, None if base is None else others[best] / base, goal, ">="))
    for kind in TEMPERATURES:
        pairs = [each for one in results.values() for each in one[kind].values() if each["forced"] is not None]
        found.append(Goal(f"{kind}: engine and teacher-forced apart, %", _percent_apart(pairs), 1.0, "<="))
    return found


def _percent_apart(pairs: list[dict[str, float]]) -> float | None:
    if not pairs:
        return None
    forced, trained = (statistics.mean(each[name] for each in pairs) for name in ("forced", "trained"))
    return 100 * abs(forced / trained - 1)


def tables(results: Results, wanted: argparse.Namespace) -> list[str]:
    """One for each of greedy and sampled and each equality: accepted lengths by K, the means over seeds."""
    passes = wanted.counts
    found = []
    for equal, kind in product(wanted.equal, TEMPERATURES):
        rows = [
            (f"{variant} {loss}", *(mean_length(results, equal, variant, loss, kind, k) for k in passes))
            for variant, loss in product(wanted.variants, wanted.losses)
        ]
        found.append(f"{kind}, equal {equal}\n" + Table(("run", *(f"K={k}" for k in passes)), rows))
    return found


if __name__ == "__main__":
    main()
