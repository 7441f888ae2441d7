"""Table row of EAGLE-3: layers that it reads, loss, settings and parts."""

from megatron_mtp.spec.kinds import SWITCH, DrafterKind, Setting, weights_of_passes

READS = 3
"""Layers of the trunk that EAGLE-3 reads."""


def engine_layers(layers: int) -> tuple[int, ...]:
    """Return the layers that engines read if a folder names none: after layer 2, after half, before the last three."""
    return 2, layers // 2, layers - 3


def default_layers(layers: int, _: int | None = None) -> tuple[int, ...]:
    """Return the engines' layers; for a trunk that is too short, the first, the middle and the second-last one."""
    chosen = engine_layers(layers)
    return chosen if sorted(set(chosen)) == [*chosen] and chosen[0] >= 1 else (1, layers // 2, layers - 1)


NORM_BEFORE_RESIDUAL = {
    "drafter_norm_before_residual": Setting(
        0,
        "1: the residual path of {kinds} carries the normalized feature, as in speculators. Default: 0, the feature "
        "itself.",
        allowed=SWITCH,
        metavar="N",
        key="norm_before_residual",
    )
}

ROW = DrafterKind(
    name="eagle3",
    called="an EAGLE-3 drafter",
    architecture="LlamaForCausalLMEagle3",
    model_type="llama",
    block="megatron_mtp.heads.eagle3.block:Eagle3Block",
    folder="megatron_mtp.heads.eagle3.folder:FOLDER",
    methods={
        "eagle3": "megatron_mtp.heads.eagle3.propose:Eagle3Chain",
        "eagle3_tree": "megatron_mtp.heads.eagle3.propose:Eagle3Tree",
    },
    default_layers=default_layers,
    weights=weights_of_passes,
    loss={"mtp_loss": "kd"},
    settings=NORM_BEFORE_RESIDUAL,
    also_called=("Eagle3Speculator", "Eagle3DraftModel"),
    latent_architectures=("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
    reads=READS,
    can_be_fitted=True,
)
