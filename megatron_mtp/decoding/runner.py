"""A loaded model that runs row by row over caches: trunk, MTP layers and output layer, with the modules of training.

Letters in names: S rows of a forward pass (Megatron's sequence), B batch, R the same rows, H hidden, V vocabulary.
"""

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron_mtp.decoding.alarm import Alarm
from megatron_mtp.decoding.backend import backend_for, layers_of
from megatron_mtp.decoding.block_tables import SLOTS_BEYOND_POSITIONS, BlockTables
from megatron_mtp.decoding.cached_attention import Scope, attach, cache_latents
from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.draft import Draft
from megatron_mtp.decoding.kv_cache import KVCache, Memory
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.sequences import Sequences
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.draft_vocabulary import NOT_DRAFTED

if TYPE_CHECKING:
    from megatron_mtp.decoding.auto_count import AutoK
    from megatron_mtp.decoding.recurrent_layers import Sizes

PLACES = ("rope", "yarn", "none")
"""Position embeddings that support arbitrary positions for each row."""

TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"
"""Module of Megatron's layers with Transformer Engine, which may read back."""

STATIC_EXPERTS = "MEGATRON_MTP_STATIC_EXPERTS"
"""Environment variable: with 1, few rows run through `StaticExperts`, so that steps with experts can be captured."""


class Keeping(NamedTuple):
    """Memory per sequence that the layers of a trunk or an MTP layer need.

    Attributes:
        numbers: values for keys and values of a token, in all layers.
        states: sizes of the recurrent layers.
    """

    numbers: int
    states: "list[Sizes]"


class Runner:
    """A model for drafting. Its attention modules get caches, so it can no longer be trained.

    Args:
        model: the whole model on this pipeline stage; any tensor parallelism.
        vocab_size: number of tokens that may be emitted; by default, those that the model was trained with. Padding
            rows beyond them are never chosen.

    Attributes:
        device, dtype, hidden_size: device and dtype of the weights, and H.
        trunk_layers, depth_layers: layers of the trunk, and of an MTP layer.
        state_size: size of a trunk state that sequences keep: H, plus the feature size of a drafter that reads inner
            layers.
        depths: D; 0 without MTP.
        drafted: number of tokens that the MTP layers may draft; smaller than `vocab_size` with a draft vocabulary.
        shares_kv: whether later passes of a repeated layer were trained on pass 1's keys, as `mtp_eagle` runs them.
        has_chain: whether they were trained on those of their own chain too; True if they share no keys.
        sequential: whether each MTP layer continues the previous one; False for parallel heads and without MTP.
        kind: kind of MTP layers or drafter, as in `Proposer.depths`; None without MTP.
        positions: number of positions that the model was trained for.
        auto_counts: measurements for automatic K, by config and number of sequences.
        kept: engine of an earlier `generate`, with its captured steps.
        source: checkpoint that it was loaded from; None if none.
        tokens: ids of the tokenizer's tokens; None if the tokenizer is unknown.
        alarm: compares measured with recorded acceptance.
        trunk_keeps, depths_keep: memory of the trunk and of each MTP layer; a drafter counts as one.
        recurrent_trunk, recurrent_depths: whether the trunk or the MTP layers have recurrent layers.
        backend: runs rows through the layers.

    Raises:
        ValueError: drafting does not support this kind of model.
    """

    def __init__(self, model: LanguageModule, vocab_size: int | None = None) -> None:
        if not (model.pre_process and model.post_process):
            raise ValueError("drafting needs the whole model on one pipeline stage; load it with pipeline size 1.")
        if model.position_embedding_type not in PLACES:
            raise ValueError(
                f"the model has position embeddings of type {model.position_embedding_type}, which drafting does not "
                f"support; give a model with {' or '.join(PLACES)}."
            )
        self.model, self.attached = model.eval(), attached_of(model)
        weight, self.hidden_size = model.embedding.word_embeddings.weight, model.config.hidden_size
        self.device, self.dtype, self.trunk_layers = weight.device, weight.dtype, len(model.decoder.layers)
        reads = () if self.attached.drafter is None else self.attached.drafter.layers
        self.state_size = self.hidden_size * (2 if reads else 1)
        self.positions: int = model.max_sequence_length
        self.vocab_size: int = vocab_size or self.attached.true_vocab_size or model.vocab_size
        self.depths: int = model.config.mtp_num_layers or 0 if model.mtp_process else 0
        self.sequential: bool = model.mtp.sequential if self.depths else False
        self.kind: str | None = ("sequential" if self.sequential else "parallel") if self.depths else None
        if self.depths and self.attached.drafter is not None:
            self.kind = self.attached.drafter.kind
        self.shares_kv: bool = model.mtp.shares_kv if self.depths else False
        self.has_chain: bool = model.mtp.has_chain if self.depths else True
        self.auto_counts: dict[tuple[SpeculativeConfig, int], AutoK] = {}
        self.kept: Any = None
        self.source: Path | None = None
        self.tokens: dict[str, int] | None = None
        self.alarm = Alarm()
        self._scope = Scope()
        self._place_caches()
        self._place_experts()
        self.read_weights()

    def read_weights(self) -> None:
        """Recompute everything derived from the weights. Call it when they have changed.

        Captured steps become invalid.
        """
        self.backend = backend_for(self.model, self._scope, self.positions + SLOTS_BEYOND_POSITIONS, self._plain_head())
        self._head = self._make_head()
        self._draft_head, self.drafted = self._make_draft_head()
        self.kept = None

    @cached_property
    def recordable(self) -> bool:
        """Whether a forward pass of few rows reads nothing back to the host.

        Megatron's experts and recurrent states do.
        """
        if self.recurrent_trunk or self.recurrent_depths or self.model.config.tensor_model_parallel_size > 1:
            return False
        layers = self._layers()
        if any(isinstance(getattr(layer, "mlp", None), MoELayer) for layer in layers):
            return False
        return not any(type(one).__module__ == TRANSFORMER_ENGINE for layer in layers for one in layer.modules())

    def new_memory(self, tables: BlockTables, drafter: "Runner | None" = None) -> Memory:
        """Allocate memory for sequences with these block tables, and for a small model that drafts."""
        sizes = tables.blocks, 1, tables.size, self.state_size
        return Memory(
            KVCache(self.trunk_layers, tables),
            [KVCache(self.depth_layers, tables) for _ in self.depths_keep],
            None if drafter is None else KVCache(drafter.trunk_layers, tables),
            torch.zeros(sizes, dtype=self.dtype, device=self.device),
            torch.arange(2 * tables.capacity + 2, device=self.device),
        )

    def trunk(self, tokens_BR: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """Return h_0 of the rows, after the final norm, [S, B, H]; with a drafter's feature after it, [S, B, 2 H]."""
        return self.backend.run(0, tokens_BR, None, rows, cache)

    def depth(self, depth: int, hidden_SBH: Tensor, tokens_BR: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """Return h_d of the rows, [S, B, H], from h_{d-1} and the tokens t_{i+d}, which parallel heads ignore."""
        given_SBH = hidden_SBH[..., -self.hidden_size :]
        return self.backend.run(1 + (depth - 1) % len(self.model.mtp.layers), tokens_BR, given_SBH, rows, cache)

    def keep_context(self, hidden_SBH: Tensor, rows: Rows, cache: KVCache) -> None:
        """Let the blocks of a drafter attend to these rows, given what `trunk` returned for them."""
        self.backend.keep_context(hidden_SBH[..., self.hidden_size :], rows, cache)

    def block(self, tokens_BR: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """Return states [S, B, H] of a drafter's block, before its norm; later rows overwrite its keys and values."""
        return self.backend.run(1, tokens_BR, None, rows, cache)

    def verify(self, sequences: Sequences, draft: Draft) -> Tensor:
        """Score the newest tokens and a draft in one forward pass of the trunk, [B, R, V], and keep its states."""
        rows = sequences.rows_of(draft)
        newest_B1 = sequences.tokens_BT.gather(1, rows.first_B.unsqueeze(1))
        tokens_BR = torch.cat([newest_B1, draft.tokens_BN], dim=1) if draft.nodes else newest_B1
        return self.logits(self.trunk(tokens_BR, rows, sequences.memory.cache))

    def logits(self, hidden_SBH: Tensor) -> Tensor:
        """Return logits [B, R, V], the same on every tensor-parallel rank."""
        return self._head(hidden_SBH[..., : self.hidden_size])[..., : self.vocab_size].transpose(0, 1)

    def draft_logits(self, hidden_SBH: Tensor) -> Tensor:
        """Return logits of an MTP layer's states, [B, R, V]; -inf for tokens that may not be drafted."""
        return self._draft_head(hidden_SBH)[..., : self.vocab_size].transpose(0, 1)

    def _place_caches(self) -> None:
        stacks = self._stacks()
        keeping = [self._cached(stack) for stack in stacks]
        self.trunk_keeps = keeping[0]
        caches = self.depths if self.attached.drafter is None else 1
        self.depths_keep = [keeping[1 + depth % (len(keeping) - 1)] for depth in range(caches if self.depths else 0)]
        self.recurrent_trunk = bool(self.trunk_keeps.states)
        self.recurrent_depths = any(one.states for one in self.depths_keep)
        self.depth_layers = max(map(len, stacks[1:]), default=1)
        cache_latents(one for one in self._layers() if hasattr(one, "self_attention"))

    def _cached(self, layers: list[Any]) -> Keeping:
        """Give attention layers of a stack their part of the cache, and recurrent layers a memory."""
        attending, states = list[Any](), list[Any]()
        for layer in layers:
            place = "mixer" if isinstance(layer, MambaLayer) else "self_attention"
            own = getattr(layer, place)
            if isinstance(own, MambaMixer | GatedDeltaNet):
                from megatron_mtp.decoding.recurrent_layers import CachedDelta, CachedMamba

                kind = CachedMamba if isinstance(own, MambaMixer) else CachedDelta
                setattr(layer, place, made := kind(own, self._scope, len(states)))
                states.append(made.sizes)
            elif not isinstance(own, IdentityOp):  # not a layer with only an MLP or experts
                attending.append(layer)
        attach(attending, self._scope, self.positions + SLOTS_BEYOND_POSITIONS)
        return Keeping(sum(_kept_numbers(layer.config) for layer in attending), states)

    def _stacks(self) -> list[list[torch.nn.Module]]:
        """Return the layers of the trunk, and inside every MTP layer."""
        depths = self.model.mtp.layers if self.depths else []
        return [list(self.model.decoder.layers), *map(layers_of, depths)]

    def _layers(self) -> list[Any]:
        """Return the layers of the trunk and of all MTP layers."""
        return [layer for stack in self._stacks() for layer in stack]

    def _place_experts(self) -> None:
        """Replace experts if requested: `decoding/experts.py` has not run on a GPU yet."""
        if os.environ.get(STATIC_EXPERTS) == "1" and isinstance(self.model, GPTModel):
            from megatron_mtp.decoding.experts import place_static_experts

            for layer in self._layers():
                place_static_experts(layer)

    def _plain_head(self) -> Tensor | None:
        """Return the head's rows if logits are its product with a state, in trunk and MTP layers; else None."""
        model = self.model
        drafts_apart = self.attached.draft_vocabulary is not None or self.attached.drafter is not None
        if not self._has_whole_head() or model.config.use_mup or drafts_apart:
            return None
        return self._head_weight().detach()[: self.vocab_size]

    def _make_head(self) -> Callable[[Tensor], Tensor]:
        model, weight = self.model, self._head_weight()
        if self._has_whole_head():
            multiply = self.backend.product(weight)
            return (lambda hidden_SBH: model._scale_logits(multiply(hidden_SBH))) if model.config.use_mup else multiply

        def project(hidden_SBH: Tensor) -> Tensor:
            logits, _ = model.output_layer(hidden_SBH, weight=weight, runtime_gather_output=True)
            return model._scale_logits(logits)

        return project

    def _make_draft_head(self) -> tuple[Callable[[Tensor], Tensor], int]:
        """Return the function from an MTP layer's or drafter's states to logits, and the number of drafted tokens."""
        model, draft_vocabulary = self.model, self.attached.draft_vocabulary
        if self.attached.drafter is not None:  # its output layer has a norm before it, and may have its own rows
            layer, tokens_N = model.mtp.layer, model.mtp.draft_vocabulary
            if tokens_N is None or layer.head is None:
                return lambda state_SBH: self._head(layer.norm(state_SBH)), self.vocab_size
            spread = self._spread(layer.head.detach(), tokens_N, model.vocab_size)
            return lambda state_SBH: spread(layer.norm(state_SBH)), min(tokens_N.numel(), self.vocab_size)
        if draft_vocabulary is None:
            return self._head, self.vocab_size
        left_out_V = draft_vocabulary.index_V == NOT_DRAFTED
        drafted = int((~left_out_V[: self.vocab_size]).sum())
        if not self._has_whole_head():
            return lambda hidden_SBH: self._head(hidden_SBH).masked_fill(left_out_V, -torch.inf), drafted
        rows_K = draft_vocabulary.rows_K
        return self._spread(self._head_weight()[rows_K], rows_K, left_out_V.numel()), drafted

    def _spread(self, weight_KH: Tensor, tokens_K: Tensor, vocabulary: int) -> Callable[[Tensor], Tensor]:
        """Return a head for some tokens: states to logits of the whole vocabulary, -inf for the others."""
        multiply = self.backend.product(weight_KH)

        def project(hidden_SBH: Tensor) -> Tensor:
            logits_SBK = self.model._scale_logits(multiply(hidden_SBH))
            logits_SBV = logits_SBK.new_full((*logits_SBK.shape[:-1], vocabulary), -torch.inf)
            return logits_SBV.index_copy_(-1, tokens_K, logits_SBK)

        return project

    def _head_weight(self) -> Tensor:
        model = self.model
        tied = model.share_embeddings_and_output_weights
        return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight

    def _has_whole_head(self) -> bool:
        return self.model.config.tensor_model_parallel_size == 1 and self.model.output_layer.bias is None


def _kept_numbers(config: TransformerConfig) -> int:
    """Return how many numbers of keys and values attention stores per token on this rank."""
    if isinstance(config, MLATransformerConfig):
        return config.kv_lora_rank + config.qk_pos_emb_head_dim
    groups = config.num_query_groups or config.num_attention_heads
    return 2 * int(config.kv_channels or 0) * groups // config.tensor_model_parallel_size
