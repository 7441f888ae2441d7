"""The flags of `megatron-mtp foretell`, for a parser that must not wait for torch."""

from argparse import RawDescriptionHelpFormatter

from megatron_mtp.errors import Parser, named
from megatron_mtp.foretell.engines import ENGINES

EXAMPLES = """examples:
  # what vLLM will accept of a trained checkpoint's drafts, once it is exported
  megatron-mtp foretell runs/quickstart/checkpoint --engine vllm --text docs

  # three drafts a round, of a Hugging Face folder, as JSON with vLLM's synthetic acceptance rates
  megatron-mtp foretell exported --engine sglang --text prompts.txt --num-speculative-tokens 3 --json

  # the same checkpoint exported as another family
  megatron-mtp foretell runs/mine/checkpoint --engine vllm --family mimo --text docs
"""


def parser(program: str) -> Parser:
    """All flags."""
    made = Parser(
        program,
        description="Compute what an engine will accept, by position, of the drafts of a checkpoint's export, beside "
        "what the depths reach when they are run as they were trained, and name the rules of the engine that cost the "
        "difference. Pieces of the text are prompts; the model continues them greedily.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("checkpoint", type=named, metavar="CKPT", help="Megatron checkpoint, or Hugging Face folder")
    add("--engine", required=True, choices=ENGINES, help="the engine that is to serve it")
    add("--text", nargs="+", required=True, metavar="FILE", help="files or folders whose text gives the prompts")
    add("--num-speculative-tokens", type=int, metavar="K", help="drafts a round; default: the number of depths")
    add("--family", metavar="NAME", help="model_type of the export (default: the one that mcore-to-hf chooses)")
    add("--prompts", type=int, default=16, metavar="N", help="prompts, evenly spread over the text; default: 16")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="tokens of each prompt; default: 32")
    add("--new-tokens", type=int, default=64, metavar="N", help="tokens that continue each prompt; default: 64")
    add("--tokenizer", type=named, metavar="FOLDER", help="Hugging Face tokenizer (default: the checkpoint's own)")
    add("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer folder")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return made
