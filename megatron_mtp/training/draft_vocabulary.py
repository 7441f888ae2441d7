"""The draft vocabulary of a run: the list of the checkpoint that it loads, or a new one by the flags."""

from argparse import Namespace
from pathlib import Path

import torch
from megatron.training import get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_mtp.checkpoint.mcore.reader import stored_draft_vocabulary
from megatron_mtp.config import MTPConfig
from megatron_mtp.data.frequent_tokens import FILE, SIZE, most_frequent, tokens_of_file
from megatron_mtp.training.loading import loaded_iteration
from megatron_mtp.training.short_log import say


def draft_vocabulary(args: Namespace, settings: MTPConfig) -> tuple[Tensor | None, bool]:
    """The tokens [N], ascending (None for all), and whether the checkpoint that will be loaded lacks them.

    Every rank computes the same list, before there is a process group.

    Raises:
        ValueError: the flags do not fit the checkpoint, the data, the vocabulary or the layout.
    """
    if args.mtp_num_layers is None:
        return None, False
    loaded = loaded_iteration(args)
    stored = None if loaded is None else stored_draft_vocabulary(loaded[1])
    if stored is not None and loaded is not None:
        _check_same(stored, settings, loaded[0])
        tokens, source = stored.tolist(), f"as {loaded[0]} has them"
    elif settings.mtp_draft_vocab_file is not None:
        tokens = tokens_of_file(Path(settings.mtp_draft_vocab_file), get_tokenizer().vocab_size)
        source = f"those of {settings.mtp_draft_vocab_file}"
    elif settings.mtp_draft_vocab_size is not None:
        tokens, source = _counted(args, settings.mtp_draft_vocab_size)
    else:
        return None, False
    _check_slices(tokens, args)
    if args.rank == 0:
        say(f"> the depths draft {len(tokens)} of {args.padded_vocab_size} tokens, {source}")
    return torch.tensor(tokens), loaded is not None and stored is None


def _check_same(stored: Tensor, settings: MTPConfig, source: str) -> None:
    size, file = settings.mtp_draft_vocab_size, settings.mtp_draft_vocab_file
    if size is not None and size != stored.numel():
        raise ValueError(
            f"{SIZE} is {size}, but the depths of {source} were trained to draft {stored.numel()} tokens; "
            "leave the flag out to go on with those, or start from a checkpoint without depths."
        )
    if file is not None and tokens_of_file(Path(file), get_tokenizer().vocab_size) != stored.tolist():
        raise ValueError(
            f"{FILE} is {file}, but the depths of {source} were trained to draft {stored.numel()} other "
            "tokens; leave the flag out to go on with those, or start from a checkpoint without depths."
        )


def _counted(args: Namespace, size: int) -> tuple[list[int], str]:
    vocab_size: int = get_tokenizer().vocab_size
    if size > vocab_size:
        raise ValueError(f"{SIZE} is {size}, and the tokenizer has {vocab_size} tokens; give at most that.")
    blend, per_split = get_blend_and_blend_per_split(args)
    prefixes, weights = blend or (per_split or [None])[0] or ([], None)
    if args.sft or args.mock_data or not prefixes or any("://" in prefix for prefix in prefixes):
        raise ValueError(
            f"{SIZE} is {size}, but tokens are counted in local .bin/.idx files (--data-path) alone; give {FILE}, a "
            "text file with one token id on every line."
        )
    tokens, share = most_frequent(prefixes, weights, size, vocab_size)
    return tokens, f"the most frequent, {share:.1%} of the data"


def _check_slices(tokens: list[int], args: Namespace) -> None:
    """Refuse a slice of the head without drafted tokens: every tensor-parallel rank drafts from its own."""
    ranks = args.tensor_model_parallel_size
    width = args.padded_vocab_size // ranks
    empty = [rank for rank in range(ranks) if not any(token // width == rank for token in tokens)]
    if empty:
        raise ValueError(
            f"--tensor-model-parallel-size is {ranks}, and of the {len(tokens)} draft tokens none has an id from "
            f"{empty[0] * width} to {empty[0] * width + width - 1}, the slice of one rank; draft more tokens, or give "
            "fewer ranks."
        )
