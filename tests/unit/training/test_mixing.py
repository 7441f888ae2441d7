"""model/mixing.py: the states that MTP layers continue from, against the definition computed position by position."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron_single import ROWS, make_batch, our_model
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch, LaterPositions, depth_batch, drawn_ages
from megatron_mtp.losses.mtp_loss import mtp_loss, trunk_states
from megatron_mtp.model.mixing import Mixer
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training import forward_step
from megatron_mtp.training.metrics import Metrics

LENGTH, DEPTHS = 9, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 2]])


def batch_of(document_BS: Tensor) -> DepthBatch:
    tokens_BS = torch.arange(document_BS.numel()).view_as(document_BS)
    whole = {"tokens": tokens_BS, "labels": tokens_BS, "loss_mask": torch.ones_like(tokens_BS)}
    return depth_batch(whole, DEPTHS, document_BS)


@pytest.mark.usefixtures("megatron")
def test_every_depth_reads_a_state_that_predicts_its_token() -> None:
    batch = batch_of(DOCUMENTS)
    ages_DS = drawn_ages(DEPTHS, (7, 3), batch.positions_S, LENGTH).cuda()
    assert [set(ages_S.tolist()) for ages_S in ages_DS] == [set(range(depth)) for depth in range(1, DEPTHS + 1)]
    later = LaterPositions(batch.positions_S, DEPTHS - 1, parallel_state.get_context_parallel_group())
    mixer = Mixer(ages_DS, batch.inside_DBS, later)
    generator = torch.Generator().manual_seed(1)
    history = [torch.randn(LENGTH, 2, 3, generator=generator).requires_grad_() for _ in range(DEPTHS)]
    for depth in range(1, DEPTHS + 1):
        read_SBH = mixer.next_input(history[depth - 1])
        for row in range(2):
            for position in range(LENGTH):
                age = int(ages_DS[depth - 1, position])
                there = position + age
                if there >= LENGTH or DOCUMENTS[row, there] != DOCUMENTS[row, position]:
                    age, there = 0, position
                assert torch.equal(read_SBH[position, row], history[depth - 1 - age][there, row])
        read_SBH.sum().backward(retain_graph=True)
        assert sum(int(state.grad.sum()) for state in history if state.grad is not None) == depth * read_SBH.numel()


def test_ages_depend_only_on_step_and_position() -> None:
    all_S, own_S = torch.arange(4000, device="cpu"), torch.tensor([5, 6, 3999, 0], device="cpu")
    whole_DS = drawn_ages(3, (7, 3), all_S, 4000)
    assert torch.equal(drawn_ages(3, (7, 3), own_S, 4000), whole_DS[:, own_S])
    assert not torch.equal(drawn_ages(3, (7, 4), all_S, 4000), whole_DS)
    assert not whole_DS[0].any()
    for ages_S, depth in zip(whole_DS, (1, 2, 3), strict=True):
        assert all(abs(share - 1 / depth) < 0.03 for share in (ages_S.bincount() / 4000).tolist())


@pytest.mark.usefixtures("megatron")
def test_states_are_mixed_by_age_and_depth_1_reads_the_trunk() -> None:
    model, given = our_model(3), make_batch(3)
    plain = given["depths"]
    positions = plain.positions_S.numel()
    ages_DS = drawn_ages(3, (1, 0), plain.positions_S, positions).cuda()
    found = []
    for ages in (None, torch.zeros_like(ages_DS), ages_DS):
        states: list[list[Tensor]] = []
        model(
            given["tokens"],
            given["position_ids"],
            given["attention_mask"],
            output_processor=lambda stage, states=states: states.append(stage.drafted[0].hidden) or stage.hidden_SBH,
            output_processor_context=[replace(plain, ages_DS=ages)],
        )
        found.append(states[0])
    for without, newest, mixed in zip(*found, strict=True):
        assert without.shape[:2] == (positions, ROWS)
        assert torch.equal(without, newest)
        assert torch.equal(without, mixed) is (without is found[0][0])


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("mixes", "trains", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_training_mixes_and_evaluation_does_not(
    mixes: bool, trains: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(mtp_num_layers=2, seed=7, curr_iteration=3, context_parallel_size=1)
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    step = forward_step.ForwardStep(MTPConfig(mtp_hidden_state_mixing=mixes), Metrics(None))
    batch = make_batch(2)["depths"]
    with torch.set_grad_enabled(trains):
        ages_DS = step._batches(batch)[0].ages_DS
    assert (ages_DS is not None) is (mixes and trains)
    if ages_DS is not None:
        assert torch.equal(ages_DS, drawn_ages(2, (7, 3), batch.positions_S, batch.positions_S.numel()).cuda())


@pytest.mark.usefixtures("megatron")
def test_blocks_depend_on_the_step_and_not_on_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of a sequence, on one rank and on two with half of its positions each; evaluations have one set."""
    args = SimpleNamespace(mtp_num_layers=2, seed=7, curr_iteration=3, context_parallel_size=1)
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    step = forward_step.ForwardStep(MTPConfig(drafter="dflash", drafter_steps=2, drafter_blocks=4), Metrics(None))
    batch = make_batch(2)["depths"]
    count = batch.positions_S.numel()

    def drawn(*parts: range) -> list[int]:
        args.context_parallel_size = len(parts)
        made = [step._batches(batch.at(torch.tensor(part, device="cpu")))[0] for part in parts]
        return sorted(one for part in made if part.block_weight for one in part.positions_S[part.blocks_A].tolist())

    whole, halves = (range(count),), (range(0, count, 2), range(1, count, 2))
    of_steps = []
    for args.curr_iteration in (3, 4, 3):
        of_steps.append(drawn(*whole))
        assert drawn(*halves) == of_steps[-1]
        assert len(of_steps[-1]) == 4
    assert of_steps[0] == of_steps[2] != of_steps[1]
    with torch.no_grad():
        args.curr_iteration = 4
        evaluated = drawn(*whole)
        args.curr_iteration = 3
        assert drawn(*whole) == evaluated


@pytest.mark.usefixtures("megatron")
def test_mtp_loss_rejects_hidden_state_mixing() -> None:
    model, given = our_model(2), make_batch(2)
    tokens, labels, mask = (given[name] for name in ("tokens", "labels", "loss_mask"))
    settings = MTPConfig(mtp_hidden_state_mixing=True)
    with pytest.raises(ValueError, match=r"mtp_hidden_state_mixing is set, .* the number of the step"):
        mtp_loss(trunk_states(model, tokens), model, tokens, labels, mask, settings)
