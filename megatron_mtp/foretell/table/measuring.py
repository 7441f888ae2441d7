"""A row of the table: the checkpoint drafts greedily, and engines' rules are run over its own continuations."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.families import family_of
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.checkpoint.mcore.iterations import is_checkpoint
from megatron_mtp.checkpoint.mcore.model import load_model
from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.drafting.api import generate
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.types import AcceptanceStats, merged
from megatron_mtp.foretell.acceptance import Acceptance, Sample, accepted
from megatron_mtp.foretell.engines import ENGINES
from megatron_mtp.foretell.rows import check_model, read_text
from megatron_mtp.foretell.source import BATCH, Source, continued, cut_prompts, load, opened, read_ids
from megatron_mtp.foretell.table.rows import Asked, Row

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Opened:
    """A checkpoint for a row.

    Attributes:
        checkpoint: Megatron's; a Hugging Face folder was converted.
        family: `model_type` of its Hugging Face form; None if it has none.
        why: the reason for that.
        objective: what its depths were trained on.
    """

    checkpoint: Path
    family: str | None
    why: str
    objective: str


def measure(asked: Asked, step: Callable[[int], object]) -> Row:
    """Fill a row.

    Args:
        asked: what to measure.
        step: called with the number of prompts that are done; every prompt counts once.

    Raises:
        ValueError: the checkpoint cannot be read or cannot draft so.
    """
    with _opened(asked) as found:
        tokenizer = None if asked.tokenizer is None else Path(asked.tokenizer)
        loaded, folder = load(Source(found.checkpoint, ""), tokenizer, asked.trust_remote_code)
        runner = loaded.runner
        if not runner.depths:
            raise ValueError(f"{asked.checkpoint} has no depths to draft with; attach some (megatron-mtp attach).")
        count = asked.drafts or runner.depths
        ids, stop = read_ids(list(asked.text), folder, asked.trust_remote_code)
        prompts = cut_prompts(ids, asked.prompts, asked.prompt_tokens)
        stats = _drafted(runner, prompts, count, asked.new_tokens, stop, step)
        samples = continued(loaded, prompts, asked.new_tokens, count, stop, lambda _: None) if asked.engines else []
        del loaded, runner
        gc.collect()  # the model that generates, before the one that engines' rules run on is loaded
        foretold = _foretold(asked, found, samples, count)
        depths = _depths(found.checkpoint)
    return {
        "checkpoint": asked.checkpoint,
        "family": found.family,
        "depths": depths,
        "objective": found.objective,
        "drafts": count,
        "acceptance": [round(rate, 4) for rate in stats.accepted_per_position],
        "accepted_length": round(stats.accepted_length, 4),
        "tokens": stats.emitted,
        "foretold": foretold,
        "settings": asked.settings(),
    }


@contextmanager
def _opened(asked: Asked) -> Iterator[Opened]:
    path = local_folder(Path(asked.checkpoint))
    if not is_checkpoint(path):
        tokenizer = None if asked.tokenizer is None else Path(asked.tokenizer)
        with opened(path, None, tokenizer, asked.trust_remote_code) as source:
            yield Opened(source.checkpoint, source.family, "", UNKNOWN)
        return
    family, why = None, ""
    try:
        form = form_of(path, tokenizer=None if asked.tokenizer is None else Path(asked.tokenizer))
        family = family_of(HFConfig.from_keys(form.keys)).model_types[0]
    except ValueError as error:
        why = str(error)
    yield Opened(path, family, why, objective_of(DistReader(path).common()["args"]))


def objective_of(args: Any) -> str:
    """The loss of the depths and what changes it, from the arguments of a training; unknown for a conversion."""
    loss = getattr(args, "mtp_loss", None)
    if loss is None or not hasattr(args, "params_dtype"):
        return UNKNOWN
    mix = f" {args.mtp_loss_mix}" if getattr(args, "mtp_loss_mix", None) else ""
    unroll = f", {args.mtp_unroll} passes" if getattr(args, "mtp_unroll", None) else ""
    frozen = ", trunk frozen" if getattr(args, "mtp_train_only", False) else ""
    return f"{loss}{mix}{unroll}{frozen}"


def _depths(checkpoint: Path) -> int:
    from megatron_mtp.checkpoint.mcore.stored_depths import StoredDepths

    return StoredDepths.of(DistReader(checkpoint).keys).layers


def _drafted(
    runner: Runner, prompts: list[list[int]], count: int, new: int, stop: int | None, step: Callable[[int], object]
) -> AcceptanceStats:
    """What drafting by the depths as they were trained accepts of greedy texts."""
    config = SpeculativeConfig("mtp_eagle" if runner.shares_kv else "mtp", count)
    ends = () if stop is None else (stop,)
    each = []
    for batch in batched(prompts, BATCH):
        each.append(generate(runner, list(batch), new, speculative=config, stop_ids=ends).stats)
        step(len(batch))
    return merged(each)


def _foretold(asked: Asked, found: Opened, samples: list[Sample], count: int) -> dict[str, Any]:
    """By engine: its acceptance by position and accepted length, or the reason why there is none."""
    if not asked.engines:
        return {}
    model = load_model(found.checkpoint)
    foretold: dict[str, Any] = {}
    for name in asked.engines:
        try:
            if found.family is None:
                raise ValueError(found.why)
            check_model(model)
            depths = len(model.mtp.layers)
            feeding = ENGINES[name].feeding(found.family, depths)
            ENGINES[name].check_count(count, depths)
        except ValueError as error:
            foretold[name] = {"reason": str(error)}
            continue
        rounds = Acceptance(0, (0,) * count)
        for sample in samples:
            if sample.end > sample.prompt + 1:
                rounds += accepted(model, read_text(model, sample.tokens), sample, count, feeding)
        if rounds.rounds:
            rates = [round(rate, 4) for rate in rounds.by_position]
            foretold[name] = {"acceptance": rates, "accepted_length": round(1 + rounds.per_round, 4)}
        else:
            foretold[name] = {"reason": "the model ends every text with its first token."}
    return foretold
