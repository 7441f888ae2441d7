"""`megatron-mtp sample`: a checkpoint and a corpus in; prompts with continuations out, as a corpus of train.

A sample depends on its number and the settings alone. Finished ones are in a file, in the order in which they end, one
line each after a line of what they depend on:

    {"settings": {"load": 3735928559, "seed": 1234, "temperature": 0.7, ...}}
    {"number": 4, "prompt": [5, 12], "tokens": [7, 9, 0], "finish": "stop", "logprobs": [-0.2, -1.5, -0.7]}

The file is only ever appended to. A kill cuts its last line at most; that line is removed, and its sample made again.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.cli.terminal import add_checkpoint_flags, add_sampling_flags, say_if_lossy
from megatron_mtp.data.checks import PARTS, read_sidecar
from megatron_mtp.drafters import DRAFTERS
from megatron_mtp.errors import Parser, check_counts, status_of
from megatron_mtp.files import check_outside, one_writer, remove, synced
from megatron_mtp.runtime import quieten

if TYPE_CHECKING:
    from megatron_mtp.data.prompts import Prompts
    from megatron_mtp.data.tokenizer import Encoder
    from megatron_mtp.decoding.config import SpeculativeConfig
    from megatron_mtp.decoding.runner import Runner

OF_TEXTS = "split part max_new_tokens temperature top_k top_p min_p seed dtype".split()
"""Flags on which texts depend; the number of texts, and how many run together, are not among them."""
OF_DOCUMENTS = "prompt_tokens anywhere".split()
ENDINGS = ("idx", "json", "bin", "answers.npy", "texts.jsonl")
MOST_SEED = 2**31 - 1

EXAMPLES = """examples:
  # 2,000 continuations of a corpus' documents: data/own.bin and .idx, for train --data-path data/own
  megatron-mtp sample --load checkpoints/trunk --data-path data/corpus --texts 2000 --output-prefix data/own

  # answers to the user's turns of conversations, at the temperature at which the model will be served
  megatron-mtp sample --load checkpoints/trunk --chat chats.jsonl --texts 5000 --temperature 0.6 \\
      --max-new-tokens 512 --output-prefix data/answers

The same command continues after an interruption, with the same texts. More --texts keep those that are there.
"""


@dataclass(frozen=True)
class Sample:
    """A finished continuation.

    Attributes:
        number: its place among all.
        tokens: that the model added.
        finish: why it ended, as `requests.Finish`.
        logprobs: of these tokens, before temperature and truncation; None if they were not asked for.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    finish: str
    logprobs: list[float] | None = None


def main(arguments: list[str], program: str) -> int:
    """Write the texts; bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    quieten()
    return status_of(program, lambda: run(args), advice="the same command continues")


def parser(program: str) -> Parser:
    """All flags."""
    made = Parser(
        program,
        description="Let a model continue the prompts of a corpus, and write prompts with continuations as data for "
        "train: MTP layers that learn from it see the sequences that they will draft for.",
        epilog=EXAMPLES,
    )
    add_checkpoint_flags(made)
    add = made.add_argument
    written = "writes PREFIX.bin, .idx, .json, .answers.npy and .texts.jsonl"
    add("--output-prefix", required=True, metavar="PREFIX", help=written)
    add("--texts", type=int, required=True, metavar="N", help="number of texts")
    prompts = made.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--data-path", metavar="PREFIX", help="a corpus of preprocess, whose documents are continued")
    prompts.add_argument("--chat", nargs="+", metavar="FILE", help="JSON lines with 'messages', for the chat template")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="tokens of a document to continue; default: 32")
    add("--anywhere", action="store_true", help="take them from anywhere in a document; default: its beginning")
    add("--split", default="98,2,0", metavar="W,W,W", help="parts of the corpus, as in train; default: 98,2,0")
    add("--part", choices=PARTS, default=PARTS[0], help="the part that prompts come from; default: training")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="of each text; default: 256")
    add_sampling_flags(made, temperature=0.7)
    add("--seed", type=int, default=1234, metavar="N", help="of prompts and texts; default: 1234")
    drafts = "how to draft, as in generate; default: mtp if there are MTP layers"
    add("--speculative-config", metavar="JSON", help=drafts)
    logprobs = "keep the model's log-probabilities of the new tokens in PREFIX.texts.jsonl, before the temperature"
    add("--logprobs", action="store_true", help=logprobs)
    add("--batch-size", type=int, default=16, metavar="N", help="texts that run together; default: 16")
    add("--overwrite", action="store_true", help="make everything anew")
    add("--dry-run", action="store_true", help="print what would be done and what is there, and write nothing")
    return made


def run(args: Namespace) -> int:
    """Write the texts that are not finished, and the corpus of all; ValueError for bad input, or other texts there."""
    from megatron_mtp.checkpoint.mcore.iterations import run_tokenizer
    from megatron_mtp.checkpoint.mcore.reader import DistReader
    from megatron_mtp.data.tokenizer import Encoder, end_tokens, read_tokenizer
    from megatron_mtp.decoding.method import parse_config
    from megatron_mtp.decoding.sampling import Sampling

    _check(args)
    sampling = Sampling.of(args)
    speculative = None if args.speculative_config is None else parse_config(args.speculative_config)
    if speculative is not None and speculative.num_speculative_tokens == "auto" and not sampling.greedy:
        raise ValueError(
            "--speculative-config has num_speculative_tokens 'auto', with which sampled texts depend on the clock; "
            "give a number."
        )
    file = Path(f"{args.output_prefix}.texts.jsonl")
    check_outside(file, Path(args.load))
    reader = DistReader(Path(args.load))
    folder = args.tokenizer or run_tokenizer(reader.common()["args"], reader.folder.parent)
    if folder is None:
        raise ValueError(f"--load is {args.load}, which names no tokenizer that is there; give --tokenizer.")
    encoder = Encoder.from_folder(folder, trust_remote_code=args.trust_remote_code)
    ends = end_tokens(read_tokenizer(folder, args.trust_remote_code))
    settings = _settings(args) | {
        "load": reader.fingerprint()["catalogue"],  # checksums by which a model is known
        "ends": sorted(ends),
        "speculative-config": None if speculative is None else speculative.flat(),
    }
    if args.dry_run:
        prompts = _prompts(args, folder)
        there = sum(number < args.texts for number in read_samples(file, settings))
        print(f"{args.texts} texts of {prompts.documents} documents, {there} of them finished")
        print(f"at most {(args.texts - there) * args.max_new_tokens} new tokens")
        print(f"would write {args.output_prefix}.bin, .idx, .json, .answers.npy and .texts.jsonl")
        return 0
    with one_writer(Path(args.output_prefix), f"--output-prefix: '{args.output_prefix}'"):
        if args.overwrite:
            for ending in ENDINGS:
                remove(Path(f"{args.output_prefix}.{ending}"))
        texts = read_samples(file, settings)
        made, corpus = read_sidecar(args.output_prefix), {**settings, "texts": args.texts}
        files = [Path(f"{args.output_prefix}.{ending}") for ending in ("bin", "idx", "answers.npy")]
        whole = all(file.is_file() for file in files) and files[0].stat().st_size == made.get("bin_bytes")
        if whole and made.get("settings") == corpus:
            print(f"{args.output_prefix}.bin and .idx are already there: {args.texts} texts with these settings")
            return 0
        say_if_lossy(speculative)
        _write(args, texts, appended(file, settings), speculative, ends, _prompts(args, folder), encoder.vocab_size)
        _publish(args, texts, encoder, corpus)
    return 0


def _check(args: Namespace) -> None:
    """Raises ValueError for a value that is not allowed."""
    check_counts(args, "texts", "prompt_tokens", "max_new_tokens", "batch_size")
    if not 0 <= args.seed <= MOST_SEED:
        raise ValueError(f"--seed is {args.seed}; give a number from 0 to {MOST_SEED}.")
    if args.anywhere and args.chat:
        raise ValueError("--anywhere was given with --chat, whose prompts are turns of the user; leave it out.")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("there are several ranks, and sample runs in one process; start it without torchrun.")


def _settings(args: Namespace) -> dict[str, Any]:
    """Settings on which texts depend, by the name of the flag."""
    if args.chat:
        found: dict[str, Any] = {"chat": [os.path.abspath(file) for file in args.chat]}
    else:
        found = {name: getattr(args, name) for name in OF_DOCUMENTS}
        found["data_path"] = os.path.abspath(args.data_path)
    found |= {name: getattr(args, name) for name in OF_TEXTS}
    found |= {"logprobs": True} if args.logprobs else {}
    return {name.replace("_", "-"): value for name, value in found.items()}


def _prompts(args: Namespace, tokenizer: Path) -> "Prompts":
    from megatron_mtp.data.prompts import Beginnings, UserTurns
    from megatron_mtp.data.tokenizer import read_tokenizer
    from megatron_mtp.decoding.sampling import Sampling

    if args.chat:
        chats = read_tokenizer(tokenizer, args.trust_remote_code)
        return UserTurns(args.chat, chats, args.seed, args.split, args.part)
    found = Beginnings(args.data_path, args.prompt_tokens, args.seed, args.split, args.part, args.anywhere)
    if Sampling.of(args).greedy and not args.anywhere and args.texts > found.documents:
        raise ValueError(
            f"--texts is {args.texts}, but greedy texts of {found.documents} documents repeat after these; give "
            "--anywhere, a --temperature or fewer texts."
        )
    return found


def _write(
    args: Namespace,
    texts: "dict[int, Sample]",
    appending: "AbstractContextManager[Callable[[Sample], None]]",
    speculative: "SpeculativeConfig | None",
    ends: frozenset[int],
    prompts: "Prompts",
    vocabulary: int,
) -> None:
    """Make the texts that are not finished, and add each to `texts` and to the file."""
    import torch
    from tqdm import tqdm

    from megatron_mtp.decoding.load import load_checkpoint

    left = [number for number in range(args.texts) if number not in texts]
    if not left:
        return
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    runner = load_checkpoint(
        args.load, vocabulary, dtype, trust_remote_code=args.trust_remote_code, config=speculative
    ).runner
    if not args.chat and args.prompt_tokens >= runner.positions:
        raise ValueError(
            f"--prompt-tokens is {args.prompt_tokens}, and the model has {runner.positions} positions; give fewer."
        )
    numbered = ((number, prompts.prompt(number)) for number in left)
    # A conversation that leaves no room for a token is left out.
    fitting = ((number, prompt) for number, prompt in numbered if len(prompt) < runner.positions)
    pause = 0.2 if sys.stderr.isatty() else 10.0  # a terminal shows a moving bar, a log file gets a line now and then
    done = args.texts - len(left)
    with (
        appending as append,
        tqdm(desc="sampling", total=args.texts, initial=done, unit="text", mininterval=pause, smoothing=0.05) as bar,
    ):

        def finished(text: "Sample") -> None:
            append(text)
            texts[text.number] = text
            bar.update(1)

        stats = _continue(args, runner, fitting, speculative or _default_method(runner), ends, finished)
    if stats.drafted:
        print(f"drafting: {stats.accepted_length:.2f} tokens per forward")


def _publish(args: Namespace, finished: "dict[int, Sample]", encoder: "Encoder", settings: dict[str, Any]) -> None:
    """Make the corpus of all texts in their order; each ends with the EOD, as documents do, chosen or not."""
    from megatron_mtp.data.corpus import write_sequences
    from megatron_mtp.decoding.types import Finish

    texts = [finished[number] for number in sorted(finished) if number < args.texts]
    if not texts:
        raise ValueError("--chat: every prompt is longer than the model's positions; give shorter conversations.")
    ids = ([*text.prompt, *text.tokens] for text in texts)
    sequences = (one[:-1] if one[-1] == encoder.eod_id else one for one in ids)
    answers = [(len(text.prompt), len(text.prompt) + len(text.tokens)) for text in texts]
    record = write_sequences(sequences, answers, encoder, args.output_prefix, settings)
    new = sum(len(text.tokens) for text in texts)
    ended = sum(text.finish == Finish.STOP for text in texts)
    less = args.texts - len(texts)
    left_out = f", {less} left out since their prompts are too long" if less else ""
    print(
        f"{args.output_prefix}.bin and .idx: {len(texts)} texts{left_out}, {record['tokens']} tokens, {new} of them "
        f"new ({new / len(texts):.0f} a text; {ended} texts ended by themselves)"
    )


def _default_method(runner: "Runner") -> "SpeculativeConfig | None":
    """Drafts of the depths or of a drafter as they were trained, where there are any; None for plain decoding."""
    from megatron_mtp.decoding.config import SpeculativeConfig

    if runner.kind in DRAFTERS:
        return SpeculativeConfig(runner.kind)
    if not (runner.depths and runner.sequential):
        return None
    return SpeculativeConfig("mtp_eagle" if runner.shares_kv else "mtp")


def _continue(
    args: Namespace,
    runner: "Runner",
    prompts: Iterable[tuple[int, list[int]]],
    speculative: "SpeculativeConfig | None",
    ends: frozenset[int],
    keep: Callable[[Sample], object],
) -> AcceptanceStats:
    """Continue every numbered prompt, taken as places become free, and `keep` it; returns what it cost."""
    from megatron_mtp.decoding.engine import Engine, blocks_for
    from megatron_mtp.decoding.sampling import Sampling
    from megatron_mtp.decoding.scheduler import EngineSettings
    from megatron_mtp.decoding.types import Finish, Request

    together, sampling, logprobs = args.batch_size, Sampling.of(args), 0 if args.logprobs else None
    engine = Engine(runner, EngineSettings(together, 2 * together, blocks_for(together, runner)), speculative)
    live: dict[int, Sample] = {}
    left = iter(prompts)
    while True:
        while len(live) < 2 * together and (following := next(left, None)) is not None:
            number, prompt = following
            seed = (args.seed << 32) + number  # which no other sample of any seed has
            asked = Request(prompt, args.max_new_tokens, sampling, seed, stop_ids=ends, logprobs=logprobs)
            live[engine.add(asked)] = Sample(number, prompt, [], "", [] if args.logprobs else None)
        if not live:
            return engine.stats
        for update in engine.step():
            sample = live[update.request]
            sample.tokens.extend(update.tokens)
            if sample.logprobs is not None:
                sample.logprobs.extend(one.logprob for one in update.logprobs)
            if update.finish is Finish.ERROR:
                raise RuntimeError(f"the continuation of prompt {sample.number} has failed; the log has the reason.")
            if update.finish is not None:
                del live[update.request]
                keep(replace(sample, finish=update.finish))


def read_samples(file: Path, settings: dict[str, Any]) -> dict[int, Sample]:
    """The samples in a file by number; none where the file is not there yet.

    Raises:
        ValueError: they were made with other settings, or a line is damaged.
    """
    samples: dict[int, Sample] = {}
    kept: dict[str, Any] = {}
    whole_lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    for place, line in enumerate(whole_lines, start=1):
        try:
            if place == 1:
                kept = dict(json.loads(line)["settings"])
            else:
                sample = Sample(**json.loads(line))
                samples[sample.number] = sample
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{file} is damaged in line {place}; remove the line, or make it anew with --overwrite."
            ) from None
    others = sorted(name for name in {*kept, *settings} if kept.get(name) != settings.get(name))
    if samples and others:
        raise ValueError(
            f"{file} holds samples made with another {', '.join(f'--{name}' for name in others)}; add --overwrite to "
            "make them anew, or name another --output-prefix."
        )
    return samples


@contextmanager
def appended(file: Path, settings: dict[str, Any]) -> Iterator[Callable[[Sample], None]]:
    """A function that appends a sample: when it returns, the sample is on the disk."""
    with open(file, "ab") as stream:

        def append(line: dict[str, Any]) -> None:
            stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            synced(stream)

        has_samples = bool(read_samples(file, settings))
        stream.truncate(file.read_bytes().rfind(b"\n") + 1 if has_samples else 0)
        if not has_samples:
            append({"settings": settings})
        yield lambda sample: append({name: value for name, value in asdict(sample).items() if value is not None})
