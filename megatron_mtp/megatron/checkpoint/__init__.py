"""Megatron's distributed checkpoints.

catalogue.py   contents of an iteration, read without running code; checksums
sealing.py     checksums of what is being written
iterations.py  the newest complete iteration of a folder, the tracker, and the tokenizer stored with them
reader.py      read tensors piece by piece without a model; complete files; the MTP layers
damage.py      one sentence for what torch and Megatron raise for checkpoints that cannot be read
bits.py        values and bits of tensors
writer.py      write checkpoints without a model

Below are file names and tensor keys. A norm has two keys, because Megatron's own modules and Transformer Engine's place
some norms in different modules. Both are checkpoints of the same model. Which key belongs to which depends on the
layer: a dense GQA layer has the fused norm with both kinds of modules, a MoE layer only with Megatron's own, a dense
MLA layer only with Transformer Engine's.
"""

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron's name for weights that no training run saved. They load without an optimizer, as iteration 0."""
HF_FILES = "hf"
"""Folder of a converted checkpoint for Hugging Face files that Megatron does not use: config, tokenizer, ..."""
ORIGIN = "origin.json"
KEPT_TOKENIZER = "tokenizer"
"""Folder of a trained checkpoint for the files of the run's tokenizer."""

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FUSED_NORM, OWN_NORM = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."

DRAFT_VOCABULARY = "mtp.draft_vocabulary"
"""Key of the draft vocabulary's tokens [N]: a buffer of the MTP block."""
DRAFTER = "drafter."
"""Key prefix of a drafter."""
COMMON = "common_state/shard_0_1"
"""Megatron's key for everything except tensors."""
HYBRID_NORM = "decoder.final_norm.weight"
"""Key that checkpoints of hybrids have and checkpoints of GPTs do not."""
HEAD_STATE = "output_layer._extra_state/shard_0_1"
"""Kernel state that Megatron's hybrid expects and its GPT does not."""
STATE = r"(?:chained_\d+\.)?optimizer\."
"""Key prefix of the optimizer's tensors."""
ABSENT = "absent: "
"""Key prefix of model entries that the checkpoint to load does not have; an optimizer's keys end with them."""

_PAIRS = (
    (OWN_NORM, FUSED_NORM),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
"""A norm as its own module, and as part of the projection that reads it."""


def other_key(key: str) -> str | None:
    """Return the key of the same norm in a checkpoint of the other kind of modules; None for other tensors."""
    for own, fused in _PAIRS:
        for name, other in ((own, fused), (fused, own)):
            start, found, kind = key.rpartition(name)
            if found and "." not in kind:
                return f"{start}{other}{kind}"
    return None
