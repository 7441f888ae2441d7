"""Few rows through a stack of layers in one call of compiled code (native/few_rows.cpp).

A forward pass of few rows takes as long as reading the weights; on a small model, as long as calling its operations.
The compiled code computes the same as `dense_layer`, for the same layers: with RMSNorm and a gated SiLU, in float32 or
bfloat16. All other layers run as before, and so do more rows than `MOST_ROWS`. Recurrent layers store their rows'
inputs in the memory of `recurrent_layers`.

Weights are packed, which needs their memory a second time, because the modules' own weights still run more rows.

Sums, norms, softmax and the residual stream are in float32 even with bfloat16 weights, where torch rounds after each
operation. A row's result does not depend on other rows, so in bfloat16 drafting emits the same tokens as plain
decoding.

Letters in names: B batch, R rows, S the same rows (Megatron's sequence), H hidden, L positions, C channels.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_mtp.decoding.backend import Pass
from megatron_mtp.decoding.block_tables import BlockTables
from megatron_mtp.decoding.dense_layer import attention_of, mixer_of, mlp_of, norm_before
from megatron_mtp.decoding.draft import Draft, StepOutput
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.sequences import Sequences
from megatron_mtp.extensions.cpu_rows.compiled import NUMBERS, library
from megatron_mtp.extensions.cpu_rows.threads import team_of
from megatron_mtp.model.norms import PortableNorm

if TYPE_CHECKING:
    from megatron_mtp.decoding.recurrent_layers import CachedRecurrence, Recurrence

MOST_ROWS = 64
"""Largest number of rows of all sequences. With more, a product is bound by arithmetic, and torch's kernels are faster.
"""

_P, _N = ctypes.c_void_p, ctypes.c_int64


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _P), ("eps", ctypes.c_float))


class _Recurrent(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("in", "out", "convolution", "bias", "decay", "step_bias", "skip")),
        ("norm", _Norm),
        *((name, _N) for name in ("heads", "groups", "key", "value", "width", "normed", "unit_keys")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("qkv", "proj", "gate", "up", "down")),
        *((name, _Norm) for name in ("mixing", "mlp", "query", "key")),
        ("scale", ctypes.c_float),
        ("recurrent", ctypes.POINTER(_Recurrent)),
    )


class _Remembered(ctypes.Structure):
    _fields_ = tuple((name, _P) for name in ("state", "keys", "values", "sums", "mixed"))


class _Stack(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("layers", "hidden", "heads", "groups", "channels", "turned", "ffn")),
        ("layer", ctypes.POINTER(_Layer)),
        *((name, _P) for name in ("turns", "embedding", "merge")),
        *((name, _Norm) for name in ("embedded", "given", "last")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("rows", "batch", "window")),
        ("tokens", _P),
        ("token_stride", _N),
        *((name, _P) for name in ("first", "positions", "places", "mask", "given", "states")),
        *((name, _P) for name in ("continued", "kept_states", "keys", "values", "table")),
        *((name, _N) for name in ("pages", "size")),
        *((name, _P) for name in ("remembered", "entry", "start", "end")),
        ("kept", _N),
        *((name, _N) for name in ("by_place", "offset", "ahead")),
        ("drafted", _P),
        ("draft_stride", _N),
    )


class _Pass(ctypes.Structure):
    _fields_ = (("stack", _P), ("memory", _P), *((name, _N) for name in ("rows", "offset", "ahead", "continues")))


class _GreedyStep(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("batch", "window")),
        *(("tokens", _P), ("token_stride", _N), ("length", _P), ("drafted", _P), ("draft_stride", _N)),
        *(("passes", ctypes.POINTER(_Pass)), ("count", _N), ("trunk", ctypes.POINTER(_Pass)), ("states", _P)),
        *(("head", _P), ("vocabulary", _N), ("best", _P), ("gained", _P)),
        ("drafting", ctypes.POINTER(ctypes.c_double)),
    )


def product_of(weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return a function that computes x @ weight.T, [..., in] to [..., out], by compiled code.

    None if not supported.
    """
    compiled = library(weight.dtype) if is_compiled(weight) else None
    if compiled is None:
        return None
    function = _function(compiled, "run_product", [_P, _P, _P, _N, _N, _N])
    (outputs, inputs), packed = weight.shape, pack(compiled, weight)

    def multiply(hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        result = hidden.new_empty(*hidden.shape[:-1], outputs)
        rows = hidden.numel() // inputs
        function(packed.data_ptr(), hidden.data_ptr(), result.data_ptr(), rows, inputs, outputs)
        return result

    return multiply


def pack(compiled: ctypes.CDLL, weight_VH: Tensor) -> Tensor:
    """Pack a weight for the products of the compiled code."""
    sizes, count = weight_VH.shape, compiled.packed_size
    count.argtypes, count.restype = [_N, _N], _N
    packed = weight_VH.new_empty(count(*sizes))
    run = _function(compiled, "pack_weight", [_P, _N, _N, _P])
    run(weight_VH.data_ptr(), *sizes, packed.data_ptr())
    return packed


def is_compiled(weight: Tensor) -> bool:
    """Return whether there is compiled code for products with this weight."""
    is_fake = isinstance(weight, torch._subclasses.FakeTensor) or weight.is_meta
    return weight.device.type == "cpu" and weight.dtype in NUMBERS and weight.is_contiguous() and not is_fake


class FewRows:
    """Compiled code of a trunk or MTP layer for few rows.

    Args:
        layers: layers that `lean` supports.
        last: norm after them, or None.
        embedding: [vocabulary, H].
        turns_L211C: cosines and signed sines by position; None without rotary embedding.
        depth: the MTP layer, whose `eh_proj` merges states and embeddings; None for a trunk.

    Raises:
        NotImplementedError: there is no compiled code, or not for these layers.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        last: Any,
        embedding: Tensor,
        turns_L211C: Tensor | None,
        depth: Any = None,
    ) -> None:
        compiled = library(embedding.dtype) if is_compiled(embedding) else None
        if compiled is None:
            raise NotImplementedError("no compiled code")
        self.dtype, self._held, self._compiled = embedding.dtype, list[Tensor](), compiled
        self._run = _function(compiled, "run_rows", [_P, _P])
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._mixers = [mixer_of(layer) for layer in layers]
        self._caches = [None if (one := attention_of(layer)) is None else one.core_attention.layer for layer in layers]
        heads, self._groups, self._channels = _heads_of(layers)
        self._reads_tokens = depth is None or hasattr(depth, "eh_proj")
        merges = depth is not None and self._reads_tokens
        turns = None if turns_L211C is None else turns_L211C.float().flatten(1).contiguous()
        self._stack = _Stack(
            *(len(layers), embedding.size(1), heads),
            *(self._groups, self._channels, 0 if turns is None else turns.size(1) // 2),
            next((mlp.linear_fc2.weight.size(1) for mlp in map(mlp_of, layers) if mlp is not None), 0),
            self._layers,
            None if turns is None else self._pointer(turns),
            self._pointer(embedding),
            self._weight(depth.eh_proj) if merges else None,
            *((self._norm(depth.enorm), self._norm(depth.hnorm)) if merges else (_Norm(), _Norm())),
            self._norm(last),
        )
        self.place = ctypes.addressof(self._stack)
        self.is_recurrent = any(self._mixers)
        self._known: tuple[list[Tensor | None], Tensor, _Rows] | None = None
        self._remembered: tuple[Recurrence, Any] | None = None

    def __call__(self, tokens_BR: Tensor, given_SBH: Tensor | None, rows: Rows, cache: KVCache) -> Tensor:
        """Return states [S, B, H] of the rows, and add their keys and values, and a trunk's states, to the cache.

        Args:
            tokens_BR: the trunk's tokens, or those that a sequential MTP layer merges with the states it continues.
            given_SBH: states that an MTP layer continues; None for the trunk.
        """
        batch, count = tokens_BR.shape
        states_SBH = self._held[0].new_empty(count, batch, self._stack.hidden)
        tokens_BR = tokens_BR if tokens_BR.stride(1) == 1 else tokens_BR.contiguous()
        given_SBH = None if given_SBH is None else given_SBH.contiguous()
        where = _where(rows)
        call = self._call(cache, rows.tables)
        call.rows, call.batch, call.window = count, batch, rows.window
        call.tokens, call.token_stride = tokens_BR.data_ptr() if self._reads_tokens else None, tokens_BR.stride(0)
        call.first, call.positions, call.places, call.mask = map(_pointer, where)
        call.given, call.states = _pointer(given_SBH), states_SBH.data_ptr()
        if self.is_recurrent:
            self.room_for(cache, rows, count)
            self.remember(call, cache, rows.tables, count)
        self._run(self.place, ctypes.addressof(call))
        return states_SBH

    def pass_of(self, sequences: Sequences, one: Pass, cache: KVCache) -> _Pass:
        """Return rows for a step of `GreedySteps`; their tokens are the sequences' and, after t_m, the drafts."""
        memory = self._common(cache, sequences.tables)
        if self.is_recurrent:
            memory = self._call(cache, sequences.tables)
            self.remember(memory, cache, sequences.tables, one.count)
        made = _Pass(self.place, ctypes.addressof(memory), one.count, one.first - 1, one.ahead, one.from_trunk)
        made.held = memory  # keeps the memory alive during the call
        return made

    def room_for(self, cache: KVCache, rows: Rows, count: int) -> None:
        """Prepare for calls of `count` rows in total, from the first of `rows` on: see `Recurrence.make_room`."""
        if self.is_recurrent:
            from megatron_mtp.decoding.recurrent_layers import recurrence_of

            recurrence_of(cache, torch.device("cpu")).make_room(rows, count)

    def remember(self, call: _Rows, cache: KVCache, tables: BlockTables, count: int) -> None:
        """Pass the memory of recurrent layers to a call of `count` rows: pointers, entries, slots, start and end."""
        from megatron_mtp.decoding.recurrent_layers import recurrence_of

        like = self._held[0]
        recurrence = recurrence_of(cache, like.device)
        recurrence.hold(count, tables)
        if self._remembered is None or self._remembered[0] is not recurrence:
            made = [self._memory(recurrence, mixer, like) for mixer in self._mixers]
            self._remembered = recurrence, (_Remembered * len(made))(*made)
        memory = next(iter(recurrence.layers.values()))
        call.remembered, call.entry = ctypes.addressof(self._remembered[1]), tables.entry_B.data_ptr()
        call.start, call.end = recurrence.start_E.data_ptr(), recurrence.end_E.data_ptr()
        call.kept = memory.kept

    def _memory(self, recurrence: "Recurrence", mixer: "CachedRecurrence | None", like: Tensor) -> _Remembered:
        if mixer is None:
            return _Remembered()
        memory = recurrence.memory(mixer.layer, mixer.sizes, like)
        return _Remembered(*(one.data_ptr() for one in memory.parts))

    def _call(self, cache: KVCache, tables: BlockTables) -> _Rows:
        """Return a call over these tables, for rows that the caller names."""
        common = self._common(cache, tables)
        call = _Rows.from_buffer_copy(common)
        call.held = common  # keeps the memory alive during the call
        return call

    def _common(self, cache: KVCache, tables: BlockTables) -> _Rows:
        """Return what all calls over these tables share, such as pointers to every layer's keys and values."""
        known, table_BL = self._known, tables.table_BL
        if known is None or known[0] is not cache.keys or known[1] is not table_BL:
            sizes = self._groups, self._channels, self._held[0]
            held = [None if layer is None else cache.take(layer, *sizes) for layer in self._caches]
            array = _P * len(held)
            keys, values = (array(*(pair and pair[side].data_ptr() for pair in held)) for side in (0, 1))
            common = _Rows(
                kept_states=_pointer(cache.states_N1SH),
                keys=ctypes.addressof(keys),
                values=ctypes.addressof(values),
                table=table_BL.data_ptr(),
                pages=table_BL.size(1),
                size=tables.size,
            )
            common.held = keys, values, cache.states_N1SH
            known = self._known = cache.keys, table_BL, common
        return known[2]

    def _layer(self, layer: Any) -> _Layer:
        made = _Layer()
        if (attention := attention_of(layer)) is not None:
            if attention.core_attention.window is not None:
                raise NotImplementedError("a window")
            made.qkv, made.proj = map(self._weight, (attention.linear_qkv, attention.linear_proj))
            made.query, made.key = map(self._norm, (attention.q_layernorm, attention.k_layernorm))
            made.scale = attention.core_attention.scale
        if (mixer := mixer_of(layer)) is not None:
            made.recurrent = ctypes.pointer(self._recurrent(mixer))
        if made.qkv or made.recurrent:
            made.mixing = self._norm(norm_before(layer))
        if (mlp := mlp_of(layer)) is not None:
            if not mlp.config.gated_linear_unit or mlp.config.activation_func is not torch.nn.functional.silu:
                raise NotImplementedError("another activation")
            made.gate, made.up = map(self._packed, mlp.linear_fc1.weight.detach().chunk(2))
            made.down = self._weight(mlp.linear_fc2)
            made.mlp = self._norm(layer.pre_mlp_layernorm)
        elif not isinstance(getattr(layer, "mlp", None), IdentityOp | None):
            raise NotImplementedError("experts")
        return made

    def _recurrent(self, mixer: "CachedRecurrence") -> _Recurrent:
        from megatron_mtp.decoding.recurrent_layers import CachedMamba
        from megatron_mtp.model.recurrent import GatedNorm

        own, sizes, unit_keys = mixer.own, mixer.sizes, False
        if isinstance(mixer, CachedMamba):
            weight_C1W, bias_C, skip_H = own.conv1d_weight, own.conv1d_bias, own.D
            norm = own.norm if own.rmsnorm else None
            normed = own.d_inner_local_tp if norm is None else norm.group_size
            known = type(own.act) is torch.nn.SiLU and type(norm) in (GatedNorm, type(None)) and not own.D_has_hdim
        else:
            weight_C1W, bias_C, skip_H, norm = own.conv1d.weight, own.conv1d.bias, None, own.out_norm
            normed, unit_keys = sizes.value_channels, bool(own.use_qk_l2norm)
            known = own.act_fn is torch.nn.functional.silu
        if not known:
            raise NotImplementedError("no compiled code for this recurrent layer")
        tensors = weight_C1W.squeeze(1).t(), bias_C, own.A_log.float().exp(), own.dt_bias, skip_H
        return _Recurrent(
            *map(self._weight, (own.in_proj, own.out_proj)),
            *(None if one is None else self._pointer(one.detach().float().contiguous()) for one in tensors),
            self._norm(norm),
            *(sizes.heads, sizes.groups, sizes.key_channels, sizes.value_channels, sizes.width),
            *(normed, unit_keys),
        )

    def _weight(self, module: Any) -> int:
        return self._packed(module.weight.detach())

    def _packed(self, weight: Tensor) -> int:
        if weight.dtype != self.dtype or not is_compiled(weight):
            raise NotImplementedError("another type of weights")
        return self._pointer(pack(self._compiled, weight))

    def _norm(self, norm: Any) -> _Norm:
        if norm is None:
            return _Norm()
        if type(norm) is not PortableNorm:
            from megatron_mtp.model.recurrent import GatedNorm

            if type(norm) is not GatedNorm:
                raise NotImplementedError("another norm")
            return _Norm(self._pointer(norm.weight.detach().float()), norm.eps)
        if norm.bias is not None:
            raise NotImplementedError("another norm")
        weight = norm.weight.detach() + (1 if norm.centered else 0)
        return _Norm(self._pointer(weight.float()), norm.eps)

    def _pointer(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()


class GreedySteps:
    """MTP layers in sequence and the trunk, in one call of compiled code.

    Each layer drafts the most probable token, which the next one may read. Then the trunk verifies the drafts.

    Args:
        trunk: compiled code of the trunk; None if its layers are not supported.
        depths: compiled code of the MTP layers, by number; empty if one of them is not supported.
        head: output layer for draft tokens, in the layers' dtype.
    """

    def __init__(self, trunk: FewRows | None, depths: Sequence[FewRows], head: "Head") -> None:
        self._trunk, self._depths, self._head = trunk, depths, head
        self._are_recurrent = any(one.is_recurrent for one in depths)
        self._run = _function(head.compiled, "run_step", [_P])

    @property
    def drafts(self) -> bool:
        """Whether the MTP layers are compiled."""
        return bool(self._depths)

    @property
    def judges(self) -> bool:
        """Whether the trunk is compiled."""
        return self._trunk is not None

    def draft(self, sequences: Sequences, passes: Sequence[Pass]) -> Tensor:
        """Return the token after the last row of every pass, [B, N]."""
        drafted_BN = sequences.tokens_BT.new_empty(len(sequences.token_ids), len(passes))
        self._step(sequences, passes, drafted_BN)
        return drafted_BN

    def accept(self, sequences: Sequences, draft: Draft, passes: Sequence[Pass]) -> StepOutput:
        """Run the passes, then t_m and the drafts, and append to every sequence what `verifiers.greedy` accepts."""
        drafted_BN = draft.tokens_BN
        batch, drafts = drafted_BN.shape
        best_BR, count_B = drafted_BN.new_empty(batch, drafts + 1), drafted_BN.new_empty(batch)
        seconds = self._step(sequences, passes, drafted_BN, best_BR, count_B)
        return StepOutput(draft, best_BR, count_B, seconds)

    def _step(
        self,
        sequences: Sequences,
        passes: Sequence[Pass],
        drafted_BN: Tensor,
        best_BR: Tensor | None = None,
        count_B: Tensor | None = None,
    ) -> float:
        """Run a step and return the seconds of its drafts. Without `best_BR` and `count_B`, drafts are not judged."""
        memory, tokens_BT, judge = sequences.memory, sequences.tokens_BT, None
        if self._are_recurrent:
            self._make_room(sequences, passes)
        made = [self._depth(one).pass_of(sequences, one, memory.depths[one.depth - 1]) for one in passes]
        if best_BR is not None and self._trunk is not None:
            rows, drafts = best_BR.size(1), drafted_BN.size(1)
            if self._trunk.is_recurrent:
                self._trunk.room_for(memory.cache, sequences.chain(sequences.newest_B, rows, drafts), rows)
            judge = self._trunk.pass_of(sequences, Pass(0, 0, rows, 0, False), memory.cache)
        seconds = ctypes.c_double()
        step = _GreedyStep(
            *(tokens_BT.size(0), sequences.window(drafted_BN.size(1)), tokens_BT.data_ptr(), tokens_BT.stride(0)),
            *(sequences.length_B.data_ptr(), drafted_BN.data_ptr(), drafted_BN.stride(0)),
            *((_Pass * len(made))(*made), len(made), judge and ctypes.pointer(judge), memory.states_N1SH.data_ptr()),
            *(*self._head.place, _pointer(best_BR), _pointer(count_B), ctypes.pointer(seconds)),
        )
        self._run(ctypes.addressof(step))
        return seconds.value

    def _make_room(self, sequences: Sequences, passes: Sequence[Pass]) -> None:
        """Make room for all passes over a cache before the first one runs: states take in rows only between calls."""
        for first in {one.depth: one for one in reversed(passes)}.values():
            count = sum(one.count for one in passes if one.depth == first.depth)
            rows = sequences.chain(sequences.newest_B + first.first, first.count, len(passes))
            self._depth(first).room_for(sequences.memory.depths[first.depth - 1], rows, count)

    def _depth(self, one: Pass) -> FewRows:
        return self._depths[(one.depth - 1) % len(self._depths)]


class Head:
    """The packed output layer.

    Attributes:
        place: pointer to the packed weight, and number of tokens.
    """

    def __init__(self, compiled: ctypes.CDLL, weight_VH: Tensor) -> None:
        self.compiled, self.dtype, self._packed = compiled, weight_VH.dtype, pack(compiled, weight_VH)
        self.place = self._packed.data_ptr(), weight_VH.size(0)


def head_of(weight_VH: Tensor | None) -> Head | None:
    """Create a `Head`; None if there is no such weight or no compiled code for it."""
    compiled = library(weight_VH.dtype) if weight_VH is not None and is_compiled(weight_VH) else None
    return None if compiled is None or weight_VH is None else Head(compiled, weight_VH)


def greedy_steps(trunk: FewRows | None, depths: Sequence[FewRows | None], head: Head) -> GreedySteps:
    """Create `GreedySteps` from the compiled stacks and the output layer."""
    judge, *fitting = [one if one is not None and one.dtype == head.dtype else None for one in (trunk, *depths)]
    known = [one for one in fitting if one is not None]
    return GreedySteps(judge, known if len(known) == len(depths) else [], head)


def _heads_of(layers: Sequence[Any]) -> tuple[int, int, int]:
    """Return query heads, key heads and channels of a stack's attention; 0 without attention."""
    for attention in map(attention_of, layers):
        if attention is not None:
            heads, groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
            return heads, groups, attention.hidden_size_per_attention_head
    return 0, 0, 0


def _where(rows: Rows) -> tuple[Tensor | None, ...]:
    """Return first positions of a chain, or positions, slots and mask of any rows."""
    if rows.is_chain and rows.live_BR is None and rows.end_B is None:
        return rows.first_B.contiguous(), None, None, None
    return None, rows.positions_BR.contiguous(), rows.slots_BR.contiguous(), rows.mask_B1RW.float().contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def few_rows(*given: Any) -> FewRows | None:
    """Create `FewRows`; None if there is no compiled code for these layers."""
    try:
        return FewRows(*given)
    except NotImplementedError:
        return None


def _function(compiled: ctypes.CDLL, name: str, arguments: list[Any]) -> Callable[..., None]:
    """Return a library function that runs on as many threads as pay: its last argument, which is not in `arguments`."""
    function = compiled[name]
    function.argtypes, function.restype = [*arguments, _N], None
    return partial(team_of(compiled).run, function)
