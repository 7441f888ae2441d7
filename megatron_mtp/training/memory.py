"""The memory that a rank needs: parameters are counted, activations estimated."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_mtp.config import trained_depths
from megatron_mtp.model.hybrid import trunk_and_depths
from megatron_mtp.model.recurrence import CHUNK

PARTS = {"trunk": "decoder.", "depths": "mtp.", "embedding": "embedding.", "head": "output_layer."}
"""The parts of a model, and how the names of their parameters begin."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of one rank.

    Attributes:
        part: trunk, depths, embedding or head.
        local: elements on this rank.
        total: elements of the whole model in this pipeline stage; 0 for a copy, such as a tied head's.
        sharded_by: ranks that share its optimizer's state, under a distributed optimizer.
        trains: it has a gradient.
    """

    part: str
    local: int
    total: int
    sharded_by: int
    trains: bool


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations


def sizes(model: torch.nn.Module, args: Namespace) -> list[Parameter]:
    """All parameters of a pipeline stage's chunk on this rank."""
    return [_size(name, weight, model, args) for name, weight in model.named_parameters()]


def _size(name: str, weight: torch.nn.Parameter, model: torch.nn.Module, args: Namespace) -> Parameter:
    part = next(part for part, start in PARTS.items() if name.startswith(start))
    is_expert = not getattr(weight, "allreduce", True)
    is_cut = getattr(weight, "tensor_model_parallel", False)
    pieces = 1
    if is_cut:
        pieces = args.expert_tensor_parallel_size if is_expert else args.tensor_model_parallel_size
    if is_expert:
        pieces *= args.expert_model_parallel_size
    group = parallel_state.get_expert_data_parallel_group() if is_expert else _data_group()
    is_copy = (part == "embedding" and not model.pre_process) or (
        part == "head" and not args.untie_embeddings_and_output_weights
    )
    total = 0 if is_copy else weight.numel() * pieces
    return Parameter(part, weight.numel(), total, group.size(), weight.requires_grad)


def _data_group() -> torch.distributed.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def symbols_of(args: Namespace, layers: int) -> str:
    """So many layers of a GPT as those of a hybrid: attention, and an MLP or experts."""
    return ("*-" if args.num_experts is None else "*E") * layers


def memory_of(args: Namespace, parameters: list[Parameter], layers: str, stage: int) -> Memory:
    """Of a rank of this stage, whose layers of the trunk these symbols name (model/hybrid.py)."""
    is_half = args.bf16 or args.fp16
    reduced_in_float32 = not is_half or args.accumulate_allreduce_grads_in_fp32
    weights = sum(one.local for one in parameters) * (2 if is_half else 4)
    gradients = sum(one.local for one in parameters if one.trains) * (4 if reduced_in_float32 else 2)
    adam = 12 if is_half else 8  # two moments, and a copy of the weights in float32
    optimizer = sum(
        adam * one.local / (one.sharded_by if args.use_distributed_optimizer else 1) for one in parameters if one.trains
    )
    depths = trained_depths(args) if any(one.part == "depths" for one in parameters) else 0
    return Memory(weights, gradients, optimizer, activations(args, layers, depths, stage))


def activations(args: Namespace, layers: str, depths: int, stage: int) -> float:
    """Bytes that a stage keeps for its backward pass: of its layers for every microbatch in flight (stage p of P has
    P - p of them), of its depths, and of the trunk's logits on the last stage.

    Attention and MLP together keep 10 + 24/t bytes an element of the hidden state, or 34/t with sequence parallelism,
    where the MLP is 4 hidden sizes wide (Korthikanti et al., arXiv:2205.05198, table 2, without attention scores); what
    is inside a layer is scaled by its width. Under full recomputation a GPT's layer keeps its input alone, and so does
    each symbol of a hybrid, which Megatron recomputes one by one.
    """
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    tokens = args.seq_length * args.micro_batch_size / args.context_parallel_size
    hidden = tokens * args.hidden_size
    in_flight = stages - stage
    logits = 0.0
    if stage == stages - 1 and not args.mtp_linear_ce_main:
        logits = tokens * args.padded_vocab_size / tensor * (4 + 2)  # in float32, and as the head makes them
    trunk, depth = (tokens * _kept(args, symbols) for symbols in (layers, _symbols_of_depth(args)))
    return trunk * in_flight + depth * depths + 4 * hidden * depths + logits


def _symbols_of_depth(args: Namespace) -> str:
    if (pattern := getattr(args, "hybrid_layer_pattern", None)) is None:
        return symbols_of(args, 1)
    _, depths = trunk_and_depths(pattern)
    return depths[0] if depths else ""


def _kept(args: Namespace, symbols: str) -> float:
    """Bytes that these layers keep of a token."""
    tensor = args.tensor_model_parallel_size
    whole = args.hidden_size / (tensor if args.sequence_parallel else 1)
    if args.recompute_granularity == "full":
        is_hybrid = getattr(args, "hybrid_layer_pattern", None) is not None
        return 2 * whole * len(symbols) / (1 if is_hybrid else 2)
    # of every layer the input of its norm (2) and of its projections (2), and a mask of dropout (1)
    return sum(5 * whole + INSIDE[symbol](args) / tensor for symbol in symbols)


def _of_attention(args: Namespace) -> float:
    """Queries, keys, values (6) and the output (2)."""
    return 8.0 * args.hidden_size


def _of_mamba(args: Namespace) -> float:
    """What `mamba_ssm` keeps, by hand: the projection, the scan's output, and what the second projection takes."""
    heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
    inner = heads * args.mamba_head_dim
    projected = 2 * inner + 2 * args.mamba_num_groups * args.mamba_state_dim + heads
    return 2.0 * (projected + 2 * inner)


def _of_delta_rule(args: Namespace) -> float:
    """What `fla` keeps, by hand: the projection; queries, keys and values after the convolution, queries and keys once
    more for every value head; the matrix of corrections of a chunk of 64; the output before and behind norm and gate,
    which is in float32.
    """
    heads = args.linear_num_value_heads
    keys, values = args.linear_num_key_heads * args.linear_key_head_dim, heads * args.linear_value_head_dim
    projected, convolved = 2 * keys + 2 * values + 2 * heads, 2 * keys + values
    repeated = 2 * heads * args.linear_key_head_dim
    return 2.0 * (projected + convolved + repeated + 64 * heads + 2 * values) + 4.0 * values


def _of_portable_mamba(args: Namespace) -> float:
    """What model/mamba.py keeps, as measured: the matrices of a chunk and the gated norm are in float32."""
    heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
    inner, states = heads * args.mamba_head_dim, 2 * args.mamba_num_groups * args.mamba_state_dim
    convolved, projected = inner + states, 2 * inner + states + heads
    of_a_chunk = heads * (
        12.0 * (CHUNK + args.mamba_state_dim) + 8.0 * args.mamba_state_dim * args.mamba_head_dim / CHUNK
    )
    return 34.0 * inner + 10.0 * convolved + 2.0 * projected + of_a_chunk


def _of_portable_delta_rule(args: Namespace) -> float:
    """What model/delta.py keeps, as measured."""
    heads, key, value = args.linear_num_value_heads, args.linear_key_head_dim, args.linear_value_head_dim
    convolved = 2 * args.linear_num_key_heads * key + heads * value
    return 12.0 * convolved + heads * (24.0 * CHUNK + 40.0 * key + 32.0 * value + 4.0 * key * value / CHUNK)


def portable_share(args: Namespace, symbol: str) -> float:
    """How many times as much an M or a G layer keeps without `mamba_ssm` or `fla`: its norm keeps its input (4) and its
    values (4) in float32, and the output (2)."""
    return (10 * args.hidden_size + PORTABLE[symbol](args)) / (5 * args.hidden_size + INSIDE[symbol](args))


INSIDE: dict[str, Callable[[Namespace], float]] = {
    Symbols.ATTENTION: _of_attention,
    Symbols.MLA: _of_attention,
    Symbols.DS_ATTENTION: _of_attention,
    Symbols.MLP: lambda args: 4.0 * args.ffn_hidden_size,
    Symbols.MOE: lambda args: 4.0 * _mlp_width(args),
    Symbols.MAMBA: _of_mamba,
    Symbols.GDN: _of_delta_rule,
}
"""By symbol: bytes that a layer keeps of a token inside of it, which tensor parallelism cuts."""

PORTABLE = {Symbols.MAMBA: _of_portable_mamba, Symbols.GDN: _of_portable_delta_rule}
"""The same on machines without `mamba_ssm` and `fla`."""


def _mlp_width(args: Namespace) -> float:
    """Of all experts that a token is sent to."""
    return float(args.moe_ffn_hidden_size * args.moe_router_topk + (args.moe_shared_expert_intermediate_size or 0))
