"""A prediction: the checkpoint continues prompts, and its MTP layers draft over the results by the engine's rules.

For a drafter, our own decoder drafts instead, because its rules are the engine's (`DrafterRules`).
"""

import gc
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.extensions.predict.acceptance import Prediction, predicted
from megatron_mtp.extensions.predict.engines import Engine
from megatron_mtp.extensions.predict.report import Case
from megatron_mtp.extensions.predict.rows import check_model, depth_layers
from megatron_mtp.extensions.predict.source import (
    Source,
    accepted_of_drafter,
    continued,
    cut_prompts,
    load,
    opened,
    read_ids,
)


def predict(checkpoint: Path, engine: Engine, args: Namespace) -> tuple[Case, Prediction]:
    """Predict the acceptance of a checkpoint's MTP layers, or of its drafter, in an engine.

    Args:
        checkpoint: a Megatron checkpoint, a Hugging Face folder, or a name on the Hub.
        engine: a row of `ENGINES`.
        args: flags of `megatron-mtp predict`.

    Raises:
        ValueError: the checkpoint cannot be read, or the engine cannot draft with it.
    """
    with opened(checkpoint, args.family, args.tokenizer, args.trust_remote_code) as source:
        return _predict_drafter(source, engine, args) if source.drafter else _predict_depths(source, engine, args)


def _predict_depths(source: Source, engine: Engine, args: Namespace) -> tuple[Case, Prediction]:
    """Generate with a cache, then run the MTP layers over the texts by the engine's rules."""
    engine.feeding(source.family, 1)  # rejects an unsupported family before loading
    loaded, tokenizer = load(source, args.tokenizer, args.trust_remote_code)
    model = loaded.runner.model
    check_model(model)
    engine.check_layers(source.family, depth_layers(model))
    depths, count = len(model.mtp.layers), args.num_speculative_tokens or model.mtp.depths
    engine.check_count(count, depths)
    prompts, ends = _prompts(args, tokenizer)
    with _bar("generating", len(prompts)) as bar:
        samples = continued(loaded, prompts, args.new_tokens, count, ends, bar.update)
    if all(sample.end <= sample.prompt + 1 for sample in samples):
        raise ValueError(DRAFTS_NOTHING)
    del loaded, model
    gc.collect()  # free the generating model before loading the drafting one
    feeding = engine.feeding(source.family, depths)
    with _bar("drafting", len(samples)) as bar:
        found = predicted(load_model(source.checkpoint), samples, count, feeding, bar.update)
    new = sum(sample.end - sample.prompt for sample in samples)
    return Case(engine, source.family, depths, None, count, len(samples), new), found


def _predict_drafter(source: Source, engine: Engine, args: Namespace) -> tuple[Case, Prediction]:
    """Draft in this package's decoder."""
    assert source.drafter is not None
    rules = engine.drafter(source.drafter, source.is_latent)
    loaded, tokenizer = load(source, args.tokenizer, args.trust_remote_code)
    count = args.num_speculative_tokens or loaded.runner.depths
    prompts, ends = _prompts(args, tokenizer)
    with _bar("drafting", len(prompts)) as bar:
        stats, new = accepted_of_drafter(loaded, prompts, args.new_tokens, count, ends, bar.update)
    if not stats.target_forwards:
        raise ValueError(DRAFTS_NOTHING)
    return Case(engine, source.family, 0, source.drafter, count, len(prompts), new, rules), Prediction(stats, stats, [])


DRAFTS_NOTHING = "the model ends every text with its first token and drafts nothing; give other --text."


def _prompts(args: Namespace, tokenizer: Path) -> tuple[list[list[int]], frozenset[int]]:
    """Return pieces of the text, and the tokens that end a text."""
    ids, ends = read_ids(args.text, tokenizer, args.trust_remote_code)
    return cut_prompts(ids, args.prompts, args.prompt_tokens), ends


@contextmanager
def _bar(title: str, total: int) -> Iterator["tqdm[None]"]:
    with tqdm(desc=title, total=total, unit="text", leave=False, disable=None) as bar:
        yield bar
