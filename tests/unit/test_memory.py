"""What a rank needs in memory, by hand."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from hybrid_single import our_hybrid

from megatron_mtp.training.memory import (
    INSIDE,
    Memory,
    Parameter,
    activations,
    memory_of,
    portable_share,
    symbols_of,
)


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
    assert activations(args(**others), "*-" * layers, depths, stage) == pytest.approx(expected)


def test_a_token_goes_through_the_experts_that_it_is_sent_to() -> None:
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 10, "moe_router_topk": 3}
    shared, alone = (args(**experts, moe_shared_expert_intermediate_size=size) for size in (10, None))
    assert activations(shared, symbols_of(shared, 1), 0, 0) == activations(args(), "*-", 0, 0)
    assert activations(alone, symbols_of(alone, 1), 0, 0) == 30 * HIDDEN + LOGITS


MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 5, "mamba_num_groups": 2, "mamba_state_dim": 3}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}


@pytest.mark.parametrize(
    ("others", "layers", "depths", "expected"),
    [
        ({"hybrid_layer_pattern": "*-*-/*-"}, "*-*-", 1, (3 * 34 + 4) * HIDDEN),  # as a GPT
        ({"hybrid_layer_pattern": "*-*-/*-", "recompute_granularity": "full"}, "*-*-", 1, (6 * 2 + 4) * HIDDEN),
        ({"hybrid_layer_pattern": "*-"}, "-", 0, (5 + 16) * HIDDEN),
        # x and z 20 each, B and C 6 each, dt 4; the output twice
        ({"hybrid_layer_pattern": "M", **MAMBA}, "M", 0, 5 * HIDDEN + 200 * 2 * (56 + 40)),
        ({"hybrid_layer_pattern": "M", **MAMBA, "tensor_model_parallel_size": 2}, "M", 0, 5 * HIDDEN + 200 * 96),
        # q, k 6 each, v and gate 20 each, beta and alpha 4 each; q, k, v convolved; q, k of 4 heads; 4 rows of 64; out
        ({"hybrid_layer_pattern": "G", **DELTA}, "G", 0, 5 * HIDDEN + 200 * (2 * (60 + 32 + 24 + 256 + 40) + 80)),
    ],
)
def test_a_hybrids_layers_are_estimated_by_their_kinds(
    others: dict[str, Any], layers: str, depths: int, expected: float
) -> None:
    given = args(**others, mtp_linear_ce_main=True)
    assert activations(given, layers, depths, 0) == expected


RECURRENT: dict[str, Any] = {
    "hidden_size": 64,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "mamba_num_groups": 3,
    "mamba_state_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 36,
}


def kept_in_a_step(pattern: str, length: int) -> int:
    """Bytes of all tensors, other than weights, that the layers keep for their backward pass."""
    model = our_hybrid(pattern, params_dtype=torch.bfloat16, bf16=True, **RECURRENT).bfloat16()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage  # held, so that no later one has its place
        return tensor

    hidden_SBH = torch.randn(length, 1, RECURRENT["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.decoder(hidden_SBH, attention_mask=None, rotary_pos_emb=model.rotary_pos_emb(length))
    return sum(storage.nbytes() for place, storage in found.items() if place not in weights)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("symbol", "MG")
def test_a_portable_layer_keeps_what_is_said(symbol: str) -> None:
    length, given = 256, args(**RECURRENT)
    measured = (kept_in_a_step(3 * symbol, length) - kept_in_a_step(2 * symbol, length)) / length
    said = portable_share(given, symbol) * (5 * given.hidden_size + INSIDE[symbol](given))
    assert said == pytest.approx(measured, rel=0.03)


def test_a_repeated_layer_keeps_the_activations_of_every_pass() -> None:
    once, passes = ({"mtp_num_layers": 1, "mtp_unroll": unroll} for unroll in (None, 3))
    one, three = (memory_of(args(**each), PARAMETERS, "*-" * 3, 0) for each in (once, passes))
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
    memory = memory_of(args(**others), PARAMETERS, layers="", stage=0)
    assert memory == Memory(weights, gradients, optimizer, LOGITS)
    assert memory.total == weights + gradients + optimizer + LOGITS
