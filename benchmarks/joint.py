"""The methods of arXiv:2407.09722 on one trunk: tokens per forward pass, perplexity and energy of sampled outputs.

    python benchmarks/joint.py                        the quickstart's trunk; a small model is trained first (a minute)
    python benchmarks/joint.py --folder DIR           keep the small model there
    python benchmarks/joint.py --quick                does it run? (the figures mean nothing)

    speculative   chains of the small model, rejection sampling
    BiLD          chains that end when the small model is unsure; rolled back when the trunk finds a token unlikely
    SpecTr        trees of samples, k-sequential selection
    SpecInfer     the same trees, multi-round rejection
    MTAD          the most likely chain of a beam; the longest prefix whose joint p/q exceeds a threshold

Prompts are pieces of the corpus that the trunk was not trained on. Every method samples at temperature 1, in turns with
plain decoding, as `generate --compare` does. Speculative, SpecTr and SpecInfer keep the trunk's distribution: their
perplexity equals that of plain sampling up to chance. BiLD and MTAD change it.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from benchmarks.agreeing import agreeing_model
from benchmarks.harness import Found, Goal, Table, main
from benchmarks.verbs import run
from megatron_mtp.cli.cost import NO_METER, Workload, summary
from megatron_mtp.data.prompts import Beginnings
from megatron_mtp.decoding import load_runner
from megatron_mtp.decoding.method import config_from, make_method
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model.build import join_world

ON_CPU = prepare()

DRAFTS, TREE, BEAM = 4, [3, 2, 1, 1], 4
MODEL: dict[str, Any] = {"model": "the small model", "num_speculative_tokens": DRAFTS}
METHODS: dict[str, dict[str, Any]] = {
    "speculative": {"method": "draft_model", **MODEL, "verifier": "rejection"},
    "BiLD": {"method": "draft_model", **MODEL, "verifier": "bild"},
    "SpecTr": {"method": "draft_model_tree", **MODEL, "tree": TREE, "verifier": "spectr"},
    "SpecInfer": {"method": "draft_model_tree", **MODEL, "tree": TREE, "verifier": "specinfer"},
    "MTAD, tau 0.5": {"method": "draft_model", **MODEL, "beam_width": BEAM, "verifier": "joint", "threshold": 0.5},
    "MTAD, tau 0.1": {"method": "draft_model", **MODEL, "beam_width": BEAM, "verifier": "joint", "threshold": 0.1},
}
SMALL = (
    "--num-layers 1 --hidden-size 128 --num-attention-heads 2 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 8 --global-batch-size 8 --train-iters 270 --lr 3e-3 "
    "--min-lr 0 --lr-decay-style linear --lr-warmup-iters 20 --mtp-num-layers 0 --split 98,2,0 "
    "--make-vocab-size-divisible-by 128 --no-create-attention-mask-in-dataloader --eval-interval 270 --eval-iters 4 "
    "--save-interval 270 --tokenizer-type HuggingFaceTokenizer"
).split()
"""The small model: one layer, trained for as many steps as the quickstart's trunk."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 32, 128

OWN, DATA = Path("runs/quickstart/checkpoint"), Path("runs/quickstart/data/corpus")
FLAGS: dict[str, dict[str, Any]] = {
    "--checkpoint": {"type": Path, "default": OWN, "help": f"the trunk; default: {OWN}"},
    "--data": {"type": Path, "default": DATA, "metavar": "PREFIX", "help": f"its corpus; default: {DATA}"},
}


def joint(wanted: Namespace) -> Found:
    """Run every method, in turns with plain decoding."""
    if not wanted.quick:  # in a fork, before this process joins a group
        small_model(wanted.folder / "small", wanted.data)
    join_world()
    if wanted.quick:
        sizes: dict[str, Any] = {"hidden": 64, "vocabulary": 128, "noise": 0.5}
        runner, small = (Runner(agreeing_model(layers=layers, depths=1, **sizes)) for layers in (2, 1))
        prompts, new = [[5, 6, 7], [8, 9]], 8
    else:
        runner, small = load_runner(wanted.checkpoint), load_runner(wanted.folder / "small")
        drawn = Beginnings(str(wanted.data), PROMPT_TOKENS, 1, "98,2,0", "validation", anywhere=True)
        prompts, new = [drawn.prompt(number) for number in range(PROMPTS)], NEW_TOKENS
    work = Workload(runner, prompts, new, Sampling(1.0), frozenset(), small, None, 1, 0)
    figures = {name: measured(work, given) for name, given in METHODS.items()}
    not_run = {"energy": NO_METER} if all(one["energy_joules_per_token"] is None for one in figures.values()) else {}
    results = {"prompts": len(prompts), "new_tokens": new, "figures": figures}
    return Found(results, goals(figures), [table(figures)], not_run)


def small_model(folder: Path, data: Path) -> None:
    """Train the small model with the trunk's tokenizer, unless it exists."""
    if not folder.is_dir():
        run("train", *SMALL, "--data-path", data, "--tokenizer-model", f"{data}-tokenizer", "--save", folder)


def measured(work: Workload, given: dict[str, Any]) -> dict[str, Any]:
    """Return what `generate --compare --json` prints for a method."""
    config = config_from(given)
    make_method(work.runner, config, work.sampling, work.drafter)  # rejects unsupported combinations
    cost, plain, same = work.compared(config, [])
    perplexities = work.perplexity(config), work.perplexity(None)
    joules = None if plain.joules is None else plain.joules / max(plain.stats.emitted, 1)
    return summary(cost, work.runner.dtype, plain, same, perplexities) | {"plain_joules_per_token": joules}


def goals(figures: dict[str, dict[str, Any]]) -> list[Goal]:
    """Check the paper's claims for MTAD: more tokens per forward than speculative decoding, with lower perplexity."""
    mtad = figures["MTAD, tau 0.5"]
    length = mtad["accepted_length"] / figures["speculative"]["accepted_length"]
    perplexity = mtad["perplexity"] / mtad["plain_perplexity"]
    return [
        Goal("tokens a forward of MTAD (tau 0.5) over speculative decoding's", length, 1.0, ">="),
        Goal("perplexity of MTAD (tau 0.5) over that of plain sampling", perplexity, 1.0),
    ]


def table(figures: dict[str, dict[str, Any]]) -> Table:
    """Return a row per method, with plain decoding first."""
    header = ("method", "tokens a forward", "perplexity", "over plain, times", "J/token")
    names = ("accepted_length", "perplexity", "speed_up", "energy_joules_per_token")
    first = next(iter(figures.values()))
    plain = ("plain", 1.0, first["plain_perplexity"], 1.0, first["plain_joules_per_token"])
    rows = [(name, *(one[figure] for figure in names)) for name, one in figures.items()]
    return Table("Sampled texts at temperature 1", header, [plain, *rows])


if __name__ == "__main__":
    main(joint, __doc__, ON_CPU, flags=FLAGS)
