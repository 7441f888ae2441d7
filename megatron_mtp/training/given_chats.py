"""Chats that a run is given: files of --chat become a data set before the first step; --show-example prints one."""

import os
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_mtp.common.outputs import one_writer
from megatron_mtp.data.chat_files import prefix_in_cache, write_chats
from megatron_mtp.data.corpus import choose_documents, find_files, list_documents
from megatron_mtp.data.counted_tokens import Counted, marked, spans_of
from megatron_mtp.data.tokenizer import Encoder, read_tokenizer
from megatron_mtp.training.chats import tokens_and_counts
from megatron_mtp.training.documents import named_prefixes
from megatron_mtp.training.short_log import say


def make_chats(args: Namespace) -> None:
    """Tokenize --chat to a data set on one rank and set --data-path to it. The other ranks wait and read the same file.

    Raises:
        ValueError: the files or the tokenizer cannot be used.
    """
    folder, trusts = args.tokenizer_model, args.trust_remote_code
    if args.tokenizer_type != "HuggingFaceTokenizer" or not Path(folder or "").is_dir():
        raise ValueError(
            f"--chat was given with --tokenizer-type {args.tokenizer_type} and --tokenizer-model {folder}; give "
            "HuggingFaceTokenizer and the folder of a tokenizer with a chat template."
        )
    empty, last = bool(args.chat_count_empty_thinking), bool(args.chat_mask_history)
    skips = bool(args.chat_skip_bad_lines)
    settings = {
        "seed": args.seed,
        "chat_count_empty_thinking": empty,
        "chat_mask_history": last,
        "chat_skip_bad_lines": skips,
    }
    prefix = prefix_in_cache(args.chat, folder, args.data_cache_path, settings)
    args.data_path, done = [prefix], Path(f"{prefix}.idx")
    if args.rank == 0 and not done.is_file():
        lines = choose_documents(list_documents(find_files(args.chat, ["*.jsonl"], "--chat")), None, args.seed, True)
        encoder = Encoder.from_folder(folder, trust_remote_code=trusts)
        with one_writer(Path(prefix), f"--chat: '{prefix}'"):
            write_chats(lines, encoder, prefix, empty, os.cpu_count() or 1, settings, last, skips)
    _await(prefix, done, args.distributed_timeout_minutes)


def _await(prefix: str, done: Path, minutes: int) -> None:
    """Wait until another rank has built a dataset. Raise ValueError if its files have not grown for some minutes."""
    sizes, since = dict[str, int](), monotonic()
    while not done.is_file():
        known = sizes
        with suppress(FileNotFoundError):  # a finished file has just been renamed
            sizes = {file.name: file.stat().st_size for file in done.parent.glob(f"{Path(prefix).name}.*")}
        if sizes != known:
            since = monotonic()
        elif monotonic() - since >= 60 * minutes:
            raise ValueError(
                f"--chat: rank 0 has written nothing at {prefix} for {minutes} minutes (--distributed-timeout-minutes)"
                "; look into its log, and give --data-cache-path, a folder that all nodes share."
            )
        sleep(1)


def show_example(args: Namespace) -> None:
    """Print the text of the first chat with the tokens that count in white brackets (--show-example)."""
    say(example(named_prefixes(args)[0], args.tokenizer_model, args.trust_remote_code))


def example(prefix: str, tokenizer: str, trust_remote_code: bool = False) -> str:
    """Return the text of the first chat with the tokens that count in white brackets; `tokenizer` is a folder."""
    ids, counts = tokens_and_counts(IndexedDataset(prefix, multimodal=True), 0)
    document = Counted(ids.tolist(), spans_of(counts))
    return marked(read_tokenizer(Path(tokenizer), trust_remote_code), document)
