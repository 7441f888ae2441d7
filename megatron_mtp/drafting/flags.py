"""The flags of `megatron-mtp generate`, for a parser that must not wait for torch."""

from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from megatron_mtp.drafting.proposers import PROPOSERS
from megatron_mtp.drafting.verifiers import VERIFIERS
from megatron_mtp.errors import Parser, named, sentences

DTYPES = ("float32", "bfloat16")

EXAMPLES = """examples:
  # two drafts per step with the depths that the checkpoint was trained with, and how much faster that is
  megatron-mtp generate --load runs/quickstart/checkpoint --prompt 'def forward(self' \\
      --speculative-config '{"method": "mtp"}' --compare

  # one module reused for five drafts, sampled; everything as JSON
  megatron-mtp generate --load CHECKPOINT --prompt-file prompts.jsonl --batch-size 8 --temperature 0.8 --top-p 0.95 \\
      --speculative-config '{"method": "mtp_eagle", "num_speculative_tokens": 5, "verifier": "block"}' --json

  # as many drafts as pay off, 0 included
  megatron-mtp generate --load CHECKPOINT --prompt-ids 1,2,3 \\
      --speculative-config '{"method": "mtp", "num_speculative_tokens": "auto"}'
"""


class _ListMethods(Action):
    """Ends the command, as --help does."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        with sentences(parser.prog):
            from megatron_mtp.drafting.listing import listing

            print(listing())
        parser.exit()


def _names() -> str:
    return (
        f"methods: {', '.join(PROPOSERS.names())}\nverifiers: {', '.join(VERIFIERS.names())}\n"
        "--list-methods says what each does, its keys, and which verifiers change the distribution.\n"
        "Where a hybrid has recurrent layers, chains are drafted: mtp, mtp_eagle, parallel_heads, ngram, draft_model.\n"
    )


def parser(program: str) -> Parser:
    """All flags."""
    made = Parser(
        program,
        description="Generate text with a trained checkpoint, plainly or drafting several tokens per forward.",
        epilog=f"{EXAMPLES}\n{_names()}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_checkpoint_flags(made)
    add = made.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--prompt-file", metavar="F", help='one prompt; of a .jsonl every line, as {"prompt": ...}')
    add("--prompt-ids", action="append", default=[], metavar="1,2,3", help="token ids; may be given several times")
    add("--speculative-config", metavar="JSON", help="how to draft, see below; default: plain decoding")
    add("--list-methods", action=_ListMethods, nargs=0, default=SUPPRESS, help="say what can be chosen there, and end")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    add_sampling_flags(made, temperature=0.0)
    add("--seed", type=int, default=0, metavar="N", help="of the first prompt; the others count on; default: 0")
    add("--batch-size", type=int, default=1, metavar="N", help="prompts that run together; default: 1")
    add("--stop", action="append", default=[], metavar="TEXT", help="end a text after this; may be given several times")
    add("--compare", action="store_true", help="decode plainly as well, and say how much faster drafting is")
    add("--record", type=Path, metavar="DIR", help="write DIR/drafts.json, for the page of megatron-mtp report")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def add_checkpoint_flags(parser: Parser) -> None:
    """The flags that say what is loaded, of every verb that runs a trained model."""
    add = parser.add_argument
    add("--load", required=True, metavar="CKPT", help="folder that Megatron saved to; the newest iteration is taken")
    add("--dtype", choices=DTYPES, help="of the weights; default: that of the training")
    add(
        "--tokenizer",
        type=named,
        metavar="FOLDER",
        help="a Hugging Face tokenizer; default: the training's",
    )
    add("--trust-remote-code", action="store_true", help="run the code of a tokenizer that has some")


def add_sampling_flags(parser: Parser, temperature: float) -> None:
    """The flags that say which distribution tokens are drawn from; `temperature` is the default of its flag."""
    add = parser.add_argument
    said = f"0 is greedy; default: {temperature:g}"
    add("--temperature", type=float, default=temperature, metavar="T", help=said)
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens; default: 0, all")
    add("--top-p", type=float, default=1.0, metavar="P", help="and among those holding this probability; default: 1")
    add("--min-p", type=float, default=0.0, metavar="P", help="and with this share of the likeliest's; default: 0, all")
