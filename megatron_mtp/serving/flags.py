"""The flags of `megatron-mtp serve`, for a parser that must not wait for torch."""

from argparse import RawDescriptionHelpFormatter

from megatron_mtp.drafting.flags import add_checkpoint_flags
from megatron_mtp.errors import Parser

EXAMPLES = """examples:
  # OpenAI's API at http://127.0.0.1:8000/v1, drafting two tokens a step; a page to try it at http://127.0.0.1:8000
  megatron-mtp serve --load runs/quickstart/checkpoint \\
      --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'

  # for other machines, with a key, up to 64 texts at once in 8 GiB of cache
  megatron-mtp serve --load CHECKPOINT --host 0.0.0.0 --port 8080 --api-key "$KEY" --max-running 64 --cache-gib 8

  # ask it
  curl -N http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "def ", "max_tokens": 32, "stream": true}'
"""


def parser(program: str) -> Parser:
    """All flags."""
    made = Parser(
        program,
        description="Serve a trained checkpoint by OpenAI's HTTP API: many texts at once, each drafting. Beginnings "
        "that texts share run once, except on a hybrid with recurrent layers.",
        epilog=f"{EXAMPLES}\nSIGTERM or Ctrl-C ends the server when its texts have ended; a second one at once.\n",
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_checkpoint_flags(made)
    add = made.add_argument
    add("--host", default="127.0.0.1", metavar="H", help="address to listen at; default: 127.0.0.1, this machine alone")
    add("--port", type=int, default=8000, metavar="N", help="0 for any that is free; default: 8000")
    add("--api-key", metavar="KEY", help="that clients must send; default: none is asked for")
    add("--served-model-name", metavar="NAME", help="by which clients call the model; default: the name of its folder")
    add("--speculative-config", metavar="JSON", help="how texts draft, as of generate; default: plain decoding")
    add("--max-running", type=int, default=16, metavar="N", help="texts in a step; default: 16")
    add("--max-waiting", type=int, default=256, metavar="N", help="texts that wait; more are refused; default: 256")
    add("--cache-gib", type=float, metavar="G", help="memory for keys and values, and for the states of recurrent "
        "layers of --max-running texts; default: what texts of full length need, at most 4")  # fmt: skip
    return made
