"""The memory that a rank needs: parameters are counted, activations estimated."""

from argparse import Namespace
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megatron_mtp.config import trained_depths

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


def memory_of(args: Namespace, parameters: list[Parameter], layers: int, stage: int) -> Memory:
    """Of a rank of this stage, which holds so many layers of the trunk."""
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


def activations(args: Namespace, layers: int, depths: int, stage: int) -> float:
    """Bytes that a stage keeps for its backward pass: of its layers for every microbatch in flight (stage p of P has
    P - p of them), of its depths, and of the trunk's logits on the last stage.

    A layer keeps 10 + 24/t bytes an element of the hidden state, or 34/t with sequence parallelism, where its MLP is 4
    hidden sizes wide (Korthikanti et al., arXiv:2205.05198, table 2, without attention scores); the part that
    grows with the MLP's width is scaled. Under full recomputation it keeps its input alone.
    """
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    tokens = args.seq_length * args.micro_batch_size / args.context_parallel_size
    hidden = tokens * args.hidden_size
    width = 4 * _mlp_width(args) / args.hidden_size  # in place of 16 where it is 4 hidden sizes
    shared = 10 / tensor if args.sequence_parallel else 10
    layer = hidden * (shared + (8 + width) / tensor)
    if args.recompute_granularity == "full":
        layer = hidden * 2 / (tensor if args.sequence_parallel else 1)
    in_flight = stages - stage
    logits = 0.0
    if stage == stages - 1 and not args.mtp_linear_ce_main:
        logits = tokens * args.padded_vocab_size / tensor * (4 + 2)  # in float32, and as the head makes them
    return layer * (layers * in_flight + depths) + 4 * hidden * depths + logits


def _mlp_width(args: Namespace) -> float:
    """Of the MLP that a token goes through; of a layer with experts, of all that the token is sent to."""
    if args.num_experts is None:
        return float(args.ffn_hidden_size)
    return float(args.moe_ffn_hidden_size * args.moe_router_topk + (args.moe_shared_expert_intermediate_size or 0))
