"""`megatron-mtp foretell`: a checkpoint, an engine and a text in; acceptance by position and its causes out."""

import gc
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from tqdm import tqdm

from megatron_mtp.checkpoint.mcore.model import load_model
from megatron_mtp.drafting.config import MOST_DRAFTED
from megatron_mtp.errors import check_counts, sentences
from megatron_mtp.foretell.acceptance import Foretold, Sample, foretell
from megatron_mtp.foretell.engines import ENGINES, Feeding
from megatron_mtp.foretell.report import Case, as_json, as_table
from megatron_mtp.foretell.rows import check_model
from megatron_mtp.foretell.source import Source, continued, cut_prompts, load, opened, read_ids
from megatron_mtp.model.trunk import MTPTrunk


def main(args: Namespace, program: str) -> int:
    """Foretell and print; bad input ends with one sentence and status 2."""
    with sentences(program):
        _check(args)
        with (
            redirect_stdout(sys.stderr),  # what libraries print is no part of the answer
            opened(args.checkpoint, args.family, args.tokenizer, args.trust_remote_code) as source,
        ):
            case, foretold = _foretell(args, source)
        print(json.dumps(as_json(case, foretold)) if args.json else as_table(case, foretold), flush=True)
    return 0


def _check(args: Namespace) -> None:
    """Raises ValueError for a number that is out of range."""
    check_counts(args, "prompts", "prompt_tokens", "new_tokens")
    count = args.num_speculative_tokens
    if count is not None and not 1 <= count <= MOST_DRAFTED:
        raise ValueError(f"--num-speculative-tokens is {count}; give 1 to {MOST_DRAFTED}.")


def _foretell(args: Namespace, source: Source) -> tuple[Case, Foretold]:
    """Generate with a cache, then run the depths by the engine's rules over the texts."""
    engine = ENGINES[args.engine]
    engine.feeding(source.family, 1)  # refuses a family before anything is loaded
    loaded, tokenizer = load(source, args.tokenizer, args.trust_remote_code)
    model = loaded.runner.model
    check_model(model)
    depths, count = len(model.mtp.layers), args.num_speculative_tokens or model.mtp.depths
    engine.check_count(count, depths)
    ids, stop = read_ids(args.text, tokenizer, args.trust_remote_code)
    prompts = cut_prompts(ids, args.prompts, args.prompt_tokens)
    with _bar("generating", len(prompts)) as bar:
        samples = continued(loaded, prompts, args.new_tokens, count, stop, bar.update)
    del loaded, model
    gc.collect()  # the model that generates, before the one that drafts is loaded
    foretold = _drafted(load_model(source.checkpoint), samples, count, engine.feeding(source.family, depths))
    new = sum(sample.end - sample.prompt for sample in samples)
    return Case(engine, source.family, depths, count, len(samples), new), foretold


def _drafted(model: MTPTrunk, samples: list[Sample], count: int, feeding: Feeding) -> Foretold:
    """Raises ValueError where every text ends at once."""
    if all(sample.end <= sample.prompt + 1 for sample in samples):
        raise ValueError("the model ends every text with its first token, so nothing is drafted; give other --text.")
    with _bar("drafting", len(samples)) as bar:
        return foretell(model, samples, count, feeding, bar.update)


@contextmanager
def _bar(title: str, total: int) -> Iterator["tqdm[None]"]:
    with tqdm(desc=title, total=total, unit="text", leave=False, disable=None) as bar:
        yield bar
