"""Models as frameworks build them: Megatron's own classes with this machine's portable modules, for any stage."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from hybrid_single import RECURRENT
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron_single import LATENT, LENGTH, MOE, VOCABULARY, transformer_config

from megatron_mtp.model.hybrid import stack_spec
from megatron_mtp.model.specs import with_portable_modules

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {**MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "latent": LATENT,
}
VIRTUAL = "virtual_pipeline_model_parallel_size"
PATTERN = "M-*-"
PACKED = [0, 4, 12, 24, LENGTH * 3]
"""Document offsets of a packed row; two ranks can split each document."""


def chunks(kind: str, tied: bool = False, depths: int | None = None, **changes: Any) -> list[Any]:
    """Return a rank's chunks: one, or one per virtual stage."""
    stages = changes.get(VIRTUAL)
    return [stock(kind, tied, depths, stage, **changes) for stage in (range(stages) if stages else [None])]


def stock(kind: str, tied: bool = False, depths: int | None = None, vp_stage: int | None = None, **changes: Any) -> Any:
    """Build a stage of a GPT of this kind, or of a hybrid; with `depths` it has Megatron's own MTP block.

    `changes` are fields of TransformerConfig, plus `position`, the type of position embedding.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    last = None if vp_stage is None else changes[VIRTUAL] - 1
    ends = {
        "pre_process": groups.pp.rank() == 0 and vp_stage in (None, 0),
        "post_process": groups.pp.rank() == groups.pp.size() - 1 and vp_stage == last,
    }
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": LENGTH,
        "share_embeddings_and_output_weights": tied,
        "position_embedding_type": changes.pop("position", "rope"),
        "pg_collection": groups,
        "vp_stage": vp_stage,
        **ends,
    }
    if kind == "hybrid":
        fields = {"num_layers": len(PATTERN), "is_hybrid_model": True, **RECURRENT, **changes}
        config = transformer_config(None, **fields)
        pattern = PATTERN if groups.pp.size() == 1 else f"{PATTERN[:2]}|{PATTERN[2:]}"
        return HybridModel(config, stack_spec(config), hybrid_layer_pattern=pattern, **common)
    config = transformer_config(depths, **KINDS[kind], **changes)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layers = TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage), LayerNormImpl)
    own = get_gpt_mtp_block_spec(config, layers, False, vp_stage=vp_stage) if depths else None
    layers, own = (with_portable_modules(spec, config) for spec in (layers, own))
    return GPTModel(config, layers, mtp_block_spec=own, **common)


def draw(model: Any, tied: bool = False) -> None:
    """Draw weights that depend only on parameter names, large enough that every part matters; norms differ from 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name
            generator = torch.Generator().manual_seed(zlib.crc32(name.replace("tf_layer", "mtp_model_layer").encode()))
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)


def packed_batch(batch: dict[str, Any]) -> tuple[dict[str, Any], PackedSeqParams]:
    """Return all rows of a batch as one row of four documents."""
    offsets = torch.tensor(PACKED, dtype=torch.int32)
    longest = int(offsets.diff().max())
    joined = {name: batch[name].reshape(1, -1) for name in ("tokens", "labels", "loss_mask")}
    position = torch.arange(PACKED[-1])
    starts = offsets[:-1].repeat_interleave(offsets.diff().long())
    joined |= {"position_ids": (position - starts)[None], "attention_mask": None}
    return joined, PackedSeqParams("thd", offsets, offsets, None, None, longest, longest)


def loss_of_logits(model: Any, logits_BSV: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Return the trunk's mean loss, computed from logits as in a training loop."""
    nats_BS = model.compute_language_model_loss(
        batch["labels"], logits_BSV.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    )
    return (nats_BS * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def learned(
    model: Any, batch: dict[str, Any], packed: PackedSeqParams | None, depths_loss: Callable[[], torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Return logits, gradients and weights after one Adam step, by name; `depths_loss` is added to the trunk's."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    arguments = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    logits_BSV = model(*arguments, **({} if packed is None else {"packed_seq_params": packed}))
    total = loss_of_logits(model, logits_BSV, batch)
    (total if depths_loss is None else total + 0.3 * depths_loss()).backward()
    found = {f"gradient of {name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
    optimizer.step()
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    return {"logits": logits_BSV.detach(), **found, **weights}
