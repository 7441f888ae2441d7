"""Table row of EAGLE: layers that it reads, loss, settings and parts."""

from megatron_mtp.spec.kinds import DrafterKind, weights_of_passes

ROW = DrafterKind(
    name="eagle",
    called="an EAGLE drafter",
    architecture="LlamaForCausalLMEagle",
    model_type="llama",
    block="megatron_mtp.heads.eagle.block:EagleBlock",
    folder="megatron_mtp.heads.eagle.folder:FOLDER",
    methods={
        "eagle": "megatron_mtp.heads.eagle.propose:EagleChain",
        "eagle_tree": "megatron_mtp.heads.eagle.propose:EagleTree",
    },
    default_layers=lambda *_: (),
    weights=weights_of_passes,
    loss={"mtp_loss": "kd"},
    reads=0,
    published_as="LlamaForCausalLM",
)
