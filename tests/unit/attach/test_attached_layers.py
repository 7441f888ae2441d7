"""attach.py on stock models in one process: the trunk is bit-identical, and the MTP layers learn as ours do.

tests/functional/test_attached_layouts.py has the other layouts.
"""

import copy
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
)
from megatron_single import LAMBDA, make_batch, megatron_name, our_model, relative_difference
from stock_models import KINDS, draw, learned, loss_of_logits, packed_batch, stock
from tiers import tiered
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from megatron_mtp.attach import attach
from megatron_mtp.checkpoint.convert.live import export_hf_weights
from megatron_mtp.data.batch import shift_left
from megatron_mtp.losses.mtp_loss import mtp_loss
from megatron_mtp.losses.stage_loss import _documents
from megatron_mtp.megatron.patches.patch import original_of
from megatron_mtp.megatron.patches.table import PATCHES
from megatron_mtp.model.stock import refused_heads, tied_embedding
from megatron_mtp.model.stock_mtp import _end_of
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.parameter_group import get_mtp_optimizer, mtp_grad_norm

pytestmark = pytest.mark.usefixtures("megatron")

APART = MTPConfig(mtp_train_only=True)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


# --- the trunk equals that of a step without the layers ---------------------------------------------------------------

TRUNKS = [
    *((kind, tied, own) for kind in ("dense", "moe", "latent") for tied in (False, True) for own in (None, 2)),
    ("hybrid", False, None),
    ("hybrid", True, None),
]


@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize(
    ("kind", "tied", "own"),
    tiered(TRUNKS, [("dense", False, 2), ("moe", True, None), ("latent", False, None), ("hybrid", False, None)]),
)
def test_logits_gradients_and_a_step_of_the_trunk_do_not_change_by_a_bit(
    kind: str, tied: bool, own: int | None, form: str
) -> None:
    """With new MTP layers, and with those of Megatron's own block."""
    batch, packed = make_batch(2), None
    if form == "packed":
        batch, packed = packed_batch(batch)
    plain, model = stock(kind, tied), stock(kind, tied, own)
    attached = attach(model, None if own else 2, APART)
    for each in (plain, model):
        draw(each)
    destroy_moe_metrics_tracker()
    expected = learned(plain, batch, packed, None)
    destroy_moe_metrics_tracker()
    given = batch["tokens"], batch["labels"], batch["loss_mask"]
    found = learned(model, batch, packed, lambda: attached.loss(*given).loss)
    assert differing(found, expected) == []
    depths = {name for name in found if name.startswith("gradient of mtp.")}
    assert depths == {f"gradient of {name}" for name, _ in model.named_parameters() if name.startswith("mtp.")}
    assert all(found[name].any() or "experts" in name for name in depths)


def test_a_loss_that_trains_the_trunk_too_changes_it() -> None:
    """Shows that the comparison can fail."""
    plain, model, batch = stock("dense"), stock("dense"), make_batch(2)
    attached = attach(model, 2)
    for each in (plain, model):
        draw(each)
    expected = learned(plain, batch, None, None)
    given = batch["tokens"], batch["labels"], batch["loss_mask"]
    found = learned(model, batch, None, lambda: attached.loss(*given).loss)
    assert differing(found, expected)


# --- the MTP layers learn as those of this package's own model --------------------------------------------------------


@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize("own", [None, 2], ids=["new", "adopted"])
@pytest.mark.parametrize(
    ("kind", "tied"),
    tiered([(kind, tied) for kind in KINDS for tied in (False, True)], [("dense", True), ("moe", False)]),
)
@pytest.mark.parametrize("settings", tiered([None, APART, MTPConfig(mtp_loss="kd")], [None]))
def test_loss_and_gradients_are_those_of_this_packages_model(
    kind: str, tied: bool, own: int | None, form: str, settings: MTPConfig | None
) -> None:
    batch, packed = make_batch(2), None
    if form == "packed":
        batch, packed = packed_batch(batch)
    ours, model = our_model(2, tied, **KINDS[kind]), stock(kind, tied, own)
    attached = attach(model, 2, settings)
    for each in (ours, model):
        draw(each)
    given = batch["tokens"], batch["labels"], batch["loss_mask"]
    arguments = batch["tokens"], batch["position_ids"], None
    forms = {} if packed is None else {"packed_seq_params": packed}
    states_SBH = ours(*arguments, output_processor=lambda stage: stage.hidden_SBH, **forms)
    expected = mtp_loss(states_SBH, ours, *given, settings, **forms)
    model(*arguments, **forms)
    made = attached.loss(*given)
    assert torch.equal(made.loss, expected.loss)
    assert made.depth_means.tolist() == expected.depth_means.tolist()
    for each in (expected, made):
        each.loss.backward()
    wanted = {megatron_name(name): each.grad for name, each in ours.named_parameters() if each.grad is not None}
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert found.keys() == wanted.keys()
    assert differing(found, wanted) == []


@pytest.mark.parametrize(
    ("position", "form", "has_labels"),
    [("learned_absolute", "rows", True), ("rope", "rows", True), ("rope", "rows", False), ("rope", "packed", False)],
)
def test_depths_of_megatrons_block_have_the_losses_of_megatrons_training(
    position: str, form: str, has_labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later token is embedded at its own position if the embedding adds positions; without labels the mask shifts
    too.

    A policy's forward pass has no labels: Megatron then expects the mask at the tokens that count.
    """
    batch, found = make_batch(2, torch.ones(3, 16) if has_labels else None), list[dict[str, Any]]()
    forms: dict[str, Any] = {"labels": batch["labels"]} if has_labels else {}
    if form == "packed":
        batch, forms["packed_seq_params"] = packed_batch(batch)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    for attaches in (False, True):
        model = stock("dense", depths=2, position=position)
        draw(model)
        attached = attach(model, weight=LAMBDA) if attaches else None
        arguments = batch["tokens"], batch["position_ids"], batch["attention_mask"]
        model(*arguments, loss_mask=batch["loss_mask"], **forms).mean().backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    assert attached is not None
    assert attached.last is not None
    expected = MTPLossLoggingHelper.tracker["loss_values"].tolist()
    assert attached.last.depth_means.tolist() == pytest.approx(expected, rel=1e-6)
    assert max(relative_difference(found[1][name], value) for name, value in found[0].items()) < 2e-6


@pytest.mark.parametrize("form", ["rows", "packed"])
def test_mask_at_gives_the_mask_position_of_each_framework(form: str) -> None:
    """At tokens, at labels as in slime, or at tokens with labels equal to the tokens, as in NeMo-RL's fused head."""
    batch, packed, means = make_batch(2), None, []
    if form == "packed":
        batch, packed = packed_batch(batch)
    tokens_BS, mask_BS = batch["tokens"], batch["loss_mask"]
    at_labels_BS = shift_left(mask_BS, 1, None if packed is None else _documents(packed, tokens_BS))[0]
    for mask_at, given in (
        ("labels", {"loss_mask": at_labels_BS}),
        ("tokens", {"loss_mask": mask_BS}),
        ("tokens", {"loss_mask": mask_BS, "labels": tokens_BS}),
    ):
        model = stock("dense")
        attached = attach(model, 2, weight=0.3, mask_at=mask_at)
        draw(model)
        forms = {} if packed is None else {"packed_seq_params": packed}
        model(tokens_BS, batch["position_ids"], batch["attention_mask"], **given, **forms)
        assert attached.last is not None
        means.append(attached.last.depth_means.tolist())
    model(tokens_BS, batch["position_ids"], batch["attention_mask"], **forms)
    assert means[0] == means[1] == means[2] != attached.last.depth_means.tolist()


def test_placeholders_of_images_are_left_out_of_the_loss() -> None:
    """A multimodal model embeds them itself; the layers look up the tokens after them."""
    batch, found = make_batch(1), list[Any]()
    model = stock("dense")
    attached = attach(model, 1)
    draw(model)
    embedded_SBH = model.embedding(input_ids=batch["tokens"], position_ids=batch["position_ids"]).detach()
    images_BS = batch["tokens"].clone()
    images_BS[:, 4:7] = -200
    text_BS = torch.cat([torch.ones(3, 4), torch.zeros(3, 3), torch.ones(3, 9)], dim=1)
    for tokens_BS, mask_BS in ((images_BS, torch.ones(3, 16)), (images_BS.clamp(min=0), text_BS)):
        labels_BS = tokens_BS.roll(-1, 1).masked_fill(text_BS.roll(-1, 1) == 0, -1)
        labels_BS[:, -1] = -100
        arguments = tokens_BS, batch["position_ids"], batch["attention_mask"]
        for labels in (None if tokens_BS is images_BS else labels_BS, labels_BS):
            model.zero_grad()
            model(*arguments, decoder_input=embedded_SBH)
            made = attached.loss(tokens_BS, labels, mask_BS)
            made.loss.backward()
            found.append((made.depth_means, model.output_layer.weight.grad.clone()))
    assert all(torch.equal(means, found[0][0]) for means, _ in found)
    assert max(relative_difference(gradient, found[0][1]) for _, gradient in found) < 1e-6


def test_documents_without_packed_parameters_end_the_shifts() -> None:
    model, batch = stock("dense"), make_batch(2)
    attached = attach(model, 2)
    draw(model)
    document_BS = (torch.arange(16) >= 6).long().expand(3, -1)
    means = []
    for documents in (document_BS, None):
        model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
        ones = torch.ones_like(batch["loss_mask"])
        made = attached.loss(batch["tokens"], batch["labels"], ones, document_BS=documents)
        model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
        one_token = attached.loss(batch["tokens"], batch["labels"], ones, normalizer=1.0, document_BS=documents)
        means.append(one_token.loss / made.loss.clamp(min=1e-9))
    assert made.depth_means.isfinite().all()
    assert means[0] < means[1]  # fewer tokens: 2 D of 16 at depth D for documents, D for rows


@pytest.mark.parametrize("part", [(slice(2), slice(None)), (slice(None), slice(8))], ids=["rows", "positions"])
def test_tokens_of_another_forward_are_refused(part: tuple[slice, slice]) -> None:
    """For example a rank's part of them under context parallelism."""
    model, batch = stock("dense"), make_batch(2)
    attached = attach(model, 2)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    given = (batch[name][part] for name in ("tokens", "labels", "loss_mask"))
    with pytest.raises(ValueError, match=r"tokens .* \[S, B\] of \(16, 3\) .*; give the whole"):
        attached.loss(*given)


# --- the loss in the forward pass -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", tiered([*KINDS, "hybrid"], ["dense", "hybrid"]))
def test_a_weight_adds_the_same_loss_in_the_forward(kind: str, per_token: bool, form: str) -> None:
    """Its gradients match the explicit loss; the forward pass's output does not change."""
    batch, packed = make_batch(2), None
    if form == "packed":
        batch, packed = packed_batch(batch)
    forms = {} if packed is None else {"packed_seq_params": packed}
    explicit, riding = (stock(kind, calculate_per_token_loss=per_token) for _ in range(2))
    attached, alone = attach(explicit, 2), attach(riding, 2, weight=0.3)
    for each in (explicit, riding):
        draw(each)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    count = 1.0 if per_token else batch["loss_mask"].sum()
    arguments, labels = (batch["tokens"], batch["position_ids"], batch["attention_mask"]), batch["labels"]
    losses = []
    for model, extra in ((explicit, {}), (riding, {"loss_mask": batch["loss_mask"]})):
        nats_BS = model(*arguments, labels=labels, **extra, **forms)
        total = (nats_BS * batch["loss_mask"]).sum() / count
        if model is explicit:
            made = attached.loss(batch["tokens"], labels, batch["loss_mask"], 1.0 if per_token else None)
            total = total + 0.3 * made.loss
        total.backward()
        losses.append(nats_BS)
    assert torch.equal(*losses)
    assert alone.last is not None
    assert alone.last.depth_means.tolist() == made.depth_means.tolist()
    wanted = {name: each.grad for name, each in explicit.named_parameters()}
    rounding = 1e-4 if kind == "hybrid" else 1e-6  # gradients of decays are small sums of large terms
    for name, each in riding.named_parameters():
        assert relative_difference(each.grad, wanted[name]) < rounding, name


def test_a_forward_without_labels_carries_the_loss_of_the_next_tokens() -> None:
    """A policy's forward pass has no labels; its logits and gradients are bit-identical."""
    batch, kd = make_batch(2), MTPConfig(mtp_train_only=True, mtp_loss="kd")
    plain, explicit, riding = (stock("dense") for _ in range(3))
    attached, alone = attach(explicit, 2, kd), attach(riding, 2, kd, weight=0.3)
    for each in (plain, explicit, riding):
        draw(each)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    expected = learned(plain, batch, None, None)
    given = batch["tokens"], None, torch.ones_like(batch["tokens"])
    wanted = learned(explicit, batch, None, lambda: attached.loss(*given).loss)
    found = learned(riding, batch, None, None)
    assert differing(found, expected) == []
    assert alone.last is not None
    depths = [name for name in wanted if name.startswith("gradient of mtp.")]
    assert len(depths) > 0
    assert max(relative_difference(found[name], wanted[name]) for name in depths) < 1e-6


def test_no_loss_is_added_without_gradients_but_it_can_be_requested() -> None:
    model, batch = stock("dense"), make_batch(2)
    attached = attach(model, 2, weight=0.3)
    arguments = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    given = batch["tokens"], batch["labels"], batch["loss_mask"]
    with torch.no_grad():
        model(*arguments, labels=batch["labels"])
        validated = attached.loss(*given)
    assert attached.last is None
    model(*arguments, labels=batch["labels"], loss_mask=batch["loss_mask"])
    assert attached.last is not None
    assert validated.depth_means.tolist() == attached.last.depth_means.tolist()
    with pytest.raises(ValueError, match="or attach without weight, which takes the loss already"):
        attached.loss(*given)


def plain_gradient(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the gradient of the MTP layers after a step of a loop without a schedule."""
    model.zero_grad()
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]).mean().backward()
    return model.mtp.layers[0].eh_proj.weight.grad.clone()


def test_a_schedules_loss_scale_is_reset_but_a_loops_scale_is_kept() -> None:
    """Regression: a supervised step between RL steps got the gradient of one of the schedule's microbatches."""
    model, batch = stock("dense"), make_batch(2)
    attach(model, 2, weight=0.3)
    draw(model)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    first = plain_gradient(model, batch)

    def forward_step(data: Any, model: Any) -> Any:
        made = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=next(data)["labels"])
        return made, lambda nats_BS: (nats_BS.mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([batch] * 4),
        model=[model],
        num_microbatches=4,
        seq_length=16,
        micro_batch_size=3,
        forward_only=False,
    )
    assert relative_difference(model.mtp.layers[0].eh_proj.weight.grad, 2 * first) < 1e-5  # 1 + 4 x 1 / 4
    assert torch.equal(plain_gradient(model, batch), first)
    quarter = torch.tensor(0.25)
    MTPLossAutoScaler.set_loss_scale(quarter)
    for _ in range(2):
        assert relative_difference(plain_gradient(model, batch), first / 4) < 1e-6
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    for _ in range(2):  # the same tensor after every forward pass
        model.zero_grad()
        nats_BS = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        MTPLossAutoScaler.set_loss_scale(quarter)
        nats_BS.mean().backward()
        assert relative_difference(model.mtp.layers[0].eh_proj.weight.grad, first / 4) < 1e-6
    assert torch.equal(plain_gradient(model, batch), first)


# --- which forward pass the loss belongs to ---------------------------------------------------------------------------


def shown(attached: Any, batch: dict[str, Any]) -> list[float]:
    means: list[float] = attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).depth_means.tolist()
    return means


def forward(model: Any, batch: dict[str, Any]) -> Any:
    return model(batch["tokens"], batch["position_ids"], batch["attention_mask"])


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("form", ["rows", "packed"])
def test_no_grad_forwards_in_between_do_not_change_the_policys_loss(form: str, freezes: bool) -> None:
    """A reference policy is the model without its adapters; its attention inputs also differ from the policy's."""
    batch, packed = make_batch(2), None
    if form == "packed":
        batch, packed = packed_batch(batch)
    forms = {} if packed is None else {"packed_seq_params": packed}
    arguments = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    model = stock("dense")
    model.requires_grad_(not freezes)
    attached = attach(model, 2, MTPConfig(mtp_train_only=True, mtp_loss="kd"))
    draw(model)
    model(*arguments, **forms)
    expected, weight = shown(attached, batch), model.decoder.layers[0].mlp.linear_fc2.weight
    model(*arguments, **forms)
    with torch.no_grad():
        weight.neg_()
        forward(model, make_batch(2))
        weight.neg_()
    assert shown(attached, batch) == expected
    with pytest.raises(ValueError, match="no forward of the model has run since the last loss"):
        shown(attached, batch)


def test_a_second_loss_of_a_forward_is_refused_with_and_without_gradients() -> None:
    model, batch = stock("dense"), make_batch(2)
    attached = attach(model, 2)
    for records in (True, False):
        with torch.set_grad_enabled(records):
            forward(model, batch)
            shown(attached, batch)
            with pytest.raises(ValueError, match=r"no forward .* has run since .* call the model first"):
                shown(attached, batch)


def test_validation_between_a_forward_and_its_loss_is_separate() -> None:
    model, batch, other = stock("dense"), make_batch(2), make_batch(2, seed=5)
    attached = attach(model, 2)
    draw(model)
    expected = []
    for each in (other, batch):
        forward(model, each)
        expected.append(shown(attached, each))
    forward(model, batch)
    with torch.no_grad():
        forward(model, other)
        assert shown(attached, other) == expected[0]
    assert shown(attached, batch) == expected[1]


def test_the_loss_of_a_forward_before_the_last_is_refused() -> None:
    """For example of chosen and rejected answers, which have the same shape."""
    model, chosen, rejected = stock("dense"), make_batch(2), make_batch(2, seed=5)
    attached = attach(model, 2)
    for each in (chosen, rejected):
        forward(model, each)
    with pytest.raises(ValueError, match=r"2 forwards .* ask for the loss after each forward"):
        shown(attached, chosen)
    assert shown(attached, rejected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("settings", [None, APART], ids=["joint", "apart"])
def test_activation_checkpointing_around_the_model_works_or_is_rejected(
    reentrant: bool, settings: MTPConfig | None
) -> None:
    """Reentrant checkpointing runs the forward pass without gradients, and again in the backward pass."""
    model, batch, found = stock("dense"), make_batch(2), list[dict[str, torch.Tensor]]()
    attached = attach(model, 2, settings)
    draw(model)
    given = batch["tokens"], batch["labels"], batch["loss_mask"]
    input_BS = batch["loss_mask"].clone().requires_grad_()  # reentrant checkpointing needs an input with a gradient

    def run(_: torch.Tensor) -> Any:
        return forward(model, batch)

    for checkpoints in (False, True, True):
        model.zero_grad()
        logits = checkpoint(run, input_BS, use_reentrant=reentrant) if checkpoints else run(input_BS)
        if checkpoints and reentrant and settings is None:
            with pytest.raises(ValueError, match=r"without gradients, .* reentrant .* mtp_train_only"):
                attached.loss(*given)
            return
        (loss_of_logits(model, logits, batch) + attached.loss(*given).loss).backward()
        found.append({name: each.grad.clone() for name, each in model.named_parameters()})
        with pytest.raises(ValueError, match="no forward of the model has run since the last loss"):
            attached.loss(*given)
    for name, expected in found[0].items():
        assert max(relative_difference(each[name], expected) for each in found[1:]) < 1e-6, name


def test_a_stage_without_tokens_says_so() -> None:
    model, batch = stock("dense"), make_batch(2)
    attach(model, 2, weight=0.3)
    embedded_SBH = model.embedding(input_ids=batch["tokens"], position_ids=batch["position_ids"])
    with pytest.raises(ValueError, match=r"last pipeline stage has no input_ids, .*; give"):
        model(None, None, None, decoder_input=embedded_SBH, labels=batch["labels"])
    assert model.mtp_process
    assert model.config.mtp_num_layers == 2


def test_routers_of_a_framework_can_leave_positions_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework does not call prepare(), and Megatron's token count for the expert bias fails with a mask."""
    for patch in (each for each in PATCHES if ".moe.router:" in each.target):
        monkeypatch.setattr(patch.owner(), patch.name.rpartition(".")[2], original_of(patch))
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model, batch = stock("moe", **bias), make_batch(2)
    destroy_moe_metrics_tracker()
    attached = attach(model, 2)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    assert attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).loss.isfinite()


# --- traps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_new_layers_are_initialized_despite_a_frameworks_setting(kind: str) -> None:
    """Regression: Megatron-Bridge disables initialization when loading weights, and the layers were uninitialized
    memory.
    """
    model = stock(kind, perform_initialization=False)
    attach(model, 2)
    assert not model.config.perform_initialization
    weights = dict(model.mtp.named_parameters())
    assert all(0.005 < each.std() < 0.05 for each in weights.values() if each.dim() > 1 and "conv1d" not in each.names)


def test_new_layers_do_not_change_the_trunks_random_numbers() -> None:
    """The trunk's dropout matches a run without the layers."""
    drawn = []
    for depths in (None, 2):
        model_parallel_cuda_manual_seed(3, force_reset_rng=True)
        model = stock("dense")
        if depths:
            attach(model, depths)
        with get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def test_layers_of_several_chunks_belong_to_the_one_with_the_head() -> None:
    first, last = stock("dense"), stock("dense")
    first.post_process = False
    attached = attach([first, last], 2)
    assert attached.model is last
    assert [hasattr(one, "mtp_attached") for one in (first, last)] == [False, True]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_new_layers_have_the_names_of_megatrons_block(kind: str) -> None:
    """Exporters of other frameworks read these names."""
    model = stock(kind)
    attach(model, 2)
    assert type(model.mtp) is MultiTokenPredictionBlock
    inner = "mtp_model_layer.layers.0.self_attention" if kind == "hybrid" else "mtp_model_layer.self_attention"
    assert f"mtp.layers.1.{inner}.linear_proj.weight" in dict(model.named_parameters())
    if kind == "hybrid":
        assert [one.mtp_layer_pattern for one in model.mtp.layers] == ["*-", "*-"]


@pytest.mark.parametrize(
    ("pattern", "end"), [("M-*-", "*-"), ("ME*E", "*E"), ("M*-|M-*/*-/*-", "*"), ("M--", "M--"), ("*-M|E", "ME")]
)
def test_an_mtp_layer_of_a_hybrid_copies_the_end_of_its_pattern(pattern: str, end: str) -> None:
    assert _end_of(pattern) == end


def test_router_statistics_ignore_shifted_in_positions() -> None:
    """Their losses have a slot for every layer; positions that were shifted in are not routed."""
    model, batch = stock("moe", moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"), make_batch(2)
    attached = attach(model, 2)
    destroy_moe_metrics_tracker()
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"])
    counts = [layer.mtp_model_layer.mlp.router.local_tokens_per_expert.sum() for layer in model.mtp.layers]
    assert counts == [3 * 15 * 2, 3 * 14 * 2]
    assert len(get_moe_metrics_tracker().metrics["load_balancing_loss"].values) == 2 + 2


def test_a_failed_forward_restores_the_mtp_layers() -> None:
    model, batch = stock("dense", True, 2), make_batch(2)
    attached = attach(model)
    config = model.config
    with pytest.raises(IndexError):
        model(batch["tokens"] + 1000, batch["position_ids"], batch["attention_mask"])
    assert model.config is config
    assert model.mtp_process
    assert "shared_embedding_or_output_weight" not in vars(model)
    with pytest.raises(ValueError, match=r"no forward of the model has run .* call the model first\."):
        attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"])


def test_an_interrupted_forward_does_not_lose_the_mtp_layers() -> None:
    """Regression: after Ctrl-C in a notebook, the model permanently lost its configuration, and the scale of the loss
    with it.
    """
    model, batch = stock("dense", True), make_batch(2)
    attach(model, 2, weight=0.3)
    config, arguments = model.config, (batch["tokens"], batch["position_ids"], batch["attention_mask"])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.decoder.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(*arguments)
    hook.remove()
    model(*arguments)
    assert model.config is config
    assert model.mtp_process
    assert "shared_embedding_or_output_weight" not in vars(model)


class Adapted(torch.nn.Module):
    """A low-rank adapter on a Megatron linear layer."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (torch.nn.Parameter(torch.ones(*shape)) for shape in ((2, 32), (96, 2)))

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.base.weight
        return weight

    def forward(self, hidden_SBH: torch.Tensor, *rest: Any, **named: Any) -> Any:
        logits_SBV, bias = self.base(hidden_SBH, *rest, **named)
        return logits_SBV + hidden_SBH @ self.down.t() @ self.up.t(), bias


HEADS: dict[str, tuple[Any, str]] = {
    "adapter": (Adapted, r"\(Adapted\) has more parameters, down, up, .* output layer from the adapter's targ"),
    "critic": (lambda _: torch.nn.Linear(32, 1), r"\(Linear\) does not have a row for each of the 96 .* a critic"),
    "none": (lambda _: None, r"\(NoneType\) does not have a row for each of the 96 tokens, which MTP layers need"),
}


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_that_is_not_a_plain_linear_is_rejected(case: str, tied: bool) -> None:
    """Present before `attach`, or added afterwards; the layers would learn from the head without it."""
    (replaced, sentence), batch = HEADS[case], make_batch(2)
    before, after = stock("dense", tied), stock("dense", tied)
    before.output_layer = replaced(before.output_layer)
    with pytest.raises(ValueError, match=sentence):
        attach(before, 2)
    assert before.config.mtp_num_layers is None
    attached = attach(after, 2)
    forward(after, batch)
    after.output_layer = replaced(after.output_layer)
    with pytest.raises(ValueError, match=sentence):
        shown(attached, batch)


def test_a_tensor_parallel_rank_has_its_slice_of_the_head() -> None:
    model = stock("dense")
    model.pg_collection.tp = SimpleNamespace(size=lambda: 2)
    for rows, is_refused in ((48, False), (96, True)):
        layer = torch.nn.Linear(32, rows, bias=False)
        model.output_layer = layer
        assert any(is_so for is_so, _ in refused_heads(model, layer)) is is_refused


def test_a_replaced_output_layer_is_used_for_the_loss() -> None:
    """An output layer with other weights, set after `attach`."""
    batch, means = make_batch(2), []
    for replaces in (False, True):
        model, other = stock("dense"), stock("dense")
        attached = attach(model, 2, MTPConfig(mtp_loss="kd"))
        for each in (model, other):
            draw(each)
        forward(model, batch)
        shown(attached, batch)
        with torch.no_grad():
            other.output_layer.weight.neg_()
            if replaces:
                model.output_layer = other.output_layer
            else:
                model.output_layer.weight.neg_()
        forward(model, batch)
        made = attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"])
        made.loss.backward()
        means.append((made.depth_means.tolist(), model.output_layer.weight.grad))
    assert means[0][0] == means[1][0]
    assert torch.equal(means[0][1], means[1][1])


def test_the_embedding_of_a_later_stages_tied_head_follows_the_head() -> None:
    """Such a stage has no embedding, and looks tokens up in its head."""
    model, other = stock("dense"), stock("dense")
    attached = attach(model, 2)
    attached._tied = tied_embedding(model)
    assert attached.embedding.word_embeddings.weight is model.output_layer.weight
    model.output_layer = other.output_layer
    assert attached.embedding.word_embeddings.weight is other.output_layer.weight


def test_a_deep_copy_trains_its_own_depths() -> None:
    """Regression: a deep copy, such as a weight average, ran the original's layers. Process groups cannot be copied,
    and are shared.
    """
    model, batch = stock("dense"), make_batch(2)
    attach(model, 2)
    values = [
        each for module in model.modules() for each in (*vars(module).values(), *vars(model.pg_collection).values())
    ]
    copied = copy.deepcopy(model, {id(each): each for each in values if isinstance(each, ProcessGroup)})
    copied(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    copied.mtp_attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).loss.backward()
    assert all(each.grad is not None for each in copied.mtp.parameters())
    assert all(each.grad is None for each in model.parameters())


def test_settings_of_the_configuration_that_change_later_hold_in_the_forward() -> None:
    """Schedules and loops set fields of it between forward passes."""
    model, batch, seen = stock("dense"), make_batch(2), []
    attach(model, 2)
    model.decoder.register_forward_hook(lambda *_: seen.append((model.config.timers, model.config.mtp_num_layers)))
    for timers in ("first", "second"):
        model.config.timers = timers
        model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    assert seen == [("first", None), ("second", None)]
    assert model.decoder.config.mtp_num_layers == 2


def test_a_trunk_in_bfloat16_gets_layers_in_bfloat16() -> None:
    model, batch = stock("dense", bf16=True, params_dtype=torch.bfloat16).bfloat16(), make_batch(2)
    attached = attach(model, 2)
    wrapped = Float16Module(model.config, model)
    wrapped(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    assert attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).loss.isfinite()
    assert {each.dtype for each in model.mtp.parameters()} == {torch.bfloat16}


def test_new_layers_keep_the_types_that_a_trunk_of_several_has() -> None:
    """Mamba's decays are float32 in a bfloat16 model."""
    model = stock("hybrid", bf16=True, params_dtype=torch.bfloat16)
    attach(model, 1, block="M-")
    trunk, layer = model.decoder.layers[0], model.mtp.layers[0].mtp_model_layer.layers[0]
    types = {name: each.dtype for name, each in layer.named_parameters()}
    assert types == {name: each.dtype for name, each in trunk.named_parameters()}
    assert set(types.values()) == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("own", [None, 2], ids=["new", "adopted"])
def test_recomputed_depths_have_the_same_gradients(own: int | None) -> None:
    found, batch = list[dict[str, Any]](), make_batch(2)
    given = batch["tokens"], batch["labels"], batch["loss_mask"]
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for changes in ({}, recompute):
        model = stock("dense", depths=own, **changes)
        attached = attach(model, 2, APART)
        draw(model)
        model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
        attached.loss(*given).loss.backward()
        found.append({name: each.grad for name, each in model.mtp.named_parameters()})
    assert max(relative_difference(found[1][name], found[0][name]) for name in found[0]) < 1e-6


def test_a_frozen_trunk_has_no_gradients_and_the_depths_have_them() -> None:
    model, batch = stock("dense").requires_grad_(False), make_batch(2)
    attached = attach(model, 2)
    draw(model)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).loss.backward()
    trained = {name.split(".")[0] for name, each in model.named_parameters() if each.grad is not None}
    assert trained == {"mtp"}


# --- what cannot be attached -----------------------------------------------------------------------------------------

DEPTHS_ONLY = {"settings": MTPConfig(mtp_architecture="parallel")}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no depths": ({}, {"depths": None}, "the model has no MTP layers, and depths is None; give the number"),
    "none": ({}, {"depths": 0}, "depths is 0; give 1 or more"),
    "others": ({"depths": 2}, {"depths": 3}, "the model has 2 MTP layers, and depths is 3; give None"),
    "settings": ({}, DEPTHS_ONLY, "mtp_architecture in the settings is not supported for these attached"),
    "draft vocabulary": (
        {},
        {"settings": MTPConfig(mtp_draft_vocab_size=8)},
        "mtp_draft_vocab_size in the settings is not supported for these attached heads; leave it",
    ),
    "schedule": (
        {},
        {"settings": MTPConfig(mtp_loss="lk:0.7,e2e_tv:0.3")},
        "--mtp-loss is 'lk:0.7,e2e_tv:0.3', but only megatron-mtp train knows the step",
    ),
    "no weight": ({}, {"weight": float("nan")}, "weight is nan; give 0 or more, such as 0.1, or None to ask for Att"),
    "negative weight": ({}, {"weight": -0.5}, "weight is -0.5; give 0 or more"),
    "pattern": ({}, {"block": "*-"}, r"block is '\*-', which is the pattern of a hybrid's new MTP layers; give 'own'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused(case: str) -> None:
    built, given, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        attach(stock("dense", **built), **{"depths": 2, **given})


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "schedule plans": ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm runs schedule"),
    "graph": ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl is full_iteration, whose replay does not run"),
    "own stage": ({"mtp_standalone": True}, "the pipeline layout gives the MTP layers a stage of their own; put m"),
    "layout": ({"pipeline_model_parallel_layout": object()}, "the pipeline layout has no place for new MTP layers"),
    "delayed": ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "fp8_recipe is delayed, whose scales would be updated"),
    "no block": ({"mtp_num_layers": 2}, "mtp_num_layers is 2, and the last stage has no MTP block; build it with"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_features_that_hooks_cannot_observe_are_rejected(case: str) -> None:
    """Megatron checks these fields when it builds a model, on GPUs; so they are set afterwards."""
    model, (changes, sentence) = stock("dense"), FIELDS[case]
    vars(model.config).update(changes)
    with pytest.raises(ValueError, match=sentence):
        attach(model, 2)
    assert not hasattr(model, "mtp")


def test_a_trunk_of_several_residual_streams_is_refused_by_its_layers() -> None:
    """Its flag has different names in Megatron's main and dev branches."""
    model = stock("dense")
    model.decoder.layers[0].mlp_hyper_connection = type("HyperConnectionModule", (torch.nn.Module,), {})()
    with pytest.raises(ValueError, match=r"hyper-connections, .* several residual streams"):
        attach(model, 2)
    assert not hasattr(model, "mtp")


def test_a_pattern_that_fails_leaves_the_model_for_another_call() -> None:
    """Regression: in a notebook, the second call found leftovers of the first and took them for the model's own MTP
    layers.
    """
    model = stock("hybrid")
    with pytest.raises(ValueError, match="'Q' is not one of"):
        attach(model, 2, block="Q-")
    assert attach(model, 2, block="*-").depths == 2


def test_a_chunk_that_is_refused_leaves_the_others_as_they_are() -> None:
    first, last = stock("dense"), stock("dense")
    last.config.mtp_standalone = True
    with pytest.raises(ValueError, match="layout gives the MTP layers a stage of their own"):
        attach([first, last], 2)
    assert not hasattr(first, "mtp")
    assert first.config.mtp_num_layers is None


def test_a_second_model_with_a_shared_config_is_rejected() -> None:
    """For example a policy and its reference."""
    policy, reference = stock("dense"), stock("dense")
    reference.config = policy.config
    attach(policy, 2)
    with pytest.raises(ValueError, match=r"no MTP block; .* shares its configuration"):
        attach(reference, 2)


def test_a_model_that_is_wrapped_already_is_refused_new_layers_and_trains_its_own() -> None:
    """Adopting its own layers adds no parameters to DDP's buffers."""
    batch, wrapped = make_batch(2), []
    for depths in (None, 2):
        model = stock("dense", depths=depths)
        draw(model)
        wrapped.append(DistributedDataParallel(model.config, DistributedDataParallelConfig(), model))
    with pytest.raises(ValueError, match=r"wrapped for data parallelism, .* attach to register_pre_"):
        attach(wrapped[0], 2)
    attached = attach(wrapped[1])
    wrapped[1].zero_grad_buffer()
    wrapped[1](batch["tokens"], batch["position_ids"], batch["attention_mask"])
    attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).loss.backward()
    assert all(each.main_grad.any() for each in wrapped[1].module.mtp.parameters())


def test_a_model_that_fsdp_has_sharded_is_refused_new_layers() -> None:
    model = stock("dense")
    fully_shard(model, mesh=DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu"))
    with pytest.raises(ValueError, match="wrapped for data parallelism, whose buffers have no place"):
        attach(model, 2)


@pytest.mark.parametrize("part", ["output_layer", "mtp.layers.0"])
def test_parts_that_fsdp_gathers_in_their_own_forward_are_refused(part: str) -> None:
    """The losses read their weights outside of it; FSDP of the whole model has already gathered them."""
    model, batch = stock("dense"), make_batch(2)
    attached = attach(model, 2)
    mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")
    fully_shard(model.get_submodule(part), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    with pytest.raises(ValueError, match=r"FSDP has sharded the output layer, .* MTP layer"):
        attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"])


def test_the_fsdp_of_the_whole_model_trains_the_depths() -> None:
    found, batch = list[dict[str, Any]](), make_batch(2)
    for shards in (False, True):
        model = stock("dense")
        attached = attach(model, 2)
        draw(model)
        if shards:
            mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")
            for layer in model.decoder.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        logits_BSV = model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
        given = batch["tokens"], batch["labels"], batch["loss_mask"]
        (loss_of_logits(model, logits_BSV, batch) + attached.loss(*given).loss).backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    whole = {name: gradient.full_tensor() for name, gradient in found[1].items()}
    assert differing(whole, found[0]) == []


def test_learned_positions_under_context_parallelism_are_refused() -> None:
    model = stock("dense", position="learned_absolute")
    model.pg_collection.cp = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match=r"learned_absolute positions .* other context-parallel"):
        attach(model, 2)


def test_a_model_of_another_library_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the model is a Linear, .* a GPTModel or Hybrid"):
        attach(torch.nn.Linear(2, 2), 2)


def test_layers_are_attached_once_and_not_to_this_packages_models() -> None:
    model = stock("dense")
    attach(model, 2)
    with pytest.raises(ValueError, match="attached to this model already; use what attach returned"):
        attach(model)
    with pytest.raises(ValueError, match=r"not of Megatron's class; .* train by mtp_loss"):
        attach(our_model(2))


def test_frozen_layers_are_refused() -> None:
    """LoRA freezes the whole model, including MTP layers, and then trains its targets."""
    model = stock("dense", depths=2)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen, as PEFT leaves them; let it target their modules"):
        attach(model)
    next(model.mtp.parameters()).requires_grad_(True)
    attach(model)


def test_layers_that_are_frozen_later_do_not_train_the_trunk() -> None:
    """Regression: with PEFT after `attach`, the trunk's adapters learned from random new layers."""
    batch, models = make_batch(2), [stock("dense"), stock("dense")]
    attached, _ = attach(models[0], 2), attach(models[1], 2, weight=0.3)
    arguments, given = (batch["tokens"], batch["position_ids"], None), (batch["labels"], batch["loss_mask"])
    for model in models:
        model.requires_grad_(False)
        model(*arguments)  # nothing is trained: a reference is measured
    assert not attached.loss(batch["tokens"], *given).loss.requires_grad
    for model in models:
        model.decoder.layers[0].requires_grad_(True)
    models[0](*arguments)
    sentence = "MTP layers are frozen, as PEFT leaves them; let it target their modules"
    with pytest.raises(ValueError, match=sentence):
        attached.loss(batch["tokens"], *given)
    with pytest.raises(ValueError, match=sentence):
        models[1](*arguments)


def test_a_decoder_that_returns_more_than_states_is_named() -> None:
    model, batch = stock("dense"), make_batch(2)
    model.decoder.register_forward_hook(lambda _, __, made: (made, made))
    attach(model, 2)
    with pytest.raises(ValueError, match="decoder returns a tuple, and MTP layers read a tensor"):
        model(batch["tokens"], batch["position_ids"], batch["attention_mask"])


# --- around the loss -------------------------------------------------------------------------------------------------


def test_a_custom_loop_trains_attached_layers_in_the_forward() -> None:
    """Supervised fine-tuning as in docs/guides/custom_loop.md: one more line than without MTP layers."""
    model = stock("dense")
    attached = attach(model, depths=2, weight=0.3)
    optimizer, batch, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), make_batch(2), []
    for _ in range(8):
        nats_BS = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        optimizer.zero_grad()
        nats_BS.mean().backward()
        optimizer.step()
        assert attached.last is not None
        losses.append(attached.last.depth_means)
    assert (losses[-1] < losses[0] - 0.5).all()


def test_the_layers_are_a_parameter_group_with_a_norm_of_their_own() -> None:
    model, batch = stock("dense"), make_batch(2)
    attached = attach(model, 2, APART)
    draw(model)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=0.0, clip_grad=1.0)
    optimizer = get_mtp_optimizer(config, [wrapped], lr=1e-2, clip_grad=1.0)
    rates = {parameter: group["max_lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert {rates[each] for each in model.mtp.parameters()} == {1e-2}
    assert rates[model.decoder.final_layernorm.weight] == 1e-3
    wrapped.zero_grad_buffer()
    wrapped(batch["tokens"], batch["position_ids"], batch["attention_mask"])
    attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).loss.backward()
    squares = sum(each.main_grad.square().sum() for each in model.mtp.parameters())
    _, norm, _ = optimizer.step()
    assert norm == 0
    assert mtp_grad_norm(optimizer) == pytest.approx(float(squares.sqrt()))


class Arguments(Namespace):
    """Megatron's arguments; those that a test does not set are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@pytest.mark.parametrize("own", [None, 2], ids=["new", "adopted"])
def test_exported_weights_are_those_of_this_packages_model(own: int | None) -> None:
    ours, model = our_model(2), stock("dense", depths=own)
    attach(model, 2)
    for each in (ours, model):
        draw(each)
    sizes = {"seq_length": 16, "max_position_embeddings": 16, "padded_vocab_size": 96, "vocab_size": 96}
    others = {"norm_epsilon": 1e-5, "rotary_base": 10000, "rotary_percent": 1.0, "position_embedding_type": "rope"}
    switches = {"untie_embeddings_and_output_weights": True, "swiglu": True, "group_query_attention": True}
    args = Arguments(**{**vars(ours.config), **sizes, **others, **switches, "mtp_architecture": "sequential"})
    expected, found = (dict(export_hf_weights(each, args)) for each in (ours, model))
    assert any(name.startswith("model.layers.3.") for name in expected)
    assert [*found] == [*expected]
    assert differing(found, expected) == []
