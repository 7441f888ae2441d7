"""Table row of P-EAGLE: layers that it reads, loss, settings and parts."""

from dataclasses import replace

from megatron_mtp.heads.eagle3.row import NORM_BEFORE_RESIDUAL, READS, default_layers
from megatron_mtp.spec.kinds import SETTINGS_OF_BLOCKS, DrafterKind


def weights(drafts: int) -> list[float]:
    """Return loss weights of drafts 1 .. K: the fraction of positions at which published trainers train each.

    They leave out random positions to save memory: draft k has 0.7^(k - 1) of them, but at least a fifth. Here every
    position trains all drafts, with these weights.
    """
    return [max(0.7**draft, 0.2) for draft in range(drafts)]


ROW = DrafterKind(
    name="peagle",
    called="a P-EAGLE drafter",
    architecture="PEagleDraftModel",
    model_type="llama",
    block="megatron_mtp.heads.peagle.block:PEagleBlock",
    folder="megatron_mtp.heads.peagle.folder:FOLDER",
    reference="megatron_mtp.heads.peagle.reference:PEagleReference",
    methods={"peagle": "megatron_mtp.heads.peagle.propose:PEagle"},
    default_layers=default_layers,
    weights=weights,
    loss={"mtp_loss": "kd"},
    settings={
        **{name: SETTINGS_OF_BLOCKS[name] for name in ("drafter_mask_token", "drafter_blocks", "drafter_full_layers")},
        "drafter_num_layers": replace(SETTINGS_OF_BLOCKS["drafter_num_layers"], default=4),
        **NORM_BEFORE_RESIDUAL,
    },
    also_called=("PEagleSpeculator", "PeagleLlamaForCausalLM"),
    reads=READS,
    begins={"mask_hidden": 1.0},
)
