"""Drafters that fill a block of K tokens in one pass, like DFlash (arXiv:2602.06036).

Let t_a be the newest token. The trunk's states before it form the context, and the block's rows begin at t_a:

    f_j   = hidden_norm(fc([state after layer ..; after layer ..; ..]))    j < a: keys and values of every layer
    rows    t_a  mask  mask  ..     at positions a, a + 1, ..     each attends to the context and to all of these rows

The last K rows draft. With an idle row, as in DFlash, the row at a + k drafts t_{a+k}, the token at its own position;
without one, as in DSpark, the row at a + k - 1 drafts it.

The layers are Qwen3's. The embedding is the trunk's; so is the output layer, unless there is a draft vocabulary. In
training, a block begins after position i, as depth 1 does: a = i + 1, and its k-th draft is t_{i+k+1}, the target of
depth k. Losses, metrics and acceptance are therefore the same as for MTP.

    K = 2, i = 2     context  f_0 f_1 f_2     rows  t_3 mask mask (DFlash), t_3 mask (DSpark)     drafts  t_4 t_5

Letters in names: S positions (rows of a layer), B batch, H hidden, A blocks, K drafts of a block, D the same drafts as
depths, X concatenated states of several layers, G key heads, C channels.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, override

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from megatron_mtp.data.batch import DepthBatch, positions_of_ranks, to_device
from megatron_mtp.megatron.layer_config import layer_config
from megatron_mtp.model.attention import PortableAttention, SinkAttention, with_sink
from megatron_mtp.model.drafter import DrafterBlock, DrafterLayer, layer_spec
from megatron_mtp.model.head import Head
from megatron_mtp.model.masks import in_window
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.packed_rows import bounds_of, offsets_of
from megatron_mtp.model.ring import Reach, joined, reach_of, ring_attention
from megatron_mtp.model.trunk_output import AttentionInputs, TrunkOutput
from megatron_mtp.spec.head import HeadSpec

BLOCKS_AT_ONCE = 64
"""Blocks per attention call; a call computes the scores of every row with the rows of all its blocks."""


@dataclass(frozen=True)
class Context:
    """Keys and values of the context, which the blocks of a layer attend to in addition to their own rows.

    Attributes:
        key_SBGC, value_SBGC: keys and values of all positions, or of this rank's.
        visible: mask of the keys that a block sees, [B or 1, 1, A, S]; or ranges of positions, for ring attention.
        first_A: positions of the first row of each block.
    """

    key_SBGC: Tensor
    value_SBGC: Tensor
    visible: Tensor | Reach
    first_A: Tensor


class BlockAttention(PortableAttention):
    """Attention for the rows of many blocks; each block attends to its context and its own rows.

    Windows are counted from the row's position, as in drafting.

    Attributes:
        context: context for the next call.
    """

    context: Context | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Compute [A K, B, N * C] from rows [A K, B, N or G, C], several blocks at a time."""
        context, self.context = self.context, None
        assert context is not None, "blocks without a context"
        blocks, rows = len(context.first_A), len(query) // len(context.first_A)
        if isinstance(context.visible, Reach):
            return self._with_ring(query, key, value, context, context.visible)
        attended = []
        for first in range(0, blocks, BLOCKS_AT_ONCE):
            these = slice(first, first + BLOCKS_AT_ONCE)
            of_these = slice(first * rows, (first + BLOCKS_AT_ONCE) * rows)
            visible_B1RS = context.visible[:, :, these].repeat_interleave(rows, 2)
            block_R = torch.arange(visible_B1RS.size(2), device=query.device) // rows
            own_RR = block_R.unsqueeze(1) == block_R
            visible = torch.cat([visible_B1RS, own_RR.expand(len(visible_B1RS), 1, -1, -1)], dim=-1)
            if self.window is not None:
                visible = visible & self._inside(context, context.first_A[these], rows)
            keys = torch.cat([context.key_SBGC, key[of_these]]), torch.cat([context.value_SBGC, value[of_these]])
            query_BNRC, key_BGWC, value_BGWC = (each.permute(1, 2, 0, 3) for each in (query[of_these], *keys))
            if self.softmax_offset is not None:
                given = query_BNRC, key_BGWC, value_BGWC
                query_BNRC, key_BGWC, value_BGWC = with_sink(*given, self.softmax_offset, self.scale)
                visible, value_BGWC = pad(visible, (0, 1), value=True), pad(value_BGWC, (0, 1))
            made_BNRC = scaled_dot_product_attention(
                query_BNRC, key_BGWC, value_BGWC, attn_mask=visible, scale=self.scale, enable_gqa=True
            )
            attended.append(made_BNRC[..., : value.size(-1)].permute(2, 0, 1, 3).flatten(2))
        return torch.cat(attended)

    def _with_ring(self, query: Tensor, key: Tensor, value: Tensor, context: Context, reach: Reach) -> Tensor:
        """Compute `forward` while the context's keys stay distributed over the ranks."""
        blocks = len(context.first_A)
        query_AKBNC, key_AKBGC, value_AKBGC = (each.unflatten(0, (blocks, -1)) for each in (query, key, value))
        place_K = torch.arange(query_AKBNC.size(1))
        reach = reach.of_rows(reach.last_S.unsqueeze(1) + 1 + place_K, self.window)
        part = ring_attention(query, context.key_SBGC, context.value_SBGC, reach, self.scale)
        shared = query.size(2) // key.size(2)
        key_AKBNC, value_AKBNC = (each.repeat_interleave(shared, 3) for each in (key_AKBGC, value_AKBGC))
        scores_ABNKK = torch.einsum("akbnc,albnc->abnkl", query_AKBNC, key_AKBNC).to(part[1].dtype) * self.scale
        if self.window is not None:
            sees_KK = in_window(place_K - place_K.unsqueeze(1), self.window)
            scores_ABNKK = scores_ABNKK.masked_fill(~to_device(sees_KK, query.device), -torch.inf)
        weights_ABNKK = scores_ABNKK.softmax(-1).to(value.dtype)
        own = torch.einsum("abnkl,albnc->akbnc", weights_ABNKK, value_AKBNC).flatten(0, 1)
        log = scores_ABNKK.logsumexp(-1).permute(0, 3, 1, 2).flatten(0, 1)
        return joined([part, (own, log), *self.sinks(part)]).flatten(2)

    def _inside(self, context: Context, first_A: Tensor, rows: int) -> Tensor:
        """Return the mask of keys in the window of each row, [R, S + R]."""
        assert self.window is not None
        position_R = (first_A.unsqueeze(1) + torch.arange(rows, device=first_A.device)).flatten()
        position_S = torch.arange(len(context.key_SBGC), device=first_A.device)
        return in_window(torch.cat([position_S, position_R]) - position_R.unsqueeze(1), self.window)


class BlockSinkAttention(BlockAttention, SinkAttention):
    """`BlockAttention` with attention sinks."""


class HeadNorm(PortableNorm):
    """Norm for the attention heads of a tensor-parallel rank; gradients of its weight are summed over all ranks.

    Args:
        is_summed: whether Megatron sums these gradients, as it does if the trunk has such norms.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, is_summed: bool = False) -> None:
        super().__init__(config, hidden_size, eps)
        self.is_summed = is_summed

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize values [..., C]."""
        weight = self.weight if self.is_summed else copy_to_tensor_model_parallel_region(self.weight)
        return torch.nn.functional.rms_norm(hidden, weight.shape, weight, self.eps)


def context_keys(attention: Any, feature_SBH: Tensor) -> tuple[Tensor, Tensor]:
    """Compute keys and values [S, B, G, C] of this rank's heads with Megatron's `SelfAttention`, without RoPE."""
    groups, channels = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    weight = attention.linear_qkv.weight
    pairs = weight.view(groups, -1, channels, weight.size(-1))[:, -2:].flatten(0, 2)
    key_SBGC, value_SBGC = linear(feature_SBH, pairs).unflatten(-1, (groups, 2, channels)).unbind(-2)
    return attention.k_layernorm(key_SBGC), value_SBGC


def _windowed(config: TransformerConfig, drafter: HeadSpec) -> Iterator[TransformerConfig]:
    """Yield the configuration of each layer, with its window."""
    for window in drafter.windows:
        own = copy.copy(config)
        own.window_size = window
        yield own


class LayeredDrafter(DrafterLayer):
    """Weights of a drafter with several layers.

    Attributes:
        layers: transformer layers.
    """

    def __init__(
        self,
        drafter: HeadSpec,
        config: TransformerConfig,
        drafted: int | None,
        submodules: MultiTokenPredictionLayerSubmodules,
        _: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config, len(drafter.layers), drafted, pg_collection)
        made: dict[str, Any] = {"config": config, "vp_stage": vp_stage, "pg_collection": pg_collection}
        self.layers = torch.nn.ModuleList(
            build_module(
                self.spec_of(number, submodules, drafter),
                layer_number=number,
                is_mtp_layer=True,
                **{**made, "config": own},
            )
            for number, own in enumerate(_windowed(config, drafter), start=1)
        )

    def spec_of(self, number: int, submodules: MultiTokenPredictionLayerSubmodules, drafter: HeadSpec) -> ModuleSpec:
        """Return the spec of a layer, counted from 1. All layers have the same spec."""
        return submodules.tf_layer

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """Name under which Megatron looks for a layer to capture as a CUDA graph; this one is not captured."""
        return self

    @override
    def feature(self, states_SBX: Tensor) -> Tensor:
        part, _ = self.fc(states_SBX)
        made: Tensor = gather_from_tensor_model_parallel_region(part, group=self.tp_group)
        return made

    def forward(
        self,
        given_SBH: Tensor | None,
        embedded_SBH: Tensor,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """Compute the states of the rows before the norm from their embeddings; attention already has the context.

        Args:
            given_SBH: not used; other drafters have a further input for their rows.
        """
        state_SBH = embedded_SBH
        for layer in self.layers:
            state_SBH = layer(hidden_states=state_SBH, attention_mask=None, rotary_pos_emb=attention.rotary_pos_emb)[0]
        return state_SBH

    @override
    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return Megatron's sharded state, corrected for the list of layers, which Megatron takes as replicated."""
        entries: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, TransformerLayer)
            entries.update(layer.sharded_state_dict(f"{prefix}layers.{number}.", sharded_offsets, metadata))
        return entries


class BlockDrafterLayer(LayeredDrafter):
    """Weights of a block drafter.

    Attributes:
        hidden_norm: norm of the features.
    """

    def __init__(self, drafter: HeadSpec, config: TransformerConfig, *others: Any) -> None:
        super().__init__(drafter, config, *others)
        self.hidden_norm = PortableNorm(config, config.hidden_size, config.layernorm_epsilon)

    @override
    def feature(self, states_SBX: Tensor) -> Tensor:
        return self.hidden_norm(super().feature(states_SBX))


class BlockDrafter(DrafterBlock):
    """Drafter that drafts K tokens in one pass. Every tensor-parallel rank has all rows of the blocks."""

    settings: ClassVar[dict[str, Any]] = {"qk_layernorm": True, "sequence_parallel": False}

    def __init__(self, drafter: HeadSpec, config: TransformerConfig, *others: Any) -> None:
        super().__init__(drafter, config, *others)
        self.takes_slices, self.cp_group = config.sequence_parallel, others[1].cp
        self.rows = self.depths + drafter.idle_rows

    @classmethod
    @override
    def submodules(cls, drafter: HeadSpec, config: TransformerConfig) -> MultiTokenPredictionLayerSubmodules:
        swaps = {PortableAttention: BlockAttention, SinkAttention: BlockSinkAttention}
        spec = layer_spec(layer_config(config, drafter, **cls.settings), swaps)
        norm = partial(HeadNorm, is_summed=config.qk_layernorm)
        attention = spec.submodules.self_attention
        attention.submodules = replace(attention.submodules, q_layernorm=norm, k_layernorm=norm)
        return MultiTokenPredictionLayerSubmodules(spec, PortableNorm)

    @override
    def make_layer(self, *args: Any) -> BlockDrafterLayer:
        return BlockDrafterLayer(self.drafter, self.config, self.drafted, *args)

    @override
    def drafts(self, trunk: TrunkOutput, batch: DepthBatch) -> tuple[list[Tensor], Tensor | None]:
        """Compute the inputs of the output layer for drafts 1 .. K, each [A, B, H].

        Args:
            trunk: this rank's part of the hidden states that are read, and the attention inputs, whose masks determine
                what a block may see.
            batch: `blocks_A` holds the positions at which blocks begin; None for all positions.

        Returns:
            The states, together with the inputs of the bias for kinds that have one; and confidence logits [K, A, B],
            or None.
        """
        assert batch.tokens_DBS is not None
        states_SBX = self.read_states(trunk)
        positions_S, place_A = self.places(batch, states_SBX.device)
        before_DBA, position_A = batch.tokens_DBS[..., place_A], positions_S[place_A]
        whole = self.cp_group.size() * len(positions_S)
        turned, _ = self.angles(whole + self.rows + 1, packed_seq=True)
        rings = self.rings(trunk.attention, whole)
        feature_SBH = self.layer.feature(self.known_states(states_SBX, positions_S, rings))
        if rings:
            reach = self.reach(trunk.attention, batch.positions_S, position_A)
            self._give_context(feature_SBH, turned[positions_S], reach, position_A + 1)
        else:
            visible_B1AS = visible_before(trunk.attention, place_A, position_A, whole)
            self._give_context(feature_SBH, turned[:whole], visible_B1AS, position_A + 1)
        row_AR = position_A.unsqueeze(1) + torch.arange(1, self.rows + 1, device=position_A.device)
        rotary = AttentionInputs(rotary_pos_emb=turned[row_AR.flatten()])
        masks = self.rows - 1
        tokens_BS = pad(before_DBA[0].unsqueeze(-1), (0, masks), value=self.drafter.mask_token).flatten(1)
        made_SBH = self.layer.norm(self.layer(None, self.embedded(tokens_BS, trunk.frozen_embedding), rotary))
        states_ADBH = made_SBH.unflatten(0, row_AR.shape)[:, -self.depths :]
        return self.with_bias(states_ADBH, before_DBA, partial(self.embedded, embedding=trunk.frozen_embedding))

    def with_bias(
        self, states_ADBH: Tensor, before_DBA: Tensor, embedded: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the result of `drafts` from the states and the token before each draft.

        Args:
            embedded: function that embeds tokens [B, S] to [S, B, H].
        """
        return list(states_ADBH.unbind(1)), None

    def places(self, batch: DepthBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return this rank's positions [S] in the whole sequence, and the indices [A] among them where blocks begin."""
        blocks_A = torch.arange(batch.positions_S.numel()) if batch.blocks_A is None else batch.blocks_A
        return to_device(batch.positions_S, device), to_device(blocks_A, device)

    def rings(self, attention: AttentionInputs, positions: int) -> bool:
        """Return whether ring attention is used for this number of positions."""
        return attention.attention_mask is None and self.layer.layers[0].self_attention.core_attention.rings(positions)

    def reach(self, attention: AttentionInputs, positions_S: Tensor, position_A: Tensor) -> Reach:
        """Return what blocks after given positions see: their documents up to these positions.

        Args:
            positions_S: all positions of this rank.
        """
        packed, ranks = attention.packed_seq_params, self.cp_group.size()
        bounds = torch.tensor([0, ranks * len(positions_S)]) if packed is None else bounds_of(packed).long()
        return reach_of(bounds, positions_of_ranks(bounds, ranks), position_A.cpu(), self.cp_group)

    def known_states(self, states_SBX: Tensor, positions_S: Tensor, rings: bool) -> Tensor:
        """Return states of all positions, in order, on every rank; with ring attention, of this rank's positions.

        They are frozen, so no gradient is sent back.
        """
        if self.takes_slices:
            states_SBX = gather_from_sequence_parallel_region(states_SBX, group=self.tp_group)
        return states_SBX if rings else self.in_order(states_SBX, positions_S)

    def in_order(self, values_S: Tensor, positions_S: Tensor) -> Tensor:
        """Gather values [S, ...] of all context-parallel ranks, in the order of positions."""
        if self.cp_group.size() == 1:
            return values_S
        values_S = gather_from_sequence_parallel_region(values_S, group=self.cp_group)
        return values_S[gather_from_sequence_parallel_region(positions_S, group=self.cp_group).argsort()]

    def _give_context(self, feature_SBH: Tensor, turned_S: Tensor, visible: Tensor | Reach, first_A: Tensor) -> None:
        feature_SBH = copy_to_tensor_model_parallel_region(feature_SBH, group=self.tp_group)
        for layer in self.layer.layers:
            own = layer.self_attention
            key_SBGC, value_SBGC = context_keys(own, feature_SBH)
            key_SBGC = apply_rotary_pos_emb(
                key_SBGC,
                turned_S,
                config=self.config,
                mscale=own._yarn_concentration_factor,
                cp_group=self.cp_group,
            )
            own.core_attention.context = Context(key_SBGC, value_SBGC, visible, first_A)

    def embedded(self, tokens_BS: Tensor, embedding: Callable[..., Tensor]) -> Tensor:
        """Embed tokens to [S, B, H], complete on every tensor-parallel rank."""
        if not self.takes_slices:
            return embedding(input_ids=tokens_BS, position_ids=None)
        count = tokens_BS.size(1)
        padded_BS = pad(tokens_BS, (0, -count % self.tp_group.size()))
        sliced_SBH = embedding(input_ids=padded_BS, position_ids=None)
        return gather_from_sequence_parallel_region(sliced_SBH, group=self.tp_group)[:count]

    @override
    def head_of(self, head: Head) -> Head:
        return replace(super().head_of(head), takes_slices=False)


def visible_before(attention: AttentionInputs, place_A: Tensor, position_A: Tensor, positions: int) -> Tensor:
    """Return the mask [B or 1, 1, A, S] of what the trunk sees at the positions before blocks.

    Args:
        place_A: indices of these positions among this rank's.
        position_A: the positions.
        positions: number of positions in the whole sequence.
    """
    if attention.attention_mask is not None:
        return ~attention.attention_mask[:, :, place_A]
    column_S = torch.arange(positions, device=position_A.device)
    visible_AS = column_S <= position_A.unsqueeze(1)
    if attention.packed_seq_params is not None:
        starts = offsets_of(attention.packed_seq_params).long()
        document_A = torch.searchsorted(starts, position_A, right=True) - 1
        visible_AS = visible_AS & (column_S >= starts[document_A].unsqueeze(1))
    return visible_AS[None, None]
