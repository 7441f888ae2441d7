"""Attention for machines without Transformer Engine, including attention sinks.

The causal mask works for queries at any positions: whole sequences, ranks of context parallelism, rows of a draft.
Letters in names: S this rank's positions, B batch, T positions of a packed row, W keys, N query heads, G key heads, M
query heads per key head, C channels of a head, P passes of a chain.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_mtp.data.batch import positions_of_ranks, to_device
from megatron_mtp.model.masks import causal_mask, in_window
from megatron_mtp.model.packed_rows import bounds_of

if TYPE_CHECKING:
    from megatron_mtp.model.ring import Part

RING_FROM = 2**14
"""Positions of whole sequences from which keys go around the context-parallel ranks. Shorter ones are gathered: that
needs little memory, and one product is quicker than many tiles."""


class PortableAttention(torch.nn.Module):
    """Attention based on `scaled_dot_product_attention`: grouped queries, packed sequences, context parallelism, MLA.

    Takes the arguments of Megatron's core attention; those that only its kernels use (`cp_comm_type`, `v_channels`) are
    ignored. Under context parallelism, keys and values are gathered from all ranks in the order of the whole sequence;
    those of long sequences go around the ranks instead (ring.py).

    Attributes:
        chain: additional keys and values for the next call: a query also attends to those at its own position
            (`SharingAttention`).
        softmax_offset: sink score for each of this rank's heads [N]; None without sinks (`SinkAttention`).
    """

    chain: Sequence[tuple[Tensor, Tensor]] = ()

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        **of_kernels: Any,
    ) -> None:
        super().__init__()
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp
        self.causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.sequence_parallel = config.sequence_parallel
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size if windowed else None
        self.softmax_offset: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return the attention output of this rank's positions, [S, B, N * C] or, packed, [T, N * C].

        Args:
            query: [S, B, N, C] or, packed, [T, N, C].
            key, value: the same with G heads; a value may have fewer channels.
            attention_mask: bool, broadcast over [B, N, S, whole sequence], True where attention is not allowed. If
                None, the mask follows from the layer's mask type. Not supported for packed rows.
            attn_mask_type: ignored, as in Megatron's own local attention.
            packed_seq_params: document boundaries of a packed row; padding belongs to the previous document.

        Raises:
            ValueError: an attention bias is given, or a document cannot be split for context parallelism.
        """
        if attention_bias is not None:
            raise ValueError("attention without Transformer Engine takes no bias; leave attention_bias out.")
        if packed_seq_params is None:
            whole = [0, self.cp_group.size() * key.size(0)]
            if attention_mask is None and self.rings(whole[-1]):
                return self._ringed(query, key, value, whole)
            return self._documents(query, key, value, whole, attention_mask)
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        self.chain = [(key.unsqueeze(1), value.unsqueeze(1)) for key, value in self.chain]
        bounds: list[int] = bounds_of(packed_seq_params).tolist()
        if self.rings(bounds[-1]):
            return self._ringed(query, key, value, bounds).squeeze(1)
        return self._documents(query, key, value, bounds, None).squeeze(1)

    def rings(self, positions: int) -> bool:
        """Return whether keys go around the context-parallel ranks at this many positions instead of being gathered."""
        drops = self.dropout and self.training
        return self.cp_group.size() > 1 and positions >= RING_FROM and not drops

    def _ringed(self, query_SBNC: Tensor, key_SBGC: Tensor, value_SBGC: Tensor, bounds: list[int]) -> Tensor:
        """`_documents` without gathered keys."""
        from megatron_mtp.model.ring import joined, reach_of, ring_attention  # drafting does not need it

        bounds_T, passes, chain = torch.tensor(bounds), len(self.chain), self.chain
        ranks_RW = positions_of_ranks(bounds_T, self.cp_group.size())
        own_S = ranks_RW[self.cp_group.rank()]
        reach = reach_of(bounds_T, ranks_RW, own_S, self.cp_group, self.causal).within(own_S + passes, self.window)
        parts = [ring_attention(query_SBNC, key_SBGC, value_SBGC, reach, self.scale)]
        for keys_SBGC, values_SBGC in chain[self._first_of_chain(passes) :]:
            shared = query_SBNC.size(2) // keys_SBGC.size(2)
            parts.append((values_SBGC.repeat_interleave(shared, 2), self.scale * _scores(query_SBNC, keys_SBGC)))
        return joined(parts + self.sinks(parts[0])).flatten(2)

    def sinks(self, part: "Part") -> "list[Part]":
        """Return the sinks' part of a softmax, to combine with another part; empty without sinks."""
        if self.softmax_offset is None:
            return []
        out_SBNC, log_SBN = part
        return [(torch.zeros_like(out_SBNC), self.softmax_offset.to(log_SBN.dtype).expand_as(log_SBN))]

    def _first_of_chain(self, passes: int) -> int:
        """The first pass of the chain that is in the window of the query behind it."""
        return passes - self.window[0] - 1 if self.window is not None and 0 <= self.window[0] < passes else 0

    def _documents(
        self, query_SBNC: Tensor, key_SBGC: Tensor, value_SBGC: Tensor, bounds: list[int], mask: Tensor | None
    ) -> Tensor:
        """Attend within every document, [S, B, N * C].

        `bounds` are the documents' starts and ends in the whole sequence.
        """
        ranks, positions_S = self.cp_group.size(), None
        if ranks > 1:
            positions_RS = to_device(positions_of_ranks(torch.tensor(bounds), ranks), query_SBNC.device)
            positions_S, order = positions_RS[self.cp_group.rank()], positions_RS.flatten().argsort()
            key_SBGC = gather_from_sequence_parallel_region(key_SBGC, group=self.cp_group)[order]
            value_SBGC = gather_from_sequence_parallel_region(value_SBGC, group=self.cp_group)[order]
        attended = []
        for start, end in pairwise(bounds):
            own, whole = slice(start // ranks, end // ranks), slice(start, end)
            position_S = None if positions_S is None else positions_S[own] - start
            inputs = query_SBNC[own], key_SBGC[whole], value_SBGC[whole], position_S, mask
            attended.append(self._attend(*inputs, [(keys[own], values[own]) for keys, values in self.chain]))
        return torch.cat(attended)

    def _attend(
        self,
        query_SBNC: Tensor,
        key_SBGC: Tensor,
        value_SBGC: Tensor,
        position_S: Tensor | None,
        mask: Tensor | None,
        chain: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Attend within one document, [S, B, N * C]; without `position_S` the queries are its last positions."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBNC, key_SBGC, value_SBGC))
        queries, keys, channels = query.size(2), key.size(2), value.size(-1)
        plain = mask is None and position_S is None and self.window is None and queries == keys
        plain = plain and self.softmax_offset is None
        if position_S is None:
            position_S = torch.arange(keys - queries, keys, device=query.device)
        passes = len(chain)
        visible = None if plain else self._visible(position_S, keys, mask, passes)
        chain = chain[self._first_of_chain(passes) :]
        if chain:
            scores_SBNP = torch.stack([_scores(query_SBNC, keys_SBGC) for keys_SBGC, _ in chain], dim=-1)
            query, key, value = with_chain(query, key, value, scores_SBNP.permute(1, 2, 0, 3))
            if visible is None:
                query = pad(query, (0, 0, len(chain), 0))  # as many rows as chain keys, so that the mask stays causal
            else:
                visible = pad(visible, (len(chain), 0), value=True)
        if self.softmax_offset is not None and visible is not None:
            query, key, value = with_sink(query, key, value, self.softmax_offset, self.scale)
            visible = pad(visible, (0, 1), value=True)
        # Each tensor-parallel rank has different heads, so dropout needs different random numbers.
        drops = self.dropout and self.training and not self.sequence_parallel
        with get_cuda_rng_tracker().fork() if drops else nullcontext():
            attended = scaled_dot_product_attention(
                query,
                key,
                pad(value, (0, query.size(-1) - value.size(-1))),  # torch's fast kernels need equal widths
                attn_mask=visible,
                is_causal=plain and self.causal,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.scale,
                enable_gqa=True,
            )
        attended_SBNC = attended[:, :, -queries:].permute(2, 0, 1, 3)
        found_SBNC = attended_SBNC[..., :channels]
        for number, (_, values_SBGC) in enumerate(chain, start=channels):
            weight_SBGM = attended_SBNC[..., number].unflatten(2, (values_SBGC.size(2), -1))
            found_SBNC = found_SBNC + (weight_SBGM.unsqueeze(-1) * values_SBGC.unsqueeze(3)).flatten(2, 3)
        return found_SBNC.flatten(2)

    def _visible(self, position_S: Tensor, keys: int, mask: Tensor | None, later: int = 0) -> Tensor:
        """Return bool, broadcast over [B, N, S, keys]: True if a query attends to a key.

        Args:
            later: how many positions after its index a query is; its window counts from there.
        """
        visible = torch.ones(position_S.numel(), keys, dtype=torch.bool, device=position_S.device)
        if mask is not None:
            visible = ~mask
        elif self.causal:
            visible = ~causal_mask(position_S, keys)
        if self.window is not None:
            ahead = torch.arange(keys, device=position_S.device) - (position_S + later).unsqueeze(1)
            visible = visible & in_window(ahead, self.window)
        return visible


def with_chain(
    query_BNSC: Tensor, key_BGWC: Tensor, value_BGWC: Tensor, scores_BNSP: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a key for each pass of a chain to queries, keys and values, where every query has its own key.

    A single key cannot differ by query, but its score can: one additional channel is 1 in this key, 0 in all others,
    and in every query the product with its own key (`scores_BNSP`). In half precision, another channel holds the
    rounding error.

        (q, q . k_1, q . k_2) * (0, 1, 0) = q . k_1

    An additional channel of the values, 1 in this key's and 0 in all others, returns the weight of the query's own
    value.
    """
    dtype, passes = query_BNSC.dtype, scores_BNSP.size(-1)
    columns = [scores_BNSP.to(dtype)]
    if dtype.itemsize < torch.float32.itemsize:
        columns.append((scores_BNSP - columns[0]).to(dtype))
    one_PP = torch.eye(passes, dtype=dtype, device=query_BNSC.device)

    def in_front(tensor_BGWC: Tensor, one_PX: Tensor) -> Tensor:
        front_PC = pad(one_PX, (tensor_BGWC.size(-1), 0))
        behind_BGWC = pad(tensor_BGWC, (0, one_PX.size(-1)))
        return torch.cat([front_PC.expand(*tensor_BGWC.shape[:2], -1, -1), behind_BGWC], dim=2)

    return (
        torch.cat([query_BNSC, *columns], dim=-1),
        in_front(key_BGWC, one_PP.repeat(1, len(columns))),
        in_front(value_BGWC, one_PP),
    )


def _scores(query_SBNC: Tensor, key_SBGC: Tensor) -> Tensor:
    """Return the product of each query with the key of its own position, [S, B, N], in at least float32."""
    exact = torch.promote_types(query_SBNC.dtype, torch.float32)
    query_SBGMC = query_SBNC.to(exact).unflatten(2, (key_SBGC.size(2), -1))
    return (query_SBGMC * key_SBGC.unsqueeze(3)).sum(-1).flatten(2)


def with_sink(
    query_BNSC: Tensor, key_BGWC: Tensor, value_BGWC: Tensor, offset_N: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a sink after the last key: its score is the head's offset, and its value is zero.

    An additional channel computes the score. It is 1 in the sink's key and 0 in all others, and offset / scale in the
    queries:

        (q, offset / scale) * (0, 1) * scale = offset
    """
    column_BNS1 = (offset_N / scale).to(query_BNSC.dtype).view(1, -1, 1, 1).expand(*query_BNSC.shape[:3], 1)
    sink_BG1C = key_BGWC.new_zeros(*key_BGWC.shape[:2], 1, key_BGWC.size(-1) + 1)
    sink_BG1C[..., -1] = 1
    return (
        torch.cat([query_BNSC, column_BNS1], dim=-1),
        torch.cat([pad(key_BGWC, (0, 1)), sink_BG1C], dim=2),
        pad(value_BGWC, (0, 0, 0, 1)),
    )


class SinkAttention(PortableAttention):
    """Attention with a sink in every head, whose score is trained or 0 (`--softmax-type`; arXiv:2309.17453).

    Name and checkpoint entry of the score match Megatron's `DotProductAttention`.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **others: Any) -> None:
        super().__init__(config, *args, **others)
        groups = others.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = groups.tp
        heads, device = config.num_attention_heads // self.tp_group.size(), torch.cuda.current_device()
        offset_N = torch.zeros(heads, dtype=config.params_dtype, device=device)
        self.softmax_offset = offset_N
        if config.softmax_type == "learnable":
            del self.softmax_offset
            self.softmax_offset = torch.nn.Parameter(offset_N)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
            if config.perform_initialization:
                with get_cuda_rng_tracker().fork():
                    config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the scores, sharded over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
