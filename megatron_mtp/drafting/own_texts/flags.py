"""The flags of `megatron-mtp sample`, for a parser that must not wait for torch."""

from argparse import RawDescriptionHelpFormatter

from megatron_mtp.data.checks import PARTS
from megatron_mtp.drafting.flags import add_checkpoint_flags, add_sampling_flags
from megatron_mtp.errors import Parser

EXAMPLES = """examples:
  # 2,000 continuations of a corpus' documents: data/own.bin and .idx, for train --data-path data/own
  megatron-mtp sample --load checkpoints/trunk --data-path data/corpus --texts 2000 --output-prefix data/own

  # answers to the user's turns of conversations, at the temperature at which the model will be served
  megatron-mtp sample --load checkpoints/trunk --chat chats.jsonl --texts 5000 --temperature 0.6 \\
      --max-new-tokens 512 --output-prefix data/answers

The same command continues after an interruption, with the same texts. More --texts keep those that are there.
"""


def parser(program: str) -> Parser:
    """All flags."""
    made = Parser(
        program,
        description="Let a model continue the prompts of a corpus, and write prompts with continuations as data for "
        "train: depths that learn from it meet the texts that they will draft for.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_checkpoint_flags(made)
    add = made.add_argument
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.bin, .idx, .json, .answers.npy and .texts.jsonl",
    )
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
    add("--speculative-config", metavar="JSON", help="how to draft, as in generate; default: mtp if there are depths")
    add("--batch-size", type=int, default=16, metavar="N", help="texts that run together; default: 16")
    add("--overwrite", action="store_true", help="make everything anew")
    add("--dry-run", action="store_true", help="print what would be done and what is there, and write nothing")
    return made
