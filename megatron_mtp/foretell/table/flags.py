"""The flags of `megatron-mtp tabulate`, for a parser that must not wait for torch."""

from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from megatron_mtp.errors import Parser, named
from megatron_mtp.foretell.engines import ENGINES

EXAMPLES = """examples:
  # three runs side by side: what their depths accept here, and what vLLM and SGLang will accept
  megatron-mtp tabulate runs/one/checkpoint runs/two/checkpoint exported --text held_out --engine vllm sglang

  # the same with one and with two drafts a round: four more rows; a page of all rows so far
  megatron-mtp tabulate runs/one/checkpoint runs/two/checkpoint --text held_out --num-speculative-tokens 1 2 \\
      --html table.html
"""


def parser(program: str) -> Parser:
    """All flags."""
    made = Parser(
        program,
        description="Fill a table of acceptance: for every checkpoint its family, depths and objective, how many of "
        "its depths' drafts are accepted by position, greedily and in float32, and what engines will accept. Finished "
        "rows are kept, and the same command continues after an interruption. Exit status: 0, or 1 if a checkpoint has "
        "no row since it cannot be read or cannot draft.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("checkpoints", nargs="+", metavar="CKPT", help="Megatron checkpoints, Hugging Face folders, names on the Hub")
    add("--text", nargs="+", required=True, metavar="FILE", help="files or folders whose text gives the prompts")
    add("--num-speculative-tokens", type=int, nargs="+", metavar="K", help="drafts a round; default: one a depth")
    add("--engine", nargs="+", choices=ENGINES, default=[], help="engines whose acceptance is foretold as well")
    add("--prompts", type=int, default=16, metavar="N", help="prompts, evenly spread over the text; default: 16")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="tokens of each prompt; default: 32")
    add("--new-tokens", type=int, default=64, metavar="N", help="tokens that continue each prompt; default: 64")
    add("--tokenizer", metavar="FOLDER", help="Hugging Face tokenizer of all (default: each checkpoint's own)")
    add("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer folder")
    rows = "folder of the finished rows, all of which are shown; default: runs/table"
    add("--output", type=named, default=Path("runs/table"), metavar="DIR", help=rows)
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--html", type=named, metavar="FILE", help="write a page as well")
    return made
