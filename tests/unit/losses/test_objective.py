"""losses/objective.py: targets of the MTP layers, and logged losses, against sums written out by hand."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron_single import one_head
from torch import Tensor

from megatron_mtp.data.batch import DepthBatch, LaterPositions, depth_batch
from megatron_mtp.losses.acceptance import accepted_positions, measured
from megatron_mtp.losses.head_objective import HeadObjective, LossSum
from megatron_mtp.losses.objective import ObjectiveOutput, kept_positions
from megatron_mtp.losses.table import depth_loss
from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.model.head import Head
from megatron_mtp.model.stage_output import Drafted, StageOutput
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.metrics import stats_of

pytestmark = pytest.mark.usefixtures("megatron")

LENGTH, ROWS, HIDDEN, VOCABULARY, DEPTHS = 9, 2, 8, 16, 2
SEED = (1234, 7)


def states() -> tuple[Tensor, list[Tensor], Tensor]:
    """Return states of trunk and MTP layers [S, B, H], and the head's weight."""
    generator = torch.Generator().manual_seed(5)
    hidden = [torch.randn(LENGTH, ROWS, HIDDEN, generator=generator).cuda() for _ in range(1 + DEPTHS)]
    trunk_SBH, *depth_hidden = (state_SBH.requires_grad_() for state_SBH in hidden)
    return trunk_SBH, depth_hidden, torch.randn(VOCABULARY, HIDDEN, generator=generator).cuda()


def batch() -> DepthBatch:
    generator = torch.Generator().manual_seed(6)
    labels_BS = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator).cuda()
    mask_BS = (torch.rand(ROWS, LENGTH, generator=generator) > 0.3).cuda()
    whole = {"tokens": None, "labels": labels_BS, "loss_mask": mask_BS}
    return depth_batch(whole, DEPTHS)


def outcome(**settings: Any) -> ObjectiveOutput:
    return outcome_of(states(), **settings)


def outcome_of(
    leaves: tuple[Tensor, list[Tensor], Tensor], drafted: Tensor | None = None, **settings: Any
) -> ObjectiveOutput:
    trunk_SBH, depth_hidden, weight_VH = leaves
    head = head_of(weight_VH, drafted)
    stage = StageOutput(trunk_SBH, head, [Drafted(depth_hidden, head, batch())], [batch()])
    return one_head([0.5, 0.25], head.tp_group, **settings)(stage)


def head_of(weight_VH: Tensor, drafted: Tensor | None = None) -> Head:
    return Head(
        project=lambda state: state @ weight_VH.t(),
        cross_entropy=lambda labels, logits: torch.nn.functional.cross_entropy(
            logits.permute(1, 2, 0), labels, reduction="none"
        ),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        weight=weight_VH,
        whole=lambda state: state,
        draft_vocabulary=None if drafted is None else DraftVocabulary(drafted, VOCABULARY),
    )


def plain_kd_sums(slots: list[int]) -> list[float]:
    """Return KL of the trunk's distribution d slots later from that of depth d, over the unmasked slots among these."""
    trunk_SBH, depth_hidden, weight_VH = states()
    trunk_SBV = torch.log_softmax(trunk_SBH @ weight_VH.t(), -1)
    sums = []
    for depth, state_SBH in enumerate(depth_hidden, start=1):
        draft_SBV = torch.log_softmax(state_SBH @ weight_VH.t(), -1)
        mask_BS = batch().loss_mask_DBS[depth - 1]
        inside = [slot for slot in slots if slot + depth < LENGTH]
        log_p, log_q = trunk_SBV[[slot + depth for slot in inside]], draft_SBV[inside]
        sums.append(((log_p.exp() * (log_p - log_q)).sum(-1) * mask_BS[:, inside].t()).sum().item())
    return sums


KD = {"depth_loss": depth_loss(MTPConfig(mtp_loss="kd"))}


def test_a_depth_is_compared_with_the_trunk_as_many_positions_later() -> None:
    output = outcome(**KD, per_token=True)
    assert [sums.total.item() for sums in output.heads[0].depths] == pytest.approx(
        plain_kd_sums(list(range(LENGTH))), rel=1e-5
    )
    weighted = 0.5 * output.heads[0].depths[0].total + 0.25 * output.heads[0].depths[1].total
    assert output.loss.item() == pytest.approx((output.main.total + weighted).item())


def test_the_trunk_teaches_without_getting_a_gradient() -> None:
    trunk_SBH, depth_hidden, _ = leaves = states()
    output = outcome_of(leaves, **KD, trains_trunk=False)
    output.loss.backward()
    assert trunk_SBH.grad is None
    assert all(state.grad is not None for state in depth_hidden)


def test_sums_over_kept_positions_are_scaled_to_all_positions() -> None:
    keep = partial(kept_positions, 0.4, SEED)
    kept = keep(LENGTH)
    assert kept is not None
    output = outcome(**KD, kept_positions=keep)
    share = kept.numel() / LENGTH
    expected = [total / share for total in plain_kd_sums(kept.tolist())]
    assert [sums.total.item() for sums in output.heads[0].depths] == pytest.approx(expected, rel=1e-5)


def test_the_trunks_loss_in_chunks_is_the_same() -> None:
    plain, chunked = outcome(), outcome(linear_main=True)
    assert chunked.main.total.item() == pytest.approx(plain.main.total.item(), rel=1e-6)
    assert chunked.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)


def test_a_trunk_that_is_not_trained_adds_its_loss_without_gradient() -> None:
    output = outcome(linear_main=True, trains_trunk=False)
    assert not output.main.total.requires_grad
    assert output.loss.requires_grad


DRAFTED = torch.tensor([1, 4, 5, 9, 10, 15], device="cuda")


def test_labels_outside_of_the_draft_vocabulary_count_nowhere_in_a_depths_mean() -> None:
    output = outcome(drafted=DRAFTED)
    _, depth_hidden, weight_VH = states()
    weighted = torch.zeros((), device="cuda")
    for depth, (state_SBH, weight) in enumerate(zip(depth_hidden, (0.5, 0.25), strict=True)):
        labels_SB, mask_BS = batch().labels_DBS[depth].t(), batch().loss_mask_DBS[depth]
        counts_SB = torch.isin(labels_SB, DRAFTED) & (mask_BS.t() > 0)
        log_q_SBN = torch.log_softmax(state_SBH @ weight_VH[DRAFTED].t(), -1)
        number_SB = (labels_SB.unsqueeze(-1) == DRAFTED).int().argmax(-1, keepdim=True)
        total = -(log_q_SBN.gather(-1, number_SB)[..., 0] * counts_SB).sum()
        assert 0 < counts_SB.sum() < mask_BS.sum()
        assert output.heads[0].depths[depth].tokens == counts_SB.sum()
        assert output.heads[0].depths[depth].total.item() == pytest.approx(total.item(), rel=1e-5)
        weighted = weighted + weight * output.main.tokens * total / counts_SB.sum()
    assert output.loss.item() == pytest.approx((output.main.total + weighted).item(), rel=1e-5)


@pytest.mark.parametrize("loss", ["kd", "tv", "nla"])
def test_soft_labels_of_all_positions_count_whatever_their_label_is(loss: str) -> None:
    """And tv and nla compare with the trunk's distribution over all tokens: its mass on other tokens is rejected."""
    output = outcome(drafted=DRAFTED, depth_loss=depth_loss(MTPConfig(mtp_loss=loss)))
    trunk_SBH, depth_hidden, weight_VH = states()
    target_SBV, rows_NH = trunk_SBH @ weight_VH.t(), weight_VH[DRAFTED]
    for depth, state_SBH in enumerate(depth_hidden, start=1):
        mask_SB = batch().loss_mask_DBS[depth - 1].t()[:-depth]
        q_SBN = torch.softmax(state_SBH @ rows_NH.t(), -1)[:-depth]
        if loss in ("tv", "nla"):
            p_SBN = torch.softmax(target_SBV, -1)[depth:, :, DRAFTED]
            overlap_SB = torch.minimum(p_SBN, q_SBN).sum(-1)
            losses_SB = 1 - overlap_SB if loss == "tv" else -overlap_SB.log()
        else:
            p_SBN = torch.softmax(target_SBV[..., DRAFTED], -1)[depth:]
            losses_SB = (p_SBN * (p_SBN / q_SBN).log()).sum(-1)
        assert output.heads[0].depths[depth - 1].total.item() == pytest.approx(
            (losses_SB * mask_SB).sum().item(), rel=1e-5
        )
        assert output.heads[0].depths[depth - 1].tokens == batch().loss_mask_DBS[depth - 1].sum()


@pytest.mark.parametrize("keep", [None, partial(kept_positions, 0.5, SEED)], ids=["all", "some"])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_chain_counts_only_where_every_depth_counts(per_token: bool, keep: Any) -> None:
    """Positions whose chain leaves its document or meets a masked label count nowhere: sums, tokens, normalizer."""
    kept = {} if keep is None else {"kept_positions": keep}
    output = outcome(depth_loss=depth_loss(MTPConfig(mtp_loss="e2e_tv")), per_token=per_token, **kept)
    trunk_SBH, depth_hidden, weight_VH = states()
    mask_SB = batch().loss_mask_DBS.float().prod(0).t()
    share, counted_SB = 1.0, mask_SB.clone()
    if keep is not None:
        positions = keep(LENGTH)
        share, counted_SB = len(positions) / LENGTH, torch.zeros_like(mask_SB)
        counted_SB[positions] = mask_SB[positions]
    assert 0 < mask_SB.sum() < batch().loss_mask_DBS[-1].sum()
    p_SBV, reached_SB = torch.softmax(trunk_SBH @ weight_VH.t(), -1), torch.ones_like(mask_SB)
    weighted = torch.zeros((), device="cuda")
    for depth, (state_SBH, weight) in enumerate(zip(depth_hidden, (0.5, 0.25), strict=True), start=1):
        later_SBV = p_SBV.roll(-depth, 0)  # what wraps around is masked
        overlap_SB = torch.minimum(torch.softmax(state_SBH @ weight_VH.t(), -1), later_SBV).sum(-1)
        reached_SB = reached_SB * overlap_SB
        sums = output.heads[0].depths[depth - 1]
        assert sums.total.item() == pytest.approx(((1 - overlap_SB) * counted_SB).sum().item() / share, rel=1e-5)
        assert sums.tokens.item() == pytest.approx(counted_SB.sum().item() / share)
        weighted = weighted + weight * ((1 - reached_SB) * counted_SB).sum() / share
    factor = 1 if per_token else output.main.tokens.item() / mask_SB.sum().item()
    assert output.loss.item() == pytest.approx((output.main.total + factor * weighted).item(), rel=1e-5)


def test_acceptance_is_of_drafts_from_the_draft_vocabulary() -> None:
    counts_4D = outcome(drafted=DRAFTED, measure=measured).heads[0].acceptance
    assert counts_4D is not None
    counts = stats_of(counts_4D)
    trunk_SBH, depth_hidden, weight_VH = states()
    target_SBV = trunk_SBH @ weight_VH.t()
    mask_SB = batch().loss_mask_DBS[0].t()[:-1]
    logits_SBN = (depth_hidden[0] @ weight_VH[DRAFTED].t())[:-1]
    agrees_SB = DRAFTED[logits_SBN.argmax(-1)] == target_SBV.argmax(-1)[1:]
    overlap_SB = torch.minimum(logits_SBN.softmax(-1), target_SBV.softmax(-1)[1:, :, DRAFTED]).sum(-1)
    assert counts.offered_at[0] == mask_SB.sum()
    assert counts.accepted_at[0] == (agrees_SB * mask_SB).sum()
    assert counts.overlap_at[0] == pytest.approx((overlap_SB * mask_SB).sum().item(), rel=1e-5)


def test_rows_that_only_pad_the_vocabulary_are_never_drafted() -> None:
    """12 of 16 rows are tokens, and the MTP layers' states point to another row."""
    trunk_SBH, _, weight_VH = states()
    head = replace(head_of(weight_VH), vocab_size=12)
    depth_hidden, mask_DBS = [weight_VH[14].expand_as(trunk_SBH)] * DEPTHS, batch().loss_mask_DBS
    later = LaterPositions(torch.arange(LENGTH, device="cpu"), DEPTHS, head.tp_group)
    overlap_D = accepted_positions(trunk_SBH, depth_hidden, head, mask_DBS, later).sum((2, 3))[3]
    q_V, p_SBV = ((state @ weight_VH[:12].t()).softmax(-1) for state in (weight_VH[14], trunk_SBH))
    for depth in range(1, 1 + DEPTHS):
        overlap_SB = torch.minimum(p_SBV.roll(-depth, 0), q_V).sum(-1)  # what wraps around is masked
        assert overlap_D[depth - 1].item() == pytest.approx((overlap_SB * mask_DBS[depth - 1].t()).sum().item())


class TwoRanks:
    """A context-parallel group of this rank, which has the first half of the sequence, and one with as many tokens."""

    def size(self) -> int:
        return 2

    @staticmethod
    def all_reduce(values: Tensor, group: "TwoRanks") -> None:
        values *= group.size()


def sums_of_two_ranks(drafted: Tensor | None = None, **settings: Any) -> list[LossSum]:
    """Return this rank's sums of the MTP layers."""
    trunk_SBH, depth_hidden, weight_VH = states()
    head, group = head_of(weight_VH, drafted), TwoRanks()
    objective = HeadObjective([0.5, 0.25], group, **settings)  # type: ignore[arg-type]
    return objective.of_depths(trunk_SBH, Drafted(depth_hidden, head, batch()), None)[1]


def test_context_parallel_ranks_keep_positions_of_the_whole_sequence() -> None:
    kept = torch.tensor([0, 4, 11], device="cpu")  # the last one belongs to the other rank
    asked = list[int]()
    sums = sums_of_two_ranks(kept_positions=lambda positions: (asked.append(positions), kept)[1])
    assert asked == [2 * LENGTH]
    masks_D = batch().loss_mask_DBS[..., kept[:2]].sum((1, 2))
    assert [one.tokens.item() for one in sums] == pytest.approx((masks_D / (3 / (2 * LENGTH))).tolist())


def test_labels_in_the_draft_vocabulary_are_counted_over_context_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", TwoRanks.all_reduce)
    for one in sums_of_two_ranks(DRAFTED):
        assert one.whole_tokens == 2 * one.tokens > 0
