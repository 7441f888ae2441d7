"""Checkpoints of tiny trainings with a tokenizer, saved for conversion."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megatron_mtp.megatron.checkpoint import TRACKER
from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.model.arguments import config_of
from megatron_mtp.model.build import build
from megatron_mtp.model.stored_arguments import completed

TINY = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0"
)


def save(model: torch.nn.Module, args: Any, folder: Path) -> Path:
    """Save as Megatron does: with vocabulary padding."""
    inner = folder / "iter_0000001"
    inner.mkdir(parents=True)
    entries = {"model": model.sharded_state_dict(), "args": args, "checkpoint_version": 3.0, "iteration": 1}
    dist_checkpointing.save(entries, str(inner))
    (folder / TRACKER).write_text("1")
    return folder


def trained(folder: Path, flags: str = "", vocabulary: int | None = 100, tokenizer: Path | None = None) -> Path:
    """Return a checkpoint with two MTP layers and at least 128 vocabulary rows, as a run would leave it."""
    words = [*TINY.split(), *flags.split(), "--mtp-num-layers", "2", "--untie-embeddings-and-output-weights"]
    args = parsed(words, vocabulary or 300)
    args.vocab_size, args.tokenizer_model = vocabulary, None if tokenizer is None else str(tokenizer)
    model = build(config_of(completed(args)))
    return save(model, args, folder)
