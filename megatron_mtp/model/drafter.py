"""Base classes of drafters, which read the trunk's states after some layers, instead of MTP layers or alongside them.

A drafter is an MTP block of another kind, so losses, metrics, layouts and decoding treat it like MTP layers: eagle3.py
runs one layer in K passes, block_drafter.py runs several layers once for K tokens.

Letters in names: S sequence, B batch, H hidden, N draft vocabulary, X states of several layers side by side.
"""

import re
from dataclasses import replace
from typing import Any, ClassVar, override

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.megatron.layer_config import layer_config
from megatron_mtp.model.head import Head
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules
from megatron_mtp.model.mtp_block import MultiTokenPredictionBlock
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.rope import rotary_of
from megatron_mtp.model.specs import with_portable_modules
from megatron_mtp.model.swapped import with_modules
from megatron_mtp.model.trunk_output import TrunkOutput
from megatron_mtp.spec.head import HEADS, HeadSpec
from megatron_mtp.spec.kinds import DRAFTERS


def layer_spec(config: TransformerConfig, swaps: dict[Any, Any], **of_layer: Any) -> ModuleSpec:
    """Return the spec of a layer of Megatron's local modules with our norms, whatever modules the trunk uses.

    Args:
        config: result of `layer_config`.
        swaps: classes to replace by others.
        of_layer: additional submodules of the layer.
    """
    plain = get_gpt_layer_local_submodules(
        normalization="RMSNorm", qk_layernorm=config.qk_layernorm, multi_latent_attention=config.multi_latent_attention
    )
    changed = replace(plain, sharded_state_dict_keys_map={}, **of_layer)
    return ModuleSpec(TransformerLayer, submodules=with_modules(with_portable_modules(changed, config), swaps))


class DrafterLayer(MegatronModule):
    """Weights and computation that all kinds of drafters share.

    Attributes:
        fc: projects the states that are read to a feature.
        norm: norm before the output layer.
        head: [N, H], output rows of the draft vocabulary, whole on every tensor-parallel rank; None to use the trunk's
            output layer.
    """

    head: Tensor | None
    norm: torch.nn.Module
    final_layernorm = None  # EAGLE-3 drafters feed back the state before the norm; the norm belongs to the output layer

    def __init__(
        self, config: TransformerConfig, read: int, drafted: int | None, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        hidden, self.tp_group = config.hidden_size, pg_collection.tp
        column: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        self.fc = ColumnParallelLinear(read * hidden, hidden, **column, tp_group=pg_collection.tp)
        self.norm = PortableNorm(config, hidden, config.layernorm_epsilon)
        rows_NH = None if drafted is None else self.whole_on_every_rank(drafted, hidden)
        self.register_parameter("head", rows_NH)

    def whole_on_every_rank(self, *sizes: int) -> torch.nn.Parameter:
        """Return new zeros that are not split by tensor parallelism."""
        device = torch.cuda.current_device()
        return torch.nn.Parameter(torch.zeros(sizes, dtype=self.config.params_dtype, device=device))

    def feature(self, states_SBX: Tensor) -> Tensor:
        """Return the features [S, B, H] of the trunk's states after the chosen layers, side by side."""
        raise NotImplementedError


class DrafterBlock(MultiTokenPredictionBlock):
    """Drafts K tokens. The trunk's output layer and embedding are used but not trained.

    Attributes:
        settings: settings of the drafter's layers, in addition to those of `layer_config`.
        rotary: computes its rotary angles, because the trunk's may differ or not exist; None if latent attention
            computes its own.

    Raises:
        ValueError: there is a draft vocabulary, and this kind drafts from all tokens.
    """

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        drafter: HeadSpec,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        draft_vocabulary: Tensor | None = None,
    ) -> None:
        if draft_vocabulary is not None and DRAFTERS[drafter.kind].drafts_all:
            raise ValueError(
                f"--drafter {drafter.kind} drafts from all tokens, and a draft vocabulary has "
                f"{draft_vocabulary.numel()}; leave out --mtp-draft-vocab-size and --mtp-draft-vocab-file."
            )
        self.drafter, self.drafted = drafter, None if draft_vocabulary is None else draft_vocabulary.numel()
        own = layer_config(config, drafter, **self.settings, mtp_num_layers=drafter.drafts)
        super().__init__(own, submodules, pg_collection, vp_stage, draft_vocabulary)
        self.rotary = None if drafter.attention.latents else rotary_of(drafter.attention, own, pg_collection.cp)
        self.sequential = True

    @property
    @override
    def is_apart(self) -> bool:
        return True

    @classmethod
    def submodules(cls, drafter: HeadSpec, config: TransformerConfig) -> MultiTokenPredictionLayerSubmodules:
        """Return the spec of its layers on a trunk of this configuration."""
        raise NotImplementedError

    def angles(self, length: int, **others: Any) -> tuple[Tensor, float]:
        """Return the rotary angles [length, 1, 1, C] of its first positions, and YaRN's factor of cosines and sines.

        Args:
            length: number of positions.
            others: further arguments of Megatron's module.
        """
        assert self.rotary is not None
        made = self.rotary(length, **others)
        return made if isinstance(made, tuple) else (made, 1.0)

    @property
    def layer(self) -> Any:
        """Return the module with the drafter's weights."""
        return self.layers[0]

    @override
    def begin_head(self, head: Head) -> None:
        """Copy the trunk's output rows of the draft vocabulary, each from the rank that has it."""
        if self.layer.head is None or head.draft_vocabulary is None:
            return
        drafted = head.draft_vocabulary
        with torch.no_grad():
            rows_NH = torch.zeros_like(self.layer.head)
            rows_NH[drafted.first : drafted.first + drafted.rows_K.numel()] = head.weight[drafted.rows_K].to(rows_NH)
            torch.distributed.all_reduce(rows_NH, group=self.tp_group)
            self.layer.head.copy_(rows_NH)

    @override
    def head_of(self, head: Head) -> Head:
        if self.layer.head is None or head.draft_vocabulary is None:
            return head
        first, count = head.draft_vocabulary.first, head.draft_vocabulary.rows_K.numel()
        rows_NH = copy_to_tensor_model_parallel_region(self.layer.head, group=self.tp_group)
        return replace(head, own_rows=rows_NH[first : first + count])

    def read_states(self, trunk: TrunkOutput) -> Tensor:
        """Return the trunk's states after the layers that are read, side by side and without gradient.

        Raises:
            ValueError: the layers did not run in the same forward pass.
        """
        if not trunk.read.keys() >= {*self.drafter.layers}:
            raise ValueError(
                "this model's drafter reads states of the trunk's layers, which only its own forward pass gives; train "
                "it by megatron-mtp train --drafter."
            )
        return torch.cat([trunk.read[number] for number in self.drafter.layers], dim=-1).detach()

    @override
    def entries(
        self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any] | None
    ) -> ShardedStateDict:
        """Return checkpoint entries under `drafter.`, or under the name of an attached drafter."""
        entries = super().entries(prefix, sharded_offsets, metadata)
        own = re.sub(rf"\b({'|'.join(HEADS)})\.$", DRAFTER, prefix)
        apply_prefix_mapping(entries, {f"{prefix}layers.0.": own, prefix: own})
        return entries
