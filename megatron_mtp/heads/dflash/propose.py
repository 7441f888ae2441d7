"""Drafting with DFlash: K + 1 rows, the last K of which draft the tokens of their own places."""

from megatron_mtp.decoding.proposers.blocks import Blocks


class DFlash(Blocks):
    """Drafts a block with a DFlash drafter."""

    line = "a DFlash drafter, which fills a block of tokens in one pass; K is at most that of its training"
    depths = "dflash"
