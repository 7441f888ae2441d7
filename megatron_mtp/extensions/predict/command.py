"""`megatron-mtp predict`: predict acceptance by position, and its causes, for checkpoints and engines."""

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from itertools import product

from megatron_mtp.common.command import check_counts, named
from megatron_mtp.common.errors import Parser, sentences
from megatron_mtp.decoding.config import MOST_DRAFTED
from megatron_mtp.extensions.predict.engines import ENGINES
from megatron_mtp.megatron.runtime import quieten

INCOMPLETE = 1
"""Exit status if a row of the table is missing."""

EXAMPLES = """examples:
  # acceptance of a trained checkpoint in vLLM once it is exported
  megatron-mtp predict runs/quickstart/checkpoint --engine vllm --text docs

  # three draft tokens per step, from a Hugging Face folder, as JSON with vLLM's synthetic acceptance rates
  megatron-mtp predict exported --engine sglang --text prompts.txt --num-speculative-tokens 3 --json

  # the same checkpoint exported as another family
  megatron-mtp predict runs/mine/checkpoint --engine vllm --family mimo --text docs

  # one line per checkpoint and engine
  megatron-mtp predict runs/one/checkpoint runs/two/checkpoint --engine vllm --engine sglang --text docs --table
"""


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="Predict the acceptance of an exported checkpoint's drafts in another engine, by position, compare "
        "it with that of the MTP layers run as trained, and name the engine's rules that cost the difference. "
        "Prompts are cut from the text and continued greedily.",
        epilog=EXAMPLES,
    )
    add = made.add_argument
    add("checkpoints", nargs="+", type=named, metavar="CKPT", help="Megatron checkpoint, or Hugging Face folder")
    engine = "engine to predict for; may be repeated with --table"
    add("--engine", required=True, action="append", choices=ENGINES, help=engine)
    add("--text", nargs="+", required=True, metavar="FILE", help="files or folders of text to take prompts from")
    add(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="draft tokens per step; default: the number of MTP layers",
    )
    add("--family", metavar="NAME", help="model_type of the export; default: the choice of mcore-to-hf")
    add("--prompts", type=int, default=16, metavar="N", help="number of prompts; default: 16")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="tokens per prompt; default: 32")
    add("--new-tokens", type=int, default=64, metavar="N", help="tokens to generate per prompt; default: 64")
    add("--tokenizer", type=named, metavar="FOLDER", help="Hugging Face tokenizer; default: the checkpoint's")
    add("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer folder")
    table = "print a line per checkpoint and engine, with the reason where one fails (exit status 1)"
    add("--table", action="store_true", help=table)
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def main(arguments: list[str], program: str) -> int:
    """Predict and print. Invalid input ends with one sentence and status 2."""
    args = parser(program).parse_args(arguments)
    with sentences(program):
        _check(args)
        quieten()
        return _table(args) if args.table else _alone(args)


def _check(args: Namespace) -> None:
    """Raise ValueError for a number out of range, and for several checkpoints or engines without a table."""
    check_counts(args, "prompts", "prompt_tokens", "new_tokens")
    count = args.num_speculative_tokens
    if count is not None and not 1 <= count <= MOST_DRAFTED:
        raise ValueError(f"--num-speculative-tokens is {count}; give 1 to {MOST_DRAFTED}.")
    if not args.table and len(args.checkpoints) + len(args.engine) > 2:
        raise ValueError("several checkpoints or engines were given; add --table, or give one of each.")


def _alone(args: Namespace) -> int:
    from megatron_mtp.extensions.predict.predict import predict
    from megatron_mtp.extensions.predict.report import as_json, as_text

    with redirect_stdout(sys.stderr):  # keep what libraries print out of the result
        case, predicted = predict(args.checkpoints[0], ENGINES[args.engine[0]], args)
    print(json.dumps(as_json(case, predicted)) if args.json else as_text(case, predicted), flush=True)
    return 0


def _table(args: Namespace) -> int:
    """Print a line for every checkpoint and engine; a line that fails does not stop the others."""
    from megatron_mtp.extensions.predict.predict import predict
    from megatron_mtp.extensions.predict.report import as_json, as_table

    rows, failed = [], []
    for checkpoint, engine in product(args.checkpoints, args.engine):
        row: dict[str, object] = {"checkpoint": str(checkpoint), "engine": engine}
        try:
            with redirect_stdout(sys.stderr):
                rows.append({**as_json(*predict(checkpoint, ENGINES[engine], args)), **row})
        except (ValueError, OSError) as error:
            failed.append({**row, "reason": " ".join(str(error).split())})
    print(json.dumps({"rows": rows, "failed": failed}) if args.json else as_table(rows, failed), flush=True)
    return INCOMPLETE if failed else 0
