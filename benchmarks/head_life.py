"""Does `attach --donor` export MTP layers that draft worse than their donor's? 24 trials, and a public failure.

    python benchmarks/head_life.py                    three trunks x four corpora x two donors, and the failure
    python benchmarks/head_life.py --steps 400        longer trainings of the layers
    python benchmarks/head_life.py --quick            does it run? (the figures mean nothing)

trunks    Trained here, with one MTP layer, on Python: a dense one, a deeper one with tied embeddings (of SmolLM2's
          family of shapes, in small: its weights are not needed), and one with experts.
corpora   Python as in the trunk's training; the same letters in another order, as a language with other words; chats
          with answers of prose; and code of other authors.
donors    good: the layers that were trained with the trunk. stale: as they were at half of that training.
failure   A published card fell from 58.6 to 49.8 % accepted by tuning the layers. Here: ce at too high a rate.

What is exported is judged on text that neither the training nor its evaluations have seen: expected accepted length of
the graft and of the export, each with the error of a bootstrap over documents. The goal is that none is below its graft
beyond twice the error of the difference.
"""

import json
import os
import random
import shutil
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from benchmarks.harness import Found, Goal, Table, count, main
from megatron_mtp.acceptance import EXPECTED_LENGTH
from megatron_mtp.runtime import prepare

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
CORPORA, DONORS = ("same", "language", "chat", "code"), ("good", "stale")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
HELD_BACK = 0.2
"""Of each corpus' documents, for the judgment."""
FAILURE = "--loss ce --learning-rate 3e-1".split()
DEVIATIONS = 2


def measure(wanted: Namespace) -> Found:
    """All trials."""
    prepare()

    import megatron_mtp.training.run  # noqa: F401  (once, for all processes that are forked from here)

    quick = wanted.place == "quick"
    steps = wanted.steps or (4 if quick else 150)
    trunks = [wanted.trunk] if wanted.trunk else list(TRUNKS)
    chosen = [(trunk, corpus, donor) for trunk in trunks for corpus in CORPORA for donor in DONORS]
    with TemporaryDirectory(prefix="head-life-") as temporary:
        place = Path(temporary)
        texts = make_texts(place, 24 if quick else 160)
        for trunk in dict.fromkeys(trunk for trunk, _, _ in chosen[: 1 if quick else None]):
            train_trunk(place, trunk, 4 if quick else 300, texts["same"])
        trials = [one_trial(place, *each, texts, steps) for each in chosen[: 1 if quick else None]]
        failed = one_trial(place, trunks[0], "same", "good", texts, steps, FAILURE)
    exported = [trial for trial in trials if trial["exported"]]
    below = [trial for trial in exported if trial["gain"] < -trial["error"]]
    header = ("trunk", "corpus", "donor", "graft", "attached", "error of the gain", "exported", "seconds")
    rows = [
        (*(trial[name] for name in ("trunk", "corpus", "donor", "before", "after", "error")),
         "yes" if trial["exported"] else "refused", trial["seconds"])
        for trial in [*trials, {**failed, "corpus": "same, ce at 0.3"}]
    ]  # fmt: skip
    results = {
        "steps": steps,
        "trials": trials,
        "failure": failed,
        "refused": len(trials) - len(exported),
        "median gain of exports": statistics.median(trial["gain"] for trial in exported) if exported else 0.0,
        "median seconds": statistics.median(trial["seconds"] for trial in trials),
    }
    goals = [
        Goal("exports below their graft beyond the error", float(len(below)), 0),
        Goal("exports of the failure replayed", float(failed["exported"]), 0),
    ]
    return Found(results, goals, [Table("expected accepted length on text that nothing has seen", header, rows)])


def make_texts(place: Path, documents: int) -> dict[str, tuple[Path, Path]]:
    """A corpus to attach with and one to judge by, of every kind; and the tokenizer of all."""
    import torch

    from megatron_mtp.data.tokenizer import train_bpe

    ours = [file.read_text() for file in sorted((ROOT / "megatron_mtp").rglob("*.py"))]
    theirs = [file.read_text() for file in sorted(Path(torch.__file__).parent.joinpath("nn").rglob("*.py"))]
    prose = [part for file in sorted((ROOT / "docs").glob("*.md")) for part in pieces(file.read_text())]
    letters = random.Random(1).sample("abcdefghijklmnopqrstuvwxyz", 26)
    other = str.maketrans("abcdefghijklmnopqrstuvwxyz", "".join(letters))
    kinds = {
        "same": [part for text in ours for part in pieces(text)],
        "language": [part.translate(other) for part in prose],
        "chat": [json.dumps({"messages": chat_of(part)}) for part in prose],
        "code": [part for text in theirs for part in pieces(text)],
    }
    train_bpe([*kinds["same"][:200], *prose[:200]], 512, place / "tokenizer")
    settings = place / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    found = {}
    for name, parts in kinds.items():
        random.Random(2).shuffle(parts)
        parts = parts[:documents]
        cut = int(len(parts) * HELD_BACK)
        files = (place / f"{name}.jsonl", place / f"{name}-judged.jsonl")
        for file, chosen in zip(files, (parts[cut:], parts[:cut]), strict=True):
            lines = chosen if name == "chat" else [json.dumps({"text": part}) for part in chosen]
            file.write_text("\n".join(lines) + "\n")
        found[name] = files
    return found


def pieces(text: str, size: int = 1200) -> list[str]:
    """Documents of about one size, so that a corpus has many."""
    return [text[start : start + size] for start in range(0, len(text) - size // 2, size)]


def chat_of(text: str) -> list[dict[str, str]]:
    """A question about a text's first line, and the text."""
    asked, _, answer = text.partition("\n")
    return [{"role": "user", "content": asked or "?"}, {"role": "assistant", "content": answer or text}]


def train_trunk(place: Path, trunk: str, steps: int, text: tuple[Path, Path]) -> None:
    """A trunk with its layer at half of the training and at its end, and the latter as a Hugging Face folder."""
    data, saved = place / "corpus", place / trunk / "checkpoint"
    words = ["--input", text[0], "--tokenizer", place / "tokenizer", "--output-prefix", data, "--workers", "1"]
    run("preprocess", *words)
    flags = [
        *SHARED,
        *TRUNKS[trunk].split(),
        "--data-path",
        data,
        "--split",
        "1",
        "--tokenizer-model",
        place / "tokenizer",
    ]
    flags += ["--train-iters", steps, "--save", saved, "--save-interval", steps // 2, "--eval-interval", steps]
    run("train", *flags)
    run("convert", "drop-mtp", saved, place / trunk / "trunk")
    run("convert", "mcore-to-hf", place / trunk / "trunk", place / trunk / "hf", "--tokenizer", place / "tokenizer")


def one_trial(
    place: Path,
    trunk: str,
    corpus: str,
    donor: str,
    texts: dict[str, tuple[Path, Path]],
    steps: int,
    flags: list[str] | None = None,
) -> dict[str, Any]:
    """Graft, attach and export as `attach --donor` does, step by step; then judge graft and result on other text."""
    began, folder = time.monotonic(), place / "runs" / "-".join((trunk, corpus, donor, *(flags or [])))
    iterations = sorted((place / trunk / "checkpoint").glob("iter_*"))
    given = [place / trunk / "hf", texts[corpus][0], folder, "--donor", iterations[-1 if donor == "good" else 0]]
    given += ["--steps", steps, "--sequence", 64, "--batch", 8, "--float32", "--split", "75,25,0"]
    given += ["--evaluated-batches", max(steps // 40, 1), *(flags or [])]
    for step in ("corpus", "start", "before", "train"):
        run("attach", *given, "--only", step)
    is_exported = run("attach", *given, "--only", "export", may_fail=True) == 0
    seconds = time.monotonic() - began
    before, after = (judged(place, folder / name, corpus, texts) for name in ("start", "checkpoint"))
    error = DEVIATIONS * (before["error"] ** 2 + after["error"] ** 2) ** 0.5
    shutil.rmtree(folder)
    trial = {
        "trunk": trunk,
        "corpus": corpus,
        "donor": donor,
        "before": before[EXPECTED_LENGTH],
        "after": after[EXPECTED_LENGTH],
        "gain": after[EXPECTED_LENGTH] - before[EXPECTED_LENGTH],
        "error": error,
        "exported": is_exported,
        "seconds": seconds,
    }
    print(json.dumps(trial), file=sys.stderr, flush=True)
    return trial


def judged(place: Path, checkpoint: Path, corpus: str, texts: dict[str, tuple[Path, Path]]) -> dict[str, Any]:
    """The record of an evaluation on text that was held back."""
    data = place / f"{corpus}-judged"
    source = "--chat" if corpus == "chat" else "--input"
    if not data.with_suffix(".idx").exists():
        words = [source, texts[corpus][1], "--tokenizer", place / "tokenizer", "--output-prefix", data]
        run("preprocess", *words, "--workers", "1")
    flags = ["--load", checkpoint, "--data-path", data, "--tokenizer-model", place / "tokenizer"]
    run("evaluate", *flags, "--seq-length", 64, "--micro-batch-size", 8, "--eval-iters", 8)
    found: dict[str, Any] = json.loads((checkpoint / "mtp_acceptance.json").read_text())
    return found


def run(verb: str, *words: object, may_fail: bool = False) -> int:
    """Run a verb in a fork of this process, which has imported Megatron; returns its exit status.

    Raises:
        RuntimeError: it failed, unless that is allowed.
    """
    from megatron_mtp.cli.main import main as program

    child = os.fork()
    if child == 0:
        log = os.open(os.environ.get("HEAD_LIFE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(_status(lambda: program([verb, *map(str, words)])))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status and not may_fail:
        raise RuntimeError(f"megatron-mtp {verb} {' '.join(map(str, words))} ended with status {status}")
    return status


def _status(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1


if __name__ == "__main__":
    steps = {"type": count, "metavar": "N", "help": "of a training of the layers; default: 150"}
    trunk = {"choices": [*TRUNKS], "help": "this one alone"}
    main(measure, __doc__, flags={"--steps": steps, "--trunk": trunk})
