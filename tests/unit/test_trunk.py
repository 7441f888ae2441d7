"""model/trunk.py: a plain GPT where no objective is given, and Megatron's checkpoint keys."""

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_single import (
    MOE,
    forward_ours,
    gradients,
    loss_of,
    make_batch,
    mean_losses,
    megatron_model,
    our_model,
    randomise,
    relative_difference,
)

from megatron_mtp.model.trunk import MTPGPTModel

pytestmark = pytest.mark.usefixtures("megatron")

KINDS = {"dense": {}, "moe": MOE}


def plain_forward(model: GPTModel, batch: dict[str, Any], with_labels: bool) -> torch.Tensor:
    labels = batch["labels"] if with_labels else None
    return model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("depths", [None, 2])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_without_an_objective_it_is_megatrons_gpt(kind: dict[str, Any], depths: int | None, tied: bool) -> None:
    ours, theirs = our_model(depths, tied, **kind), megatron_model(None, tied, **kind)
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights.pop(name))
    assert all(name.startswith("mtp.") for name in weights)
    batch = make_batch(0)
    for with_labels in (True, False):
        ours_out, theirs_out = (plain_forward(model, batch, with_labels) for model in (ours, theirs))
        assert relative_difference(ours_out, theirs_out) < 1e-6


def test_without_depths_there_is_no_block() -> None:
    model = our_model(None)
    assert not model.mtp_process
    assert not hasattr(model, "mtp")
    output = forward_ours(model, make_batch(0))
    assert output.depths == []
    loss_of(output).backward()
    assert gradients(model)


def test_a_tied_head_owns_no_weight() -> None:
    assert our_model(2, tied=True).output_layer.weight is None
    assert our_model(2, tied=False).output_layer.weight is not None


def test_a_repeated_layer_is_one_layer() -> None:
    assert len(our_model(3, mtp_use_repeated_layer=True).mtp.layers) == 1
    assert len(our_model(3).mtp.layers) == 3


RECOMPUTE: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE.keys())
@pytest.mark.parametrize("architecture", ["sequential", "parallel"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_recomputation_changes_nothing(kind: dict[str, Any], architecture: str, recompute: dict[str, Any]) -> None:
    losses, grads = [], []
    for changes in (kind, {**kind, **recompute}):
        model = our_model(2, architecture=architecture, **changes)
        runs: list[int] = []
        attention = model.mtp.layers[0].tf_layer.self_attention.core_attention
        attention.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        output = forward_ours(model, make_batch(2))
        loss_of(output).backward()
        assert len(runs) == (1 if changes is kind else 2), "the depth's attention runs twice where it is recomputed"
        losses.append(mean_losses(output))
        grads.append(gradients(model))
    assert torch.equal(*losses)
    assert max(relative_difference(grads[1][name], grad) for name, grad in grads[0].items()) <= 1e-6


def sharded(model: GPTModel) -> dict[str, Any]:
    """What a checkpoint would hold: key to shape for tensors, to None for objects."""
    entries = {}
    for entry in model.sharded_state_dict().values():
        if isinstance(entry, ShardedTensor):
            entries[entry.key] = (entry.global_shape, entry.global_offset, entry.replica_id)
        elif isinstance(entry, ShardedObject):
            entries[entry.unique_key] = None
        else:
            entries[entry.key] = type(entry).__name__  # a factory, which splits the gate and up projections
    return entries


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("repeated", [False, True], ids=["own-layers", "repeated-layer"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_checkpoint_keys_are_megatrons_own(kind: dict[str, Any], repeated: bool, tied: bool) -> None:
    ours = sharded(our_model(2, tied, mtp_use_repeated_layer=repeated, **kind))
    assert ours == sharded(megatron_model(2, tied, mtp_use_repeated_layer=repeated, **kind))
    second = "mtp.layers.1.transformer_layer.self_attention.linear_qkv.weight"
    assert (second in ours) == (not repeated)
    assert ("output_layer.weight" in ours) == (not tied)


def test_a_parallel_heads_checkpoint_has_no_embedding_side() -> None:
    keys = sharded(our_model(2, architecture="parallel"))
    assert not [key for key in keys if any(part in key for part in ("eh_proj", "enorm", "hnorm"))]
    assert "mtp.layers.1.final_layernorm.weight" in keys


def step(model: MTPGPTModel, batch: dict[str, Any]) -> list[float]:
    output = forward_ours(model, batch)
    loss_of(output).backward()
    return mean_losses(output).tolist()


def test_two_models_of_a_process_share_no_state() -> None:
    MTPLossLoggingHelper.tracker.clear()
    alone = step(our_model(2), make_batch(2))
    first, second = our_model(2), our_model(3, tied=True, mtp_use_repeated_layer=True)
    randomise(second, seed=7)
    assert len(step(second, make_batch(3))) == 4
    assert all(parameter.grad is None for parameter in first.parameters())
    assert step(first, make_batch(2)) == alone
    assert not MTPLossLoggingHelper.tracker, "Megatron's class-level tracker is not used"


def test_every_module_hears_of_the_quantisation_recipe_once(megatron: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """TE modules have `finish_init`; here Megatron's linear layer stands in for them."""
    told: list[torch.nn.Module] = []
    monkeypatch.setattr(ColumnParallelLinear, "finish_init", lambda module, recipe: told.append(module), raising=False)
    model = our_model(2)
    assert told == [module for module in model.modules() if isinstance(module, ColumnParallelLinear)]
