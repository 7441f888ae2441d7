"""model/trained_stage.py: a plain GPT without an objective, and Megatron's checkpoint keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hybrid_single import our_hybrid
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine
from megatron.core.models import backends
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_single import (
    LENGTH,
    MOE,
    ROWS,
    forward_ours,
    gradients,
    loss_of,
    make_batch,
    mean_losses,
    megatron_model,
    our_model,
    randomize,
    relative_difference,
)
from tiers import tiered

from megatron_mtp.losses.head_objective import HeadObjective
from megatron_mtp.model import around_layers, mtp, mtp_block
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.model.frozen import freeze_trunk
from megatron_mtp.model.passed_states import as_one
from megatron_mtp.model.trunk_output import AttentionInputs

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


PATTERN = "M*-/*-"


def model_with_heads(pattern: str | None, freezes: bool = False) -> Any:
    if pattern is None:
        return our_model(1, freezes=freezes)
    return our_hybrid(pattern, settings={"mtp_train_only": freezes})


@pytest.mark.parametrize(("pattern", "kind"), [(None, GPTModel), (PATTERN, HybridModel)], ids=["gpt", "hybrid"])
def test_training_uses_megatrons_class_and_never_makes_logits(pattern: str | None, kind: type) -> None:
    """None of its methods is replaced, and the chunked losses read the head's weight instead of its output."""
    model = model_with_heads(pattern)
    assert type(model) is kind
    assert [name for name in vars(model) if hasattr(kind, name)] == []
    calls: list[int] = []
    model.output_layer.register_forward_hook(lambda *_: calls.append(1))
    loss_of(forward_ours(model, make_batch(1), linear_main=True)).backward()
    assert calls == []
    plain_forward(model, make_batch(1), with_labels=True)
    assert calls == [1]


@pytest.mark.parametrize("loads", [False, True])
def test_a_loaded_trunk_skips_initialization_unlike_its_mtp_layers(loads: bool) -> None:
    drawn: list[int] = []

    def draw(weight: torch.Tensor) -> torch.Tensor:
        drawn.append(weight.numel())
        return weight.data.fill_(0.5)

    model = our_model(1, loads_trunk=loads, init_method=draw, output_layer_init_method=draw)
    of_layers = [each.numel() for each in model.mtp.parameters() if each.dim() == 2]
    of_trunk = [each.numel() for name, each in model.named_parameters() if each.dim() == 2 and name[:4] != "mtp."]
    assert sorted(drawn) == sorted(of_layers if loads else of_layers + of_trunk)
    assert model.config.perform_initialization


@pytest.mark.parametrize("detaches", [True, False])
def test_a_later_stage_trains_its_output_layer_as_the_heads_require(detaches: bool) -> None:
    """It receives the states of trunk and heads as one tensor, and has no MTP layers or drafters itself."""
    model, states = our_model(2, mtp_detach_heads=detaches), list(torch.randn(3, 4, 1, 32))
    stage = attached_of(model)
    stage.heads = []
    shown = stage.finish(as_one(states[0], states[1:]), lambda output: output, [make_batch(2)["depths"]], None, None)
    (drafted,) = shown.drafted
    assert [torch.equal(*each) for each in zip([shown.hidden_SBH, *drafted.hidden], states, strict=True)] == [True] * 3
    assert (shown.head.weight.requires_grad, drafted.head.weight.requires_grad) == (True, not detaches)


@pytest.mark.parametrize("fails", ["decoder", "objective"])
@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["gpt", "hybrid"])
def test_after_a_forward_that_fails_the_model_is_as_before(
    pattern: str | None, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = model_with_heads(pattern), make_batch(1)
    expected, before = mean_losses(forward_ours(model, batch)), dict(vars(model))

    def stop(*_: Any, **__: Any) -> None:
        raise RuntimeError("stopped")

    with monkeypatch.context() as patches:
        patches.setattr(*((model.decoder, "forward") if fails == "decoder" else (HeadObjective, "__call__")), stop)
        with pytest.raises(RuntimeError, match="stopped"):
            forward_ours(model, batch)
    assert vars(model) == before
    assert torch.equal(mean_losses(forward_ours(model, batch)), expected)


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["gpt", "hybrid"])
def test_offloading_excludes_the_weights_of_heads_and_output_layer(
    pattern: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron marks weights in its first forward pass, where both are hidden."""
    model, kept = model_with_heads(pattern), list[torch.nn.Parameter]()
    monkeypatch.setattr(FineGrainedActivationOffloadingInterface, "mark_not_offload", kept.append)
    monkeypatch.setattr(model, "preprocess_for_fine_grained_offloading", lambda: None, raising=False)
    model.config.fine_grained_activation_offloading = True
    forward_ours(model, make_batch(1))
    wanted = [*model.mtp.parameters(), *model.output_layer.parameters()]
    assert {id(each) for each in wanted} <= {id(each) for each in kept}


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["gpt", "hybrid"])
def test_a_frozen_trunk_stays_in_evaluation_while_its_heads_train(pattern: str | None) -> None:
    model = model_with_heads(pattern, freezes=True)
    forward_ours(model.train(), make_batch(1), trains_trunk=False)
    training = {name for name, module in model.named_children() if module.training}
    assert training == {"mtp"}


def test_without_mtp_layers_there_is_no_mtp_block() -> None:
    model = our_model(None)
    assert not model.mtp_process
    assert not hasattr(model, "mtp")
    output = forward_ours(model, make_batch(0))
    assert output.heads == []
    loss_of(output).backward()
    assert gradients(model)


def test_a_tied_head_owns_no_weight() -> None:
    assert our_model(2, tied=True).output_layer.weight is None
    assert our_model(2, tied=False).output_layer.weight is not None


def test_a_repeated_layer_is_built_once() -> None:
    assert len(our_model(3, mtp_use_repeated_layer=True).mtp.layers) == 1
    assert len(our_model(3).mtp.layers) == 3


RECOMPUTE: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE.keys())
@pytest.mark.parametrize("trunk", ["trained", "detached", "frozen"])
@pytest.mark.parametrize("architecture", tiered(["sequential", "parallel"], ("sequential",)))
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_recomputation_changes_nothing(
    kind: dict[str, Any], architecture: str, trunk: str, recompute: dict[str, Any]
) -> None:
    """Even if the MTP layers' inputs need no gradient: their weights are trained nonetheless."""
    losses, grads = [], []
    for changes in ({}, recompute):
        model = our_model(2, architecture=architecture, mtp_detach_heads=trunk == "detached", **kind, **changes)
        if trunk == "frozen":
            freeze_trunk(model)
        runs: list[int] = []
        attention = model.mtp.layers[0].tf_layer.self_attention.core_attention
        attention.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        output = forward_ours(model, make_batch(2), trains_trunk=trunk != "frozen")
        loss_of(output).backward()
        assert len(runs) == (2 if changes else 1), "the depth's attention runs twice where it is recomputed"
        losses.append(mean_losses(output))
        grads.append(gradients(model.mtp if trunk == "frozen" else model))
    assert torch.equal(*losses)
    assert max(relative_difference(grads[1][name], grad) for name, grad in grads[0].items()) <= 1e-6


@pytest.mark.parametrize(
    ("precision", "is_on"),
    [
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, True),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, False),
        ({"fp4": "e2m1"}, False),
    ],
)
def test_quantized_mtp_layers_are_recomputed_by_tes_checkpoint(
    precision: dict[str, Any], is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's functions stand in for TE's: only delayed scaling must be on where the checkpoint begins."""
    model = our_model(1, architecture="parallel", **RECOMPUTE["uniform"])
    for name, value in precision.items():
        setattr(model.config, name, value)
    entered: list[bool] = []
    found: list[tuple[int, bool, Any]] = []

    def te_checkpoint(run: Any, distributes: bool, rng_tracker: Any, group: Any, *inputs: Any) -> Any:
        assert rng_tracker is tensor_parallel.get_cuda_rng_tracker
        found.append((len(entered), distributes, group))
        return tensor_parallel.checkpoint(run, distributes, *inputs)

    @contextmanager
    def get_fp8_context(_: Any) -> Iterator[None]:
        entered.append(True)
        yield

    monkeypatch.setattr(transformer_engine, "te_checkpoint", te_checkpoint)
    for module in (around_layers, mtp):
        monkeypatch.setattr(module, "get_fp8_context", get_fp8_context)
    hidden_SBH = torch.randn(LENGTH, ROWS, model.config.hidden_size).cuda()
    attention = AttentionInputs(make_batch(1)["attention_mask"])
    model.mtp.layers[0](hidden_SBH, None, attention).sum().backward()
    assert found == [(int(is_on), False, model.pg_collection.tp)]
    assert gradients(model.mtp)


class FusedAccumulation:
    """Stand in for Apex's extension, which adds a layer's weight gradient to `main_grad` in its backward pass."""

    @staticmethod
    def wgrad_gemm_accum_fp32(states_NH: torch.Tensor, gradient_NV: torch.Tensor, main_grad_VH: torch.Tensor) -> None:
        main_grad_VH += gradient_NV.t() @ states_NH


def main_gradients(model: GPTModel, **settings: Any) -> dict[str, torch.Tensor]:
    """Return what Megatron's optimizer would see after two microbatches."""
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    wrapped.zero_grad_buffer()
    for seed in (2, 3):
        loss_of(forward_ours(wrapped, make_batch(2, seed=seed), **settings)).backward()
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("linear_main", [False, True], ids=["main-by-layer", "main-in-chunks"])
@pytest.mark.parametrize("pipeline", [False, True], ids=["one-stage", "last-of-several"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fused_accumulation_keeps_the_mtp_gradient_of_the_head(
    tied: bool, pipeline: bool, linear_main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the output layer's dummy gradient was dropped together with that of the MTP layers."""
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", FusedAccumulation, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    if pipeline:  # here Megatron marks no weight, unlike on a stage that is both first and last
        monkeypatch.setattr(LanguageModule, "setup_embeddings_and_output_layer", lambda _: None)
    plain, fused = (
        main_gradients(our_model(2, tied, gradient_accumulation_fusion=fusion), linear_main=linear_main)
        for fusion in (False, True)
    )
    assert max(relative_difference(fused[name], gradient) for name, gradient in plain.items()) <= 1e-5


def linear_layers(model: GPTModel) -> dict[bool, set[str]]:
    """Return names of layers by whether they fuse their weight gradients."""
    named = {name: each.gradient_accumulation_fusion for name, each in model.named_modules() if _is_linear(each)}
    return {fused: {name for name, own in named.items() if own == fused} for fused in (False, True)}


def _is_linear(module: torch.nn.Module) -> bool:
    return hasattr(module, "gradient_accumulation_fusion")


class FusingLinear(ColumnParallelLinear):
    """Stand in for TE's layers, which read the setting and need no Apex."""

    def __init__(self, *sizes: Any, config: Any, **settings: Any) -> None:
        super().__init__(*sizes, config=replace(config, gradient_accumulation_fusion=False), **settings)
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion


def test_without_apex_the_head_alone_fuses_no_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: fusion was disabled for the whole model, although TE's layers do their own."""
    assert not layers._grad_accum_fusion_available
    monkeypatch.setattr(backends.LocalSpecProvider, "column_parallel_linear", lambda _: FusingLinear)
    model = our_model(1, gradient_accumulation_fusion=True)
    found = linear_layers(model)
    assert found[False] == {"output_layer"}
    assert {"decoder.layers.0.mlp.linear_fc1", "mtp.layers.0.eh_proj", "mtp.layers.0.tf_layer.mlp.linear_fc1"} <= (
        found[True]
    )
    assert model.output_layer.config is model.config, "so that what Megatron changes later reaches the head"


@pytest.mark.parametrize("repeated", [False, True], ids=["own-layers", "repeated-layer"])
def test_depths_are_built_with_weights_in_fp8_where_the_trunk_is(
    repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with --fp8-param-gather they stayed in bfloat16, outside of TE's `fp8_model_init`."""
    inside: list[bool] = []
    built: list[tuple[str, bool]] = []

    @contextmanager
    def get_fp8_context(config: Any, layer: int = -1, is_init: bool = False) -> Iterator[None]:
        inside.append(is_init)
        yield
        inside.pop()

    make_layer = layers.ColumnParallelLinear.__init__

    def make(layer: Any, *sizes: Any, **settings: Any) -> None:
        built.append((settings.get("tp_comm_buffer_name") or "", inside == [True]))
        make_layer(layer, *sizes, **settings)

    monkeypatch.setattr(mtp_block, "get_fp8_context", get_fp8_context)
    monkeypatch.setattr(layers.ColumnParallelLinear, "__init__", make)
    our_model(2, mtp_use_repeated_layer=repeated)
    of_depths = [name for name, is_inside in built if is_inside]
    assert of_depths == ["mtp_eh_proj", "qkv", "fc1"] * (1 if repeated else 2)


@pytest.mark.parametrize("depths", [None, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_head_is_gathered_before_the_losses_in_chunks_read_it(tied: bool, depths: int | None) -> None:
    """With --overlap-param-gather; the output layer's forward pass, which would wait for it, is not called."""
    model = our_model(depths, tied)
    overlapping = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1000
    )
    wrapped = DistributedDataParallel(model.config, overlapping, model)
    forward_ours(wrapped, make_batch(depths or 0), linear_main=True)
    assert len(wrapped.bucket_groups) > 3
    assert all(group.param_gather_dispatched for group in wrapped.bucket_groups)
    assert not [group for group in wrapped.bucket_groups if group.param_gather_handle is not None]


def sharded(model: GPTModel) -> dict[str, Any]:
    """Return a checkpoint's contents: shape by key for tensors, None for objects."""
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


def step(model: GPTModel, batch: dict[str, Any]) -> list[float]:
    output = forward_ours(model, batch)
    loss_of(output).backward()
    return mean_losses(output).tolist()


def test_two_models_of_a_process_share_no_state() -> None:
    MTPLossLoggingHelper.tracker.clear()
    alone = step(our_model(2), make_batch(2))
    first, second = our_model(2), our_model(3, tied=True, mtp_use_repeated_layer=True)
    randomize(second, seed=7)
    assert len(step(second, make_batch(3))) == 4
    assert all(parameter.grad is None for parameter in first.parameters())
    assert step(first, make_batch(2)) == alone
    assert not MTPLossLoggingHelper.tracker, "Megatron's class-level tracker is not used"


def test_every_module_receives_the_quantization_recipe_once(megatron: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """TE modules have `finish_init`; here Megatron's linear layer stands in for them."""
    told: list[torch.nn.Module] = []
    monkeypatch.setattr(ColumnParallelLinear, "finish_init", lambda module, recipe: told.append(module), raising=False)
    model = our_model(2)
    assert told == [module for module in model.modules() if isinstance(module, ColumnParallelLinear)]
