"""Table row of DFlash: layers that it reads, loss, settings and parts."""

from megatron_mtp.spec.kinds import SETTINGS_OF_BLOCKS, DrafterKind, spread_layers, weights_of_blocks

ROW = DrafterKind(
    name="dflash",
    called="a DFlash drafter",
    architecture="DFlashDraftModel",
    model_type="qwen3",
    block="megatron_mtp.model.block_drafter:BlockDrafter",
    folder="megatron_mtp.heads.dflash.folder:FOLDER",
    methods={"dflash": "megatron_mtp.heads.dflash.propose:DFlash"},
    default_layers=spread_layers,
    weights=weights_of_blocks,
    loss={"mtp_loss": "ce"},
    settings=SETTINGS_OF_BLOCKS,
    also_called=("DFlashSpeculator",),
    idle_rows=1,
)
