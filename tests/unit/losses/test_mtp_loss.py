"""losses/mtp_loss.py: the MTP loss on its own equals that of a training step, in value and gradient."""

from typing import Any

import pytest
import torch
from hybrid_single import drafting_hybrid
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import Float16Module
from megatron_single import (
    LAMBDA,
    LATENT,
    LENGTH,
    MOE,
    ROWS,
    VOCABULARY,
    forward_ours,
    make_batch,
    one_head,
    our_model,
    relative_difference,
)

from megatron_mtp.losses.head_objective import depth_weights
from megatron_mtp.losses.mtp_loss import logits_and_states, mtp_loss, trunk_states
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.megatron import cpu
from megatron_mtp.spec.config import MTPConfig

IGNORED = -100
"""The label for ignored tokens in Hugging Face datasets."""

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("kind", [{}, MOE], ids=["dense", "moe"])
def test_mtp_loss_equals_the_mtp_part_of_a_training_step(kind: dict[str, Any]) -> None:
    batch = make_batch(2)
    stepped, called = our_model(2, **kind), our_model(2, **kind)
    called.load_state_dict(stepped.state_dict())
    output = forward_ours(stepped, batch)
    (output.loss - output.main.total).backward()

    hidden_SBH = trunk_states(called, batch["tokens"])
    made = mtp_loss(hidden_SBH, called, batch["tokens"], batch["labels"], batch["loss_mask"])
    (LAMBDA * output.main.tokens * made.loss).backward()

    assert made.depth_means.tolist() == pytest.approx(
        [float(sums.total / sums.tokens) for sums in output.heads[0].depths]
    )
    gradients = {name: parameter.grad for name, parameter in called.named_parameters()}
    for name, parameter in stepped.named_parameters():
        if name.startswith("mtp."):
            assert parameter.grad is not None
            assert relative_difference(gradients[name], parameter.grad) < 1e-5, name  # type: ignore[arg-type]


def test_mtp_loss_uses_the_draft_head_of_a_drafter() -> None:
    """Regression: it was computed with the trunk's rows of the output head."""
    settings, batch = MTPConfig(drafter="eagle3", mtp_loss="kd"), make_batch(3)
    model = our_model(3, num_layers=5, drafter_layers=(1, 2, 4), drafted=[*range(1, VOCABULARY, 2)])
    group = parallel_state.get_context_parallel_group()
    objective = one_head(depth_weights(settings, 3, 1.0), group, depth_loss(settings), trains_trunk=False)
    inputs = [batch[name] for name in ("tokens", "position_ids", "attention_mask")]
    output = model(*inputs, output_processor=objective, output_processor_context=[batch["depths"]])
    hidden_SBH = model(*inputs, output_processor=lambda stage: stage.hidden_SBH)
    made = mtp_loss(hidden_SBH, model, batch["tokens"], batch["labels"], batch["loss_mask"], settings)
    expected = [float(sums.total / sums.tokens) for sums in output.heads[0].depths]
    assert made.depth_means.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["dense", "latent", "hybrid"])
def test_packed_documents_match_separate_documents(kind: str) -> None:
    """Two rows of two documents; attention and recurrent states stop at their ends, and the second row has padding."""
    if kind == "hybrid":
        model: LanguageModule = drafting_hybrid("MG*-/M*-/M*-", torch.float32)
    else:
        model = our_model(2, **(LATENT if kind == "latent" else {}))
    batch = make_batch(2)
    pieces = [(0, 0, 5), (0, 5, LENGTH), (1, 0, 7), (1, 7, LENGTH - 2)]
    document_BS = torch.full((ROWS, LENGTH), -1)
    for number, (row, start, end) in enumerate(pieces):
        document_BS[row, start:end] = number % 2
    given = batch["tokens"], batch["labels"], batch["loss_mask"] * (document_BS >= 0)
    hidden_SBH = trunk_states(model, given[0], document_BS)
    together = mtp_loss(hidden_SBH, model, *given, document_BS=document_BS).depth_means
    sums_D, counts_D = torch.zeros(2), torch.zeros(2)
    for row, start, end in pieces:
        tokens, labels, mask = (each[row : row + 1, start:end] for each in given)
        alone_SBH = trunk_states(model, tokens)
        assert torch.allclose(alone_SBH[:, 0], hidden_SBH[start:end, row], atol=1e-5)
        tokens_D = torch.stack([mask[:, depth:].sum() for depth in (1, 2)])
        sums_D += tokens_D * mtp_loss(alone_SBH, model, tokens, labels, mask).depth_means
        counts_D += tokens_D
    assert torch.allclose(together, sums_D / counts_D, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", [None, MTPConfig(mtp_train_only=True)])
def test_a_detached_trunk_gets_no_gradient_anywhere(tied: bool, settings: MTPConfig | None) -> None:
    model, batch = our_model(2, tied=tied), make_batch(2)
    hidden_SBH = trunk_states(model, batch["tokens"])
    states_SBH = hidden_SBH if settings else hidden_SBH.detach()
    mtp_loss(states_SBH, model, batch["tokens"], batch["labels"], batch["loss_mask"], settings).loss.backward()
    trained = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"mtp"}
    assert not model.config.mtp_detach_heads


@pytest.mark.skipif(not cpu.installed(), reason="labels on a GPU are not read, so that the host need not wait")
@pytest.mark.parametrize("given", ["labels", "tokens"])
def test_a_label_in_a_row_that_pads_the_vocabulary_is_refused(given: str) -> None:
    batch, says = (
        make_batch(2, tokens=70),
        r"^the label 70 counts, and the model has tokens 0 to 69; the rows .* or mask them\.$",
    )
    model = our_model(2, tokens=70)
    hidden_SBH = trunk_states(model, batch["tokens"])
    batch[given][0, 3] = 70
    labels_BS = batch["labels"] if given == "labels" else None
    with pytest.raises(ValueError, match=says):
        mtp_loss(hidden_SBH, model, batch["tokens"], labels_BS, torch.ones_like(batch["loss_mask"]))
    batch["loss_mask"][0, 2:4] = 0  # a masked label may be anything
    assert mtp_loss(hidden_SBH, model, batch["tokens"], labels_BS, batch["loss_mask"]).loss > 0


def test_without_labels_the_next_tokens_are_learned_and_the_last_of_a_document_is_masked() -> None:
    model, batch = our_model(2), make_batch(2)
    tokens_BS, mask_BS = batch["tokens"], torch.ones_like(batch["loss_mask"])
    document_BS = (torch.arange(LENGTH) >= 6).long().expand(ROWS, -1)
    hidden_SBH = trunk_states(model, tokens_BS, document_BS)
    made = mtp_loss(hidden_SBH, model, tokens_BS, None, mask_BS, document_BS=document_BS)
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS[:, [5, LENGTH - 1]] = IGNORED
    given = mtp_loss(hidden_SBH, model, tokens_BS, labels_BS, mask_BS, document_BS=document_BS)
    assert torch.equal(made.depth_means, given.depth_means)


def test_labels_that_are_ignored_are_masked_and_the_trunk_can_be_left_out() -> None:
    model, batch = our_model(2), make_batch(2)
    masked = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)
    hidden_SBH = trunk_states(model, batch["tokens"])
    by_mask = mtp_loss(hidden_SBH, model, batch["tokens"], batch["labels"], batch["loss_mask"])
    ones = torch.ones_like(batch["loss_mask"])
    by_label = mtp_loss(hidden_SBH.detach(), model, batch["tokens"], masked, ones, MTPConfig(mtp_train_only=True))
    assert by_label.loss.item() == pytest.approx(by_mask.loss.item())
    by_label.loss.backward()
    assert model.output_layer.weight.grad is None
    assert all(parameter.grad is None for parameter in model.decoder.parameters())


def test_dropout_in_the_depths_leaves_the_trunks_next_forward_as_it_is() -> None:
    """Two microbatches: the second one's random numbers match a loop without the call."""
    model, found = our_model(2, hidden_dropout=0.2).train(), []
    for is_called in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        for seed in (2, 3):
            batch = make_batch(2, seed=seed)
            given = batch["tokens"], batch["position_ids"], batch["attention_mask"]
            logits_BSV, hidden_SBH = model(*given, output_processor=logits_and_states)
            logits_BSV.logsumexp(-1).sum().backward()
            if is_called:
                mtp_loss(hidden_SBH.detach(), model, batch["tokens"], None, batch["loss_mask"]).loss.backward()
        found.append({name: each.grad for name, each in model.named_parameters() if not name.startswith("mtp.")})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_wrapped_model_in_bfloat16_gives_its_logits_and_takes_its_states() -> None:
    model, batch = our_model(2, bf16=True, params_dtype=torch.bfloat16).bfloat16(), make_batch(2)
    wrapped = Float16Module(model.config, model)
    given = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    logits_BSV, hidden_SBH = wrapped(*given, output_processor=logits_and_states)
    assert torch.equal(logits_BSV, wrapped(*given))
    assert hidden_SBH.dtype == torch.float32
    rest = batch["tokens"], batch["labels"], batch["loss_mask"]
    inner = mtp_loss(trunk_states(model, batch["tokens"]), model, *rest)
    assert torch.equal(mtp_loss(hidden_SBH, wrapped, *rest).depth_means, inner.depth_means)


def test_shapes_that_differ_and_a_model_without_depths_are_refused() -> None:
    batch = make_batch(2)
    tokens, labels, mask = (batch[name] for name in ("tokens", "labels", "loss_mask"))
    model = our_model(2)
    with pytest.raises(ValueError, match=r"have the shapes .* give all as \[B, S\]"):
        mtp_loss(trunk_states(model, tokens), model, tokens, labels[:, 1:], mask)
    plain = our_model(None)
    rows = PackedSeqParams("thd", torch.tensor([0, LENGTH]), torch.tensor([0, LENGTH]))
    with pytest.raises(ValueError, match=r"packed_seq_params .* 3 rows of tokens; join them"):
        mtp_loss(trunk_states(model, tokens), model, tokens, labels, mask, packed_seq_params=rows)
    with pytest.raises(ValueError, match="the model has no MTP layers; attach some with"):
        mtp_loss(trunk_states(plain, tokens), plain, tokens, labels, mask)
