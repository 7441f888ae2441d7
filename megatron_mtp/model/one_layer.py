"""Drafters with one layer that runs K times, such as EAGLE: each step reads the next token's embedding and a state.

    x_1  = layer(merge(embedding(t_{i+1}), feature))     step 1 at position i
    x_k  = layer(merge(embedding(t_{i+k}), x_{k-1}))     step k = 2 .. K
    the drafts' logits are output(norm(x_k))

In training, step k reads the layer's own output of step k - 1, as in decoding, and attends to the same rows as an
engine's k-th draft (`SharingAttention` of shared_keys.py). Letters in names: S sequence, B batch, H hidden, X states of
several layers side by side.
"""

from dataclasses import replace
from typing import ClassVar, override

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.model.chain import DepthInputs
from megatron_mtp.model.drafter import DrafterBlock, DrafterLayer
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules
from megatron_mtp.model.shared_keys import recomputed
from megatron_mtp.model.trunk_output import AttentionInputs, TrunkOutput


class OneLayer(DrafterLayer):
    """All weights of the drafter.

    Attributes:
        states_read: number of states that `fc` takes side by side.
    """

    states_read: ClassVar[int]

    def __init__(
        self,
        config: TransformerConfig,
        drafted: int | None,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config, self.states_read, drafted, pg_collection)
        self.tf_layer = build_module(
            submodules.tf_layer,
            config=config,
            vp_stage=vp_stage,
            layer_number=layer_number,
            is_mtp_layer=True,
            pg_collection=pg_collection,
        )

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """`tf_layer`, under the name that Megatron's schedule uses."""
        return self.tf_layer

    def merge(self, embedded_SBH: Tensor, given_SBH: Tensor) -> Tensor:
        """Return the input [S, B, H] of `tf_layer`'s next call, from the next tokens' embeddings and a state."""
        raise NotImplementedError

    def forward(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the state of a step, before the norm.

        Args:
            hidden_SBH: the feature, or the state of the previous step.
            embedded_SBH: embedding of the next token.
            padding_mask_BS: ignored; there are no experts.
        """

        def run(given_SBH: Tensor, following_SBH: Tensor) -> Tensor:
            made_SBH: Tensor = self.tf_layer(
                hidden_states=self.merge(following_SBH, given_SBH),
                attention_mask=attention.attention_mask,
                rotary_pos_emb=attention.rotary_pos_emb,
                packed_seq_params=attention.packed_seq_params,
            )[0]
            return made_SBH

        if self.training and self.config.recompute_granularity == "full":
            return recomputed(self.tf_layer.self_attention.core_attention, run, hidden_SBH, embedded_SBH)
        return run(hidden_SBH, embedded_SBH)


class OneLayerBlock(DrafterBlock):
    """K steps of the drafter."""

    @override
    def drafts(self, trunk: TrunkOutput, batch: DepthBatch) -> tuple[list[Tensor], None]:
        positions = [trunk.position_ids_BS] * self.depths
        inputs = DepthInputs(batch.tokens_DBS, positions, trunk.frozen_embedding, trunk.attention)
        if self.rotary is None:
            inputs = replace(inputs, attention=replace(trunk.attention, rotary_pos_emb=None))
            return self(self.read_states(trunk), inputs), None
        packed = trunk.attention.packed_seq_params
        length = self.groups.cp.size() * trunk.position_ids_BS.size(1) if packed is None else packed.max_seqlen_q

        def turned(later: int) -> Tensor:
            return self.angles(length, offset=later, packed_seq=packed is not None)[0]

        inputs = replace(inputs, attention=replace(trunk.attention, rotary_pos_emb=turned(0)), angles=turned)
        return self(self.read_states(trunk), inputs), None

    @override
    def forward(self, hidden_SBH: Tensor, inputs: DepthInputs) -> list[Tensor]:
        """Return the inputs of the output layer at steps 1 .. K, each [S, B, H], from the trunk states [S, B, X]."""
        states = super().forward(self.layer.feature(hidden_SBH), inputs)
        return [self.layer.norm(state_SBH) for state_SBH in states]
