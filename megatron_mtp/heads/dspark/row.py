"""Table row of DSpark: layers that it reads, loss, settings and parts."""

from megatron_mtp.spec.kinds import (
    IDLE_ROWS,
    MARKOV,
    MARKOV_RANK,
    SETTINGS_OF_BLOCKS,
    DrafterKind,
    spread_layers,
    weights_of_blocks,
)

ROW = DrafterKind(
    name="dspark",
    called="a DSpark drafter",
    architecture="Qwen3DSparkModel",
    model_type="qwen3",
    block="megatron_mtp.heads.dspark.block:DSparkBlock",
    folder="megatron_mtp.heads.dspark.folder:FOLDER",
    methods={"dspark": "megatron_mtp.heads.dspark.propose:DSpark"},
    default_layers=spread_layers,
    weights=weights_of_blocks,
    loss={"mtp_loss": "mix", "mtp_loss_mix": "ce=0.1,tv=0.9"},
    settings={**SETTINGS_OF_BLOCKS, **MARKOV_RANK, **IDLE_ROWS},
    also_called=("DSparkSpeculator", "DSparkDraftModel"),
    has_confidence=True,
    begins={**MARKOV, "confidence_weight": 0, "confidence_bias": 0},
)
