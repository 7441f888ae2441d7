"""Table row of Domino: layers that it reads, loss, settings and parts."""

import math

from megatron_mtp.spec.kinds import (
    FROM_1,
    IDLE_ROWS,
    MARKOV_RANK,
    SETTINGS_OF_BLOCKS,
    DrafterKind,
    Setting,
    spread_layers,
)


def weights(drafts: int) -> list[float]:
    """Return loss weights that fall by a factor of e in 7 of 16 drafts, as published for blocks of 16."""
    return [math.exp(-16 * draft / (7 * drafts)) for draft in range(drafts)]


GRU_SIZE = {
    "drafter_gru_size": Setting(
        1024,
        "Size of the recurrent state over the tokens of a block in {kinds}. Default: 1024.",
        allowed=FROM_1,
        metavar="G",
    )
}

ROW = DrafterKind(
    name="domino",
    called="a Domino drafter",
    architecture="DominoDraftModel",
    model_type="qwen3",
    block="megatron_mtp.heads.domino.block:DominoBlock",
    folder="megatron_mtp.heads.domino.folder:FOLDER",
    reference="megatron_mtp.heads.domino.reference:DominoReference",
    methods={"domino": "megatron_mtp.heads.domino.propose:Domino"},
    default_layers=spread_layers,
    weights=weights,
    loss={"mtp_loss": "ce"},
    settings={**SETTINGS_OF_BLOCKS, **MARKOV_RANK, **GRU_SIZE, **IDLE_ROWS},
    projector_type="domino",
    base_share=lambda progress: max(1 - progress, 0.0),
    drafts_all=True,
    begins=dict.fromkeys(("gru_input", "gru_state", "bias_input", "bias_output")),
)
