"""Builds the model of a job without storage, and counts its parameters by part and pipeline stage."""

import copy
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_mtp.model import hybrid
from megatron_mtp.model.arguments import MTPModelConfig
from megatron_mtp.model.build import build
from megatron_mtp.model.linear import PortableLinear
from megatron_mtp.model.recurrent import PortableGatedDeltaNet
from megatron_mtp.model.swapped import having
from megatron_mtp.spec.head import HEADS

PARTS = {
    "trunk": "decoder.",
    "depths": tuple(f"{name}." for name in HEADS),
    "embedding": "embedding.",
    "head": "output_layer.",
}
"""Parts of a model, with the prefixes of their parameter names."""


def parameters(args: Namespace, config: MTPModelConfig, rank: int) -> tuple[Counter[str], Counter[str]]:
    """Count parameters by part: on one rank, and on its stage over all ranks, without copies such as a tied head."""
    local, whole = Counter[str](), Counter[str]()
    with _job(args, rank), _planned_variants():
        chunks = args.virtual_pipeline_model_parallel_size
        for chunk in range(chunks) if chunks else [None]:
            if chunk is not None:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            model = build(config, vp_stage=chunk)
            copies = {"embedding"} if not model.pre_process else set()
            copies |= {"head"} if not args.untie_embeddings_and_output_weights else set()
            for name, weight in model.named_parameters():
                part = next(part for part, start in PARTS.items() if name.startswith(start))
                tensor, expert = args.tensor_model_parallel_size, 1
                if not getattr(weight, "allreduce", True):  # an expert's weight
                    tensor, expert = args.expert_tensor_parallel_size, args.expert_model_parallel_size
                pieces = expert * (tensor if getattr(weight, "tensor_model_parallel", False) else 1)
                local[part] += weight.numel()
                whole[part] += 0 if part in copies else weight.numel() * pieces
    return local, whole


@contextmanager
def _job(args: Namespace, rank: int) -> Iterator[None]:
    """Create the process groups of one rank of the job without the other ranks; tensors have no storage."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    try:
        with having([torch.cuda], current_device=lambda: torch.device("meta")):
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(args.seed)
            with torch.device("meta"):
                yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


class _PlannedModules(LocalSpecProvider):
    """Modules with the sizes of Transformer Engine's; the norm before a projection is part of the layer."""

    def linear(self) -> type:
        return PortableLinear

    def column_parallel_layer_norm_linear(self) -> type:
        return ColumnParallelLinear


def _planned_layers(config: TransformerConfig, backend: LocalSpecProvider) -> list[ModuleSpec]:
    """Return specs of the trunk's layers. Megatron builds --experimental-attention-variant only from TE's modules."""
    kind = config.experimental_attention_variant
    is_linear = variants.is_linear_attention_variant(kind)
    pattern = variants.get_linear_attention_pattern(config) if is_linear else [1] * config.num_layers
    attention = variants.get_experimental_attention_variant_module_spec(config, backend)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    layers = get_gpt_decoder_layer_specs(plain, use_transformer_engine=False, normalization=config.normalization)
    return [
        replace(layer, submodules=replace(layer.submodules, self_attention=attention)) if has_variant else layer
        for has_variant, layer in zip(pattern, layers, strict=True)
    ]


def _planned_stack(config: TransformerConfig, others: Callable[[TransformerConfig], Any]) -> Any:
    """Return the layer specs of a hybrid, including sparse attention (D)."""
    made = others(config)
    if config.experimental_attention_variant is None:
        return made
    attention = variants.get_experimental_attention_variant_module_spec(config, _PlannedModules())
    norm = made.mla_layer.submodules.input_layernorm
    return replace(made, dsa_layer=hybrid._mixing_layer(norm, attention))


def _planned_variants() -> AbstractContextManager[None]:
    """Build layers that need Transformer Engine without it, with the same sizes, within the context."""
    return having(
        [variants, absorbed_mla, hybrid],
        _local_submodules=partial(_planned_stack, others=hybrid._local_submodules),
        TELinear=PortableLinear,
        _get_backend_spec_provider=lambda config: _PlannedModules(),
        get_transformer_layer_with_experimental_attention_variant_spec=_planned_layers,
        GatedDeltaNet=PortableGatedDeltaNet,
    )
