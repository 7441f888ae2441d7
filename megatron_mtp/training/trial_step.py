"""One training step of a tiny model in a layout of this job's ranks, and the same step in one process.

    reference(experts) -> Step     what one process computes; every rank by itself
    distributed(layout) -> Step    what the layout computes; all ranks together

Weights are drawn by their keys in checkpoints, and batches by their number, so that both steps start alike. Letters in
names: B batch, S sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_mtp.data.batch import add_depths, depth_batch, keep_positions
from megatron_mtp.data.context_parallel import positions_of_ranks
from megatron_mtp.model.build import MTPGPTModelConfig, build
from megatron_mtp.model.random_weights import normal_by_name
from megatron_mtp.model.sharing import embedding_ranks
from megatron_mtp.model.trunk import MTPGPTModel
from megatron_mtp.training.objective import NextTokensObjective, ObjectiveOutput

LENGTH, VOCABULARY, DEPTHS = 16, 96, 2
WEIGHTS = (0.15, 0.15)
"""Of the depths in the loss."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups; the other ranks hold replicas."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1


@dataclass(frozen=True)
class Step:
    """The loss of the trunk and the norm of all gradients, before the weights change."""

    loss: float
    grad_norm: float


def layouts_of(ranks: int) -> tuple[Layout, ...]:
    """Those that so many ranks can have."""
    replicas = (Layout(f"DP {ranks}"),) if ranks > 1 else ()
    if ranks % 2:
        return replicas
    pairs = (
        Layout("TP 2", tensor=2),
        Layout("PP 2", pipeline=2),
        Layout("CP 2", context=2),
        Layout("EP 2", expert=2),
    )
    return (*replicas, *pairs)


def reference(layout: Layout, microbatches: int) -> Step:
    """The step of a layout's model in this process alone: plain autograd, no schedule and no communication."""
    join(Layout("alone"))
    model = model_of(layout, Layout("alone"))
    total, losses = torch.zeros(()).cuda(), []
    for number in range(microbatches):
        output = forward(model, batch_of(number))
        total = total + output.loss / output.main.tokens / microbatches
        losses.append((output.main.total / output.main.tokens).item())
    total.backward()
    squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return Step(sum(losses) / microbatches, torch.stack(squares).sum().sqrt().item())


def distributed(layout: Layout, microbatches: int) -> Step:
    """The same by Megatron's schedule, DDP and optimizer; every rank returns the same numbers."""
    join(layout)
    model = model_of(layout, layout)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    wrapped.zero_grad_buffer()
    model.config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [wrapped])
    model.config.grad_scale_func = optimizer.scale_loss
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    own = range(replica, microbatches, replicas)
    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=map(batch_of, own),
        model=[wrapped],
        num_microbatches=len(own),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    _, grad_norm, _ = optimizer.step()
    sums = torch.stack([report["lm loss"] for report in reports]).sum(0) if reports else torch.zeros(2).cuda()
    torch.distributed.all_reduce(sums)
    return Step((sums[0] / sums[1]).item(), float(grad_norm))


def join(layout: Layout) -> None:
    """Megatron's groups for the layout; those of another are given up."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        get_embedding_ranks=lambda ranks: embedding_ranks(ranks, _transformer(layout, layout), tied=False),
    )
    model_parallel_cuda_manual_seed(0)


def model_of(kind: Layout, spread: Layout) -> MTPGPTModel:
    """This rank's part of the tiny model, which has experts where `kind` is about them."""
    config = MTPGPTModelConfig(
        transformer=_transformer(kind, spread),
        vocab_size=VOCABULARY,
        seq_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = build(config).cuda()
    fill(model)
    return model


def _transformer(kind: Layout, spread: Layout) -> TransformerConfig:
    experts: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": spread.expert,
    }
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        mtp_num_layers=DEPTHS,
        tensor_model_parallel_size=spread.tensor,
        pipeline_model_parallel_size=spread.pipeline,
        context_parallel_size=spread.context,
        pipeline_dtype=torch.float32,
        **(experts if kind.expert > 1 else {}),
    )


@torch.no_grad()
def fill(model: MTPGPTModel) -> None:
    """Draw every weight by its key and take this rank's part of it."""
    entries = model.sharded_state_dict()
    apply_factories(entries)
    for entry in nested_values(entries):
        if isinstance(entry, ShardedTensor):
            noise = normal_by_name(entry.key, *entry.global_shape)
            whole = 1 + 0.1 * noise if "norm" in entry.key else 0.2 * noise
            entry.data.copy_(whole[entry.global_slice()].view(entry.data.shape))


def batch_of(number: int) -> dict[str, Any]:
    """Microbatch of one sequence, cut for context parallelism."""
    generator = torch.Generator("cpu").manual_seed(number)
    stream_BS = torch.randint(1, VOCABULARY, (1, LENGTH + 1), generator=generator, device="cpu").cuda()
    batch: dict[str, Any] = {
        "tokens": stream_BS[:, :-1].contiguous(),
        "labels": stream_BS[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, LENGTH).cuda(),
        "position_ids": torch.arange(LENGTH).expand(1, LENGTH).contiguous().cuda(),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not().cuda(),
    }
    add_depths(batch, DEPTHS, None)
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        positions_RS = positions_of_ranks(torch.tensor([0, LENGTH]), group.size())
        keep_positions(batch, positions_RS[group.rank()].to(stream_BS.device))
    return batch


def forward(model: Any, batch: dict[str, Any]) -> Any:
    """The objective's output on the last stage, hidden states on another."""
    return model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        output_processor=NextTokensObjective(WEIGHTS, parallel_state.get_context_parallel_group()),
        output_processor_context=depth_batch(batch),
    )


def _forward_step(batches: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[Any, Any]:
    return forward(model, next(batches)), _loss


def _loss(output: ObjectiveOutput) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = output.loss * parallel_state.get_context_parallel_world_size()  # Megatron takes the mean over these ranks
    return loss, output.main.whole_tokens.detach().int(), {"lm loss": output.main.report()}
