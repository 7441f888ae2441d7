"""How a repeated layer was trained: kept in a folder's `config.json` by an export, and read back by an import.

The folder holds D depths, as the checkpoint does. Loaders of transformers and of engines ignore these keys.
"""

from argparse import Namespace
from typing import Any

from megatron_mtp.checkpoint.hf.config import HFConfig

UNROLL = "mtp_unroll"
"""Passes of the layer in training."""


def pass_keys(args: Namespace) -> dict[str, Any]:
    """The keys of `config.json` for a checkpoint with these arguments; none where every depth had one pass."""
    passes = getattr(args, UNROLL, None)
    return {} if passes is None else {UNROLL: passes}


def set_passes(args: Namespace, config: HFConfig) -> None:
    """Give Megatron's arguments of an imported folder what `pass_keys` has written.

    Raises:
        ValueError: the value is no number of passes.
    """
    if args.mtp_num_layers and config.has(UNROLL):
        args.mtp_use_repeated_layer = True
        args.mtp_unroll = config.integer(UNROLL, least=args.mtp_num_layers)
