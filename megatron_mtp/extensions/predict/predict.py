"""A prediction: the checkpoint continues prompts, and its MTP layers draft over the texts by the engine's rules."""

import gc
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from megatron_mtp.checkpoint.families.hybrid import HYBRID
from megatron_mtp.checkpoint.mcore.model import load_model
from megatron_mtp.extensions.predict.acceptance import Foretold, foretell
from megatron_mtp.extensions.predict.engines import Engine
from megatron_mtp.extensions.predict.report import Case
from megatron_mtp.extensions.predict.rows import HYBRID_SENTENCE, check_model
from megatron_mtp.extensions.predict.source import continued, cut_prompts, load, opened, read_ids


def predict(checkpoint: Path, engine: Engine, args: Namespace) -> tuple[Case, Foretold]:
    """Generate with a cache, then run the MTP layers by the engine's rules over the texts.

    Args:
        checkpoint: a Megatron checkpoint, a Hugging Face folder, or a name on the Hub.
        engine: a row of `ENGINES`.
        args: the flags of `megatron-mtp foretell`.

    Raises:
        ValueError: the checkpoint cannot be read, or the engine cannot draft with its MTP layers so.
    """
    with opened(checkpoint, args.family, args.tokenizer, args.trust_remote_code) as source:
        if any(source.family in family.model_types for family in HYBRID):
            raise ValueError(HYBRID_SENTENCE)
        engine.feeding(source.family, 1)  # refuses a family before anything is loaded
        loaded, tokenizer = load(source, args.tokenizer, args.trust_remote_code)
        model = loaded.runner.model
        check_model(model)
        depths, count = len(model.mtp.layers), args.num_speculative_tokens or model.mtp.depths
        engine.check_count(count, depths)
        ids, ends = read_ids(args.text, tokenizer, args.trust_remote_code)
        prompts = cut_prompts(ids, args.prompts, args.prompt_tokens)
        with _bar("generating", len(prompts)) as bar:
            samples = continued(loaded, prompts, args.new_tokens, count, ends, bar.update)
        if all(sample.end <= sample.prompt + 1 for sample in samples):
            raise ValueError("the model ends every text with its first token and drafts nothing; give other --text.")
        del loaded, model
        gc.collect()  # the model that generates, before the one that drafts is loaded
        feeding = engine.feeding(source.family, depths)
        with _bar("drafting", len(samples)) as bar:
            foretold = foretell(load_model(source.checkpoint), samples, count, feeding, bar.update)
    new = sum(sample.end - sample.prompt for sample in samples)
    return Case(engine, source.family, depths, count, len(samples), new), foretold


@contextmanager
def _bar(title: str, total: int) -> Iterator["tqdm[None]"]:
    with tqdm(desc=title, total=total, unit="text", leave=False, disable=None) as bar:
        yield bar
