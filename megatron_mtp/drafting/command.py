"""The command line of `megatron-mtp generate`: a checkpoint and prompts in, texts and their cost out."""

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

import torch

from megatron_mtp.drafting.api import check_prompts
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.cost import Work, summary, table
from megatron_mtp.drafting.load import load_checkpoint, load_drafter
from megatron_mtp.drafting.loop import Limits
from megatron_mtp.drafting.method import is_lossless, make_method, parse_config
from megatron_mtp.drafting.sampling import Sampling
from megatron_mtp.drafting.text import Stream, cutter, own_output, quoted, read_prompts
from megatron_mtp.drafting.types import Emitted
from megatron_mtp.errors import sentences
from megatron_mtp.files import written_beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DRAFTS = "drafts.json"
"""Written to `--record`: {"config": {"method": "mtp", ...}, "figures": {...}, "pieces": {"12": " the", ...}, "texts":
[{"prompt": [5, 12], "steps": [as `Emitted.as_json`, ...]}, ...]}"""


def main(args: Namespace, program: str) -> None:
    """Run the command line; bad input ends with one sentence and exit status 2."""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # its warnings would stand in the text
    logging.getLogger("megatron_mtp").setLevel(logging.WARNING)  # ours are for the user
    answer = own_output() if args.json else sys.stdout
    with sentences(program):
        run(args, answer)


def run(args: Namespace, answer: TextIO) -> None:
    """Load, check, generate, report. Raises ValueError for bad input, before anything is generated."""
    sampling = Sampling.of(args)
    config = None if args.speculative_config is None else parse_config(args.speculative_config)
    if args.batch_size < 1:
        raise ValueError(f"--batch-size is {args.batch_size}; give 1 or more.")
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    loaded = load_checkpoint(args.load, dtype=dtype, trust_remote_code=args.trust_remote_code)
    tokenizer = loaded.read_tokenizer(args.tokenizer, args.trust_remote_code)
    prompts = read_prompts(args.prompt, args.prompt_file, args.prompt_ids, tokenizer)
    if not -(2**63) <= args.seed <= 2**63 - len(prompts):
        raise ValueError(f"--seed is {args.seed}, which 64 bits do not hold for every prompt; give a smaller one.")
    check_prompts(loaded.runner, prompts, args.max_new_tokens)
    drafter = load_drafter(config, dtype)
    make_method(loaded.runner, config, sampling, drafter)
    limits = _limits(args, tokenizer)
    work = Work(loaded.runner, prompts, sampling, limits, drafter, args.batch_size, args.seed)
    streams = _is_first() and not args.json and len(prompts) == 1
    stream = Stream(tokenizer) if streams and tokenizer is not None else None
    steps: list[list[dict[str, Any]]] = [[] for _ in prompts]
    if args.record is not None and _is_first():
        args.record.mkdir(parents=True, exist_ok=True)  # before anything is generated
    if _is_first() and not args.json:
        _announce(loaded.line(args.load), config, stream, prompts[0])

    def emit(number: int, emitted: Emitted) -> None:
        if stream is not None:
            stream(emitted.tokens, emitted.accepted)
        if args.record is not None:
            steps[number].append(emitted.as_json())

    texts, cost = work.timed(config, None if stream is None and args.record is None else emit)
    plain, same = None, None
    if args.compare and config is not None:
        cost, plain, same = work.compared(config, texts, cost)
    figures = summary(cost, loaded.runner.dtype, plain, same)
    if not _is_first():
        return
    if args.record is not None:
        written = [{"prompt": prompt, "steps": own} for prompt, own in zip(prompts, steps, strict=True)]
        ids = {token for text in written for token in _ids(text)}
        pieces = {} if tokenizer is None else {token: tokenizer.decode([token]) for token in sorted(ids)}
        settings = None if config is None else config.flat()
        with written_beside(args.record / DRAFTS) as beside:
            beside.write_text(json.dumps({"config": settings, "figures": figures, "pieces": pieces, "texts": written}))
    if args.json:
        _print_json(texts, tokenizer, figures, answer)
        return
    if stream is None:
        _print_texts(prompts, texts, tokenizer)
    else:
        print()
    print(f"\n{table(figures, sampled=not sampling.greedy)}")


def _ids(text: dict[str, Any]) -> Iterator[int]:
    """The tokens of a recorded text, drafted ones included."""
    yield from text["prompt"]
    for step in text["steps"]:
        yield from step["emitted"]
        yield from (token for token in step["drafted"] if token is not None)


def _announce(line: str, config: SpeculativeConfig | None, stream: Stream | None, prompt: list[int]) -> None:
    """What stands before the text."""
    print(f"> {line}")
    if config is not None and not is_lossless(config):
        print(f"> the verifier '{config.verifier}' does not keep the model's distribution")
    if stream is not None:
        stream.echo(prompt)


def _limits(args: Namespace, tokenizer: "PreTrainedTokenizerBase | None") -> Limits:
    if "" in args.stop:
        raise ValueError("--stop is empty; give the text to end after.")
    if tokenizer is None:
        if args.stop:
            raise ValueError(
                "--stop was given, but the checkpoint names no tokenizer to read text with; give --tokenizer."
            )
        return Limits(args.max_new_tokens)
    ends = frozenset([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    return Limits(args.max_new_tokens, None, ends, cutter(args.stop, tokenizer) if args.stop else None)


def _is_first() -> bool:
    return torch.distributed.get_rank() == 0


def _print_json(
    texts: list[list[int]], tokenizer: "PreTrainedTokenizerBase | None", figures: dict[str, Any], answer: TextIO
) -> None:
    """One object; of several prompts, `token_ids` and `text` are lists of them."""
    written = None if tokenizer is None else [tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
    alone = len(texts) == 1
    text = None if written is None else written[0] if alone else written
    print(json.dumps({"token_ids": texts[0] if alone else texts, "text": text, **figures}), file=answer, flush=True)


def _print_texts(prompts: list[list[int]], texts: list[list[int]], tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Texts that were not streamed, each after its prompt; token ids where there is no tokenizer."""
    for number, (prompt, ids) in enumerate(zip(prompts, texts, strict=True), start=1):
        sign = f"[{number}] " if len(texts) > 1 else ""
        print(f"> {sign}prompt: {quoted(prompt, tokenizer)}")
        body = ",".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
        print(f"{sign}{body}")
