"""`megatron-mtp evaluate`: report losses and acceptance by depth of a checkpoint on a text.

It is `train` with `--skip-train` and `DEFAULTS`; all flags of `train` are accepted and take precedence.
"""

import json
import os
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_mtp.cli import preprocess, train
from megatron_mtp.common.acceptance import EXPECTED_LENGTH, BySource, figures_of
from megatron_mtp.common.command import check_counts
from megatron_mtp.common.errors import Parser, sentences
from megatron_mtp.data.checks import read_sidecar
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.spec.config import flag_of
from megatron_mtp.spec.kinds import BLOCKS
from megatron_mtp.training.quiet import quiet

DEFAULTS = (
    "--skip-train --use-checkpoint-args --no-load-optim --no-load-rng --split 0,1,0 --micro-batch-size 1 "
    "--train-iters 1 --eval-interval 1 --eval-iters 16 --no-create-attention-mask-in-dataloader"
)
"""Flags with which `train` only evaluates."""

OTHER_DATA = (
    "--chat --mock-data --train-data-path --valid-data-path --test-data-path --data-args-path "
    "--per-split-data-args-path"
).split()
"""Flags of `train` that replace `--data-path`."""

SIZES = "seq_length", "micro_batch_size", "drafter_blocks"
"""Our arguments that `train` also has. Results with other sequences or blocks cannot be compared."""

TRUST = "--trust-remote-code"
"""A flag of `train` that the corpus of `--text` also needs."""

EXAMPLES = f"""examples:
  # all text of a folder, with the tokenizer of the training
  megatron-mtp evaluate --load runs/mine/checkpoint --text held_out

  # 64 batches of 8 sequences from a corpus made by preprocess; the result as one JSON object
  megatron-mtp evaluate --load runs/mine/checkpoint --data-path data/corpus --micro-batch-size 8 --eval-iters 64 --json

  # acceptance by context length
  megatron-mtp evaluate --load runs/mine/checkpoint --text held_out --context-lengths 64 128 256

  # a model on two GPUs with tensor parallelism
  torchrun --nproc-per-node 2 -m megatron_mtp evaluate --load runs/mine/checkpoint --data-path data/corpus \\
      --tensor-model-parallel-size 2

All flags of `megatron-mtp train` are accepted as well. Defaults:
  {DEFAULTS.replace(" --train", chr(10) + "  --train")}
"""


def main(arguments: list[str], program: str) -> int:
    """Evaluate a checkpoint and print the result. Invalid input ends with one sentence and exit status 2."""
    args, rest = parser(program).parse_known_args(arguments)
    given, rest = train.parse_run(program, rest)
    with quiet(given.verbose, notes=sys.stderr) as output:
        on_cpu = prepare()

        from megatron_mtp.cli.terminal import own_output

        answer = own_output() if given.verbose else output
        with TemporaryDirectory(prefix="megatron-mtp-") as folder:
            with sentences(program):
                others = [flag for flag in rest if flag.split("=")[0] in OTHER_DATA]
                check_counts(args, "eval_iters", *SIZES)
                if args.text is None and args.data_path is None and not others:
                    raise ValueError("there is no data to evaluate on; give --text or --data-path.")
                if args.text is not None and others:
                    raise ValueError(f"--text and {others[0]} were given; drop one of the two.")
                if args.by_source and args.context_lengths:
                    raise ValueError("--by-source and --context-lengths count the same tokens; give one of the two.")
                apart = "--by-source" if args.by_source else "--context-lengths" if args.context_lengths else None
                if apart and "--mock-data" in others:
                    raise ValueError(
                        f"{apart} was given with --mock-data, which has no documents; drop one of the two."
                    )
                if args.context_lengths:
                    args.seq_length = args.seq_length or max(args.context_lengths)
                flags = _data_flags(args, Path(folder), [word for word in rest if word == TRUST])

            from megatron_mtp.training.run import main as evaluate

            argv = train.with_file(program, given, [*DEFAULTS.split(), *flags, "--load", args.load, *rest])
            metrics = evaluate(argv, on_cpu, shows_tables=False)
        if metrics.evaluated is not None:  # only one rank has it
            row, table = metrics.evaluated
            title = "context" if args.context_lengths else "source"
            if (args.by_source or args.context_lengths) and metrics.sources:
                figures = {name: figures_of(list(each.values())) for name, each in metrics.sources.items()}
                row |= {f"{title}s": figures}
                table = f"{table}\n\n{source_table(metrics.sources, title)}"
            print(json.dumps({"load": args.load, **row}) if args.json else table, file=answer, flush=True)
    return 0


def parser(program: str) -> Parser:
    """Create the parser of the flags that `train` does not have."""
    made = Parser(
        program,
        description="Report losses, acceptance by depth and expected accepted length of a checkpoint on text.",
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--load", required=True, metavar="CKPT", help="Megatron checkpoint, trained or converted")
    data = made.add_mutually_exclusive_group()
    data.add_argument("--text", nargs="+", metavar="PATH", help="files or folders of text; all of it is used")
    data.add_argument("--data-path", nargs="+", metavar="PREFIX", help="corpus made by preprocess, as in train")
    add("--eval-iters", type=int, metavar="N", help="number of batches; default: 16, or all of --text")
    add("--seq-length", type=int, metavar="S", help="tokens per sequence; default: the training's")
    add("--micro-batch-size", type=int, metavar="B", help="sequences per batch and rank; default: 1")
    blocks = f"blocks per sequence on which a block drafter is evaluated; default: {BLOCKS}"
    add("--drafter-blocks", type=int, metavar="A", help=blocks)
    add("--tokenizer-model", metavar="FOLDER", help="Hugging Face tokenizer; default: the training's")
    sources = "also report acceptance by source: the category or source of a line, else its folder"
    add("--by-source", action="store_true", help=sources)
    contexts = (
        "also report acceptance by context length, in buckets with these upper bounds, such as 2k 4k 8k (k = 1024); "
    )
    contexts += "sets --seq-length to the last"
    add("--context-lengths", type=_tokens, nargs="+", metavar="N", help=contexts)
    add("--json", action="store_true", help="print one JSON object with the names of metrics.jsonl")
    return made


def _tokens(text: str) -> int:
    """Parse a number of tokens, such as 512 or 2k."""
    digits, thousands = text.removesuffix("k"), text.endswith("k")
    if not digits.isdecimal() or int(digits) < 1:
        raise ArgumentTypeError(f"'{text}' is not a number of tokens; give one such as 512 or 2k.")
    return int(digits) * (1024 if thousands else 1)


def _data_flags(args: Namespace, folder: Path, trust: list[str]) -> list[str]:
    """Return flags for tokenizer and data; `--text` becomes a corpus in `folder`, made with the flags `trust`."""
    from megatron_mtp.data.sentence_pieces import model_in
    from megatron_mtp.megatron.checkpoint.iterations import SENTENCE_PIECES, run_tokenizer
    from megatron_mtp.megatron.checkpoint.reader import DistReader

    reader = DistReader(Path(args.load))
    stored = reader.common()["args"]
    tokenizer = args.tokenizer_model or run_tokenizer(stored, reader.folder.parent)
    reads = args.tokenizer_model or args.text or stored.tokenizer_type in ("HuggingFaceTokenizer", *SENTENCE_PIECES)
    chosen = []
    if tokenizer and reads:
        model = model_in(Path(tokenizer))
        kind = "HuggingFaceTokenizer" if model is None else SENTENCE_PIECES[0]
        chosen = ["--tokenizer-type", kind, "--tokenizer-model", str(model or tokenizer)]
        chosen.append("--no-use-tokenizer-model-from-checkpoint-args")
    elif stored.tokenizer_type == "NullTokenizer" and stored.vocab_size is not None:
        chosen = ["--vocab-size", str(stored.vocab_size)]  # Megatron does not read it from a checkpoint
    for name in SIZES:
        if (size := getattr(args, name)) is not None:
            chosen += [flag_of(name), str(size)]
    if args.context_lengths:
        chosen += ["--mtp-context-lengths", *map(str, args.context_lengths)]
        if args.seq_length > stored.max_position_embeddings:
            chosen += ["--max-position-embeddings", str(args.seq_length)]
    if args.eval_iters is not None:
        chosen += ["--eval-iters", str(args.eval_iters)]
    if args.data_path is not None:
        chosen += ["--data-path", *args.data_path]
    if args.text is None:
        return chosen
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            "--text is read by one process, and there are several; make a corpus with megatron-mtp preprocess and give "
            "--data-path."
        )
    if tokenizer is None:
        raise ValueError(f"--load is {args.load}, which names no tokenizer that is there; give --tokenizer-model.")
    prefix, length = str(folder / "corpus"), args.seq_length or stored.seq_length
    flags = ["--input", *args.text, "--tokenizer", str(tokenizer), "--output-prefix", prefix, "--workers", "1", *trust]
    if status := preprocess.main(flags, "megatron-mtp evaluate --text"):
        sys.exit(status)
    tokens = int(read_sidecar(prefix)["tokens"])
    if tokens <= length:
        raise ValueError(f"--text has {tokens} tokens, and the sequences have {length}; give more text.")
    return ["--eval-iters", str((tokens - 1) // length), *chosen, "--data-path", prefix]


def source_table(sources: BySource, title: str = "source") -> str:
    """Format expected accepted length and acceptance by source, with bootstrap standard errors over documents."""
    lines = [f"{title:24} documents   {EXPECTED_LENGTH}   acceptance by depth"]
    for name, documents in sources.items():
        figures = figures_of(list(documents.values()))
        rates = " ".join(f"{rate:.1%}" for rate in figures["acceptance"])
        length = f"{figures[EXPECTED_LENGTH]:.3f} ± {figures['error']:.3f}"
        lines.append(f"{name[:24]:24} {len(documents):9}   {length:>24}   {rates}")
    return "\n".join(lines)
