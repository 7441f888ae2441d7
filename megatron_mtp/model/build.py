"""Build a model on this machine from a configuration. This is the only place that builds models.

join_world()                    join the process group, of a job or of this process alone
build(configuration) -> model   a pipeline stage with MTP layers and drafters, as Megatron's `pretrain()` builds it:
                                `GPTModel` or, with a hybrid layer pattern, `HybridModel`
"""

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, override

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.models import gpt as megatron_gpt

from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.machine import check_device
from megatron_mtp.megatron.patterns import symbols_of_a_layer
from megatron_mtp.model.arguments import MTPGPTModelConfig, MTPModelConfig
from megatron_mtp.model.heads import BLOCKS, DraftHeads, HeadPlan
from megatron_mtp.model.latent_attention import PLAIN_QUERIES
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules, mtp_layer_submodules
from megatron_mtp.model.mtp_block import MultiTokenPredictionBlock
from megatron_mtp.model.shared_keys import FIRST_PASS_ALONE, WITH_CHAIN
from megatron_mtp.model.specs import with_portable_modules, with_portable_projections
from megatron_mtp.model.stock import initializing
from megatron_mtp.model.swapped import with_modules
from megatron_mtp.model.trained_stage import TrainedStage
from megatron_mtp.model.trunk_facts import trunk_spec_of
from megatron_mtp.spec.head import HeadSettings, HeadSpec


def join_world(alone: bool = False, expert_parallel: int = 1) -> None:
    """Join the process group of the job, all of it tensor-parallel, unless this process has already joined one.

    Args:
        alone: create a group of only this process, whatever job it belongs to.
        expert_parallel: number of ranks that hold different experts; each expert is split over the remaining ranks.

    Raises:
        ValueError: the job was given GPUs and this rank finds none, or the number of ranks is not a multiple of
            `expert_parallel`.
    """
    if not torch.distributed.is_initialized():
        backend = "gloo" if alone or cpu.installed() else "nccl"
        if "RANK" in os.environ and not alone:
            check_device(cpu.installed())
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # otherwise NCCL puts all ranks on device 0
            torch.distributed.init_process_group(backend)
        else:
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        ranks = torch.distributed.get_world_size()
        if ranks % expert_parallel:
            raise ValueError(
                f"--expert-model-parallel-size is {expert_parallel}, and there are {ranks} ranks (torchrun "
                "--nproc-per-node); give a number that divides them."
            )
        parallel_state.initialize_model_parallel(
            ranks,
            expert_model_parallel_size=expert_parallel,
            expert_tensor_parallel_size=ranks // expert_parallel,
        )
        model_parallel_cuda_manual_seed(0)


def build(config: MTPModelConfig, groups: ProcessGroupCollection | None = None, **stage: Any) -> LanguageModule:
    """Build this process's model: all of it, or a pipeline stage.

    Args:
        groups: process groups; None for Megatron's global ones.
        stage: additional arguments of `MTPGPTModelBuilder.build_model`.
    """
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    return config.get_builder_cls()(config).build_model(groups, **stage)


Specs = tuple[dict[str, Any], MultiTokenPredictionLayerSubmodules | None]
"""Arguments of a model's class that specify its layers, and the spec of an MTP layer; None without MTP layers."""


class AttachingBuilder(ABC):
    """Mix-in for Megatron's builders: builds Megatron's model class from these layers and adds MTP layers and drafters.

    Attributes:
        kind: the model class.
    """

    kind: ClassVar[type]

    @abstractmethod
    def specs(self, vp_stage: int | None) -> Specs:
        """Return the layer spec of a stage."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> LanguageModule:
        """Build a pipeline stage; takes the arguments of Megatron's builder."""
        config: MTPModelConfig = self._model_config  # type: ignore[attr-defined]
        virtual: dict[str, Any] = {"vp_stage": vp_stage, "vp_size": config.virtual_pipeline_model_parallel_size}
        if pre_process is None:
            pre_process = megatron_gpt.is_vp_first_stage(**virtual) and megatron_gpt.is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = megatron_gpt.is_vp_last_stage(**virtual) and megatron_gpt.is_pp_last_stage(pg_collection.pp)
        groups = copy.copy(pg_collection)
        groups.embd = None  # set later: the stage of the MTP layers may also hold a copy of the embedding
        layers, mtp_layer = self.specs(vp_stage)
        draws = config.transformer.perform_initialization
        with with_portable_projections(config.transformer):
            with initializing(config.transformer, draws and not config.loads_trunk):
                model = self.kind(
                    **layers,
                    config=config.transformer,
                    vocab_size=_padded_vocab_size(config),
                    max_sequence_length=config.seq_length,
                    pre_process=pre_process,
                    post_process=post_process,
                    pg_collection=groups,
                    vp_stage=vp_stage,
                    **{name: getattr(config, name) for name in _PASSED_ON},
                )
            model.pg_collection, model.embd_group = pg_collection, pg_collection.embd
            plans = [_head_plan(config, head, mtp_layer) for head in config.heads]
            heads = DraftHeads(plans, config.absent_draft_vocabulary)
            TrainedStage(model, heads, config.draft_vocabulary, config.true_vocab_size, config.mtp.mtp_train_only)
        return model


class MTPGPTModelBuilder(AttachingBuilder, megatron_gpt.GPTModelBuilder):
    """Builds a GPT with MTP layers and drafters."""

    kind = GPTModel

    @override
    def specs(self, vp_stage: int | None) -> Specs:
        config = self._model_config
        layer_spec = _layer_spec(config, vp_stage)
        names = ("rope_scaling", "rope_scaling_factor", "scatter_embedding_sequence_parallel")
        layers = {name: getattr(config, name) for name in names}
        layers["transformer_layer_spec"] = _block_spec(config, layer_spec, vp_stage)
        return layers, _mtp_submodules(config, layer_spec, vp_stage)


_PASSED_ON = (
    "fp16_lm_cross_entropy",
    "parallel_output",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "seq_len_interpolation_factor",
)


def _layer_spec(config: MTPGPTModelConfig, vp_stage: int | None) -> Any:
    """Return the spec of the trunk's layers: the user's `--spec`, or Megatron's choice for this configuration."""
    spec = config.transformer_layer_spec
    if spec is None:
        spec = megatron_gpt.default_layer_spec(config, vp_stage)
    elif not isinstance(spec, ModuleSpec):
        spec = spec(config)
    if config.attention_backend == AttnBackend.local and isinstance(spec, ModuleSpec):
        spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    return spec


def _block_spec(config: MTPGPTModelConfig, layer_spec: Any, vp_stage: int | None) -> Any:
    """Return the spec of the trunk's layers and final norm, with portable modules instead of Megatron's local ones."""
    if config.transformer.transformer_impl != "local":
        return with_modules(layer_spec, PLAIN_QUERIES)
    if isinstance(layer_spec, ModuleSpec) and layer_spec.module is TransformerLayer:
        layers = get_num_layers_to_build(config.transformer, vp_stage)
        layer_spec = TransformerBlockSubmodules([layer_spec] * layers, LayerNormImpl)
    return with_portable_modules(layer_spec, config.transformer)


def _head_plan(
    config: MTPModelConfig, head: HeadSettings, mtp_layer: MultiTokenPredictionLayerSubmodules | None
) -> HeadPlan:
    """Plan how a stage creates a head.

    Raises:
        ValueError: the trunk does not have the layers that it reads.
    """
    block: Callable[..., MultiTokenPredictionBlock] = MultiTokenPredictionBlock
    layer, drafter = mtp_layer, _drafter(config, head)
    if drafter is not None:
        kind = BLOCKS[drafter.kind]
        block, layer = partial(kind, drafter), kind.submodules(drafter, config.transformer)
    assert layer is not None
    return HeadPlan(
        name=head.name,
        block=block,
        layer=layer,
        reads=() if drafter is None else drafter.layers,
        absent=config.absent.get(head.name, ()),
        init=head.settings.mtp_init or "random",
        seed=config.mtp_init_seed,
    )


def _drafter(config: MTPModelConfig, head: HeadSettings) -> HeadSpec | None:
    """Return a head's drafter with layers in Megatron's numbers; None for MTP layers.

    Raises:
        ValueError: the trunk does not have them.
    """
    kind, symbols = head.settings.drafter, symbols_of_a_layer(getattr(config, "hybrid_layer_pattern", None))
    if kind is None:
        return None
    if config.transformer.mtp_standalone:
        raise ValueError(
            f"--pipeline-model-parallel-layout gives --drafter {kind} a stage of its own, but it belongs "
            "to the stage of the output layer; put m before L in the last stage."
        )
    given = {**vars(head.settings), "drafter_steps": head.depths}
    made = HeadSpec.resolve(kind, given, trunk_spec_of(config))
    return replace(made, layers=tuple(symbols * number for number in made.layers))


def _padded_vocab_size(config: MTPModelConfig) -> int:
    assert config.vocab_size is not None
    if not config.should_pad_vocab:
        return config.vocab_size
    return megatron_gpt.calculate_padded_vocab_size(
        config.vocab_size, config.make_vocab_size_divisible_by, config.transformer.tensor_model_parallel_size
    )


def _mtp_submodules(
    config: MTPGPTModelConfig, layer_spec: Any, vp_stage: int | None
) -> MultiTokenPredictionLayerSubmodules | None:
    """Return the spec of an MTP layer, of the same kind as the trunk's last layer, dense or MoE.

    None without MTP layers.
    """
    transformer = config.transformer
    if all(head.settings.drafter is not None for head in config.heads):
        return None
    use_te = transformer.transformer_impl == "transformer_engine"
    if isinstance(layer_spec, ModuleSpec):
        last_layer = layer_spec
    else:
        last_layer = gpt_layer_specs.get_gpt_decoder_layer_specs(
            transformer, use_transformer_engine=use_te, normalization=transformer.normalization, vp_stage=vp_stage
        )[-1]
    submodules = mtp_layer_submodules(last_layer, config.mtp.mtp_architecture, use_te)
    of_first, has_chain = config.mtp.mtp_repeated_layer_first_pass_kv, config.mtp.mtp_repeated_layer_shares_kv
    submodules = replace(submodules, shares_kv=of_first or has_chain, has_chain=not of_first)
    made: MultiTokenPredictionLayerSubmodules = (
        with_modules(submodules, PLAIN_QUERIES) if use_te else with_portable_modules(submodules, transformer)
    )
    if not made.shares_kv:
        return made
    shared: MultiTokenPredictionLayerSubmodules = with_modules(made, FIRST_PASS_ALONE if of_first else WITH_CHAIN)
    return shared
