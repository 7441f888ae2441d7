"""The flags of `megatron-mtp bench-serve`."""

from argparse import RawDescriptionHelpFormatter

from megatron_mtp.errors import Parser, named

EXAMPLES = """examples:
  # 100 synthetic prompts of 20 to 120 words, 64 new tokens each, by 16 clients at once
  megatron-mtp bench-serve http://127.0.0.1:8000 --requests 100 --words 20:120 --max-tokens 64 --concurrency 16

  # requests of a file at random times, 2 a second; figures as JSON, and a picture of them
  megatron-mtp bench-serve http://127.0.0.1:8000 --input prompts.jsonl --rate 2 --json --out results.png

  # a field that only this server, or vLLM, knows
  megatron-mtp bench-serve http://127.0.0.1:8000 --extra-body '{"ignore_eos": true}'
"""


def parser(program: str) -> Parser:
    """All flags."""
    made = Parser(
        program,
        description="Measure a server of OpenAI's API: waiting times, tokens a second, acceptance of drafts.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("url", metavar="URL", help="of the server, with or without /v1")
    add("--model", metavar="NAME", help="default: the first that the server lists")
    add("--api-key", metavar="KEY", help="default: none is sent")
    add("--input", type=named, metavar="F", help='.jsonl of {"prompt": ...} or {"messages": [...]}, or a text of which '
        "every paragraph is a prompt; default: synthetic prompts")  # fmt: skip
    add("--words", default="20:120", metavar="A:B", help="of a synthetic prompt, from A to B; default: 20:120")
    add("--requests", type=int, default=100, metavar="N", help="default: 100; a file that has fewer is begun again")
    add("--concurrency", type=int, metavar="N", help="clients that ask one request after another; default: 16")
    add("--rate", type=float, metavar="R", help="requests a second at random times (Poisson), instead of clients")
    add("--max-tokens", type=int, default=64, metavar="N", help="new tokens of a request; default: 64")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    add("--extra-body", default="{}", metavar="JSON", help="fields that every request has beside")
    add("--seed", type=int, default=0, metavar="N", help="of synthetic prompts and arrival times; default: 0")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--out", type=named, metavar="FILE", help="a picture of the results, .png, .svg or .pdf")
    return made
