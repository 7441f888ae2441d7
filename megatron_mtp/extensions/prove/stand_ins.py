"""Substitutes, in the ranks of worker.py, for CUDA and for modules that need Transformer Engine or GPU kernels.

Imports torch and the Megatron that comes first on PYTHONPATH, but nothing from this package.
"""

import sys
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")

REASONS = {
    "torch.cuda (device, streams, memory, random state)": "Megatron asks for a CUDA device",
    "megatron.core.tensor_parallel.random (state of generators, shared storage)": "it reaches past torch.cuda",
    "is_inference_column_parallel_linear (0.20)": "it compares with classes of Transformer Engine",
    "device='cuda' in torch.tensor, empty, zeros, ones, full, arange": "tensors are made on the CUDA device",
    "Transformer Engine and Apex": "hidden: Megatron's local layers run",
    "core attention": "the local one has neither packed documents nor context parallelism",
    "norms": "the local ones refuse sequence parallelism",
}
OF_HYBRIDS = {
    "specs of hybrids, with a final norm": "Megatron's are of Transformer Engine's modules",
    "Mamba-2's mixer": "Megatron's needs kernels",
}


def reasons(is_hybrid: bool) -> dict[str, str]:
    """Return the parts that are substituted in these runs, and why."""
    return REASONS | OF_HYBRIDS if is_hybrid else REASONS


# --- CUDA ------------------------------------------------------------------------------------------------------------


class _Stream:
    """A CUDA stream or event that is always finished."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def stand_in() -> None:
    """Substitute the CPU for CUDA. Call it before Megatron is imported."""

    def gives(value: Any) -> Any:
        return lambda *_, **__: value

    cuda: Any = torch.cuda
    for name in "set_device synchronize empty_cache manual_seed set_rng_state set_stream nvtx_range_push".split():
        setattr(cuda, name, gives(None))
    for name in "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split():
        setattr(cuda, name, gives(0))
    cuda.current_device, cuda.device_count, cuda.is_available = gives(CPU), gives(1), gives(True)
    cuda.get_device_capability, cuda.get_device_name = gives((0, 0)), gives("CPU")
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Stream, _Stream
    cuda.current_stream = cuda.default_stream = gives(_Stream())
    cuda.get_rng_state = torch.get_rng_state
    tensor: Any = torch.Tensor
    tensor.cuda, tensor.pin_memory = (lambda own, *_, **__: own), (lambda own, *_, **__: own)
    module: Any = torch.nn.Module
    module.cuda = lambda own, *_, **__: own
    for name in "tensor empty zeros ones full arange".split():
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    for name in ("transformer_engine", "apex"):
        sys.modules[name] = None  # type: ignore[assignment]  # makes its import raise ImportError


def _on_the_cpu(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def stand_in_in_megatron() -> None:
    """Substitute the CPU's random state and storage for CUDA's, and the modules below for Megatron's local ones."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_token_prediction

    def shared(emptied: Tensor, source: Tensor) -> None:
        storage, filled = emptied.untyped_storage(), source.untyped_storage()
        storage.resize_(filled.nbytes())
        storage.copy_(filled)

    functions: Any = random
    functions._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    functions._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    functions._get_share_storage = lambda: shared
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        functions = multi_token_prediction
        functions.is_inference_column_parallel_linear = lambda *_, **__: False
    for name in ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
        setattr(gpt_layer_specs, name, _with_stand_ins(getattr(gpt_layer_specs, name)))


# --- modules ---------------------------------------------------------------------------------------------------------


class GatheredRanks(torch.autograd.Function):
    """Concatenates a tensor over all ranks of a group; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        """Gather the tensors of all ranks."""
        ctx.group, ctx.rows = group, own.size(0)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's tensor."""
        whole = gradients[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.rows
        return whole[start : start + ctx.rows], None


class Sequence:
    """Documents of the whole sequence, and the positions of this context-parallel rank."""

    def __init__(self, bounds: list[int], ranks: int, rank: int) -> None:
        held = [positions_of(bounds, ranks, other) for other in range(ranks)]
        self.own, self.held = held[rank], torch.cat(held)
        self.document = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)

    @classmethod
    def of(cls, positions: int, packed: Any) -> "Sequence":
        """Create the sequence from this rank's number of positions, for plain rows or packed documents."""
        from megatron.core import parallel_state

        ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        if packed is None:
            return cls([0, positions * ranks], ranks, rank)
        held = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        return cls(held.tolist(), ranks, rank)

    def whole(self, own: Tensor) -> Tensor:
        """Gather a tensor of this rank's positions [S, ...] to all positions, in order."""
        from megatron.core import parallel_state

        if len(self.own) == len(self.held):
            return own
        gathered = cast("Any", GatheredRanks.apply)(own, parallel_state.get_context_parallel_group())
        return cast("Tensor", gathered[self.held.argsort()])


class Attention(torch.nn.Module):
    """Causal attention within documents, with grouped queries and context parallelism, like Transformer Engine's."""

    def __init__(
        self, config: Any, *_: Any, softmax_scale: float | None = None, k_channels: int | None = None, **__: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **others: Any) -> Tensor:
        """Compute [S, B, heads * channels] or, for packed rows, [T, heads * channels]."""
        packed = others.get("packed_seq_params")
        if packed is not None:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        sequence = Sequence.of(query.size(0), packed)
        own, document = sequence.own, sequence.document
        key, value = sequence.whole(key), sequence.whole(value)
        visible = (document[own][:, None] == document) & (torch.arange(len(document)) <= own[:, None])
        more = query.size(2) // key.size(2)
        key, value = key.repeat_interleave(more, 2), value.repeat_interleave(more, 2)
        scores = torch.einsum("sbnc,tbnc->bnst", query, key) * self.scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        attended = torch.einsum("bnst,tbnc->sbnc", weights, value).flatten(2)
        return attended if packed is None else attended.squeeze(1)


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm, whose gradients Megatron sums under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.shift = eps, float(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize the values."""
        weight = self.weight + self.shift
        if self.bias is None:
            return torch.nn.functional.rms_norm(hidden, weight.shape, weight, self.eps)
        return torch.nn.functional.layer_norm(hidden, weight.shape, weight, self.bias, self.eps)


class Mamba(torch.nn.Module):
    """Mamba-2 mixer like Megatron's (Dao and Gu, arXiv:2405.21060), position by position; states end with documents.

    Under context parallelism every rank computes the whole sequence and keeps its own positions.
    """

    conv1d_weight: Tensor
    conv1d_bias: Tensor
    norm_weight: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor

    def __init__(self, config: Any, submodules: Any, d_model: int, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        ranks, self.channels, self.states = pg_collection.tp.size(), config.mamba_head_dim, config.mamba_state_dim
        self.heads, self.groups = config.mamba_num_heads // ranks, config.mamba_num_groups // ranks
        self.inner, self.shared = self.heads * self.channels, self.groups * self.states
        mixed = self.inner + 2 * self.shared
        column, row = submodules
        same = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        self.in_proj = column(d_model, ranks * (self.inner + mixed + self.heads), gather_output=False, **same)
        self.out_proj = row(ranks * self.inner, d_model, input_is_parallel=True, is_expert=False, **same)
        shapes = {"conv1d_weight": (mixed, 4), "conv1d_bias": (mixed,), "norm_weight": (self.inner,)}
        for name, shape in (shapes | dict.fromkeys(("dt_bias", "A_log", "D"), (self.heads,))).items():
            parameter = torch.nn.Parameter(torch.empty(shape))
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, hidden: Tensor, packed_seq_params: Any = None, **_: Any) -> tuple[Tensor, Any]:
        """Compute the output [S, B, H] of this rank's positions; there is no bias."""
        projected, _bias = self.in_proj(hidden)
        sequence = Sequence.of(projected.size(0), packed_seq_params)
        gate, mixed, steps = sequence.whole(projected).split(
            [self.inner, self.inner + 2 * self.shared, self.heads], dim=-1
        )
        output = self._scan(self._convolution(mixed, sequence.document), steps, sequence.document)
        output = (output * torch.nn.functional.silu(gate)).unflatten(-1, (self.groups, -1))
        output = torch.nn.functional.rms_norm(output, output.shape[-1:], eps=1e-5).flatten(2) * self.norm_weight
        found: tuple[Tensor, Any] = self.out_proj(output[sequence.own])
        return found

    def _convolution(self, mixed: Tensor, document: Tensor) -> Tensor:
        """Convolve every channel with its three previous positions in the document."""
        found = self.conv1d_bias + mixed * self.conv1d_weight[:, -1]
        for back in range(1, self.conv1d_weight.size(1)):
            is_same = (document[back:] == document[:-back])[:, None, None]
            earlier = torch.nn.functional.pad(mixed[:-back] * is_same, (0, 0, 0, 0, back, 0))
            found = found + earlier * self.conv1d_weight[:, -1 - back]
        return torch.nn.functional.silu(found)

    def _scan(self, mixed: Tensor, steps: Tensor, document: Tensor) -> Tensor:
        """Run the recurrence of all heads and read the states at every position."""
        values, *shared = mixed.split([self.inner, self.shared, self.shared], dim=-1)
        values = values.unflatten(-1, (self.heads, -1))  # [L, B, heads, channels]
        keys, queries = (
            one.unflatten(-1, (self.groups, -1)).repeat_interleave(self.heads // self.groups, 2) for one in shared
        )
        steps = torch.nn.functional.softplus(steps + self.dt_bias)
        decays = (-steps * self.A_log.exp())[..., None, None].exp()
        brought = (steps.unsqueeze(-1) * values).unsqueeze(-1) * keys.unsqueeze(-2)
        state, found = torch.zeros_like(brought[0]), []
        for position in range(len(brought)):
            if position and document[position] != document[position - 1]:
                state = torch.zeros_like(state)
            state = decays[position] * state + brought[position]
            found.append((state * queries[position].unsqueeze(-2)).sum(-1))
        return (torch.stack(found) + self.D.unsqueeze(-1) * values).flatten(2)


def positions_of(bounds: list[int], ranks: int, rank: int) -> Tensor:
    """Return the positions of a context-parallel rank: a chunk of every document and its mirror image."""
    if ranks == 1:
        return torch.arange(bounds[-1])
    chunks = [torch.arange(start, end).chunk(2 * ranks) for start, end in pairwise(bounds)]
    return torch.cat([torch.cat([one[rank], one[2 * ranks - 1 - rank]]) for one in chunks])


# --- specs -----------------------------------------------------------------------------------------------------------


def _with_stand_ins(make: Any) -> Any:
    return lambda *args, **kwargs: with_stand_ins(make(*args, **kwargs))


def with_stand_ins(spec: Any) -> Any:
    """Replace attention and norms in a Megatron spec by the modules above."""
    import dataclasses

    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    swaps = {DotProductAttention: Attention, WrappedTorchNorm: Norm}
    if isinstance(spec, list):
        return [with_stand_ins(one) for one in spec]
    if isinstance(spec, ModuleSpec) or (dataclasses.is_dataclass(spec) and not isinstance(spec, type)):
        values = {field.name: with_stand_ins(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **values)
    return swaps.get(spec, spec) if isinstance(spec, type) else spec


def hybrid_stack_of(config: Any) -> Any:
    """Return the spec of a hybrid's layers: Mamba-2, attention, MLP and experts, with Megatron's own linear layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    class Stack(HybridStack):
        """Megatron's stack with a different final norm, since its own is Transformer Engine's."""

        def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **others: Any) -> None:
            super().__init__(config, *args, post_layer_norm=False, **others)
            self.post_layer_norm = post_layer_norm
            if self.post_process and post_layer_norm:
                self.final_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def parts_of(experts: int | None) -> Any:
        return get_gpt_layer_local_submodules(
            num_experts=experts,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )

    def feed_forward(parts: Any) -> Any:
        return TransformerLayerSubmodules(
            pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=get_bias_dropout_add
        )

    dense, backend = parts_of(None), LocalSpecProvider()
    mixer = ModuleSpec(Mamba, submodules=(backend.column_parallel_linear(), backend.row_parallel_linear()))
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm,
        self_attention=dense.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )
    return with_stand_ins(
        ModuleSpec(
            Stack,
            submodules=HybridStackSubmodules(
                mamba_layer=ModuleSpec(
                    MambaLayer, submodules=MambaLayerSubmodules(dense.input_layernorm, mixer, get_bias_dropout_add)
                ),
                attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
                mlp_layer=ModuleSpec(MLPLayer, submodules=feed_forward(dense)),
                moe_layer=ModuleSpec(MoETransformerLayer, submodules=feed_forward(parts_of(config.num_moe_experts))),
            ),
        )
    )
