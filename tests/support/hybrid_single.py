"""Tiny hybrid models of this package and of Megatron in one process, and a GPT's names in an equivalent hybrid."""

import re
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig
from megatron_single import LATENT, LENGTH, MOE, VOCABULARY, randomize, transformer_config

from megatron_mtp.model.arguments import MTPHybridModelConfig
from megatron_mtp.model.build import build
from megatron_mtp.model.hybrid import stack_spec
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.spec.config import MTPConfig

RECURRENT: dict[str, Any] = {
    "mamba_state_dim": 6,
    "mamba_head_dim": 4,
    "mamba_num_heads": 8,
    "mamba_num_groups": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def our_hybrid(
    pattern: str, tied: bool = False, position: str = "rope", architecture: str = "sequential", **changes: Any
) -> HybridModel:
    """Create a hybrid. `changes` are fields of TransformerConfig, plus `drafted` (draft vocabulary) and `settings`."""
    drafted, settings = changes.pop("drafted", None), changes.pop("settings", {})
    config = MTPHybridModelConfig(
        transformer=_transformer(pattern, changes),
        mtp=MTPConfig(mtp_architecture=architecture, **settings),
        draft_vocabulary=None if drafted is None else torch.tensor(drafted),
        **_fields(pattern, tied, position),
    )
    model = build(config)
    assert isinstance(model, HybridModel)
    randomize(model)
    return model.cuda()


def drafting_hybrid(pattern: str, dtype: torch.dtype = torch.float64, **changes: Any) -> HybridModel:
    """Create a hybrid with the settings its layers need, and decays slow enough to remember distant tokens.

    With random decays it would forget a fault at once.
    """
    kinds = (MOE if "E" in pattern else {}) | (LATENT if "+" in pattern else {})
    model = our_hybrid(pattern, params_dtype=dtype, **kinds, **changes)
    model.max_sequence_length = 2100
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.sub_(4)
    return model.to(dtype).eval()


def megatrons_hybrid(pattern: str, tied: bool = False, position: str = "rope", **changes: Any) -> HybridModel:
    """Create the same layers with Megatron's own model class and MTP."""
    transformer = _transformer(pattern, changes)
    spec = stack_spec(transformer)
    norms = {"enorm": PortableNorm, "hnorm": PortableNorm, "layer_norm": PortableNorm}
    depth = MultiTokenPredictionLayerSubmodules(eh_proj=ColumnParallelLinear, mtp_model_layer=None, **norms)
    spec.submodules.mtp_block_spec = ModuleSpec(
        MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=depth)]),
    )
    config = HybridModelConfig(transformer=transformer, hybrid_stack_spec=spec, **_fields(pattern, tied, position))
    return HybridModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).cuda()


def _transformer(pattern: str, changes: dict[str, Any]) -> TransformerConfig:
    parsed = parse_hybrid_pattern(pattern)
    layers = len(parsed.main_pattern.replace("|", ""))
    fields = {"num_layers": layers, "is_hybrid_model": True, **RECURRENT, **changes}
    return transformer_config(parsed.mtp_num_depths or None, **fields)


def _fields(pattern: str, tied: bool, position: str) -> dict[str, Any]:
    return {
        "hybrid_layer_pattern": pattern,
        "vocab_size": VOCABULARY,
        "seq_length": LENGTH,
        "position_embedding_type": position,
        "share_embeddings_and_output_weights": tied,
    }


def hybrid_name(name: str) -> str:
    """Return a GPT parameter's name in a hybrid with an attention layer and an MLP (or MoE) for each GPT layer."""
    half = int(bool(re.search(r"\.(pre_mlp_layernorm|mlp)\.", name)))
    name = re.sub(r"^decoder\.layers\.(\d+)", lambda found: f"decoder.layers.{2 * int(found[1]) + half}", name)
    return name.replace(".tf_layer.", f".tf_layer.layers.{half}.").replace(
        "decoder.final_layernorm", "decoder.final_norm"
    )
