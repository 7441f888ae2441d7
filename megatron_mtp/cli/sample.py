"""`megatron-mtp sample`: generate training data by continuing prompts of a corpus.

A sample depends only on its number and the settings. Finished samples are in an append-only file that survives kills
(data/samples.py). The model is a checkpoint or behind a server.
"""

import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mtp.cli.terminal import add_checkpoint_flags, add_sampling_flags
from megatron_mtp.common.command import check_counts, status_of
from megatron_mtp.common.errors import Parser
from megatron_mtp.common.files import remove
from megatron_mtp.common.outputs import one_writer
from megatron_mtp.common.progress import progress_bar
from megatron_mtp.data.checks import PARTS, read_sidecar
from megatron_mtp.data.samples import Sample, appended, read_samples
from megatron_mtp.data.sources import SOURCES
from megatron_mtp.megatron.runtime import quieten

if TYPE_CHECKING:
    from megatron_mtp.cli.checkpoint_texts import Checkpoint
    from megatron_mtp.cli.served_texts import TextServer
    from megatron_mtp.data.prompts import Prompts
    from megatron_mtp.data.tokenizer import Encoder

OF_TEXTS = "split part max_new_tokens temperature top_k top_p min_p seed".split()
"""Flags that samples depend on; the number of samples and the batch size are not among them."""
OF_DOCUMENTS = "prompt_tokens anywhere".split()
OF_CHECKPOINTS = "dtype speculative_config".split()
"""Flags for running a checkpoint; a server has its own."""
ENDINGS = ("idx", "json", "bin", "answers.npy", SOURCES, "texts.jsonl")
MOST_SEED = 2**31 - 1

EXAMPLES = """examples:
  # 2,000 continuations of a corpus' documents: data/own.bin and .idx, for train --data-path data/own
  megatron-mtp sample --load checkpoints/trunk --data-path data/corpus --texts 2000 --output-prefix data/own

  # answers to the user turns of chats, at the temperature used for serving
  megatron-mtp sample --load checkpoints/trunk --chat chats.jsonl --texts 5000 --temperature 0.6 \\
      --max-new-tokens 512 --output-prefix data/answers

  # the same with a server (vLLM, SGLang, megatron-mtp serve), 64 requests at a time; its key is in OPENAI_API_KEY
  megatron-mtp sample --server http://localhost:8000 --tokenizer models/my-model --chat chats.jsonl --texts 5000 \\
      --temperature 0.6 --max-new-tokens 512 --concurrency 64 --output-prefix data/answers

The same command continues after an interruption, with the same samples. A larger --texts keeps existing samples.
"""


def main(arguments: list[str], program: str) -> int:
    """Generate the samples. Invalid input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    quieten()
    return status_of(program, lambda: run(args), advice="the same command continues")


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="Continue prompts of a corpus with a model, and write prompts and continuations as training data: "
        "MTP layers then train on the sequences that they will draft.",
        epilog=EXAMPLES,
    )
    source = made.add_mutually_exclusive_group(required=True)
    add_checkpoint_flags(made, source)
    server = "OpenAI-compatible server that runs the model, instead of --load; needs --tokenizer"
    source.add_argument("--server", metavar="URL", help=server)
    add = made.add_argument
    add("--model", metavar="NAME", help="model name on --server; default: the first one listed")
    written = "writes PREFIX.bin, .idx, .json, .answers.npy and .texts.jsonl"
    add("--output-prefix", required=True, metavar="PREFIX", help=written)
    add("--texts", type=int, required=True, metavar="N", help="number of samples to generate")
    prompts = made.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--data-path", metavar="PREFIX", help="corpus made by preprocess to take prompts from")
    prompts.add_argument("--chat", nargs="+", metavar="FILE", help="JSON lines with 'messages' to take prompts from")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="tokens per prompt from a document; default: 32")
    add("--anywhere", action="store_true", help="take prompts from anywhere in a document; default: its beginning")
    add("--split", default="98,2,0", metavar="W,W,W", help="split of the corpus, as in train; default: 98,2,0")
    add("--part", choices=PARTS, default=PARTS[0], help="part of the split to take prompts from; default: training")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to generate per prompt; default: 256")
    add_sampling_flags(made, temperature=0.7)
    add("--seed", type=int, default=1234, metavar="N", help="seed for prompts and sampling; default: 1234")
    drafts = "how to draft, as in generate; default: mtp if the model has MTP layers"
    add("--speculative-config", metavar="JSON", help=drafts)
    logprobs = "save log-probabilities of the generated tokens, before temperature, in PREFIX.texts.jsonl"
    add("--logprobs", action="store_true", help=logprobs)
    add("--batch-size", "--concurrency", type=int, default=16, metavar="N", help="prompts per batch; default: 16")
    add("--overwrite", action="store_true", help="delete existing output and start over")
    add("--dry-run", action="store_true", help="print what exists and what would be done, and write nothing")
    return made


def run(args: Namespace) -> int:
    """Generate missing samples and write the corpus of all.

    Raise ValueError for invalid input or other samples there.
    """
    from megatron_mtp.data.tokenizer import Encoder, end_tokens, read_tokenizer

    _check(args)
    writer = _writer(args)
    folder = writer.tokenizer
    encoder = Encoder.from_folder(folder, trust_remote_code=args.trust_remote_code)
    tokenizer = read_tokenizer(folder, args.trust_remote_code)
    ends = end_tokens(tokenizer)
    file, settings = Path(f"{args.output_prefix}.texts.jsonl"), _settings(args) | writer.settings
    settings |= {"ends": sorted(ends)}
    if args.dry_run:
        prompts = _prompts(args, folder)
        there = sum(number < args.texts for number in read_samples(file, settings))
        print(f"{args.texts} samples of {prompts.documents} documents, {there} of them finished")
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
            print(f"{args.output_prefix}.bin and .idx are already there: {args.texts} samples with these settings")
            return 0
        prompts = _prompts(args, folder)
        if any(number not in texts for number in range(args.texts)):
            positions = writer.start(tokenizer, ends)
            _write(args, texts, appended(file, settings), prompts, positions, writer)
        _publish(args, texts, prompts, encoder, corpus)
    return 0


def _check(args: Namespace) -> None:
    """Raise ValueError for a value that is not allowed."""
    check_counts(args, "texts", "prompt_tokens", "max_new_tokens", "batch_size")
    if not 0 <= args.seed <= MOST_SEED:
        raise ValueError(f"--seed is {args.seed}; give a number from 0 to {MOST_SEED}.")
    if args.anywhere and args.chat:
        raise ValueError("--anywhere was given with --chat, whose prompts are turns of the user; leave it out.")
    if args.server is None and args.model is not None:
        raise ValueError("--model was given with --load, which is one model; leave it out.")
    for name in OF_CHECKPOINTS if args.server else ():
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} was given with --server, which runs the model as it was started; leave it out.")
    if args.server and args.tokenizer is None:
        raise ValueError("--server was given without --tokenizer; give the folder of the model's tokenizer.")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("there are several ranks, and sample runs in one process; start it without torchrun.")


def _writer(args: Namespace) -> "Checkpoint | TextServer":
    """Return the model that continues the prompts. Raise ValueError for a checkpoint or server that cannot."""
    from megatron_mtp.cli.checkpoint_texts import Checkpoint
    from megatron_mtp.cli.served_texts import TextServer

    return TextServer(args) if args.server else Checkpoint(args)


def _settings(args: Namespace) -> dict[str, Any]:
    """Return settings that affect the texts, by the name of the flag."""
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
            f"--texts is {args.texts}, but greedy samples of {found.documents} documents repeat after these; give "
            "--anywhere, a --temperature or a smaller number."
        )
    return found


def _write(
    args: Namespace,
    texts: "dict[int, Sample]",
    appending: "AbstractContextManager[Callable[[Sample], None]]",
    prompts: "Prompts",
    positions: int | None,
    writer: "Checkpoint | TextServer",
) -> None:
    """Generate the unfinished texts, and add each to `texts` and to the file."""
    left = [number for number in range(args.texts) if number not in texts]
    if not args.chat and positions is not None and args.prompt_tokens >= positions:
        raise ValueError(
            f"--prompt-tokens is {args.prompt_tokens}, and the model has {positions} positions; give fewer."
        )
    numbered = ((number, prompts.prompt(number)) for number in left)
    # Skip conversations that leave no room for a new token.
    fitting = ((number, prompt) for number, prompt in numbered if positions is None or len(prompt) < positions)
    done = args.texts - len(left)
    with (
        appending as append,
        progress_bar(desc="sampling", total=args.texts, initial=done, unit="text", smoothing=0.05) as bar,
    ):

        def finished(text: "Sample") -> None:
            append(text)
            texts[text.number] = text
            bar.update(1)

        writer.continue_all(fitting, finished)


def _publish(
    args: Namespace, finished: "dict[int, Sample]", prompts: "Prompts", encoder: "Encoder", settings: dict[str, Any]
) -> None:
    """Build the corpus of all texts in their order; each ends with the EOD, as documents do, chosen or not."""
    from megatron_mtp.data.corpus import write_sequences
    from megatron_mtp.decoding.requests import Finish

    texts = [finished[number] for number in sorted(finished) if number < args.texts]
    if not texts:
        raise ValueError("--chat: every prompt is longer than the model's positions; give shorter conversations.")
    ids = ([*text.prompt, *text.tokens] for text in texts)
    sequences = (one[:-1] if one[-1] == encoder.eod_id else one for one in ids)
    answers = [(len(text.prompt), len(text.prompt) + len(text.tokens)) for text in texts]
    sources = [prompts.source(text.number) for text in texts]
    record = write_sequences(sequences, answers, sources, encoder, args.output_prefix, settings)
    new = sum(len(text.tokens) for text in texts)
    ended = sum(text.finish == Finish.STOP for text in texts)
    less = args.texts - len(texts)
    left_out = f", {less} skipped because their prompts are too long" if less else ""
    print(
        f"{args.output_prefix}.bin and .idx: {len(texts)} samples{left_out}, {record['tokens']} tokens, {new} of them "
        f"new ({new / len(texts):.0f} per sample; {ended} ended with an end token)"
    )
