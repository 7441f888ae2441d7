"""The steps of `megatron-mtp attach`, each a verb and its arguments, from the flags and from what is in RUN."""

import json
import shutil
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from megatron_mtp.cli.attach_probe import budget_of, choice, default, next_trial
from megatron_mtp.cli.attach_training import (
    OF_CHATS,
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
from megatron_mtp.megatron.runtime import quieten
from megatron_mtp.training.run_files import DOCUMENTS

STEPS = {
    "corpus": "the corpus",
    "trunk": "the trunk in Megatron's form",
    "start": "the MTP layers",
    "sample": "self-generated data",
    "before": "loss and acceptance before the training",
    "probe": "the probe of learning rates and losses",
    "train": "the training",
    "export": "the Hugging Face folder",
    "verify": "the proof that folder and checkpoint are the same model",
    "draft": "drafting",
}
"""The steps in their order, and their names in the output."""
DRAFTED_PROMPTS, DRAFTED_TOKENS = 6, 32
"""Pieces of held-out documents that are continued by drafting at the end, and tokens of each."""
ON_RANKS, OF_THE_FOLDER = ("before", "probe", "train"), ("export", "verify")
AFTER_CORPUS, AFTER_START, AFTER_TRAIN = "trunk", "sample", "export"
"""The steps before which it is known how many documents there are, what the attached model is, and what it learned."""


def command_of(step: str, args: Namespace) -> list[str] | None:
    """A step's verb and arguments, from the flags; None if it is finished, or not needed."""
    from megatron_mtp.megatron.checkpoint import TRACKER

    run, saved, start = args.run, args.run / "checkpoint", args.run / "start"
    data, chat = run / "data" / "corpus", is_chat_file(args.corpus)
    match step:
        case "corpus" if args.self_generated is None or not chat:  # of chats, `sample` takes the prompts
            source = "--chat" if chat else "--input"
            paths = ["--tokenizer", str(args.model), "--output-prefix", str(data)]
            return ["preprocess", source, args.corpus, *paths, *(word for word in args.more if word in OF_CHATS)]
        case "trunk" if args.load is None and not (run / "trunk").is_dir() and args.donor is None:
            lost = ["--trunk-only"] if _has_lost_depths(args.model) else []
            return ["convert", "hf-to-mcore", str(args.model), f"{run}/trunk", *lost, "--resume"]
        case "start" if fits_drafter(args) and not start.is_dir():
            return _fit(args)
        case "start" | "before" | "verify" if args.drafter:
            return None
        case "start" if not start.is_dir() and args.donor is not None:
            return ["convert", "graft", str(args.donor), str(args.model), str(start), "--resume"]
        case "start" if not start.is_dir():
            init = args.mtp_init or ("last-layer" if chat or args.load else "fitted")
            flags = ["--mtp-num-layers", str(args.mtp_layers or 1), "--mtp-init", init]
            flags += ["--data-path", str(data)] if init == "fitted" else []
            return ["convert", "attach-mtp", trunk_of(args), str(start), *flags, "--resume"]
        case "sample" if args.self_generated is not None:
            return _sample(args)
        case "before":
            if (run / "before" / DOCUMENTS).exists():
                return None
            flags = ["--skip-train", "--eval-interval", "1", "--mtp-patience", args.patience]
            flags += ["--load", str(start), "--finetune", "--mtp-metrics-dir", f"{run}/before"]
            return ["train", *training_of(args, default(args), args.steps), *flags]
        case "probe":
            return next_trial(args)
        case "train":
            load = ["--load", str(saved)] if (saved / TRACKER).exists() else ["--load", beginning(args), "--finetune"]
            every = (
                f"--save-interval {args.save_every or args.steps} --eval-interval {budget_of(args).interval}".split()
            )
            every += ["--mtp-patience", args.patience]
            chosen = training_of(args, choice(args), args.steps)
            return ["train", *chosen, *load, *every, "--save", str(saved), "--mtp-metrics-dir", str(run)]
        case "export":
            target, written = run / "exported", run / "exported" / "config.json"
            if written.exists() and written.stat().st_mtime >= (saved / TRACKER).stat().st_mtime:
                return None
            if target.is_dir() and not args.dry_run:
                shutil.rmtree(target)
            if args.drafter:
                return ["convert", "drafter-to-hf", str(saved), str(target)]
            family = [] if family_of(args) is None else ["--family", str(family_of(args))]
            flags = [*family, "--tokenizer", str(args.model), "--resume"]
            return ["convert", "mcore-to-hf", str(saved), str(target), *flags]
        case "verify" if args.load is None:  # it prints which logits are not compared, and why
            return ["convert", "verify", f"{run}/exported", str(saved), "--allow-uncompared"]
        case "draft" if args.load is None:
            repeated = {"method": "mtp_eagle", "num_speculative_tokens": passes_of(args)}
            config = json.dumps(repeated if passes_of(args) else {"method": args.drafter or "mtp"})
            prompts = ["--prompt-file", str(_held_out(args))] if args.prompt is None else ["--prompt", args.prompt]
            flags = ["--speculative-config", config, "--compare", *prompts, "--max-new-tokens", "96"]
            return ["generate", "--load", str(saved), *flags]
    return None


def _held_out(args: Namespace) -> Path:
    """The file of prompts from documents that the training held out, which is written where it is missing."""
    file = args.run / "data" / "held_out.jsonl"
    if file.exists() or args.dry_run or not Path(f"{trained_on(args)}.idx").exists():
        return file
    quieten()

    from megatron_mtp.data.prompts import Beginnings
    from megatron_mtp.data.tokenizer import read_tokenizer

    given = ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--split", default=SPLIT)
    split = given.parse_known_args(args.more)[0].split
    tokenizer, corpus = read_tokenizer(args.model), trained_on(args)
    try:
        pieces = Beginnings(corpus, DRAFTED_TOKENS, 1, split, "validation", anywhere=True)
    except ValueError:  # all documents are short
        pieces = Beginnings(corpus, 1, 1, split, "validation", anywhere=True)
    lines = [{"prompt": tokenizer.decode(pieces.prompt(number))} for number in range(DRAFTED_PROMPTS)]
    with written_beside(file, shared=True) as beside:
        beside.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return file


def _has_lost_depths(model: Path) -> bool:
    """True if the model's config counts MTP layers that are not there; new ones are trained in their place."""
    quieten()

    from megatron_mtp.checkpoint.convert.plan import has_lost_depths

    with suppress(ValueError):  # `convert` says what is wrong
        return has_lost_depths(model)
    return False


def _sample(args: Namespace) -> list[str]:
    """The verb that makes the model's own texts, from prompts of the corpus."""
    flags = ["--tokenizer", str(args.model)]
    if args.texts_by:
        flags += ["--server", args.texts_by]
    else:
        flags += ["--load", f"{args.run}/start" if args.donor else trunk_of(args)]
        flags += ["--dtype", "float32" if args.float32 and "--bf16" not in args.more else "bfloat16"]
    flags += ["--chat", args.corpus] if is_chat_file(args.corpus) else ["--data-path", f"{args.run}/data/corpus"]
    flags += ["--anywhere"] if args.anywhere else []
    flags += ["--texts", str(args.self_generated), "--temperature", args.temperature]
    flags += ["--max-new-tokens", args.max_new_tokens, "--prompt-tokens", args.prompt_tokens]
    return ["sample", *flags, "--output-prefix", trained_on(args)]


def _fit(args: Namespace) -> list[str]:
    shared = _words_of(args.more, "--drafter-layers", "--mtp-draft-vocab-size", "--mtp-draft-vocab-file")
    folders = [trunk_of(args), f"{args.run}/start"]
    return ["convert", "fit-drafter", *folders, "--data-path", f"{args.run}/data/corpus", *shared, "--resume"]


def _words_of(more: list[str], *flags: str) -> list[str]:
    """These flags among others, with their values."""
    named = [next((word for word in reversed(more[: at + 1]) if word.startswith("--")), "") for at in range(len(more))]
    return [word for word, flag in zip(more, named, strict=True) if flag in flags]


def family_of(args: Namespace) -> str | None:
    """The family of the exported folder; None for the model's own, or the one that fits."""
    return args.family or (None if args.donor is not None else "glm4_moe")
