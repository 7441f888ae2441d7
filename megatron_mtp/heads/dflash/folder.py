"""Hugging Face format of a DFlash drafter: `fc`, `hidden_norm`, `layers.*`, `norm`."""

from megatron_mtp.checkpoint.convert.drafter_codec import BlockCodec

FOLDER = BlockCodec()
