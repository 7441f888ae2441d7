"""A loaded model, run row by row over caches: the trunk, each depth, and the head, with the modules of training.

Letters in names: S rows of a forward (Megatron's sequence), B batch, R the same rows, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from megatron_mtp.drafting.auto import AutoK
from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.dense_layer import Angles, lean, short_norm, turns
from megatron_mtp.drafting.experts import place_static_experts, reads_nothing_back
from megatron_mtp.drafting.few_rows import MOST_ROWS, DepthPass, FewRows, GreedyDrafts, best_of, few_rows, greedy_drafts
from megatron_mtp.drafting.kv_cache import KVCache, Rows
from megatron_mtp.drafting.latent_attention import cache_latents
from megatron_mtp.drafting.packed import packed
from megatron_mtp.drafting.products import product
from megatron_mtp.drafting.recurrent_layers import attach_stack
from megatron_mtp.drafting.recurrent_state import RecurrentScope
from megatron_mtp.model.draft_vocabulary import NOT_DRAFTED
from megatron_mtp.model.hybrid import DepthStack, MTPHybridModel
from megatron_mtp.model.mtp import AttentionInputs
from megatron_mtp.model.trunk import MTPTrunk

BEYOND = 64
"""Positions after the model's last one that drafts may have; no token is emitted there."""

PLACES = ("rope", "yarn", "none")
"""Position embeddings that can give every row the angles of its own position."""


class Runner:
    """A model for drafting. Its attention modules get caches, so it can no longer train.

    Args:
        model: all of it on this pipeline stage; any tensor parallelism.
        vocab_size: tokens that may be emitted; those that the model was trained with by default. The padding of the
            vocabulary beyond them is never chosen.

    Attributes:
        depths: D; 0 without MTP.
        drafted: tokens that the depths may draft; fewer than `vocab_size` with a draft vocabulary.
        shares_kv: whether later passes of a repeated layer were trained on pass 1's keys, as `mtp_eagle` runs them.
        sequential: whether each depth continues the one before; False for parallel heads, and without depths.
        positions: how many the model was trained for.
        auto_counts: what has been measured for automatic K, by config and size of the batch.
        kept: memory of earlier batches, by their size (`graphs.py`).
        trunk_keeps, depths_keep: what the trunk and each depth keep of a text.
        recurrent_trunk, recurrent_depths: whether the trunk or the depths have layers with a state.
        depth_layers: layers of a depth.
        all_short: whether every layer runs as `dense_layer` runs it.
        recordable: whether a forward of few rows reads nothing back to the host.

    Raises:
        ValueError: a kind of model that drafting does not support.
    """

    def __init__(self, model: MTPTrunk, vocab_size: int | None = None) -> None:
        if not (model.pre_process and model.post_process):
            raise ValueError("drafting needs the whole model on one pipeline stage; load it with pipeline size 1.")
        if model.position_embedding_type not in PLACES:
            raise ValueError(
                f"the model has position embeddings of type {model.position_embedding_type}, which drafting does not "
                f"support; give a model with {' or '.join(PLACES)}."
            )
        self.model = model.eval()
        self.positions: int = model.max_sequence_length
        self.vocab_size: int = vocab_size or model.true_vocab_size or model.vocab_size
        self.depths: int = model.config.mtp_num_layers or 0 if model.mtp_process else 0
        self.sequential: bool = model.mtp.sequential if self.depths else False
        self.shares_kv: bool = model.mtp.shares_kv if self.depths else False
        self.auto_counts: dict[tuple[SpeculativeConfig, int], AutoK] = {}
        self.kept: dict[int, Any] = {}
        self._scope = RecurrentScope()
        self._turned_rows: Rows | None = None
        self._turned: tuple[Tensor | None, Angles | None] = None, None
        self._place_attention()
        self._place_experts()
        self._layers = [(lean(layer), layer) for layer in model.decoder.layers]
        self._mtp = [_Depth(layer) for layer in model.mtp.layers] if self.depths else []
        self.all_short = all(one is not None for one, _ in self._layers) and all(one.short for one in self._mtp)
        self.recordable = not (self.recurrent_trunk or self.recurrent_depths) and (
            self.all_short or all(map(reads_nothing_back, self._transformer_layers()))
        )
        self._last_norm = model.decoder.final_norm if self._is_hybrid else model.decoder.final_layernorm
        self._final_norm = None if self._last_norm is None else short_norm(self._last_norm)
        self._embed, self._head = self._make_embedding(), self._make_head()
        self._draft_head, self.drafted = self._make_draft_head()
        self._few_rows = self._make_few_rows()
        self._greedy_drafts = self._make_greedy_drafts()
        self._best = None if (head_VH := self._plain_head()) is None else best_of(head_VH)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.embedding.word_embeddings.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.model.embedding.word_embeddings.weight.dtype

    @property
    def hidden_size(self) -> int:
        """H, the hidden size."""
        return self.model.config.hidden_size

    @property
    def trunk_layers(self) -> int:
        """Layers of the trunk."""
        return len(self._layers)

    def trunk(self, tokens_BR: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """h_0 of the rows, after the final norm, [S, B, H]."""
        if (few := self._few_rows[0]) is not None and tokens_BR.numel() <= MOST_ROWS:
            return few(tokens_BR, None, rows, cache)
        if (own := packed(rows, cache)) is not None:
            return own.unpacked(self._run_trunk(own.tokens(tokens_BR), own, own.cache(cache)))
        return self._run_trunk(tokens_BR, rows, cache)

    def _run_trunk(self, tokens_BR: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        self._scope.enter(cache, rows)
        hidden_SBH = self._embed(tokens_BR)
        rotary, angles = self._rotary(rows)
        for short, module in self._layers:
            if short is not None:
                hidden_SBH = short(hidden_SBH, angles)
            else:
                made = module(hidden_states=hidden_SBH, attention_mask=None, rotary_pos_emb=rotary)
                hidden_SBH = made[0] if isinstance(made, tuple) else made
        return hidden_SBH if self._final_norm is None else self._final_norm(hidden_SBH)

    def depth(self, depth: int, hidden_SBH: Tensor, tokens_BR: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """h_d of the rows from h_{d-1} and the tokens t_{i+d}, which parallel heads do not read; [S, B, H]."""
        number = (depth - 1) % len(self._mtp)
        if (few := self._few_rows[1 + number]) is not None and tokens_BR.numel() <= MOST_ROWS:
            return few(tokens_BR, hidden_SBH, rows, cache)
        if (own := packed(rows, cache)) is not None:
            given = number, own.states(hidden_SBH), own.tokens(tokens_BR)
            return own.unpacked(self._run_depth(*given, own, own.cache(cache)))
        return self._run_depth(number, hidden_SBH, tokens_BR, rows, cache)

    def _run_depth(self, number: int, hidden_SBH: Tensor, tokens_BR: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        self._scope.enter(cache, rows)
        embedded_SBH = self._embed(tokens_BR) if self.sequential else None
        rotary, angles = self._rotary(rows)
        return self._mtp[number](hidden_SBH, embedded_SBH, rotary, angles)

    def logits(self, hidden_SBH: Tensor) -> Tensor:
        """[B, R, V], the same on every tensor-parallel rank."""
        return self._head(hidden_SBH)[..., : self.vocab_size].transpose(0, 1)

    def draft_logits(self, hidden_SBH: Tensor) -> Tensor:
        """Logits of a depth's states, [B, R, V]; -inf for tokens that may not be drafted."""
        return self._draft_head(hidden_SBH)[..., : self.vocab_size].transpose(0, 1)

    def most_probable(self, hidden_SBH: Tensor, draft: bool = False) -> Tensor:
        """The most probable token after every state, [S, B]; with `draft`, of those that may be drafted."""
        if self._best is not None and hidden_SBH.numel() <= MOST_ROWS * self.hidden_size:
            return self._best(hidden_SBH)
        logits_BRV = self.draft_logits(hidden_SBH) if draft else self.logits(hidden_SBH)
        return logits_BRV.argmax(dim=-1).transpose(0, 1)

    def drafts_at_once(self, rows: int) -> bool:
        """Whether `draft_greedily` takes depths of so many rows, of all texts together."""
        return self._greedy_drafts is not None and rows <= MOST_ROWS

    def draft_greedily(self, passes: list[DepthPass], drafted_BN: Tensor) -> None:
        """Run depths in turn; the most probable token after the last row of each goes to `drafted_BN`."""
        assert self._greedy_drafts is not None
        self._greedy_drafts(passes, drafted_BN)

    def _rotary(self, rows: Rows) -> tuple[Tensor | None, Angles | None]:
        """Rotary inputs of Megatron's modules, and of short layers; kept for further forwards of these rows."""
        if self._angles_L11C is not None and rows is not self._turned_rows:
            place_SB = rows.positions_BR.transpose(0, 1)
            cosine, signed_sine = self._turns_L211C[place_SB].unbind(2)
            rotary_SB1C = None if self.all_short else self._angles_L11C[place_SB, 0]
            self._turned_rows, self._turned = rows, (rotary_SB1C, (cosine, signed_sine))
        return self._turned

    def _place_attention(self) -> None:
        model, config = self.model, self.model.config
        stacks = self._stacks()
        keeping = [attach_stack(stack, self._scope, config, self.positions + BEYOND) for stack in stacks]
        self.trunk_keeps = keeping[0]
        self.depths_keep = [keeping[1 + depth % (len(keeping) - 1)] for depth in range(self.depths)]
        self.recurrent_trunk = bool(self.trunk_keeps.states)
        self.recurrent_depths = any(one.states for one in self.depths_keep)
        self.depth_layers = max(map(len, stacks[1:]), default=1)
        cache_latents(one for one in self._transformer_layers() if hasattr(one, "self_attention"))
        self._angles_L11C: Tensor | None = None
        if model.turns_heads:
            self._angles_L11C, scale = model.rotary_angles(self.positions + BEYOND)
            self._turns_L211C = turns(self._angles_L11C, self.dtype, scale)

    @property
    def _is_hybrid(self) -> bool:
        return isinstance(self.model, MTPHybridModel)

    def _stacks(self) -> list[list[torch.nn.Module]]:
        """The layers of the trunk, and of every depth."""
        depths = self.model.mtp.layers if self.depths else []
        return [list(self.model.decoder.layers), *map(_layers_of, depths)]

    def _transformer_layers(self) -> list[Any]:
        """Those of the trunk and of the depths; of a hybrid, layers of all kinds."""
        return [layer for stack in self._stacks() for layer in stack]

    def _place_experts(self) -> None:
        """On a GPU alone: the host of a CPU's model need not wait for what it reads."""
        if self.device.type == "cuda" and not self._is_hybrid:
            for layer in self._transformer_layers():
                place_static_experts(layer)

    def _make_embedding(self) -> Callable[[Tensor], Tensor]:
        """Tokens [B, R] to [S, B, H]; Megatron's module does it where it does more than look up."""
        model = self.model
        if self._looks_up:
            weight = model.embedding.word_embeddings.weight.detach()
            return lambda tokens_BR: embedding(tokens_BR.transpose(0, 1), weight)
        return lambda tokens_BR: model.embedding(input_ids=tokens_BR, position_ids=None)

    @property
    def _looks_up(self) -> bool:
        """Whether Megatron's embedding does no more than look up."""
        config = self.model.config
        return config.tensor_model_parallel_size == 1 and not (config.use_mup or config.fp32_residual_connection)

    def _make_few_rows(self) -> list[FewRows | None]:
        """The trunk and every depth as compiled code; None for those of other kinds."""
        model, turns_L211C = self.model, None if self._angles_L11C is None else self._turns_L211C
        if not self._looks_up:
            return [None] * (1 + len(self._mtp))
        weight, layers = model.embedding.word_embeddings.weight.detach(), list(model.decoder.layers)
        all_lean = all(short is not None for short, _ in self._layers)
        return [
            few_rows(layers, self._last_norm, weight, turns_L211C) if all_lean else None,
            *(one.few_rows(weight, turns_L211C) for one in self._mtp),
        ]

    def _make_greedy_drafts(self) -> GreedyDrafts | None:
        """None without compiled code for all depths and their head."""
        head_VH = self._plain_head()
        return None if head_VH is None else greedy_drafts(self._few_rows[1:], head_VH)

    def _plain_head(self) -> Tensor | None:
        """The head's rows where logits are its product with a state, of the trunk and of the depths; else None."""
        if not self._has_whole_head() or self.model.config.use_mup or self.model.draft_vocabulary is not None:
            return None
        return self._head_weight().detach()[: self.vocab_size]

    def _make_head(self) -> Callable[[Tensor], Tensor]:
        model, weight = self.model, self._head_weight()
        if self._has_whole_head():
            multiply = product(weight)
            return (lambda hidden_SBH: model._scale_logits(multiply(hidden_SBH))) if model.config.use_mup else multiply

        def project(hidden_SBH: Tensor) -> Tensor:
            logits, _ = model.output_layer(hidden_SBH, weight=weight, runtime_gather_output=True)
            return model._scale_logits(logits)

        return project

    def _make_draft_head(self) -> tuple[Callable[[Tensor], Tensor], int]:
        """A depth's states to logits, and how many tokens it may draft; a whole head is cut to their rows."""
        model, draft_vocabulary = self.model, self.model.draft_vocabulary
        if draft_vocabulary is None:
            return self._head, self.vocab_size
        left_out_V = draft_vocabulary.index_V == NOT_DRAFTED
        drafted = int((~left_out_V[: self.vocab_size]).sum())
        if not self._has_whole_head():
            return lambda hidden_SBH: self._head(hidden_SBH).masked_fill(left_out_V, -torch.inf), drafted
        rows_K = draft_vocabulary.rows_K
        multiply = product(self._head_weight()[rows_K])

        def project(hidden_SBH: Tensor) -> Tensor:
            logits_SBK = model._scale_logits(multiply(hidden_SBH))
            logits_SBV = logits_SBK.new_full((*logits_SBK.shape[:-1], left_out_V.numel()), -torch.inf)
            return logits_SBV.index_copy_(-1, rows_K, logits_SBK)

        return project, drafted

    def _head_weight(self) -> Tensor:
        model = self.model
        tied = model.share_embeddings_and_output_weights
        return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight

    def _has_whole_head(self) -> bool:
        return self.model.config.tensor_model_parallel_size == 1 and self.model.output_layer.bias is None


def _layers_of(depth: Any) -> list[Any]:
    """The layers of a depth: one, or those of its stack."""
    return [*depth.tf_layer.layers] if isinstance(depth.tf_layer, DepthStack) else [depth.tf_layer]


class _Depth:
    """One MTP layer: short where all its layers are, else as its module runs it."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        found = [lean(one) for one in _layers_of(layer)]
        self.short = [one for one in found if one is not None] if all(found) else []
        sequential = hasattr(layer, "eh_proj")
        self.merge = product(layer.eh_proj.weight) if sequential and self.short else None
        self.norms = [short_norm(norm) for norm in (layer.enorm, layer.hnorm)] if sequential else []
        self.final_norm = short_norm(layer.final_layernorm)

    def few_rows(self, embedding: Tensor, turns_L211C: Tensor | None) -> FewRows | None:
        """The layer as compiled code."""
        if not self.short:
            return None
        return few_rows(_layers_of(self.layer), self.layer.final_layernorm, embedding, turns_L211C, self.layer)

    def __call__(
        self, hidden_SBH: Tensor, embedded_SBH: Tensor | None, rotary: Tensor | None, angles: Angles | None
    ) -> Tensor:
        if not self.short:
            return self.layer(hidden_SBH, embedded_SBH, AttentionInputs(rotary_pos_emb=rotary))
        if embedded_SBH is not None:
            assert self.merge is not None
            enorm, hnorm = self.norms
            hidden_SBH = self.merge(torch.cat((enorm(embedded_SBH), hnorm(hidden_SBH)), dim=-1))
        for short in self.short:
            hidden_SBH = short(hidden_SBH, angles)
        return self.final_norm(hidden_SBH)
