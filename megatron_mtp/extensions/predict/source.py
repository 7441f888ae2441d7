"""The given checkpoint in the form that a prediction needs: family, model, and documents as an engine would generate.

In:  a Megatron checkpoint, or a Hugging Face folder, which is converted to a temporary folder.
Out: `Source`; prompts cut from files; their greedy continuations; acceptance of a drafter's drafts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.families import family_of
from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig
from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.data.corpus import TEXT_FILES, find_files, list_documents, read_document
from megatron_mtp.data.tokenizer import end_tokens, entries, read_tokenizer
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import Loaded, load_checkpoint
from megatron_mtp.extensions.predict.acceptance import Sample
from megatron_mtp.megatron.checkpoint.iterations import is_checkpoint
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.spec.head import only_drafter

BATCH = 8
"""Sequences that are continued together."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, the `model_type` of its export, and the kind of its drafter; None where MTP layers draft.

    `is_latent` tells whether the drafter has latent attention.
    """

    checkpoint: Path
    family: str
    drafter: str | None = None
    is_latent: bool = False


@contextmanager
def opened(path: Path, family: str | None, tokenizer: Path | None, trust_remote_code: bool) -> Iterator[Source]:
    """Open the checkpoint within this context.

    Args:
        path: a Megatron checkpoint, a Hugging Face folder, or a name on the Hub.
        family: `model_type` of the export; None for the one that mcore-to-hf chooses.
        tokenizer: tokenizer folder; None for the checkpoint's own.
        trust_remote_code: whether to run Python code that comes with the tokenizer.

    Raises:
        ValueError: there is no such model, it cannot be exported, or a folder was given with a family.
    """
    path = local_folder(path)
    if is_checkpoint(path):
        reader = DistReader(path)
        form, args = form_of(reader, None, family, tokenizer, trust_remote_code), reader.common()["args"]
        drafter = only_drafter(args)
        is_latent = getattr(args, "drafter_multi_latent_attention", None) is not None
        yield Source(path, _family(HFConfig.from_keys(form.keys)), drafter, is_latent)
    elif (path / CONFIG).is_file():
        if family is not None:
            raise ValueError(f"--family is '{family}', but {path} is a Hugging Face folder; leave --family out.")
        with TemporaryDirectory(prefix="megatron-mtp-") as folder:
            target = Path(folder) / "checkpoint"
            hf_to_mcore(path, target, Options(quiet=True))
            yield Source(target, _family(HFConfig.read(path)))
    else:
        raise ValueError(f"{path} is neither a Megatron checkpoint nor a Hugging Face folder; give one of the two.")


def _family(config: HFConfig) -> str:
    return family_of(config).model_types[0]


def cut_prompts(ids: list[int], count: int, length: int) -> list[list[int]]:
    """Cut this many pieces out of a document, evenly spread and without overlap.

    Raises:
        ValueError: the document is too short.
    """
    if len(ids) < count * length:
        raise ValueError(
            f"--text has {len(ids)} tokens, and {count} prompts of {length} tokens need {count * length}; give more "
            "text, or fewer or shorter prompts (--prompts, --prompt-tokens)."
        )
    apart = (len(ids) - length) // max(1, count - 1)
    return [ids[place * apart :][:length] for place in range(count)]


def read_ids(files: list[str], folder: Path, trust_remote_code: bool) -> tuple[list[int], frozenset[int]]:
    """Return token ids of all input, and the end tokens; folders are searched as by preprocess."""
    tokenizer = read_tokenizer(folder, trust_remote_code)
    documents = list_documents(find_files(files, TEXT_FILES))
    texts = (read_document(document, "text") for document in documents)
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False).input_ids]
    return ids, end_tokens(tokenizer)


def load(source: Source, tokenizer: Path | None, trust_remote_code: bool) -> tuple[Loaded, Path]:
    """Load the model to generate with, and return its tokenizer folder.

    Raises:
        ValueError: Megatron cannot run the model, or there is no tokenizer.
    """
    vocabulary = None if tokenizer is None else entries(read_tokenizer(tokenizer, trust_remote_code))
    loaded = load_checkpoint(source.checkpoint, vocabulary, torch.float32, "CKPT", trust_remote_code)
    folder = tokenizer or loaded.tokenizer
    if folder is None:
        raise ValueError(f"{source.checkpoint} names no tokenizer for the text; give --tokenizer.")
    return loaded, folder


def continued(
    loaded: Loaded,
    prompts: list[list[int]],
    new: int,
    count: int,
    ends: frozenset[int],
    progress: Callable[[int], object],
) -> list[Sample]:
    """Return every prompt with its greedy continuation.

    Args:
        loaded: the model.
        prompts: token ids.
        new: number of tokens to generate for each.
        count: K, drafts per round: this many more tokens are generated, to compare the last round's drafts with.
        ends: end tokens.
        progress: called with the number of finished documents.

    Raises:
        ValueError: the model does not have this many positions.
    """
    _check_positions(loaded, len(prompts[0]) + new + count + 1)
    samples = []
    for batch in _batches(prompts):
        made = generate(loaded.runner, batch, new + count + 1).token_ids
        samples += [_sample(prompt, text, new, ends) for prompt, text in zip(batch, made, strict=True)]
        progress(len(batch))
    return samples


def accepted_of_drafter(
    loaded: Loaded,
    prompts: list[list[int]],
    new: int,
    count: int,
    ends: frozenset[int],
    progress: Callable[[int], object],
) -> tuple[AcceptanceStats, int]:
    """Return the acceptance of the drafter's drafts in our own decoder, and the number of new tokens.

    Arguments as above.
    """
    _check_positions(loaded, len(prompts[0]) + new + count + 1)
    stats, made = AcceptanceStats(), 0
    config = {"method": loaded.runner.kind, "num_speculative_tokens": count}
    for batch in _batches(prompts):
        done = generate(loaded.runner, batch, new, speculative=config, stop_ids=ends)
        stats, made = stats + done.stats, made + sum(map(len, done.token_ids))
        progress(len(batch))
    return replace(stats, target_forwards=sum(stats.offered_at[:1])), made  # count only forwards with a draft


def _batches(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    return (prompts[first : first + BATCH] for first in range(0, len(prompts), BATCH))


def _check_positions(loaded: Loaded, length: int) -> None:
    if length > loaded.runner.positions:
        raise ValueError(
            f"--prompt-tokens and --new-tokens ask for {length} positions with the drafts, and the model has "
            f"{loaded.runner.positions}; give fewer."
        )


def _sample(prompt: list[int], text: list[int], new: int, ends: frozenset[int]) -> Sample:
    counted = next((place for place, token in enumerate(text[:new], start=1) if token in ends), new)
    return Sample([*prompt, *text], len(prompt), len(prompt) + counted)
