"""Backends run rows through the layers of a model: the trunk and each MTP layer.

`Modules` is the default: the trained modules, with faster forwards for the layers that `dense_layer` supports. Packages
add others by an entry point:

    [project.entry-points."megatron_mtp.backends"]
    mine = "my_package.mine:Mine"        # a subclass of Modules

The first backend that fits the model runs it; a backend that does not fit raises `Unfit` on creation. It may override
`run`, `draft`, `accept` and `product`, call the base class for cases that it does not handle, and read all attributes
of `Modules`, `Stack`, `Pass` and `Sequences`. rows.py, kv_cache.py and recurrent_layers.py describe rows, caches and
recurrent layers.

Letters in names: S rows of a forward pass (Megatron's sequence), B batch, R the same rows, H hidden, V vocabulary, N
drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor
from torch.nn.functional import embedding, linear

from megatron_mtp.decoding.block_tables import write_rows
from megatron_mtp.decoding.cached_attention import Scope
from megatron_mtp.decoding.dense_layer import Angles, Forward, Multiply, lean, rotated, short_norm, turns
from megatron_mtp.decoding.draft import Draft, StepOutput
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.sequences import Sequences
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.mtp import whole_states
from megatron_mtp.model.trunk_output import AttentionInputs
from megatron_mtp.spec.registry import Registry


class Unfit(Exception):  # noqa: N818 - control flow, not an error
    """Raised when a backend does not support this model."""


@dataclass(frozen=True)
class Stack:
    """Layers of the trunk or of an MTP layer.

    Attributes:
        layers: the modules.
        short: the forward of `dense_layer` for each; None if it has none.
        last: norm after them; None if there is none.
        mtp: the MTP layer; None for the trunk.
        read: numbers of the trunk layers whose states a drafter reads, from 1; empty without a drafter.
    """

    layers: Sequence[Any]
    short: Sequence[Forward | None]
    last: Any
    mtp: Any = None
    read: Sequence[int] = ()

    @property
    def is_short(self) -> bool:
        """Whether `dense_layer` has a forward for every layer."""
        return None not in self.short


@dataclass(frozen=True)
class Pass:
    """Rows of every sequence that MTP layer `depth` has to run.

    With t_m a sequence's newest token, row i is at position m + first + i and merges the token `ahead` places after it.
    Tokens after t_m were drafted by earlier passes.

    Attributes:
        count: number of rows.
        from_trunk: whether it continues the trunk's states of these rows, or the last states of the previous pass.
        keeps: whether its keys and values are kept; if not, its rows attend only to those before row m.
    """

    depth: int
    first: int
    count: int
    ahead: int
    from_trunk: bool
    keeps: bool = True


@dataclass(frozen=True)
class MTPRows:
    """A pass as tensors.

    Attributes:
        given_SBH: trunk states to continue; None to continue the last states of the previous pass.
        tokens_BR: tokens whose embeddings are merged with these; may be part of the draft in progress.
    """

    depth: int
    given_SBH: Tensor | None
    tokens_BR: Tensor
    rows: Rows
    cache: KVCache


def in_tensors(sequences: Sequences, passes: Sequence[Pass]) -> tuple[list[MTPRows], Tensor]:
    """Convert passes to tensors, with the buffer of their drafts [B, N], which later passes read."""
    known, places = -passes[0].first - passes[0].ahead + 1, dict[tuple[int, int], Rows]()
    tokens_BT = sequences.tokens_at(sequences.newest_B + (1 - known), known + len(passes))
    made = []
    for one in passes:
        rows = places.get((one.first, one.count))
        if rows is None:
            beyond = 0 if one.first < 0 else len(passes)
            rows = sequences.chain(sequences.newest_B + one.first, one.count, beyond, keeps=one.keeps)
            places[one.first, one.count] = rows
        given_SBH = rows.states_in(sequences.memory.states_N1SH) if one.from_trunk else None
        start = one.first + one.ahead + known - 1
        tokens_BR, cache = tokens_BT[:, start : start + one.count], sequences.memory.depths[one.depth - 1]
        made.append(MTPRows(one.depth, given_SBH, tokens_BR, rows, cache))
    return made, tokens_BT[:, known:]


class _Turns:
    """Rotary angles of all positions.

    Args:
        dtype: of cosines and sines.
        angles_L11C: Megatron's.
        scale: YaRN's factor of cosines and sines.

    Attributes:
        turns_L211C: cosine and signed sine.
    """

    def __init__(self, dtype: torch.dtype, angles_L11C: Tensor, scale: float) -> None:
        self.angles_L11C, self.turns_L211C = angles_L11C, turns(angles_L11C, dtype, scale)
        self._rows: Rows | None = None
        self._made: tuple[Tensor | None, Angles | None] = None, None

    def of(self, rows: Rows, has_modules: bool) -> tuple[Tensor | None, Angles | None]:
        """Return rotary inputs of these rows for Megatron's modules, if any, and for short layers.

        Cached for these rows.
        """
        if rows is not self._rows:
            place_SB = rows.positions_BR.transpose(0, 1)
            cosine, signed_sine = self.turns_L211C[place_SB].unbind(2)
            rotary_SB1C = self.angles_L11C[place_SB, 0] if has_modules else None
            self._rows, self._made = rows, (rotary_SB1C, (cosine, signed_sine))
        return self._made


class Modules:
    """The default backend: the trained modules.

    Args:
        model: model with caches in place of attention and recurrent layers.
        scope: scope that these layers read.
        positions: number of positions that a row may have.
        head_VH: weight whose product with a state gives its logits, for the trunk and the MTP layers; None if the
            output layer computes more than that.

    Attributes:
        stacks: the trunk's, then those of the MTP layers.
        embedding_VH: embedding weight; None if the embedding computes more than a lookup.
        turns_L211C: cosine and signed sine of every position; None without rotary embedding.
        all_short: whether `dense_layer` has a forward for every layer.
    """

    def __init__(self, model: LanguageModule, scope: Scope, positions: int, head_VH: Tensor | None) -> None:
        self.model, self.attached, self.scope, self.head_VH = model, attached_of(model), scope, head_VH
        decoder: Any = model.decoder
        last = decoder.final_norm if hasattr(decoder, "final_norm") else decoder.final_layernorm
        mtp_layers: list[Any] = [*model.mtp.layers] if model.mtp_process else []
        self.stacks = [
            replace(
                self._stack([*model.decoder.layers], last),
                read=self.attached.drafter.layers if self.attached.drafter else (),
            ),
            *(self._stack(layers_of(one), one.final_layernorm, one) for one in mtp_layers),
        ]
        self.all_short = all(stack.is_short for stack in self.stacks)
        self.embedding_VH = model.embedding.word_embeddings.weight.detach() if _looks_up(model) else None
        self._last_norms = [None if one.last is None else short_norm(one.last) for one in self.stacks]
        self._merges = [_merge(stack.mtp, self.product) if stack.is_short else None for stack in self.stacks]
        dtype = model.embedding.word_embeddings.weight.dtype
        trunk = _Turns(dtype, *self.attached.rotary_angles(positions)) if self.attached.turns_heads else None
        self.turns_L211C = None if trunk is None else trunk.turns_L211C
        own = trunk
        if self.attached.drafter is not None:
            is_turned = model.mtp.rotary is not None
            own = _Turns(dtype, *model.mtp.angles(positions, packed_seq=True)) if is_turned else None
        self._turns = [trunk, *(own for _ in mtp_layers)]

    def product(self, weight: Tensor) -> Multiply:
        """Compute x @ weight.T, [..., in] to [..., out]."""
        return lambda hidden: linear(hidden, weight)

    def run(self, number: int, tokens_BR: Tensor, given_SBH: Tensor | None, rows: Rows, cache: KVCache) -> Tensor:
        """Run rows through a stack and its final norm, and keep their keys, values and states. Return states [S, B, H].

        States of a trunk with a drafter are [S, B, 2 H], with the feature after the state. The trunk's states are also
        written to `cache.states_N1SH`, if allocated.

        Args:
            number: index of the stack.
            given_SBH: states that an MTP layer continues; None for the trunk and for a block drafter.
        """
        if (own := rows.without_padding()) is not None:
            given_SBH = None if given_SBH is None else own.packed(given_SBH, 1, 0)
            made_SBH = own.unpacked(self._run(number, own.packed(tokens_BR), given_SBH, own, cache), 1, 0)
        else:
            made_SBH = self._run(number, tokens_BR, given_SBH, rows, cache)
        if number == 0 and cache.states_N1SH is not None:
            write_rows(cache.states_N1SH, made_SBH.transpose(0, 1).unsqueeze(1), rows.memory_places)
        return made_SBH

    def keep_context(self, feature_SBH: Tensor, rows: Rows, cache: KVCache) -> None:
        """Store the keys and values that a block drafter's layers compute from the features [S, B, H] of these rows."""
        from megatron_mtp.model.block_drafter import context_keys

        if (own := rows.without_padding()) is not None:
            feature_SBH, rows = own.packed(feature_SBH, 1, 0), own
        _, angles = self._rotary(1, rows)
        for number, layer in enumerate(self.stacks[1].layers):
            key_SBGC, value_SBGC = context_keys(layer.self_attention, feature_SBH)
            if angles is not None:
                key_SBGC = rotated(key_SBGC.unsqueeze(3), *angles).squeeze(3)
            memories = cache.take(number, key_SBGC.size(2), key_SBGC.size(3), key_SBGC)
            for memory_NGSC, new_SBGC in zip(memories, (key_SBGC, value_SBGC), strict=True):
                write_rows(memory_NGSC, new_SBGC.permute(1, 2, 0, 3), rows.memory_places)

    def draft(self, sequences: Sequences, passes: Sequence[Pass]) -> Tensor | None:
        """Run MTP layers in sequence in one call.

        Return the most probable token after the last row of each pass, [B, N].

        Returns:
            None if nothing was done; the caller then does it step by step.
        """
        return None

    def accept(self, sequences: Sequences, draft: Draft, passes: Sequence[Pass] = ()) -> StepOutput | None:
        """Score a draft with the trunk and append what the verifier `greedy` accepts, in one call.

        Args:
            passes: passes of MTP layers that first write the draft tokens, as in `draft`; empty if they are already
                written.

        Returns:
            None if nothing was done; the caller then does it step by step.
        """
        return None

    def _run(self, number: int, tokens_BR: Tensor, given_SBH: Tensor | None, rows: Rows, cache: KVCache) -> Tensor:
        self.scope.enter(cache, rows)
        stack, merge, normalize = self.stacks[number], self._merges[number], self._last_norms[number]
        rotary, angles = self._rotary(number, rows)
        if stack.mtp is not None and not stack.is_short:
            embedded_SBH = self._embed(tokens_BR) if self.model.mtp.sequential else None
            made_SBH: Tensor = stack.mtp(given_SBH, embedded_SBH, AttentionInputs(rotary_pos_emb=rotary))
            return made_SBH
        if given_SBH is None:
            hidden_SBH = self._embed(tokens_BR)
        else:
            hidden_SBH = given_SBH if merge is None else merge(self._embed(tokens_BR), given_SBH)
        after: list[Tensor] = []
        for layer, short in zip(stack.layers, stack.short, strict=True):
            if short is not None:
                hidden_SBH = short(hidden_SBH, angles)
            else:
                made = layer(hidden_states=hidden_SBH, attention_mask=None, rotary_pos_emb=rotary)
                hidden_SBH = made[0] if isinstance(made, tuple) else made
            if stack.read:
                after.append(hidden_SBH)
        state_SBH = hidden_SBH if normalize is None else normalize(hidden_SBH)
        if not stack.read:
            return state_SBH
        feature_SBH = self.model.mtp.layer.feature(torch.cat([after[number - 1] for number in stack.read], dim=-1))
        return torch.cat((state_SBH, feature_SBH), dim=-1)

    def _embed(self, tokens_BR: Tensor) -> Tensor:
        """Return embeddings, [S, B, H]."""
        if self.embedding_VH is not None:
            return embedding(tokens_BR.transpose(0, 1), self.embedding_VH)
        embedded_SBH: Tensor = self.model.embedding(input_ids=tokens_BR, position_ids=None)
        return embedded_SBH

    def _rotary(self, number: int, rows: Rows) -> tuple[Tensor | None, Angles | None]:
        """Return rotary inputs of a stack, for Megatron's modules and for short layers."""
        turns = self._turns[number]
        return (None, None) if turns is None else turns.of(rows, not self.all_short)

    def _stack(self, layers: list[Any], last: Any, mtp: Any = None) -> Stack:
        return Stack(layers, [lean(layer, self.product) for layer in layers], last, mtp)


BACKENDS: Registry[type[Modules]] = Registry("megatron_mtp.backends", {"modules": Modules})


def backend_for(model: LanguageModule, scope: Scope, positions: int, head_VH: Tensor | None) -> Modules:
    """Create the first backend of another package that fits the model, or else `Modules`; takes their arguments.

    Raises:
        ValueError: a package's backend cannot be imported.
    """
    for kind in (one for one in BACKENDS.values() if one is not Modules):
        try:
            return kind(model, scope, positions, head_VH)
        except Unfit:
            continue
    return Modules(model, scope, positions, head_VH)


def layers_of(mtp: Any) -> list[Any]:
    """Return the layers of an MTP layer: one, or those of its stack; for a block drafter, all."""
    stack = mtp if hasattr(mtp, "layers") else mtp.tf_layer
    return [*stack.layers] if hasattr(stack, "layers") else [stack]


def _merge(mtp: Any, product: Callable[[Tensor], Multiply]) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the function from embeddings and states [S, B, H] to the input of a sequential MTP layer.

    None for others.
    """
    if not hasattr(mtp, "eh_proj"):  # EAGLE-3 drafters have their own merge; parallel heads and blocks have none
        merges: Callable[[Tensor, Tensor], Tensor] | None = getattr(mtp, "merge", None)
        return merges
    multiply, enorm, hnorm = product(mtp.eh_proj.weight), short_norm(mtp.enorm), short_norm(mtp.hnorm)

    def merge(embedded_SBH: Tensor, given_SBH: Tensor) -> Tensor:
        part = multiply(torch.cat((enorm(embedded_SBH), hnorm(given_SBH)), dim=-1))
        return whole_states(part, mtp.config, mtp.tp_group)

    return merge


def _looks_up(model: LanguageModule) -> bool:
    """Return whether Megatron's embedding only looks up rows."""
    config = model.config
    return config.tensor_model_parallel_size == 1 and not (config.use_mup or config.fp32_residual_connection)
