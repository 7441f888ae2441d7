"""training/mtp_loss.py: the depths' loss on its own is that of the training step, value and gradient."""

from typing import Any

import pytest
import torch
from megatron_single import LAMBDA, MOE, forward_ours, make_batch, our_model, relative_difference

from megatron_mtp.config import MTPConfig
from megatron_mtp.data.batch import IGNORED_LABEL
from megatron_mtp.training.mtp_loss import mtp_loss, trunk_states

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("kind", [{}, MOE], ids=["dense", "moe"])
def test_it_is_the_depths_part_of_a_training_step(kind: dict[str, Any]) -> None:
    batch = make_batch(2)
    stepped, called = our_model(2, **kind), our_model(2, **kind)
    called.load_state_dict(stepped.state_dict())
    output = forward_ours(stepped, batch)
    (output.loss - output.main.total).backward()

    hidden_SBH = trunk_states(called, batch["tokens"])
    made = mtp_loss(hidden_SBH, called, batch["tokens"], batch["labels"], batch["loss_mask"])
    (LAMBDA * output.main.tokens * made.loss).backward()

    assert made.depth_means.tolist() == pytest.approx([float(sums.total / sums.tokens) for sums in output.depths])
    gradients = {name: parameter.grad for name, parameter in called.named_parameters()}
    for name, parameter in stepped.named_parameters():
        if name.startswith("mtp."):
            assert parameter.grad is not None
            assert relative_difference(gradients[name], parameter.grad) < 1e-5, name  # type: ignore[arg-type]


def test_labels_that_are_ignored_are_masked_and_the_trunk_can_be_left_out() -> None:
    model, batch = our_model(2), make_batch(2)
    masked = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED_LABEL)
    hidden_SBH = trunk_states(model, batch["tokens"])
    by_mask = mtp_loss(hidden_SBH, model, batch["tokens"], batch["labels"], batch["loss_mask"])
    ones = torch.ones_like(batch["loss_mask"])
    by_label = mtp_loss(hidden_SBH.detach(), model, batch["tokens"], masked, ones, MTPConfig(mtp_train_only=True))
    assert by_label.loss.item() == pytest.approx(by_mask.loss.item())
    by_label.loss.backward()
    assert model.output_layer.weight.grad is None
    assert all(parameter.grad is None for parameter in model.decoder.parameters())


def test_shapes_that_differ_and_a_model_without_depths_are_refused() -> None:
    batch = make_batch(2)
    tokens, labels, mask = (batch[name] for name in ("tokens", "labels", "loss_mask"))
    model = our_model(2)
    with pytest.raises(ValueError, match=r"have the shapes .* give all three as \[B, S\]"):
        mtp_loss(trunk_states(model, tokens), model, tokens, labels[:, 1:], mask)
    plain = our_model(None)
    with pytest.raises(ValueError, match="the model has no MTP depths; attach some with"):
        mtp_loss(trunk_states(plain, tokens), plain, tokens, labels, mask)
