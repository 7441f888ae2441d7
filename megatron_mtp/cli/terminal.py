"""Prompts, terminal output, and the flags of commands that run a model."""

import json
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tokenizers.decoders import DecodeStream

from megatron_mtp.common.command import named
from megatron_mtp.common.errors import Parser

if TYPE_CHECKING:
    from argparse import _MutuallyExclusiveGroup

    from transformers import PreTrainedTokenizerBase

    from megatron_mtp.decoding.config import SpeculativeConfig

DTYPES = ("float32", "bfloat16")
_LOAD = "--load, a checkpoint as megatron-mtp convert hf-to-mcore makes it"
_TORCHRUN = "torchrun --nproc-per-node N in front of -m megatron_mtp, which splits the model over N ranks"
_METHOD = "--speculative-config with a 'method'"
_TREE = f"{_METHOD} that drafts trees, such as eagle3_tree"
_COUNT = "--speculative-config with 'num_speculative_tokens'"
_DRAFTER = "--load, a checkpoint to which megatron-mtp convert attach-drafter has added the folder"
OF_OTHER_ENGINES = {
    **dict.fromkeys(("--model", "--model-path", "--model-id"), _LOAD),
    "--tokenizer-path": "--tokenizer",
    "--chat-template": "--tokenizer, a folder with a chat template",
    **dict.fromkeys(("--tensor-parallel-size", "--tp", "--tp-size", "--num-shard", "--tensor-split"), _TORCHRUN),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp", "--pp-size"), _TORCHRUN),
    **dict.fromkeys(("--enable-expert-parallel", "--ep", "--ep-size"), "--expert-model-parallel-size"),
    **dict.fromkeys(("--speculative-algorithm", "--speculative-algo"), _METHOD),
    **dict.fromkeys(("--speculative-num-steps", "--speculative-num-draft-tokens", "--num-speculative-tokens"), _COUNT),
    "--draft-max": _COUNT,
    "--speculative-eagle-topk": _TREE,
    **dict.fromkeys(("--speculative-model", "--speculative-draft-model-path", "--model-draft"), _DRAFTER),
}
"""Flags of vLLM, SGLang, TGI and llama.cpp, and what to use instead, for commands that run a checkpoint."""

COLOR, DIM, PLAIN = "\033[32m", "\033[2m", "\033[0m"


def read_prompts(
    texts: list[str], file: str | None, ids: list[str], tokenizer: "PreTrainedTokenizerBase | None"
) -> list[list[int]]:
    """Return the token ids of all prompts of `--prompt`, `--prompt-file` and `--prompt-ids`, in this order.

    A file is one prompt. In a .jsonl file, every line is one, an object with the key 'prompt'.

    Raises:
        ValueError: a file cannot be read, ids are not numbers, or there is text without a tokenizer.
    """
    texts = [*texts, *([] if file is None else _texts_of(Path(file)))]
    if texts and tokenizer is None:
        raise ValueError("the checkpoint names no tokenizer for the prompt's text; give --tokenizer or --prompt-ids.")
    for text in texts:  # lone surrogates come from command-line bytes that are not UTF-8, or from JSON escapes
        try:
            text.encode()
        except UnicodeEncodeError as error:
            shown = f"{text[error.start : error.end]!a} at character {error.start + 1}"
            raise ValueError(f"a prompt holds {shown}, which is not UTF-8; take it out.") from error
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts] if tokenizer is not None else []
    for listed in ids:
        try:
            prompts.append([int(one) for one in listed.split(",") if one.strip()])
        except ValueError as error:
            raise ValueError(f"--prompt-ids is '{listed}'; give token ids like 1,2,3.") from error
    return prompts


def _texts_of(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt-file: '{file}' cannot be read ({error}); give a UTF-8 text file.") from error
    if file.suffix != ".jsonl":
        return [text]
    try:
        prompts = [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(
            f"--prompt-file: '{file}' has a line that is not a JSON object with a key 'prompt' ({error!r}); correct it."
        ) from error
    if wrong := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise ValueError(f"--prompt-file: '{file}' has the prompt {wrong[0]!r}, which is not text; correct it.")
    return prompts


def cutter(stops: list[str], tokenizer: "PreTrainedTokenizerBase") -> Callable[[list[int]], int | None]:
    """Return a function for `Request.cut`: how many tokens to keep once the text contains a stop string, else None."""
    longest = max(map(len, stops))

    def cut(ids: list[int]) -> int | None:
        if not any(stop in tokenizer.decode(ids[-4 * longest - 32 :]) for stop in stops):
            return None
        ends = (end for end in range(1, len(ids) + 1) if any(stop in tokenizer.decode(ids[:end]) for stop in stops))
        return next(ends, None)

    return cut


def quoted(prompt: list[int], tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Format a prompt on one line: its text in quotes, or its token ids."""
    return ",".join(map(str, prompt)) if tokenizer is None else repr(tokenizer.decode(prompt))


class Stream:
    """Prints text as it is generated, with accepted drafts in color on a terminal."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", output: TextIO = sys.stdout) -> None:
        self._tokenizer = tokenizer
        self._backend, self._stream = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)
        self._output, self._colored = output, output.isatty()

    def echo(self, prompt: list[int]) -> None:
        """Print the prompt, before its continuation."""
        if self._colored:
            self._output.write(f"{DIM}{self._tokenizer.decode(prompt)}{PLAIN}")
        else:
            self._output.write(f"> prompt: {quoted(prompt, self._tokenizer)}\n")
        self._output.flush()

    def __call__(self, tokens: list[int], drafted: int) -> None:
        """Print a step's tokens; the first `drafted` were drafted."""
        for place, token in enumerate(tokens):
            piece = self._stream.step(self._backend, token) or ""
            colored = self._colored and place < drafted
            self._output.write(f"{COLOR}{piece}{PLAIN}" if colored else piece)
        self._output.flush()


def own_output() -> TextIO:
    """Reserve standard output for JSON: redirect the output of libraries to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w")


def say_if_lossy(config: "SpeculativeConfig | None") -> None:
    """Print a line if the output does not follow the model's distribution."""
    from megatron_mtp.decoding.method import is_lossless

    if config is not None and not is_lossless(config):
        print(f"> the verifier '{config.verifier}' does not keep the model's distribution", flush=True)


def add_checkpoint_flags(parser: Parser, sources: "_MutuallyExclusiveGroup | None" = None) -> None:
    """Add the flags that choose the checkpoint to load, with `--load` as the only source or one of several."""
    add, load = parser.add_argument, "Megatron checkpoint; its newest iteration is loaded"
    (sources or parser).add_argument(
        "--load", type=megatron_folder, required=sources is None, metavar="CKPT", help=load
    )
    add("--dtype", choices=DTYPES, help="data type of the weights; default: the training's")
    add("--tokenizer", type=named, metavar="FOLDER", help="Hugging Face tokenizer; default: the training's")
    add("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer folder")


def megatron_folder(text: str) -> str:
    """Convert an argument to a folder, for argparse's `type=`, before anything slow is imported.

    Raises:
        ArgumentTypeError: it is a Hugging Face folder.
    """
    if Path(text, "config.json").is_file():
        raise ArgumentTypeError(
            f"'{text}' is a Hugging Face folder; give the checkpoint that megatron-mtp convert hf-to-mcore makes of a "
            "model, or convert attach-drafter of a drafter"
        )
    return text


def add_ranks_flags(parser: Parser) -> None:
    """Add the flags that spread a model over the ranks of torchrun."""
    spread = "under torchrun: ranks to divide whole experts among; default: 1, each rank has a slice of every expert"
    parser.add_argument("--expert-model-parallel-size", type=int, default=1, metavar="E", help=spread)


def add_sampling_flags(parser: Parser, temperature: float) -> None:
    """Add the sampling flags; `temperature` is the default of its flag."""
    add = parser.add_argument
    said = f"sampling temperature; 0: greedy; default: {temperature:g}"
    add("--temperature", type=float, default=temperature, metavar="T", help=said)
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens; default: 0, all")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens up to this total; default: 1",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="least probability relative to the most likely token; default: 0",
    )
