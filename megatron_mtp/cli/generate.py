"""`megatron-mtp generate`: generate text with speculative decoding, and report its cost."""

import json
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron_mtp.cli.terminal import (
    OF_OTHER_ENGINES,
    Stream,
    add_checkpoint_flags,
    add_ranks_flags,
    add_sampling_flags,
    cutter,
    own_output,
    quoted,
    read_prompts,
    say_if_lossy,
)
from megatron_mtp.common.command import check_counts
from megatron_mtp.common.errors import Parser, add_foreign_flags, sentences
from megatron_mtp.common.files import written_beside
from megatron_mtp.decoding.config import PROPOSERS, VERIFIERS, Settings, keys
from megatron_mtp.megatron.runtime import quieten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_mtp.decoding.config import SpeculativeConfig
    from megatron_mtp.decoding.method import Method
    from megatron_mtp.decoding.requests import Update

OF_OTHER_GENERATORS = {
    **OF_OTHER_ENGINES,
    **dict.fromkeys(("--max-tokens", "--num-predict", "--n-predict"), "--max-new-tokens"),
    "--file": "--prompt-file",
}
"""Flags of vLLM, SGLang, llama.cpp and others, and what to use instead."""

DRAFTS = "drafts.json"
"""Contents of the file for `--record`: {"config": {"method": "mtp", ...}, "figures": {...}, "pieces": {"12": " the",
...}, "texts": [{"prompt": [5, 12], "steps": [as `Update.as_json`, ...]}, ...]}
"""

EXAMPLES = """examples:
  # draft with the checkpoint's MTP layers, and compare with plain decoding
  megatron-mtp generate --load runs/quickstart/checkpoint --prompt 'def forward(self' \\
      --speculative-config '{"method": "mtp"}' --compare

  # one MTP layer reused for five draft tokens, with sampling and JSON output
  megatron-mtp generate --load runs/mine/checkpoint --prompt-file prompts.jsonl --batch-size 8 \\
      --temperature 0.8 --top-p 0.95 --json \\
      --speculative-config '{"method": "mtp_eagle", "num_speculative_tokens": 5, "verifier": "block"}'

  # as many draft tokens as pay off, possibly none
  megatron-mtp generate --load runs/mine/checkpoint --prompt-ids 1,2,3 \\
      --speculative-config '{"method": "mtp", "num_speculative_tokens": "auto"}'
"""


def main(arguments: list[str], program: str) -> int:
    """Generate. Invalid input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    quieten()

    answer = own_output() if args.json else sys.stdout
    with sentences(program):
        run(args, answer)
    return 0


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="Generate text with a checkpoint, by plain or speculative decoding.",
        epilog=f"{EXAMPLES}\nmethods: {', '.join(PROPOSERS.names())}\nverifiers: {', '.join(VERIFIERS.names())}\n"
        "--list-methods explains each with its keys, and which verifiers change the distribution.\n"
        "Hybrids with recurrent layers draft chains only: mtp, mtp_eagle, parallel_heads, ngram, draft_model.",
    )
    add_foreign_flags(made, OF_OTHER_GENERATORS)
    add_checkpoint_flags(made)
    add_ranks_flags(made)
    add = made.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="prompt; may be repeated")
    add("--prompt-file", metavar="F", help='file with one prompt, or .jsonl with {"prompt": ...} lines')
    add("--prompt-ids", action="append", default=[], metavar="1,2,3", help="prompt as token ids; may be repeated")
    add("--speculative-config", metavar="JSON", help="how to draft (see below); default: plain decoding")
    add(
        "--list-methods", action=_ListMethods, nargs=0, default=SUPPRESS, help="explain methods and verifiers, and exit"
    )
    add("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate per prompt; default: 128")
    add_sampling_flags(made, temperature=0.0)
    add("--seed", type=int, default=0, metavar="N", help="seed of the first prompt; later ones count up; default: 0")
    add("--batch-size", type=int, default=1, metavar="N", help="prompts per batch; default: 1")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop after this string; may be repeated")
    add("--compare", action="store_true", help="also decode without drafts, and report the speed-up")
    add("--record", type=Path, metavar="DIR", help="write DIR/drafts.json for megatron-mtp report")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return made


class _ListMethods(Action):
    """Action that lists the methods and ends the command, like --help."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        def row(name: str, line: str, kind: type[Settings]) -> None:
            print(f"  {name:<18}{line}".replace("`", ""))
            for key in keys(kind):
                print(f"    {key.name:<16}{key.meaning}{key.limits}".replace("`", ""))

        with sentences(parser.prog):
            print("methods, which draft from")
            for name, method in PROPOSERS.items():
                states = method.recurrent_layers()
                notes = [f"needs: {method.depths}"] if method.depths else []
                notes += [] if states == "yes" else [f"recurrent layers: {states}"]
                row(name, method.line + (f" ({'; '.join(notes)})" if notes else ""), method.settings_kind)
            print("\nverifiers")
            for name, verifier in VERIFIERS.items():
                row(name, verifier.line, verifier.settings_kind)
            *others, last = (name for name, one in VERIFIERS.items() if not one.lossless)
            print(f"{', '.join(others)} and {last} change the distribution; the others keep it.")
        parser.exit()


def run(args: Namespace, answer: TextIO) -> None:
    """Load, check, generate and report. Raise ValueError for invalid input before anything is generated."""
    import torch

    from megatron_mtp.cli.cost import Workload, summary, table
    from megatron_mtp.decoding.engine import check_prompts
    from megatron_mtp.decoding.load import load_checkpoint, load_drafter
    from megatron_mtp.decoding.method import is_lossless, make_method, parse_config
    from megatron_mtp.decoding.sampling import Sampling

    sampling = Sampling.of(args)
    config = None if args.speculative_config is None else parse_config(args.speculative_config)
    check_counts(args, "batch_size", "expert_model_parallel_size")
    dtype = args.dtype and getattr(torch, args.dtype)
    trusted, spread = args.trust_remote_code, args.expert_model_parallel_size
    loaded = load_checkpoint(args.load, None, dtype, "--load", trusted, config, spread)
    runner, tokenizer = loaded.runner, loaded.read_tokenizer(args.tokenizer, args.trust_remote_code)
    prompts = read_prompts(args.prompt, args.prompt_file, args.prompt_ids, tokenizer)
    if not -(2**63) <= args.seed <= 2**63 - len(prompts):
        raise ValueError(f"--seed is {args.seed}, which 64 bits do not hold for every prompt; give a smaller one.")
    check_prompts(runner, prompts, args.max_new_tokens)
    drafter = load_drafter(config, dtype)
    method = make_method(runner, config, sampling, drafter)  # rejects unsupported combinations
    stop_ids, cut = _ends(args, tokenizer)
    work = Workload(runner, prompts, args.max_new_tokens, sampling, stop_ids, drafter, cut, args.batch_size, args.seed)
    is_first = torch.distributed.get_rank() == 0
    stream = Stream(tokenizer) if is_first and not args.json and len(prompts) == 1 and tokenizer is not None else None
    steps: list[list[dict[str, Any]]] = [[] for _ in prompts]
    if args.record is not None and is_first:
        args.record.mkdir(parents=True, exist_ok=True)  # fail before generating anything
    if is_first and not args.json:
        print(f"> {loaded.line(args.load)}")
        say_if_lossy(config)
        if stream is not None:
            stream.echo(prompts[0])

    def emit(update: "Update") -> None:
        if stream is not None:
            stream(update.tokens, update.accepted)
        if args.record is not None:
            steps[update.request].append(update.as_json())

    texts, cost = work.timed(config, None if stream is None and args.record is None else emit)
    compared = None if config is None or not args.compare else work.compared(config, texts)
    cost, plain, same = compared or (cost, None, None)
    may_differ = compared is not None and not (sampling.greedy and config is not None and is_lossless(config))
    perplexities = (work.perplexity(config), work.perplexity(None)) if may_differ else None
    figures = summary(cost, runner.dtype, plain, same, perplexities)
    if not is_first:
        return
    if args.record is not None:
        _record(args.record / DRAFTS, prompts, steps, config, figures, tokenizer)
    shown = None if tokenizer is None else [tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
    if args.json:
        both: dict[str, Any] = {"token_ids": texts, "text": shown}
        one = {name: value and value[0] for name, value in both.items()}  # a single output instead of a list
        made = (one if len(texts) == 1 else both) | _drafting(method) | figures
        print(json.dumps(made), file=answer, flush=True)
        return
    if stream is None:
        _print_texts([quoted(prompt, tokenizer) for prompt in prompts], texts, shown)
    print(f"{chr(10) if stream else ''}\n{table(figures, sampled=not sampling.greedy)}")


def _drafting(method: "Method") -> dict[str, Any]:
    """Return how sequences are drafted, under the names of `--json`."""
    from megatron_mtp.decoding.method import is_lossless

    return {
        "method": method.config.method,
        "num_speculative_tokens": "auto" if method.auto else method.count,
        "verifier": method.config.verifier,
        "lossless": is_lossless(method.config),
    }


def _record(
    file: Path,
    prompts: list[list[int]],
    steps: list[list[dict[str, Any]]],
    config: "SpeculativeConfig | None",
    figures: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> None:
    """Write every step's drafted and accepted tokens, with the characters of each token, for `report`."""
    texts: list[dict[str, Any]] = [{"prompt": prompt, "steps": own} for prompt, own in zip(prompts, steps, strict=True)]
    of_texts = [
        text["prompt"] + [one for step in text["steps"] for one in step["emitted"] + step["drafted"]] for text in texts
    ]
    ids = {token for tokens in of_texts for token in tokens if token is not None}
    pieces = {} if tokenizer is None else {token: tokenizer.decode([token]) for token in sorted(ids)}
    settings = None if config is None else config.flat()
    with written_beside(file) as beside:
        beside.write_text(json.dumps({"config": settings, "figures": figures, "pieces": pieces, "texts": texts}))


def _ends(
    args: Namespace, tokenizer: "PreTrainedTokenizerBase | None"
) -> "tuple[frozenset[int], Callable[[list[int]], int | None] | None]":
    """Return tokens and strings of `--stop` that end a sequence before its budget."""
    from megatron_mtp.data.tokenizer import end_tokens

    if "" in args.stop:
        raise ValueError("--stop is empty; give the text to end after.")
    if tokenizer is None:
        if args.stop:
            raise ValueError(
                "--stop was given, but the checkpoint names no tokenizer to read text with; give --tokenizer."
            )
        return frozenset(), None
    return end_tokens(tokenizer), cutter(args.stop, tokenizer) if args.stop else None


def _print_texts(prompts: list[str], texts: list[list[int]], shown: list[str] | None) -> None:
    """Print texts that were not streamed, each after its prompt; token ids without a tokenizer."""
    for number, (prompt, ids) in enumerate(zip(prompts, texts, strict=True)):
        sign = f"[{number + 1}] " if len(texts) > 1 else ""
        print(f"> {sign}prompt: {prompt}")
        print(f"{sign}{','.join(map(str, ids)) if shown is None else shown[number]}")
