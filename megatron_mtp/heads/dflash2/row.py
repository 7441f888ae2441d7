"""Table row of DFlash2: layers that it reads, loss, settings and parts."""

from megatron_mtp.spec.kinds import (
    FIRST_TAP,
    MARKOV,
    MARKOV_RANK,
    SETTINGS_OF_BLOCKS,
    DrafterKind,
    spread_layers,
    weights_of_blocks,
)

TAPS, CHANNELS_OF_A_KERNEL, CANDIDATES = 2, 16, 16
"""Sizes in every published checkpoint: rows that a convolution adds up, channels that share a row's contribution to its
kernel, and candidate tokens of a draft.
"""

ROW = DrafterKind(
    name="dflash2",
    called="a DFlash2 drafter",
    architecture="DFlash2DraftModel",
    model_type="qwen3",
    block="megatron_mtp.heads.dflash2.block:DFlash2Block",
    folder="megatron_mtp.heads.dflash2.folder:FOLDER",
    methods={"dflash2": "megatron_mtp.heads.dflash2.propose:DFlash2"},
    default_layers=spread_layers,
    weights=weights_of_blocks,
    loss={"mtp_loss": "kd"},
    settings={**SETTINGS_OF_BLOCKS, **MARKOV_RANK},
    idle_rows=1,
    drafts_all=True,
    begins={**MARKOV, "base_kernel": FIRST_TAP, "markov_projection": None, "kernel_projection": 0},
)
