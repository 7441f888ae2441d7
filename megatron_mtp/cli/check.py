"""`megatron-mtp check FOLDER`: compare the measured acceptance of a model's drafts with `mtp_acceptance.json`.

Prompts are cut from a text, one per document if there are enough, or are the user turns of chats. The model continues
them, locally or behind a server, and drafts are counted by prompt. Standard errors are bootstrapped over documents.

Exit status 0: accepted as recorded, or more. 1: less. 2: invalid input.
"""

import json
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import numpy as np

from megatron_mtp.cli.terminal import DTYPES, add_sampling_flags
from megatron_mtp.common.acceptance import LEAST_DOCUMENTS, RECORD, AcceptanceStats, resampled
from megatron_mtp.common.command import check_counts, from_extra, named, status_of
from megatron_mtp.common.errors import Parser
from megatron_mtp.common.record import read_record
from megatron_mtp.megatron.runtime import quieten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_mtp.data.samples import Sample
    from megatron_mtp.decoding.config import SpeculativeConfig
    from megatron_mtp.decoding.runner import Runner

LESS = 1
"""Exit status if drafts are accepted less often than recorded."""
LEAST_DRAFTS = 64
SIDES = (2.5, 97.5)
"""Percentiles of the bootstrap that are shown."""
COUNTERS = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total")
"""Suffixes of names in /metrics of vLLM and `serve`."""

EXAMPLES = """examples:
  # an export, quantized or not, on text held out from training
  megatron-mtp check exported --text held_out

  # a running server without other traffic: vLLM, or megatron-mtp serve
  megatron-mtp check exported --chat chats.jsonl --server http://localhost:8000

  # in a script: status 0 if drafts are accepted as recorded, 1 if less, 2 for bad input
  megatron-mtp check exported --text held_out --prompts 128 --json > check.json
"""

NumberedPrompts = list[tuple[int, list[int]]]
"""Document number, and token ids."""


def main(arguments: list[str], program: str) -> int:
    """Draft, compare and print. Invalid input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    quieten()
    return status_of(program, lambda: run(args))


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="Continue prompts with a model that has MTP layers, and compare the acceptance of its drafts with "
        f"the {RECORD} in its folder, which evaluate writes. Exit status: 0 as recorded, 1 less, 2 bad input.",
        epilog=EXAMPLES,
    )
    add = made.add_argument
    add("folder", type=named, metavar="FOLDER", help="Hugging Face folder, quantized or not, or Megatron checkpoint")
    texts = made.add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", nargs="+", metavar="PATH", help="files or folders of text to take prompts from")
    texts.add_argument("--chat", nargs="+", metavar="FILE", help="JSON lines with 'messages' to take prompts from")
    server = "OpenAI-compatible server that runs the folder, drafts and has /metrics; default: run it here"
    add("--server", metavar="URL", help=server)
    add("--model", metavar="NAME", help="model name on --server; default: the first one listed")
    lost = "fraction of the recorded acceptance that may be lost, beyond statistical error; default: 0.05"
    add("--tolerance", type=float, default=0.05, metavar="F", help=lost)
    add("--prompts", type=int, default=32, metavar="N", help="number of prompts; default: 32")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="tokens per prompt from a document; default: 32")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate per prompt; default: 64")
    add_sampling_flags(made, temperature=0.0)
    add("--seed", type=int, default=1234, metavar="N", help="seed for prompts and sampling; default: 1234")
    drafts = "how to draft, as in generate, without --server; default: as many tokens as the record has positions"
    add("--speculative-config", metavar="JSON", help=drafts)
    add("--batch-size", type=int, default=8, metavar="N", help="prompts per batch, without --server; default: 8")
    add("--dtype", choices=DTYPES, help="data type of the weights, without --server; default: the folder's")
    add("--tokenizer", type=named, metavar="DIR", help="Hugging Face tokenizer; default: the folder's")
    add("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer folder")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    made.set_defaults(logprobs=False)
    return made


def run(args: Namespace) -> int:
    """Measure, print and compare; return the exit status. Raise ValueError for invalid input."""
    from megatron_mtp.checkpoint.hf.hub import local_folder
    from megatron_mtp.data.tokenizer import end_tokens, read_tokenizer

    _check(args)
    args.folder = local_folder(args.folder)
    recorded = read_record(args.folder)
    if not recorded:
        raise ValueError(
            f"{args.folder} has no {RECORD} to compare with; measure the checkpoint with megatron-mtp evaluate, which "
            "writes it, and export again."
        )
    folder = args.tokenizer or _tokenizer_of(args.folder)
    if folder is None:
        raise ValueError(f"{args.folder} names no tokenizer for the text; give --tokenizer.")
    tokenizer = read_tokenizer(folder, args.trust_remote_code)
    prompts, ends = _prompts(args, tokenizer), end_tokens(tokenizer)
    of_prompts = (_served if args.server else _drafted)(args, prompts, recorded, tokenizer, ends)
    result = _compared(args, [document for document, _ in prompts], of_prompts, recorded)
    print(json.dumps(result) if args.json else text_of(result), flush=True)
    return 0 if result["ok"] else LESS


def _check(args: Namespace) -> None:
    """Raise ValueError for a value that is not allowed."""
    check_counts(args, "prompts", "prompt_tokens", "max_new_tokens", "batch_size")
    if not 0 <= args.tolerance < 1:
        raise ValueError(f"--tolerance is {args.tolerance:g}; give 0 or more, and less than 1.")
    if args.server is None and args.model is not None:
        raise ValueError("--model was given without --server; leave it out.")
    for name in ("speculative_config", "dtype") if args.server else ():
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} was given with --server, which runs the model as it was started; leave it out.")


def _tokenizer_of(folder: Path) -> Path | None:
    from megatron_mtp.megatron.checkpoint.iterations import has_tokenizer, is_checkpoint, run_tokenizer
    from megatron_mtp.megatron.checkpoint.reader import DistReader

    if is_checkpoint(folder):
        reader = DistReader(folder)
        return run_tokenizer(reader.common()["args"], reader.folder.parent)
    return folder if has_tokenizer(folder) else None


def _prompts(args: Namespace, tokenizer: "PreTrainedTokenizerBase") -> NumberedPrompts:
    """Return turns of chats, or pieces of documents, evenly spaced. Raise ValueError if there are too few."""
    from megatron_mtp.data.corpus import TEXT_FILES, find_files, list_documents, read_document
    from megatron_mtp.data.prompts import UserTurns

    if args.chat:
        turns = UserTurns(args.chat, tokenizer, args.seed, "1", "training")
        return [(number % turns.documents, turns.prompt(number)) for number in range(args.prompts)]
    documents = list_documents(find_files(args.text, TEXT_FILES, "--text"))
    chosen = documents[:: max(1, len(documents) // args.prompts)][: args.prompts]
    found: NumberedPrompts = []
    for number, document in enumerate(chosen):
        ids = tokenizer(read_document(document, "text"), add_special_tokens=False).input_ids
        pieces = min(-(-args.prompts // len(chosen)), len(ids) // args.prompt_tokens)
        apart = (len(ids) - args.prompt_tokens) // max(1, pieces - 1)
        found += [(number, ids[piece * apart :][: args.prompt_tokens]) for piece in range(pieces)]
    if len(found) < args.prompts:
        raise ValueError(
            f"--text has {len(found)} prompts of {args.prompt_tokens} tokens, and {args.prompts} are needed; give "
            "more text, or fewer or shorter prompts (--prompts, --prompt-tokens)."
        )
    return found[: args.prompts]


# --- drafts per prompt -----------------------------------------------------------------------------------------------


def _drafted(
    args: Namespace,
    prompts: NumberedPrompts,
    recorded: list[float],
    tokenizer: "PreTrainedTokenizerBase",
    ends: frozenset[int],
) -> list[AcceptanceStats]:
    """Measure what this package's engine accepts, by prompt; a folder is converted into a temporary one."""
    import torch

    from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
    from megatron_mtp.checkpoint.convert.stream import Options
    from megatron_mtp.data.tokenizer import entries
    from megatron_mtp.decoding.load import load_checkpoint
    from megatron_mtp.decoding.method import parse_config
    from megatron_mtp.megatron.checkpoint.iterations import is_checkpoint

    given = None if args.speculative_config is None else parse_config(args.speculative_config)
    with TemporaryDirectory(prefix="megatron-mtp-") as temporary:
        folder = args.folder
        if not is_checkpoint(folder):
            folder = Path(temporary) / "checkpoint"
            hf_to_mcore(args.folder, folder, Options(quiet=True))
        dtype = None if args.dtype is None else getattr(torch, args.dtype)
        trusted = args.trust_remote_code
        runner = load_checkpoint(folder, entries(tokenizer), dtype, "FOLDER", trusted, given).runner
    return _counted(args, prompts, runner, given or _method(runner, len(recorded)), ends)


def _method(runner: "Runner", positions: int) -> "SpeculativeConfig":
    """Return a method with as many drafts as were recorded, from that many MTP layers or one repeated layer."""
    from megatron_mtp.decoding.config import SpeculativeConfig

    if runner.depths == positions and not runner.shares_kv:
        return SpeculativeConfig("mtp")
    return SpeculativeConfig("mtp_eagle", positions)


def _counted(
    args: Namespace, prompts: NumberedPrompts, runner: "Runner", method: "SpeculativeConfig", ends: frozenset[int]
) -> list[AcceptanceStats]:
    from megatron_mtp.data.samples import seed_of
    from megatron_mtp.decoding.engine import Engine, blocks_for
    from megatron_mtp.decoding.requests import Request
    from megatron_mtp.decoding.sampling import Sampling
    from megatron_mtp.decoding.scheduler import EngineSettings

    settings = EngineSettings(args.batch_size, len(prompts), blocks_for(args.batch_size, runner))
    engine, sampling = Engine(runner, settings, method), Sampling.of(args)
    stats = {
        engine.add(Request(prompt, args.max_new_tokens, sampling, seed_of(args.seed, number), stop_ids=ends)): (
            AcceptanceStats()
        )
        for number, (_, prompt) in enumerate(prompts)
    }
    while engine.busy:
        for update in engine.step():
            stats[update.request].count(update.offered, update.accepted, len(update.tokens))
    return list(stats.values())


def _served(
    args: Namespace,
    prompts: NumberedPrompts,
    recorded: list[float],
    tokenizer: "PreTrainedTokenizerBase",
    ends: frozenset[int],
) -> list[AcceptanceStats]:
    """Measure what a server accepts, one prompt at a time, from the increase of its counters."""
    from megatron_mtp.cli.served_texts import TextServer

    args.batch_size = 1
    server = TextServer(args)
    positions = server.start(tokenizer, ends)
    if positions is not None and max(len(prompt) for _, prompt in prompts) >= positions:
        raise ValueError(f"a prompt is longer than the {positions} positions of {args.server}; give shorter ones.")
    counted: list[AcceptanceStats] = []
    before = _counters(args.server)

    def keep(_: "Sample") -> None:
        nonlocal before
        after = _counters(args.server)
        drafts = after[0] - before[0]
        accepted = [now - then for now, then in zip(after[1], before[1] or [0] * len(after[1]), strict=True)]
        reached = [drafts, *accepted[:-1]] if accepted else []
        counted.append(AcceptanceStats(accepted_at=accepted, offered_at=[drafts] * len(accepted), reached_at=reached))
        before = after

    server.continue_all(((number, prompt) for number, (_, prompt) in enumerate(prompts)), keep)
    return counted


def _counters(url: str) -> tuple[int, list[int]]:
    """Return drafts, and accepted tokens by position, since the server's start.

    Raise ValueError for a server without them.
    """
    with from_extra("openai", "--server", "prometheus_client"):
        from prometheus_client.parser import text_string_to_metric_families

    page = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
    try:
        with urlopen(page, timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, ValueError) as error:
        raise ValueError(f"--server: {page} cannot be read ({error}); see that the server runs.") from error
    samples = [sample for family in families for sample in family.samples]
    drafts = [sample.value for sample in samples if sample.name.endswith(COUNTERS[0])]
    by_position: dict[int, float] = {}
    for sample in samples:
        if sample.name.endswith(COUNTERS[1]):
            position = int(sample.labels["position"])
            by_position[position] = by_position.get(position, 0) + sample.value
    if not drafts:
        raise ValueError(
            f"--server: {page} has no {COUNTERS[0]}, by which vLLM and megatron-mtp serve count drafts; start the "
            "server with a --speculative-config."
        )
    return int(sum(drafts)), [int(by_position[position]) for position in sorted(by_position)]


# --- the comparison --------------------------------------------------------------------------------------------------


def _compared(
    args: Namespace, documents: list[int], of_prompts: list[AcceptanceStats], recorded: list[float]
) -> dict[str, Any]:
    """Return the result. Raise ValueError if there are too few drafts to compare."""
    count = len(set(documents))
    units: dict[int, AcceptanceStats] = {}
    for place, (document, stats) in enumerate(zip(documents, of_prompts, strict=True)):
        unit = document if count >= LEAST_DOCUMENTS else place  # with few documents, resample prompts
        units[unit] = units.get(unit, AcceptanceStats()) + stats
    whole = sum(units.values(), AcceptanceStats())
    drafts = next(iter(whole.offered_at), 0)
    if drafts < LEAST_DRAFTS:
        raise ValueError(
            f"{drafts} drafts were made, and a comparison needs {LEAST_DRAFTS}; give more --prompts, or more "
            "--max-new-tokens, and check that the model drafts."
        )
    positions = min(len(recorded), len(whole.offered_at))
    drawn_RD = resampled(list(units.values()))[:, :positions]
    found = whole.acceptance[:positions]
    low, high = (float(one) for one in np.percentile(drawn_RD.sum(axis=1), SIDES))
    least = (1 - args.tolerance) * sum(recorded[:positions])
    return {
        "folder": str(args.folder),
        "server": args.server,
        "prompts": len(of_prompts),
        "documents": count,
        "drafts": drafts,
        "recorded acceptance": recorded[:positions],
        "acceptance": found,
        "acceptance error": [float(one) for one in drawn_RD.std(axis=0)],
        "recorded drafts accepted a step": sum(recorded[:positions]),
        "drafts accepted a step": sum(found),
        "95 % interval": [low, high],
        "tolerance": args.tolerance,
        "ok": high >= least,
    }


def text_of(result: dict[str, Any]) -> str:
    """Format the result as text: a table by position, and the verdict."""
    lines = ["position   recorded   accepted"]
    rows = zip(*(result[name] for name in ("recorded acceptance", "acceptance", "acceptance error")), strict=True)
    lines += [
        f"{at:8} {recorded:10.1%} {found:10.1%} ± {error:.1%}" for at, (recorded, found, error) in enumerate(rows, 1)
    ]
    (low, high), recorded = result["95 % interval"], result["recorded drafts accepted a step"]
    counts = f"{result['drafts']} drafts of {result['prompts']} prompts in {result['documents']} documents"
    found = result["drafts accepted a step"]
    lines.append(
        f"drafts accepted a step: {found:.3f} ({low:.3f} to {high:.3f}), and {recorded:.3f} recorded; {counts}"
    )
    if result["ok"]:
        return "\n".join([*lines, "drafts are accepted as recorded."])
    less = f"fewer drafts are accepted than recorded, beyond the error and a tolerance of {result['tolerance']:.0%}"
    causes = "the text differs from the evaluation's, the MTP layers are not of this trunk (megatron-mtp audit)"
    more = "the server drafts differently" if result["server"] else "they are quantized too coarsely"
    return "\n".join([*lines, f"{less}: {causes}, or {more}."])
