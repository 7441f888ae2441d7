"""Output layer and loss alone, in chunks and as in Megatron without fusion: peak memory of forward and backward.

Both sides train the weight of one of Megatron's output layers, in Megatron's DDP, from the same hidden states [N, H]
per depth. A peak is what the passes allocate in addition to the weight, its `main_grad` and the states.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from benchmarks.harness import allocated_peak
from megatron_mtp.losses.linear_cross_entropy import Targets, linear_loss
from megatron_mtp.losses.token_loss import CrossEntropy
from megatron_mtp.model.vocabulary import Vocabulary

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def peaks(tokens: int, entries: int, hidden: int, dtype: str, depths: int = 1) -> tuple[float, float]:
    """Return peak MiB of ours and of Megatron's; needs process groups."""
    head = _head(hidden, entries, DTYPES[dtype])
    weight_VH = head.weight
    states = [torch.randn(tokens, 1, hidden, dtype=weight_VH.dtype, device=weight_VH.device) for _ in range(depths)]
    leaves = [each.requires_grad_() for each in states]
    labels_N = torch.randint(entries, (tokens,), device=weight_VH.device)
    ours, theirs = (partial(_step, side, head, leaves, labels_N) for side in (_ours, _theirs))
    return allocated_peak(ours, not weight_VH.is_cuda), allocated_peak(theirs, not weight_VH.is_cuda)


def _head(hidden: int, entries: int, dtype: torch.dtype) -> Any:
    config = TransformerConfig(num_layers=1, hidden_size=hidden, num_attention_heads=1, params_dtype=dtype)
    head = ColumnParallelLinear(
        hidden,
        entries,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), head)
    return head


def _step(loss: Callable[..., Tensor], head: Any, leaves: list[Tensor], labels_N: Tensor) -> None:
    loss(head, leaves, labels_N).backward()
    for leaf in leaves:
        leaf.grad = None


def _ours(head: Any, leaves: list[Tensor], labels_N: Tensor) -> Tensor:
    labels_DN = labels_N.expand(len(leaves), -1)
    targets = Targets(labels_DN, torch.ones_like(labels_DN), torch.ones(len(leaves), device=labels_N.device))
    states = [leaf.flatten(0, 1) for leaf in leaves]
    vocabulary = Vocabulary(len(head.weight))
    total, _ = linear_loss(CrossEntropy(), states, targets, head.weight, vocabulary, main_grad=True)
    return total


def _theirs(head: Any, leaves: list[Tensor], labels_N: Tensor) -> Tensor:
    total = torch.zeros((), device=labels_N.device)
    for leaf in leaves:
        losses_NB = vocab_parallel_cross_entropy(head(leaf)[0], labels_N.unsqueeze(1), tp_group=head.tp_group)
        total = total + losses_NB.sum()
    return total
