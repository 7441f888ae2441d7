"""P-EAGLE (parallel EAGLE, from speculators): EAGLE-3 with additional layers, which drafts K tokens in one pass.

    row i of the text        embedding(t_{i+1}), feature f_i                    drafts t_{i+2}
    mask k = 2 .. K after it embedding(mask), fc(learned states), at i + k - 1  drafts t_{i+k+1}

The first layer is EAGLE-3's, which computes queries, keys and values from [norm(embedding); norm(feature)]; the others
are Llama's. A text row attends to earlier text rows; a mask attends to the text rows up to i and to earlier masks. In
training the whole text runs once, and masks follow the positions where blocks begin:

    K = 3, i = 2     text  (t_1, f_0) (t_2, f_1) (t_3, f_2)    masks  at 3, at 4     drafts  t_4 t_5 t_6

Letters in names: S positions, B batch, H hidden, A blocks, M masks of a block, R rows of text and masks, D drafts, N
heads, G key heads, C channels.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, override

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.heads.eagle3.block import InputNorms, of_both
from megatron_mtp.megatron.layer_config import layer_config
from megatron_mtp.model.attention import PortableAttention
from megatron_mtp.model.block_drafter import (
    BlockAttention,
    BlockDrafter,
    Context,
    LayeredDrafter,
    visible_before,
)
from megatron_mtp.model.drafter import layer_spec
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.ring import Reach
from megatron_mtp.model.trunk_output import AttentionInputs, TrunkOutput
from megatron_mtp.spec.head import HeadSpec


class TextAndMasks(BlockAttention):
    """Attention of text rows, and of the masks that follow some of them.

    Attributes:
        rows: masks for the next call: which earlier rows each text row attends to and which text rows the blocks attend
            to, as in `Context`, and the positions of their first masks [A].
    """

    rows: tuple[Tensor | Reach, Tensor | Reach, Tensor] | None = None

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.window = self.window or (-1, 0)  # masks only attend to earlier rows

    @override
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return [R, B, N * C] for rows [R, B, N or G, C], text rows first."""
        assert self.rows is not None, "a text without its blocks"
        (before, visible, first_A), self.rows = self.rows, None
        count = len(before.first_S) if isinstance(before, Reach) else before.size(-1)
        text, position_S = slice(count), torch.arange(count, device=query.device)
        self.context = Context(key[text], value[text], before, position_S)
        made = [super().forward(query[text], key[text], value[text])]
        if len(query) > count:
            self.context = Context(key[text], value[text], visible, first_A)
            made.append(super().forward(query[count:], key[count:], value[count:]))
        return torch.cat(made)


class PEagleLayer(LayeredDrafter):
    """All weights of the drafter.

    Attributes:
        mask_hidden: [1, 1, X], replaces the trunk's states for masks.
    """

    def __init__(self, drafter: HeadSpec, config: TransformerConfig, *others: Any) -> None:
        super().__init__(drafter, config, *others)
        self.mask_hidden = self.whole_on_every_rank(1, 1, len(drafter.layers) * config.hidden_size)

    @override
    def spec_of(self, number: int, submodules: MultiTokenPredictionLayerSubmodules, drafter: HeadSpec) -> ModuleSpec:
        if number > 1:
            return submodules.tf_layer
        norms = partial(InputNorms, before_residual=bool(drafter.own["drafter_norm_before_residual"]))
        spec = submodules.tf_layer
        own = replace(spec.submodules, input_layernorm=norms)
        return of_both(ModuleSpec(spec.module, submodules=own), self.config)

    def merge(self, embedded_SBH: Tensor, given_SBH: Tensor) -> Tensor:
        """Return the input [S, B, H] of the first layer's next call, from embeddings and features."""
        norms = self.layers[0].input_layernorm
        assert isinstance(norms, InputNorms)
        return norms.begin(embedded_SBH, given_SBH)

    @override
    def forward(
        self,
        given_SBH: Tensor | None,
        embedded_SBH: Tensor,
        attention: AttentionInputs,
        padding_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the rows' states before the norm, from their features and embeddings."""
        assert given_SBH is not None
        return super().forward(None, self.merge(embedded_SBH, given_SBH), attention)


class PEagleBlock(BlockDrafter):
    """Drafts K tokens at once; each mask attends to earlier ones."""

    settings: ClassVar[dict[str, Any]] = {"sequence_parallel": False}

    @classmethod
    @override
    def submodules(cls, drafter: HeadSpec, config: TransformerConfig) -> MultiTokenPredictionLayerSubmodules:
        own = layer_config(config, drafter, **cls.settings)
        return MultiTokenPredictionLayerSubmodules(layer_spec(own, {PortableAttention: TextAndMasks}), PortableNorm)

    @override
    def make_layer(self, *args: Any) -> PEagleLayer:
        return PEagleLayer(self.drafter, self.config, self.drafted, *args)

    @override
    def drafts(self, trunk: TrunkOutput, batch: DepthBatch) -> tuple[list[Tensor], Tensor | None]:
        assert batch.tokens_DBS is not None
        states_SBX = self.read_states(trunk)
        positions_S, place_A = self.places(batch, states_SBX.device)
        position_A = positions_S[place_A]
        rings = self.rings(trunk.attention, self.cp_group.size() * len(positions_S))
        text_SBH = self.layer.feature(self.known_states(states_SBX, positions_S, rings))
        next_SB = batch.tokens_DBS[0].t()
        next_SB = next_SB if rings else self.in_order(next_SB, positions_S)
        (count, width), blocks, masks = next_SB.shape, len(position_A), self.depths - 1
        filled = next_SB.new_full((width, blocks * masks), self.drafter.mask_token)
        embedded_RBH = self.embedded(torch.cat([next_SB.t(), filled], dim=1), trunk.frozen_embedding)
        mask_11H = self.layer.feature(self.layer.mask_hidden)
        given_RBH = torch.cat([text_SBH, mask_11H.expand(blocks * masks, width, -1)])
        later_M = torch.arange(1, masks + 1, device=position_A.device)
        text_S, newest_A = (positions_S, place_A) if rings else (torch.arange(count).to(position_A), position_A)
        place_R = torch.cat([text_S, (position_A.unsqueeze(1) + later_M).flatten()])
        turned, _ = self.angles(self.cp_group.size() * len(positions_S) + self.depths, packed_seq=True)
        if rings:
            self._give_reach(trunk.attention, batch.positions_S, position_A)
        else:
            self._give_rows(trunk.attention, positions_S, place_A, count)
        made_RBH = self.layer.norm(self.layer(given_RBH, embedded_RBH, AttentionInputs(rotary_pos_emb=turned[place_R])))
        masks_AMBH = made_RBH[count:].unflatten(0, (blocks, masks))
        return list(torch.cat([made_RBH[newest_A].unsqueeze(1), masks_AMBH], dim=1).unbind(1)), None

    def _give_reach(self, attention: AttentionInputs, positions_S: Tensor, position_A: Tensor) -> None:
        """Tell every layer what its rows attend to if keys stay on the ranks that computed them."""
        text = self.reach(attention, positions_S, positions_S)
        rows = replace(text, last_S=text.last_S - 1), self.reach(attention, positions_S, position_A), position_A + 1
        for layer in self.layer.layers:
            layer.self_attention.core_attention.rows = rows

    def _give_rows(self, attention: AttentionInputs, positions_S: Tensor, place_A: Tensor, count: int) -> None:
        """Set in every layer which rows attend to which; a mask of the trunk's attention has only this rank's rows."""
        visible_B1AS = visible_before(attention, place_A, positions_S[place_A], count)
        if attention.attention_mask is not None:
            own = attention.attention_mask.permute(2, 0, 1, 3)
            visible_B1SS = ~self.in_order(own.byte(), positions_S).bool().permute(1, 2, 0, 3)
        else:
            every_S = torch.arange(count, device=positions_S.device)
            visible_B1SS = visible_before(attention, every_S, every_S, count)
        before_SS = torch.ones_like(visible_B1SS[0, 0]).tril(-1)
        for layer in self.layer.layers:
            layer.self_attention.core_attention.rows = visible_B1SS & before_SS, visible_B1AS, positions_S[place_A] + 1
