"""Steps of `megatron-mtp attach`: the output of each, whether it still has to run, and its command."""

import json
import shutil
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_mtp.cli.attach_guard import check_gain
from megatron_mtp.cli.attach_probe import budget_of, choice, default, left_trial
from megatron_mtp.cli.attach_settings import OF_CHATS, OF_FIT, AttachSettings, names_of, words_of
from megatron_mtp.cli.attach_training import (
    SPLIT,
    beginning,
    fits_drafter,
    is_chat_file,
    passes_of,
    trained_on,
    training_of,
    trunk_of,
)
from megatron_mtp.common.files import written_beside
from megatron_mtp.data.checks import check_split
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.training.run_files import DOCUMENTS

DRAFTED_PROMPTS, DRAFTED_TOKENS = 6, 32
"""Number of held-out pieces to continue with drafts at the end, and tokens of each."""


def _nothing(settings: AttachSettings) -> None:
    pass


@dataclass(frozen=True)
class Step:
    """A step, which runs a command in its own process.

    Attributes:
        name: name for --only.
        makes: description of its output, to print.
        is_left: whether the settings need it and it is not finished. Commands that find this out themselves always run.
        command: the command and its arguments.
        check: checks before it; raises ValueError.
        prepare: what this process does before it runs.
        on_ranks: whether --launch starts it.
        of_the_folder: whether to skip it if no Hugging Face format supports the model.
    """

    name: str
    makes: str
    is_left: Callable[[AttachSettings], bool]
    command: Callable[[AttachSettings], list[str]]
    check: Callable[[AttachSettings], None] = _nothing
    prepare: Callable[[AttachSettings], None] = _nothing
    on_ranks: bool = False
    of_the_folder: bool = False

    def left_command(self, settings: AttachSettings) -> list[str] | None:
        """Return the command and its arguments; None if it is finished or not needed."""
        return self.command(settings) if self.is_left(settings) else None


# --- the corpus -------------------------------------------------------------------------------------------------------


def _needs_corpus(settings: AttachSettings) -> bool:
    return settings.self_generated is None or not is_chat_file(settings.corpus)  # `sample` reads chats directly


def _corpus(settings: AttachSettings) -> list[str]:
    source = "--chat" if is_chat_file(settings.corpus) else "--input"
    paths = ["--tokenizer", str(settings.model), "--output-prefix", _prefix(settings)]
    return ["preprocess", source, settings.corpus, *paths, *(word for word in settings.more if word in OF_CHATS)]


def _prefix(settings: AttachSettings) -> str:
    return f"{settings.run}/data/corpus"


def _check_split(settings: AttachSettings) -> None:
    """Raise ValueError if the corpus has too few documents to hold some out, before any fit."""
    is_trained_on = settings.self_generated is None and not {"--data-path", "--split"} & {*names_of(settings.more)}
    if is_trained_on and Path(f"{_prefix(settings)}.idx").exists():
        check_split([_prefix(settings)], SPLIT)


# --- the starting checkpoint ------------------------------------------------------------------------------------------


def _lacks_trunk(settings: AttachSettings) -> bool:
    return settings.load is None and settings.donor is None and not (settings.run / "trunk").is_dir()


def _trunk(settings: AttachSettings) -> list[str]:
    lost = ["--trunk-only"] if _has_lost_depths(settings.model) else []
    return ["convert", "hf-to-mcore", str(settings.model), f"{settings.run}/trunk", *lost, "--resume"]


def _has_lost_depths(model: Path) -> bool:
    """Return whether the model's config counts MTP layers that are missing; new layers are trained instead."""
    quieten()

    from megatron_mtp.checkpoint.convert.plan import has_lost_depths

    with suppress(ValueError):  # `convert` reports the error
        return has_lost_depths(model)
    return False


def _lacks_start(settings: AttachSettings) -> bool:
    begins = settings.drafter is None or fits_drafter(settings)
    return begins and not (settings.run / "start").is_dir()


def _start(settings: AttachSettings) -> list[str]:
    start, corpus = f"{settings.run}/start", ["--data-path", _prefix(settings)]
    if settings.drafter is not None:
        shared = words_of(settings.more, OF_FIT)
        return ["convert", "fit-drafter", trunk_of(settings), start, *corpus, *shared, "--resume"]
    if settings.donor is not None:
        return ["convert", "graft", str(settings.donor), str(settings.model), start, "--resume"]
    init = settings.mtp_init or ("last-layer" if is_chat_file(settings.corpus) or settings.load else "fitted")
    flags = ["--mtp-num-layers", str(settings.mtp_layers or 1), "--mtp-init", init]
    flags += corpus if init == "fitted" else []
    return ["convert", "attach-mtp", trunk_of(settings), start, *flags, "--resume"]


# --- training and evaluation ------------------------------------------------------------------------------------------


def _sample(settings: AttachSettings) -> list[str]:
    flags = ["--tokenizer", str(settings.model)]
    if settings.texts_by:
        flags += ["--server", settings.texts_by]
    else:
        flags += ["--load", f"{settings.run}/start" if settings.donor else trunk_of(settings)]
        flags += ["--dtype", "float32" if settings.float32 and "--bf16" not in settings.more else "bfloat16"]
    flags += ["--chat", settings.corpus] if is_chat_file(settings.corpus) else ["--data-path", _prefix(settings)]
    flags += ["--anywhere"] if settings.anywhere else []
    flags += ["--texts", str(settings.self_generated), "--temperature", settings.temperature]
    flags += ["--max-new-tokens", settings.max_new_tokens, "--prompt-tokens", settings.prompt_tokens]
    return ["sample", *flags, "--output-prefix", trained_on(settings)]


def _lacks_before(settings: AttachSettings) -> bool:
    return settings.drafter is None and not (settings.run / "before" / DOCUMENTS).exists()


def _before(settings: AttachSettings) -> list[str]:
    flags = ["--skip-train", "--eval-interval", "1", "--mtp-patience", settings.patience]
    flags += ["--load", f"{settings.run}/start", "--finetune", "--mtp-metrics-dir", f"{settings.run}/before"]
    return ["train", *training_of(settings, default(settings), settings.steps), *flags]


def _probe(settings: AttachSettings) -> list[str]:
    trial = left_trial(settings)
    assert trial is not None
    return trial.command(settings, budget_of(settings).evaluated)


def _train(settings: AttachSettings) -> list[str]:
    saved = settings.run / "checkpoint"
    load = ["--load", str(saved)] if _tracker(settings).exists() else ["--load", beginning(settings), "--finetune"]
    every = ["--save-interval", str(settings.save_every or settings.steps)]
    every += ["--eval-interval", str(budget_of(settings).interval), "--mtp-patience", settings.patience]
    chosen = training_of(settings, choice(settings), settings.steps)
    return ["train", *chosen, *load, *every, "--save", str(saved), "--mtp-metrics-dir", str(settings.run)]


def _tracker(settings: AttachSettings) -> Path:
    """Return the file that the training writes last."""
    from megatron_mtp.megatron.checkpoint import TRACKER

    return settings.run / "checkpoint" / TRACKER


# --- the Hugging Face folder ------------------------------------------------------------------------------------------


def _lacks_export(settings: AttachSettings) -> bool:
    written = settings.run / "exported" / "config.json"
    return not written.exists() or written.stat().st_mtime < _tracker(settings).stat().st_mtime


def _remove_older_export(settings: AttachSettings) -> None:
    if (settings.run / "exported").is_dir():
        shutil.rmtree(settings.run / "exported")


def _export(settings: AttachSettings) -> list[str]:
    folders = [f"{settings.run}/checkpoint", f"{settings.run}/exported"]
    if settings.drafter:
        return ["convert", "drafter-to-hf", *folders]
    family = family_of(settings)
    flags = [*([] if family is None else ["--family", family]), "--tokenizer", str(settings.model), "--resume"]
    return ["convert", "mcore-to-hf", *folders, *flags]


def family_of(settings: AttachSettings) -> str | None:
    """Return the family of the exported folder; None for the model's own, or the one that fits."""
    return settings.family or (None if settings.donor is not None else "glm4_moe")


def _verify(settings: AttachSettings) -> list[str]:
    folders = [f"{settings.run}/exported", f"{settings.run}/checkpoint"]
    return ["convert", "verify", *folders, "--allow-uncompared"]  # it prints which logits it does not compare, and why


# --- drafting ---------------------------------------------------------------------------------------------------------


def _draft(settings: AttachSettings) -> list[str]:
    repeated = {"method": "mtp_eagle", "num_speculative_tokens": passes_of(settings)}
    config = json.dumps(repeated if passes_of(settings) else {"method": settings.drafter or "mtp"})
    prompts = ["--prompt-file", str(_held_out(settings))] if settings.prompt is None else ["--prompt", settings.prompt]
    flags = ["--speculative-config", config, "--compare", *prompts, "--max-new-tokens", "96"]
    return ["generate", "--load", f"{settings.run}/checkpoint", *flags]


def _held_out(settings: AttachSettings) -> Path:
    """Return the file of prompts from documents that the training held out."""
    return settings.run / "data" / "held_out.jsonl"


def _write_held_out(settings: AttachSettings) -> None:
    file = _held_out(settings)
    if settings.prompt is not None or file.exists() or not Path(f"{trained_on(settings)}.idx").exists():
        return
    quieten()

    from megatron_mtp.data.prompts import Beginnings
    from megatron_mtp.data.tokenizer import read_tokenizer

    given = ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--split", default=SPLIT)
    split = given.parse_known_args(settings.more)[0].split
    tokenizer, corpus = read_tokenizer(settings.model), trained_on(settings)
    try:
        pieces = Beginnings(corpus, DRAFTED_TOKENS, 1, split, "validation", anywhere=True)
    except ValueError:  # all documents are short
        pieces = Beginnings(corpus, 1, 1, split, "validation", anywhere=True)
    lines = [{"prompt": tokenizer.decode(pieces.prompt(number))} for number in range(DRAFTED_PROMPTS)]
    with written_beside(file, shared=True) as beside:
        beside.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


_ALL = (
    Step("corpus", "the corpus", _needs_corpus, _corpus),
    Step("trunk", "the trunk in Megatron's form", _lacks_trunk, _trunk, check=_check_split),
    Step("start", "the MTP layers", _lacks_start, _start),
    Step("sample", "self-generated data", lambda settings: settings.self_generated is not None, _sample),
    Step("before", "loss and acceptance before the training", _lacks_before, _before, on_ranks=True),
    Step(
        "probe",
        "the probe of learning rates and losses",
        lambda settings: left_trial(settings) is not None,
        _probe,
        on_ranks=True,
    ),
    Step("train", "the training", lambda settings: True, _train, on_ranks=True),
    Step(
        "export",
        "the Hugging Face folder",
        _lacks_export,
        _export,
        check=check_gain,
        prepare=_remove_older_export,
        of_the_folder=True,
    ),
    Step(
        "verify",
        "the proof that folder and checkpoint are the same model",
        lambda settings: settings.load is None and settings.drafter is None,
        _verify,
        of_the_folder=True,
    ),
    Step("draft", "drafting", lambda settings: settings.load is None, _draft, prepare=_write_held_out),
)
STEPS = {step.name: step for step in _ALL}
"""The steps, in order."""
