"""What a rank needs in memory, by hand."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_mtp.training.memory import Memory, Parameter, activations, memory_of


def args(**others: Any) -> Namespace:
    sizes: dict[str, Any] = {
        "seq_length": 100,
        "micro_batch_size": 2,
        "hidden_size": 10,
        "ffn_hidden_size": 40,
        "num_experts": None,
        "padded_vocab_size": 1000,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "recompute_granularity": None,
        "mtp_linear_ce_main": False,
        "bf16": True,
        "fp16": False,
        "accumulate_allreduce_grads_in_fp32": True,
        "use_distributed_optimizer": False,
        "mtp_num_layers": None,
    }
    return Namespace(**(sizes | others))


HIDDEN, LOGITS = 100 * 2 * 10, 100 * 2 * 1000 * 6


@pytest.mark.parametrize(
    ("others", "layers", "depths", "stage", "expected"),
    [
        ({}, 3, 0, 0, 3 * 34 * HIDDEN + LOGITS),  # 34 bytes an element: the paper's number without attention scores
        ({"tensor_model_parallel_size": 2}, 3, 0, 0, 3 * 22 * HIDDEN + LOGITS / 2),  # 10 + 24 / 2
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 3, 0, 0, 3 * 17 * HIDDEN + LOGITS / 2),
        ({"recompute_granularity": "full"}, 3, 0, 0, 3 * 2 * HIDDEN + LOGITS),
        ({"pipeline_model_parallel_size": 4}, 3, 0, 0, 3 * 34 * 4 * HIDDEN),  # four microbatches in flight, no head
        ({"pipeline_model_parallel_size": 4}, 3, 0, 3, 3 * 34 * HIDDEN + LOGITS),
        ({"context_parallel_size": 2}, 3, 0, 0, (3 * 34 * HIDDEN + LOGITS) / 2),
        ({"mtp_linear_ce_main": True}, 3, 2, 0, (3 + 2) * 34 * HIDDEN + 2 * 4 * HIDDEN),
    ],
)
def test_activations(others: dict[str, Any], layers: int, depths: int, stage: int, expected: float) -> None:
    assert activations(args(**others), layers, depths, stage) == expected


def test_a_token_goes_through_the_experts_that_it_is_sent_to() -> None:
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 10, "moe_router_topk": 3}
    assert activations(args(**experts, moe_shared_expert_intermediate_size=10), 1, 0, 0) == activations(args(), 1, 0, 0)
    assert activations(args(**experts, moe_shared_expert_intermediate_size=None), 1, 0, 0) == 30 * HIDDEN + LOGITS


def test_a_repeated_layer_keeps_the_activations_of_every_pass() -> None:
    once, passes = ({"mtp_num_layers": 1, "mtp_unroll": unroll} for unroll in (None, 3))
    one, three = (memory_of(args(**each), PARAMETERS, 3, 0) for each in (once, passes))
    assert three.activations - one.activations == 2 * (34 + 4) * HIDDEN
    assert three.weights == one.weights


PARAMETERS = [Parameter("trunk", 1000, 1000, 4, False), Parameter("depths", 100, 200, 4, True)]


@pytest.mark.parametrize(
    ("others", "weights", "gradients", "optimizer"),
    [
        ({}, 2200, 400, 1200),  # the frozen trunk has weights alone
        ({"use_distributed_optimizer": True}, 2200, 400, 300),
        ({"bf16": False}, 4400, 400, 800),
        ({"accumulate_allreduce_grads_in_fp32": False}, 2200, 200, 1200),
    ],
)
def test_weights_gradients_and_optimizer(
    others: dict[str, Any], weights: float, gradients: float, optimizer: float
) -> None:
    memory = memory_of(args(**others), PARAMETERS, layers=0, stage=0)
    assert memory == Memory(weights, gradients, optimizer, LOGITS)
    assert memory.total == weights + gradients + optimizer + LOGITS
