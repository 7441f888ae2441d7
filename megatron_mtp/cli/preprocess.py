"""Tokenize text to the `.bin` and `.idx` files that Megatron trains on. Can train a tokenizer first.

Parses flags, calls `megatron_mtp.data` and prints one line per step. Exit status 2 is a user error.
"""

import argparse
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_mtp.common.command import status_of
from megatron_mtp.common.errors import Parser
from megatron_mtp.common.outputs import one_writer
from megatron_mtp.data.chat_counts import lines_of
from megatron_mtp.data.checks import read_sidecar
from megatron_mtp.data.corpus import (
    TEXT_FILES,
    Document,
    choose_documents,
    find_files,
    list_documents,
    read_document,
    write_corpus,
)
from megatron_mtp.data.tokenizer import SMALLEST_VOCAB, TOKENIZER_FILES, Encoder, train_bpe
from megatron_mtp.spec.config import flag_of
from megatron_mtp.training.flags import CHAT_FLAGS, add_counting_arguments

EXAMPLES = """examples:
  # every .txt, .md, .py and .jsonl file of a folder, with a new tokenizer of 8192 entries (data/corpus-tokenizer)
  megatron-mtp preprocess --input my_texts --output-prefix data/corpus

  # 40 MB of the Python sources of installed packages, with a small vocabulary
  megatron-mtp preprocess --input '.venv/lib/python3*/site-packages' --include '*.py' --max-mb 40 \\
      --vocab-size 1024 --output-prefix data/code

  # JSON lines with the text under "content", and an existing tokenizer
  megatron-mtp preprocess --input 'shards/*.jsonl' --json-key content --tokenizer models/Qwen3-0.6B \\
      --output-prefix data/web

  # chats, rendered with the tokenizer's chat template; training uses the assistant's tokens
  megatron-mtp preprocess --chat chats.jsonl --tokenizer models/Qwen3-0.6B --output-prefix data/chats

Then train with: --data-path PREFIX --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOKENIZER_FOLDER
"""
BYTES_PER_MB = 1_000_000
TRAINING_BYTES = 20_000_000
# Keeps one huge file from filling the whole sample for the tokenizer, unless there are few files.
TRAINING_BYTES_PER_FILE = 1_000_000
# Flags that do not affect the output.
NOT_SETTINGS = ("output_prefix", "workers", "overwrite")


def main(arguments: list[str], program: str = "megatron-mtp preprocess") -> int:
    """Run `preprocess`. Exit status 0 if the corpus was written, 2 for an error in the flags or the input."""
    args = parser(program).parse_args(arguments)

    def work() -> int:
        _check_flags(args)
        with one_writer(Path(args.output_prefix), f"--output-prefix: '{args.output_prefix}'"):
            preprocess(args)
        return 0

    return status_of(program, work)


def preprocess(args: argparse.Namespace) -> None:
    """Find documents, tokenize them and write the corpus.

    Raise ValueError for a user error or a dead worker process.
    """
    settings = {name: value for name, value in sorted(vars(args).items()) if name not in NOT_SETTINGS}
    if not args.overwrite and _is_done(args.output_prefix, settings):
        return
    flag, files, what = ("--chat", args.chat, "chats") if args.chat else ("--input", args.input, "text")
    documents = list_documents(find_files(files, ["*.jsonl"] if args.chat else args.include, flag))
    total = sum(document.size for document in documents)
    wanted = None if args.max_mb is None else int(args.max_mb * BYTES_PER_MB)
    documents = choose_documents(documents, wanted, args.seed, args.shuffle)
    if not documents:
        raise ValueError(f"{flag}: every file in {', '.join(map(repr, files))} is empty; give files with {what}.")
    size = sum(document.size for document in documents)
    print(f"{len(documents)} documents, {size / 1e6:.1f} of {total / 1e6:.1f} MB", flush=True)
    folder = args.tokenizer or _trained_tokenizer(args, documents)
    encoder = Encoder.from_folder(folder, args.eod_token, args.trust_remote_code)
    if args.chat is not None:
        from megatron_mtp.data.chat_files import write_chats

        empty, last = bool(args.chat_count_empty_thinking), bool(args.chat_mask_history)
        skips = bool(args.chat_skip_bad_lines)
        record = write_chats(documents, encoder, args.output_prefix, empty, args.workers, settings, last, skips)
        print(
            f"{args.output_prefix}.bin and .idx: {record['documents']} documents of {record['chats']} chats, "
            f"{record['counted_tokens']} of {record['tokens']} tokens count, {record['seconds']} s"
        )
        print(*lines_of(record["left_out"], record["chats"], record["bad_lines"]), sep="\n")
        return
    record = write_corpus(documents, encoder, args.output_prefix, args.json_key, args.workers, settings)
    print(
        f"{args.output_prefix}.bin and .idx: {record['documents']} documents, {record['tokens']} tokens, "
        f"vocabulary {record['vocab_size']}, {record['text_bytes'] / record['tokens']:.2f} bytes a token, "
        f"EOD '{record['eod_token']}' = {record['eod_id']}, {record['seconds']} s"
    )
    print(f"tokenizer: {folder}")
    if args.eod_token:
        print(
            f"note: Megatron ends documents at the eos_token of {folder}/tokenizer_config.json; see that it is the same"
        )


def parser(program: str) -> Parser:
    """Create the parser of all flags."""
    made = Parser(program, description=(__doc__ or "").split("\n")[0], epilog=EXAMPLES)
    add = made.add_argument
    files = "files, folders or quoted globs; .jsonl files have one document per line"
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help=files)
    chats = "JSON lines with 'messages' or 'conversations', rendered with the tokenizer's chat template"
    source.add_argument("--chat", nargs="+", metavar="FILE", help=chats)
    add_counting_arguments(made)
    inside = f"files to read in folders (default: {' '.join(TEXT_FILES)})"
    add("--include", nargs="+", default=TEXT_FILES, metavar="GLOB", help=inside)
    add("--json-key", default="text", metavar="KEY", help="key of the text in .jsonl lines (default: text)")
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.json")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--tokenizer", metavar="FOLDER", help="existing Hugging Face tokenizer")
    size = "without --tokenizer: train a byte-level BPE tokenizer with N entries (default: 8192)"
    which.add_argument("--vocab-size", type=int, default=8192, metavar="N", help=size)
    add("--tokenizer-output", metavar="FOLDER", help="folder for the trained tokenizer (default: PREFIX-tokenizer)")
    add("--eod-token", metavar="TOKEN", help="token that ends a document (default: the tokenizer's eos_token)")
    add("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer folder")
    add("--max-mb", type=float, metavar="MB", help="use a random sample of about this many megabytes of text")
    add("--seed", type=int, default=1234, help="seed for shuffling and --max-mb (default: 1234)")
    add("--no-shuffle", dest="shuffle", action="store_false", help="keep the documents in the order of file names")
    processes = "worker processes; the output does not depend on the number (default: one per core)"
    add("--workers", type=int, default=os.cpu_count(), help=processes)
    add("--overwrite", action="store_true", help="replace existing output")
    return made


def _check_flags(args: argparse.Namespace) -> None:
    if args.workers < 1:
        raise ValueError(f"--workers is {args.workers}; give 1 or more.")
    if args.max_mb is not None and not 0 < args.max_mb * BYTES_PER_MB < math.inf:
        raise ValueError(f"--max-mb is {args.max_mb}; give a number above 0, or drop the flag.")
    if os.path.basename(args.output_prefix) in ("", ".", ".."):
        raise ValueError(f"--output-prefix is '{args.output_prefix}'; name the files to write, such as data/corpus.")
    for name in CHAT_FLAGS:
        if getattr(args, name) and not args.chat:
            raise ValueError(f"{flag_of(name)} was given without --chat, so it would change nothing; leave it out.")
    if args.chat and not args.tokenizer:
        raise ValueError("--chat was given without --tokenizer; give the folder of one that has a chat template.")
    if not args.tokenizer and args.vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"--vocab-size: {args.vocab_size} is too small; give {SMALLEST_VOCAB} or more.")
    if not args.tokenizer and args.vocab_size > TRAINING_BYTES:  # the amount of training text
        raise ValueError(f"--vocab-size: {args.vocab_size} is too large; give {TRAINING_BYTES} at most.")
    if args.tokenizer and (unused := args.tokenizer_output):
        says = f"'{unused}' would stay empty, since --tokenizer '{args.tokenizer}' is used as it is"
        raise ValueError(f"--tokenizer-output: {says}; leave one of the two out.")


def _is_done(prefix: str, settings: dict[str, Any]) -> bool:
    """Return whether the output exists, and print it. Raise ValueError if it has other settings."""
    if not os.path.exists(f"{prefix}.idx"):
        return False
    record = read_sidecar(prefix)
    whole = os.path.exists(f"{prefix}.bin") and os.path.getsize(f"{prefix}.bin") == record.get("bin_bytes")
    whole = whole and {"documents", "tokens"} <= record.keys() and isinstance(record.get("settings"), dict)
    whole = whole and os.path.isdir(str(record.get("tokenizer")))
    differing = [flag_of(name) for name, value in settings.items() if whole and record["settings"].get(name) != value]
    if not whole or differing:
        reason = f"with another {', '.join(differing)}" if whole else "by something else, or is no longer whole"
        raise ValueError(
            f"--output-prefix: '{prefix}' is already there, made {reason}; "
            "add --overwrite to replace it, or name another prefix."
        )
    print(
        f"{prefix}.bin and .idx are already there: {record['documents']} documents, {record['tokens']} tokens "
        "with these settings (--overwrite makes them again)"
    )
    return True


def _trained_tokenizer(args: argparse.Namespace, documents: Sequence[Document]) -> str:
    """Return the folder of a trained tokenizer, maybe of an interrupted run. Raise ValueError if its size differs."""
    folder = args.tokenizer_output or f"{args.output_prefix}-tokenizer"
    if not args.overwrite and TOKENIZER_FILES & set(os.listdir(folder) if os.path.isdir(folder) else []):
        found = Encoder.from_folder(folder).vocab_size
        if found != args.vocab_size:
            raise ValueError(
                f"--tokenizer-output: '{folder}' already holds a tokenizer of {found} entries, not {args.vocab_size}; "
                f"use it with --tokenizer {folder}, or add --overwrite to replace it."
            )
        print(f"tokenizer: taking the one of {found} entries that is already in {folder}", flush=True)
        return folder
    started = time.monotonic()
    limit = max(TRAINING_BYTES_PER_FILE, TRAINING_BYTES // len(documents))
    heads = [d if d.line else d._replace(size=min(d.size, limit)) for d in documents]
    texts = (read_document(d, args.json_key) for d in choose_documents(heads, TRAINING_BYTES, args.seed, shuffle=True))
    print(f"tokenizer: training a byte-level BPE of {args.vocab_size} entries", flush=True)
    # If this run is interrupted, no old corpus may remain next to the new tokenizer.
    Path(f"{args.output_prefix}.idx").unlink(missing_ok=True)
    train_bpe(texts, args.vocab_size, folder)
    print(f"tokenizer: {folder}, {time.monotonic() - started:.1f} s", flush=True)
    return folder
