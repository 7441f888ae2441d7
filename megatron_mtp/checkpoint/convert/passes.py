"""How a repeated layer was trained: kept in a folder's `config.json` by an export, and read back by an import.

The folder holds D depths, as the checkpoint does. Loaders of transformers and of engines ignore these keys.
"""

from argparse import Namespace
from typing import Any

from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.config import trained_depths

UNROLL = "mtp_unroll"
"""Passes of the layer in training."""

SHARES = "mtp_repeated_layer_shares_kv"
"""Whether later passes attended to the keys and values of pass 1."""


def pass_keys(args: Namespace) -> dict[str, Any]:
    """The keys of `config.json` for a checkpoint with these arguments; none where every depth had one pass."""
    if not getattr(args, "mtp_use_repeated_layer", False) or trained_depths(args) < 2:
        return {}
    shares = {SHARES: True} if getattr(args, SHARES, False) else {}
    return {UNROLL: trained_depths(args), **shares}


def set_passes(args: Namespace, config: HFConfig) -> None:
    """Give Megatron's arguments of an imported folder what `pass_keys` has written.

    Raises:
        ValueError: a value is no number of passes, or neither true nor false.
    """
    if args.mtp_num_layers and config.has(UNROLL):
        args.mtp_use_repeated_layer = True
        args.mtp_unroll = config.integer(UNROLL, least=args.mtp_num_layers)
        args.mtp_repeated_layer_shares_kv = config.flag(SHARES)
