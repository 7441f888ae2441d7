"""Does `attach --donor` export MTP layers that draft worse than their donor's? 24 trials, and a public failure.

    python benchmarks/head_life.py                    three trunks x four corpora x two donors, failure and probe
    python benchmarks/head_life.py --steps 400        train the layers longer
    python benchmarks/head_life.py --quick            does it run? (the figures mean nothing)
    python benchmarks/head_life.py --trunk NAME=DIR   a Hugging Face model instead of the three; no probe

With --folder DIR, texts, trunks and finished trials are kept there, and the same command resumes an interrupted run.

trunks    Trained here, with one MTP layer, on Python: a dense one, a deeper one with tied embeddings, and one with
          experts. A Hugging Face model keeps its tokenizer, and `attach` gives it an MTP layer first, in bfloat16 and
          twice the steps of a trial.
corpora   Python as in the trunk's training; the same characters permuted, as a language with other words; chats with
          answers in prose; and code of other authors.
donors    good: the layers trained with the trunk, or on it. stale: the same layers halfway through that training.
failure   In a published model card, tuning the layers lowered acceptance from 58.6 to 49.8 %. Here: ce at too high a
          learning rate.
probe     One training long enough for `attach` to choose learning rate and loss itself, and the cost of the choice.

Exports are evaluated on text that neither the training nor its evaluations have seen: expected accepted length of the
graft and of the export, each with a bootstrap error over documents. The goal is that no export is below its graft by
more than twice the error of the difference.
"""

import json
import random
import statistics
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from benchmarks.harness import Found, Goal, Table, count, main
from benchmarks.verbs import VerbError, run
from megatron_mtp.common.acceptance import EXPECTED_LENGTH
from megatron_mtp.common.files import remove, written_beside
from megatron_mtp.training.read_runs import read_rows

ROOT = Path(__file__).resolve().parents[1]
SHARED = (
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 256 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--no-create-attention-mask-in-dataloader --tokenizer-type HuggingFaceTokenizer --mtp-num-layers 1 "
    "--micro-batch-size 8 --global-batch-size 8 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --eval-iters 0"
).split()
TRUNKS = {
    "dense": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 176 --untie-embeddings-and-output-weights",
    "deep": "--num-layers 4 --hidden-size 48 --ffn-hidden-size 128",
    "experts": (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 176 --untie-embeddings-and-output-weights --num-experts 4 "
        "--moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --moe-layer-freq [0,1] "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32"
    ),
}
SIZES = "--sequence 64 --batch 8 --float32 --split 75,25,0".split()
"""Flags of every training by `attach`, unless later flags override them."""
CORPORA, DONORS = ("same", "language", "chat", "code"), ("good", "stale")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
HELD_BACK = 0.2
"""Fraction of each corpus' documents held back for evaluation."""
FAILURE = ("--loss", "ce", "--learning-rate", "3e-1")
PROBED = 4880
"""Minimum number of steps for which `attach` probes by default."""
DEVIATIONS = 2
SHARE = 0.15
"""Largest cost of probe and guard, as a fraction of a training's steps."""


class Trunk(NamedTuple):
    """A trunk of `TRUNKS`, or a Hugging Face model."""

    name: str
    model: Path | None

    @classmethod
    def parse(cls, text: str) -> "Trunk":
        """Parse a trunk from the command line. Raise ArgumentTypeError if it does not exist."""
        name, _, folder = text.partition("=")
        if folder and name not in TRUNKS and (Path(folder) / "config.json").exists():
            return cls(name, Path(folder).absolute())
        if text in TRUNKS:
            return cls(text, None)
        raise ArgumentTypeError(
            f"{text} was given; give {', '.join(TRUNKS)}, or another name, = and the folder of a Hugging Face model."
        )


@dataclass(frozen=True)
class Trial:
    """A graft and its training; `flags` are additional flags of `attach`."""

    trunk: str
    corpus: str
    donor: str
    steps: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of its folder and file."""
        return "-".join((self.trunk, self.corpus, self.donor, str(self.steps), *self.flags))


@dataclass(frozen=True)
class Texts:
    """A corpus to attach with, as text, and prefixes of tokens to train a trunk on and to evaluate on."""

    attached: Path
    trained: Path
    judged: Path


def head_life(wanted: Namespace) -> Found:
    """Run all trials."""
    quick = wanted.place == "quick"
    steps = wanted.steps or (4 if quick else 150)
    model = wanted.trunk and wanted.trunk.model
    trunks = [wanted.trunk.name] if wanted.trunk else list(TRUNKS)
    more = ("--batch", str(wanted.batch)) if wanted.batch else ()
    chosen = [Trial(*each, steps, more) for each in product(trunks, CORPORA, DONORS)][: 1 if quick else None]
    place = wanted.folder / wanted.place / (wanted.trunk.name if model else "")  # its texts have other tokens
    texts = make_texts(place / "texts", 24 if quick else 640 if model else 160, model)
    for trunk in dict.fromkeys(trial.trunk for trial in chosen):
        if model:
            attach_layer(place / trunk, model, 2 * steps, texts["same"], more)
        else:
            train_trunk(place, trunk, 4 if quick else 300, texts["same"])
    trials = [finished(place, trial, texts) for trial in chosen]
    failed = finished(place, Trial(trunks[0], "same", "good", steps, (*more, *FAILURE)), texts)
    probed = None if quick or model else finished(place, Trial(trunks[0], "code", "stale", PROBED, more), texts)
    exported = [trial for trial in trials if trial["exported"]]
    below = [trial for trial in exported if trial["gain"] < -trial["error"]]
    header = ("trunk", "corpus", "donor", "graft", "attached", "error of the gain", "exported", "seconds")
    apart = [{**failed, "corpus": "same, ce at 0.3"}] + ([{**probed, "corpus": "code, probed"}] if probed else [])
    rows = [
        (*(trial[name] for name in ("trunk", "corpus", "donor", "before", "after", "error")),
         "yes" if trial["exported"] else "refused", round(trial["seconds"]))
        for trial in [*trials, *apart]
    ]  # fmt: skip
    results = {
        "steps": steps,
        "trials": trials,
        "failure": failed,
        "probe": probed,
        "refused": len(trials) - len(exported),
        "median gain of exports": statistics.median(trial["gain"] for trial in exported) if exported else 0.0,
        "median seconds": statistics.median(trial["seconds"] for trial in trials),
    }
    goals = [
        Goal("exports below their graft beyond the error", float(len(below)), 0),
        Goal("exports of the failure replayed", float(failed["exported"]), 0),
    ]
    if probed:
        spent = probed["steps and evaluated batches"]
        goals.append(Goal("share of probe and guard", (spent["probe"] + spent["guard"]) / spent["training"], SHARE))
    return Found(
        results,
        goals,
        [Table("expected accepted length on text that nothing has seen", header, rows), by_corpus(trials)],
        {} if probed else {"the probe": "its training is too long for --quick and a given model"},
    )


def by_corpus(trials: list[dict[str, Any]]) -> Table:
    """Return a row for each trunk and donor: accepted length of the graft and of the attached layers."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for trial in trials:
        lengths = f"{trial['before']:.2f} to {trial['after']:.2f}{'' if trial['exported'] else ', refused'}"
        rows.setdefault((trial["trunk"], trial["donor"]), {})[trial["corpus"]] = lengths
    cells = [[*row, *(found.get(corpus) for corpus in CORPORA)] for row, found in rows.items()]
    return Table("from the graft to the attached layers", ("trunk", "donor", *CORPORA), cells)


def make_texts(folder: Path, documents: int, model: Path | None) -> dict[str, Texts]:
    """Write texts of every kind, holding back some documents for evaluation; and their tokenizer.

    The tokenizer is the model's, or trained on some of the texts.
    """
    if not folder.exists():
        with written_beside(folder) as beside:
            write_texts(beside, documents, model)
    return {
        kind: Texts(folder / f"{kind}.jsonl", folder / kind / "corpus", folder / kind / "judged") for kind in CORPORA
    }


def write_texts(folder: Path, documents: int, model: Path | None) -> None:
    """Write them to a new folder."""
    import torch

    from megatron_mtp.data.tokenizer import read_tokenizer, train_bpe

    folder.mkdir(parents=True)
    ours = [file.read_text() for file in sorted((ROOT / "megatron_mtp").rglob("*.py"))]
    theirs = [file.read_text() for file in sorted(Path(torch.__file__).parent.joinpath("nn").rglob("*.py"))]
    prose = [part for file in sorted((ROOT / "docs").rglob("*.md")) for part in pieces(file.read_text())]
    letters = random.Random(1).sample("abcdefghijklmnopqrstuvwxyz", 26)
    other = str.maketrans("abcdefghijklmnopqrstuvwxyz", "".join(letters))
    kinds = {
        "same": [part for text in ours for part in pieces(text)],
        "language": [part.translate(other) for part in prose],
        "chat": [json.dumps({"messages": chat_of(part)}) for part in prose],
        "code": [part for text in theirs for part in pieces(text)],
    }
    if model is None:
        train_bpe([*kinds["same"][:200], *prose[:200]], 512, folder / "tokenizer")
        settings = folder / "tokenizer" / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    else:
        read_tokenizer(model).save_pretrained(str(folder / "tokenizer"))
    for kind, parts in kinds.items():
        random.Random(2).shuffle(parts)
        parts = parts[:documents]
        cut = int(len(parts) * HELD_BACK)
        judged = folder / f"{kind}-judged.jsonl"
        for file, chosen in ((folder / f"{kind}.jsonl", parts[cut:]), (judged, parts[:cut])):
            lines = chosen if kind == "chat" else [json.dumps({"text": part}) for part in chosen]
            file.write_text("\n".join(lines) + "\n")
        source = "--chat" if kind == "chat" else "--input"
        for file, name in ((folder / f"{kind}.jsonl", "corpus"), (judged, "judged")):
            words = [source, file, "--tokenizer", folder / "tokenizer", "--output-prefix", folder / kind / name]
            run("preprocess", *words, "--workers", "1")


def pieces(text: str, size: int = 1200) -> list[str]:
    """Split into documents of about equal size, so that a corpus has many."""
    return [text[start : start + size] for start in range(0, len(text) - size // 2, size)]


def chat_of(text: str) -> list[dict[str, str]]:
    """Return a question about a text's first line, and the text as the answer."""
    asked, _, answer = text.partition("\n")
    return [{"role": "user", "content": asked or "?"}, {"role": "assistant", "content": answer or text}]


def train_trunk(place: Path, trunk: str, steps: int, text: Texts) -> None:
    """Train a trunk; save its MTP layer halfway and at the end, and the end as a Hugging Face folder."""
    folder, tokenizer = place / trunk, place / "texts" / "tokenizer"
    mark = folder / "finished"
    if mark.exists():
        return
    remove(folder)  # left by an interrupted run
    flags = [*SHARED, *TRUNKS[trunk].split(), "--data-path", text.trained, "--split", "1"]
    flags += ["--tokenizer-model", tokenizer, "--save", folder / "checkpoint"]
    flags += ["--train-iters", steps, "--save-interval", steps // 2, "--eval-interval", steps]
    run("train", *flags)
    run("convert", "drop-mtp", folder / "checkpoint", folder / "trunk")
    run("convert", "mcore-to-hf", folder / "trunk", folder / "hf", "--tokenizer", tokenizer)
    mark.touch()


def attach_layer(folder: Path, model: Path, steps: int, text: Texts, more: tuple[str, ...]) -> None:
    """Train a new MTP layer on a Hugging Face model, saved halfway and at the end, and link to the model."""
    mark = folder / "finished"
    if mark.exists():
        return
    given = [model, text.attached, folder, *SIZES, *precision(folder.name), *more]
    given += ["--steps", steps, "--save-every", steps // 2]
    for step in ("corpus", "trunk", "start", "train"):  # each resumes if it was interrupted
        run("attach", *given, "--only", step)
    (folder / "hf").unlink(missing_ok=True)
    (folder / "hf").symlink_to(model)
    mark.touch()


def finished(place: Path, trial: Trial, texts: dict[str, Texts]) -> dict[str, Any]:
    """Return the record of a trial; run it if there is none."""
    folder = place / "runs" / trial.name

    def run_anew() -> dict[str, Any]:
        remove(folder)  # of an interrupted run
        return run_trial(place, folder, trial, texts[trial.corpus])

    found = kept(place / "trials" / f"{trial.name}.json", run_anew)
    remove(folder)
    return found


def kept[T](file: Path, make: Callable[[], T]) -> T:
    """Return what the JSON file holds; if there is none, make it and write the file."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = make()
        with written_beside(file) as beside:
            beside.write_text(json.dumps(made))
    found: T = json.loads(file.read_text())
    return found


def run_trial(place: Path, folder: Path, trial: Trial, text: Texts) -> dict[str, Any]:
    """Graft, attach and export as `attach --donor` does, step by step; then judge graft and result on other text."""
    began = time.monotonic()
    iterations = sorted((place / trial.trunk / "checkpoint").glob("iter_*"))
    donor = iterations[-1 if trial.donor == "good" else 0]
    given = [place / trial.trunk / "hf", text.attached, folder, "--donor", donor]
    given += ["--steps", trial.steps, *SIZES, *precision(trial.trunk)]
    probes = trial.steps >= PROBED
    given += [*trial.flags, *([] if probes else ["--evaluated-batches", max(trial.steps // 40, 1)])]
    for step in ("corpus", "start", "before"):
        run("attach", *given, "--only", step)
    while probes and not (folder / "probe.json").exists():  # one candidate each, then the table
        run("attach", *given, "--only", "probe")
    run("attach", *given, "--only", "train")
    try:
        run("attach", *given, "--only", "export")
        is_exported = True
    except VerbError:
        is_exported = False
    seconds = time.monotonic() - began
    flags = precision(trial.trunk)
    before, after = (judged(place, folder / name, text, flags) for name in ("start", "checkpoint"))
    error = DEVIATIONS * (before["error"] ** 2 + after["error"] ** 2) ** 0.5
    record = {
        **asdict(trial),
        "before": before[EXPECTED_LENGTH],
        "after": after[EXPECTED_LENGTH],
        "gain": after[EXPECTED_LENGTH] - before[EXPECTED_LENGTH],
        "error": error,
        "exported": is_exported,
        "seconds": seconds,
        "steps taken": read_rows(folder)[-1]["iteration"],
    }
    if probes:
        record |= json.loads((folder / "probe.json").read_text())
    print(json.dumps(record), file=sys.stderr, flush=True)
    return record


def precision(trunk: str) -> list[str]:
    """Flags of a training or an evaluation; float32 for the trunks that are trained here."""
    return [] if trunk in TRUNKS else ["--bf16"]


def judged(place: Path, checkpoint: Path, text: Texts, more: Sequence[object]) -> dict[str, Any]:
    """Return the record of an evaluation on held-back text; additional flags take precedence."""
    flags = ["--load", checkpoint, "--data-path", text.judged, "--tokenizer-model", place / "texts" / "tokenizer"]
    run("evaluate", *flags, "--seq-length", 64, "--micro-batch-size", 8, "--eval-iters", 8, *more)
    found: dict[str, Any] = json.loads((checkpoint / "mtp_acceptance.json").read_text())
    return found


FLAGS: dict[str, dict[str, Any]] = {
    "--steps": {"type": count, "metavar": "N", "help": "of a training of the layers; default: 150"},
    "--batch": {"type": count, "metavar": "N", "help": "sequences of 64 tokens a step of these trainings; default: 8"},
    "--trunk": {
        "type": Trunk.parse,
        "metavar": "NAME",
        "help": f"this one alone: {', '.join(TRUNKS)}, or NAME=DIR, a folder of a Hugging Face model",
    },
}

if __name__ == "__main__":
    main(head_life, __doc__, flags=FLAGS)
