"""`megatron-mtp sample`: a checkpoint and a corpus in; prompts with continuations out, as a corpus of train."""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.checkpoint.mcore.tokenizer import run_tokenizer
from megatron_mtp.data.checks import read_sidecar
from megatron_mtp.data.corpus import write_sequences
from megatron_mtp.data.tokenizer import Encoder, read_tokenizer
from megatron_mtp.drafting.config import SpeculativeConfig, parse_config
from megatron_mtp.drafting.load import load_checkpoint
from megatron_mtp.drafting.own_texts.journal import Journal, Written
from megatron_mtp.drafting.own_texts.prompts import Beginnings, Prompts, UserTurns
from megatron_mtp.drafting.own_texts.writing import MOST_SEED, How, default_method, write_texts
from megatron_mtp.drafting.requests import Finish
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import Sampling
from megatron_mtp.drafting.stats import AcceptanceStats
from megatron_mtp.errors import check_counts, status_of
from megatron_mtp.files import check_outside, one_writer, remove

OF_TEXTS = "split part max_new_tokens temperature top_k top_p min_p seed".split()
"""Flags on which texts depend; the number of texts, and how many run together, are not among them."""
OF_DOCUMENTS = "data_path prompt_tokens anywhere".split()
ENDINGS = ("idx", "json", "bin", "answers.npy", "texts.jsonl")


def main(args: Namespace, program: str) -> int:
    """Write the texts; bad input ends with one sentence and exit status 2."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    return status_of(program, lambda: sample(args), advice="the same command continues")


def sample(args: Namespace) -> int:
    """Check, write what is not finished, and make the corpus; returns 0.

    Raises:
        ValueError: bad input, or texts of other settings are there.
    """
    sampling, speculative = _check(args)
    check_outside(_file(args), Path(args.load))
    folder = _tokenizer(args)
    encoder = Encoder.from_folder(folder, trust_remote_code=args.trust_remote_code)
    settings = settings_of(args, speculative)
    if args.dry_run:
        _plan(args, settings, _prompts(args, folder))
        return 0
    with one_writer(Path(args.output_prefix), f"--output-prefix: '{args.output_prefix}'"):
        if args.overwrite:
            for ending in ENDINGS:
                remove(Path(f"{args.output_prefix}.{ending}"))
        journal = Journal(_file(args), settings)
        if _is_done(args, settings):
            print(f"{args.output_prefix}.bin and .idx are already there: {args.texts} texts with these settings")
            return 0
        how = How(sampling, args.max_new_tokens, args.seed, frozenset([encoder.eod_id]), speculative, args.batch_size)
        _write(args, journal, how, _prompts(args, folder), encoder.vocab_size)
        _publish(args, journal, encoder, settings)
    return 0


def _check(args: Namespace) -> tuple[Sampling, SpeculativeConfig | None]:
    """How texts are sampled and drafted; ValueError for a value that is not allowed."""
    check_counts(args, "texts", "prompt_tokens", "max_new_tokens", "batch_size")
    if not 0 <= args.seed <= MOST_SEED:
        raise ValueError(f"--seed is {args.seed}; give a number from 0 to {MOST_SEED}.")
    if args.anywhere and args.chat:
        raise ValueError("--anywhere was given with --chat, whose prompts are turns of the user; leave it out.")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("there are several ranks, and sample runs in one process; start it without torchrun.")
    sampling = Sampling.of(args)
    speculative = None if args.speculative_config is None else parse_config(args.speculative_config)
    if speculative is not None and speculative.num_speculative_tokens == "auto" and not sampling.greedy:
        raise ValueError(
            "--speculative-config has num_speculative_tokens 'auto', with which sampled texts depend on the clock; "
            "give a number."
        )
    return sampling, speculative


def _tokenizer(args: Namespace) -> Path:
    if args.tokenizer is not None:
        return Path(args.tokenizer)
    reader = DistReader(Path(args.load))
    found = run_tokenizer(reader.common()["args"], reader.folder.parent)
    if found is None:
        raise ValueError(f"--load is {args.load}, which names no tokenizer that is there; give --tokenizer.")
    return found


def settings_of(args: Namespace, speculative: SpeculativeConfig | None) -> dict[str, Any]:
    """What texts depend on, by the name of the flag; a model is known by the checksums in its catalogue."""
    found = {name: getattr(args, name) for name in OF_TEXTS}
    if args.chat:
        found["chat"] = [os.path.abspath(file) for file in args.chat]
    else:
        found |= {name: getattr(args, name) for name in OF_DOCUMENTS}
        found["data_path"] = os.path.abspath(args.data_path)
    found["load"] = DistReader(Path(args.load)).fingerprint()["catalogue"]
    found["dtype"] = args.dtype
    found["speculative_config"] = None if speculative is None else speculative.flat()
    return {name.replace("_", "-"): value for name, value in found.items()}


def _prompts(args: Namespace, tokenizer: Path) -> Prompts:
    if args.chat:
        chats = read_tokenizer(tokenizer, args.trust_remote_code)
        return UserTurns(args.chat, chats, args.seed, args.split, args.part)
    found = Beginnings(args.data_path, args.prompt_tokens, args.seed, args.split, args.part, args.anywhere)
    if args.temperature == 0 and not args.anywhere and args.texts > found.documents:
        raise ValueError(
            f"--texts is {args.texts}, but greedy texts of {found.documents} documents repeat after these; give "
            "--anywhere, a --temperature or fewer texts."
        )
    return found


def _file(args: Namespace) -> Path:
    return Path(f"{args.output_prefix}.texts.jsonl")


def _is_done(args: Namespace, settings: dict[str, Any]) -> bool:
    """Whether the corpus of these texts is there, and whole."""
    made = read_sidecar(args.output_prefix)
    files = [Path(f"{args.output_prefix}.{ending}") for ending in ("bin", "idx", "answers.npy")]
    whole = all(file.is_file() for file in files) and files[0].stat().st_size == made.get("bin_bytes")
    return whole and made.get("settings") == {**settings, "texts": args.texts}


def _plan(args: Namespace, settings: dict[str, Any], prompts: Prompts) -> None:
    there = len([number for number in Journal(_file(args), settings).texts if number < args.texts])
    print(f"{args.texts} texts of {prompts.documents} documents, {there} of them finished")
    print(f"at most {(args.texts - there) * args.max_new_tokens} new tokens")
    print(f"would write {args.output_prefix}.bin, .idx, .json, .answers.npy and .texts.jsonl")


def _write(args: Namespace, journal: Journal, how: How, prompts: Prompts, vocabulary: int) -> None:
    """Make the texts that are not finished."""
    left = [number for number in range(args.texts) if number not in journal.texts]
    if not left:
        return
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    runner = load_checkpoint(args.load, vocabulary, dtype, trust_remote_code=args.trust_remote_code).runner
    how = How(**{**vars(how), "speculative": how.speculative or default_method(runner)})
    if not args.chat and args.prompt_tokens >= runner.positions:
        raise ValueError(
            f"--prompt-tokens is {args.prompt_tokens}, and the model has {runner.positions} positions; give fewer."
        )
    with journal.keeping() as keep, _bar(args.texts, args.texts - len(left)) as bar:

        def finished(text: Written) -> None:
            keep(text)
            bar.update(1)

        stats = write_texts(runner, _numbered(left, prompts, runner), how, finished)
    _say(stats)


def _numbered(numbers: list[int], prompts: Prompts, runner: Runner) -> Iterator[tuple[int, list[int]]]:
    """The prompts that leave room for a token; a conversation that does not is left out."""
    for number in numbers:
        prompt = prompts.prompt(number)
        if len(prompt) < runner.positions:
            yield number, prompt


def _bar(total: int, done: int) -> "tqdm[None]":
    """A terminal shows a moving bar, a log file gets a line now and then."""
    pause = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(desc="sampling", total=total, initial=done, unit="text", mininterval=pause, smoothing=0.05)


def _say(stats: AcceptanceStats) -> None:
    if stats.drafted:
        print(f"drafting: {stats.accepted_length:.2f} tokens per forward")


def _publish(args: Namespace, journal: Journal, encoder: Encoder, settings: dict[str, Any]) -> None:
    """Make the corpus of all texts in their order; each ends with the EOD, as documents do, chosen or not."""
    texts = [journal.texts[number] for number in sorted(journal.texts) if number < args.texts]
    if not texts:
        raise ValueError("--chat: every prompt is longer than the model's positions; give shorter conversations.")
    ids = ([*text.prompt, *text.tokens] for text in texts)
    sequences = (one[:-1] if one[-1] == encoder.eod_id else one for one in ids)
    answers = [(len(text.prompt), len(text.prompt) + len(text.tokens)) for text in texts]
    record = write_sequences(sequences, answers, encoder, args.output_prefix, {**settings, "texts": args.texts})
    new = sum(len(text.tokens) for text in texts)
    ended = sum(text.finish == Finish.STOP for text in texts)
    left_out = (
        f", {args.texts - len(texts)} left out since their prompts are too long" if len(texts) < args.texts else ""
    )
    print(
        f"{args.output_prefix}.bin and .idx: {len(texts)} texts{left_out}, {record['tokens']} tokens, {new} of them "
        f"new ({new / len(texts):.0f} a text; {ended} texts ended by themselves)"
    )
