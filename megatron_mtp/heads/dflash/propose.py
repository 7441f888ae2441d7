"""Drafting with DFlash: K + 1 rows, of which the last K draft the tokens at their own positions."""

from megatron_mtp.decoding.proposers.blocks import Blocks


class DFlash(Blocks):
    """Drafts a block with a DFlash drafter."""

    line = "a DFlash drafter, which fills a block of tokens in one pass; K is at most that of its training"
    depths = "dflash"
