"""model/block_drafter.py: blocks, losses and gradients against the definition in plain float64; error messages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from block_reference import DRAFTS, KINDS, LAYERS, LOSSES, READ, drafter_model, earlier, losses
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_single import LENGTH, VOCABULARY, make_batch, one_head, our_model
from tiers import tiered
from torch import Tensor

from megatron_mtp.data.batch import depth_batch, with_blocks
from megatron_mtp.losses.head_objective import base_share, depth_weights
from megatron_mtp.losses.table import check_loss, depth_loss
from megatron_mtp.model.block_drafter import BlockAttention
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.kinds import DRAFTERS

DRAFTED = sorted({*range(0, VOCABULARY, 3), 1})

pytestmark = pytest.mark.usefixtures("megatron")


HEADS_OF = [
    ("dflash", None),
    ("dflash", DRAFTED),
    ("dspark", None),
    ("dspark", DRAFTED),
    ("domino", None),
    ("dflash2", None),
]


@pytest.mark.parametrize("blocks", tiered([None, 5], (5,)), ids=["everywhere", "five"])
@pytest.mark.parametrize(
    ("kind", "drafted"), tiered(HEADS_OF, (("dflash", DRAFTED), ("dspark", DRAFTED), *HEADS_OF[-2:]))
)
def test_loss_and_gradients_are_those_of_the_definition(
    kind: str, drafted: list[int] | None, blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_mtp.model.block_drafter.BLOCKS_AT_ONCE", 4)
    ours, expected, found, wanted = losses(drafter_model(kind, drafted), kind, blocks=blocks)
    torch.testing.assert_close(ours, expected, rtol=5e-7, atol=0)  # weights and masks are float32
    assert ("mtp.layers.0.head" in found) == (drafted is not None)
    assert ("mtp.layers.0.markov_w2" in found) == (kind in ("dspark", "dflash2"))
    assert ("mtp.layers.0.confidence_weight" in found) == (kind == "dspark")
    assert all(name.startswith("mtp.") for name in found)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=3e-7 * gradient.abs().max().item())


@pytest.mark.parametrize("drafted", tiered([None, DRAFTED], (DRAFTED,)), ids=["all", "drafted"])
def test_dpace_weights_drafts_by_the_accepted_drafts_of_their_block(drafted: list[int] | None) -> None:
    """Blocks at a document's end count, and blocks with a label outside the draft vocabulary count up to it."""
    ours, expected, found, wanted = losses(drafter_model("dflash", drafted), "dflash", blocks=5, is_paced=True)
    torch.testing.assert_close(ours, expected, rtol=5e-7, atol=0)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=3e-7 * gradient.abs().max().item())


@pytest.mark.parametrize("kind", tiered(KINDS, ("dspark",)))
def test_without_a_mask_a_block_sees_the_positions_before_it(kind: str) -> None:
    ours, expected, _, _ = losses(drafter_model(kind), kind, has_mask=False)
    torch.testing.assert_close(ours, expected, rtol=5e-7, atol=0)


def other_layer(states: list[Tensor]) -> Tensor:
    return torch.cat([states[number] for number in (2, 4)], dim=-1)


@pytest.mark.parametrize("wrong", tiered([earlier, other_layer], (earlier,)))
def test_features_of_other_positions_or_layers_are_seen(wrong: Callable[[list[Tensor]], Tensor]) -> None:
    ours, expected, _, _ = losses(drafter_model("dspark"), "dspark", wrong)
    assert abs(ours - expected) / expected > 1e-3


def test_attention_to_another_block_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: all rows of a call form one block."""
    apart = torch.arange

    def together(*args: Any, **named: Any) -> Tensor:
        made = apart(*args, **named)
        return torch.zeros_like(made)

    forward = BlockAttention.forward

    def unaware(self: BlockAttention, *args: Any, **named: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "arange", together)
            return forward(self, *args, **named)

    monkeypatch.setattr(BlockAttention, "forward", unaware)
    ours, expected, _, _ = losses(drafter_model("dflash"), "dflash")
    assert abs(ours - expected) / expected > 1e-3


def test_attention_to_the_future_of_a_block_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = BlockAttention.forward

    def unmasked(self: BlockAttention, *args: Any, **named: Any) -> Tensor:
        assert self.context is not None
        assert isinstance(self.context.visible, Tensor)
        self.context = replace(self.context, visible=torch.ones_like(self.context.visible))
        return forward(self, *args, **named)

    monkeypatch.setattr(BlockAttention, "forward", unmasked)
    ours, expected, _, _ = losses(drafter_model("dflash"), "dflash")
    assert abs(ours - expected) / expected > 1e-3


def loss_of_last(model: GPTModel, kind: str, documents: list[Tensor]) -> Tensor:
    """Return the drafter's loss of the last document in a packed row."""
    lengths = torch.tensor([0, *(len(each) - 1 for each in documents)])
    offsets = lengths.cumsum(0, dtype=torch.int32)
    packed = PackedSeqParams("thd", offsets, offsets, None, None, int(lengths.max()), int(lengths.max()))
    tokens_BS, labels_BS = (torch.cat([each[part] for each in documents])[None] for part in (slice(-1), slice(1, None)))
    number_BS = torch.searchsorted(offsets[1:], torch.arange(int(offsets[-1])), right=True)[None]
    mask_BS = (number_BS == len(documents) - 1).float()
    position_BS = torch.cat([torch.arange(len(each) - 1) for each in documents])[None]
    depths = depth_batch({"tokens": tokens_BS, "labels": labels_BS, "loss_mask": mask_BS}, DRAFTS, number_BS)
    settings = MTPConfig(**KINDS[kind], **LOSSES[kind])
    loss, group = depth_loss(settings), parallel_state.get_context_parallel_group()
    objective = one_head(depth_weights(settings, DRAFTS, 1.0, loss), group, loss, linear_main=True, trains_trunk=False)
    named = {"labels": labels_BS, "packed_seq_params": packed, "output_processor_context": [depths]}
    output = model(tokens_BS, position_BS, None, output_processor=objective, **named)
    made: Tensor = (output.loss - output.main.total) / output.main.tokens
    return made


@pytest.mark.parametrize("kind", tiered(KINDS, ("dspark",)))
def test_a_block_sees_the_positions_of_its_packed_document_alone(kind: str) -> None:
    """The second of two documents has the same loss as alone, whatever the first one is."""
    model, generator = drafter_model(kind), torch.Generator().manual_seed(4)
    first, other, last = (torch.randint(1, VOCABULARY, (count,), generator=generator) for count in (6, 6, 9))
    expected = loss_of_last(model, kind, [last])
    for before in (first, other):
        torch.testing.assert_close(loss_of_last(model, kind, [before, last]), expected, rtol=1e-6, atol=0)


def test_blocks_of_a_rank_start_at_its_own_positions() -> None:
    whole = make_batch(DRAFTS)["depths"]
    of_ranks = [
        with_blocks(whole.at(torch.arange(first, LENGTH, 2, device="cpu")), 5, (3, 4), LENGTH) for first in (0, 1)
    ]
    begun = [part.positions_S[part.blocks_A] for part in of_ranks]
    assert sorted(torch.cat(begun).tolist()) == with_blocks(whole, 5, (3, 4), LENGTH).blocks_A.tolist()
    assert [part.block_weight for part in of_ranks] == [LENGTH / 5] * 2
    none = with_blocks(whole.at(torch.arange(2, device="cpu")), 1, (3, 4), LENGTH)
    assert (none.block_weight, none.of_blocks().loss_mask_DBS.sum()) == (0, 0)


@pytest.mark.parametrize(("chosen", "layers"), [((1, 2, 8), 8), ((0, 2), 8), ((2, 2), 8), ((4, 2), 8), ((), 8)])
def test_layers_that_do_not_exist_are_refused(chosen: tuple[int, ...], layers: int) -> None:
    given = " ".join(map(str, chosen))
    with pytest.raises(ValueError, match=f"is {given}, and the trunk has {layers} layers; give rising"):
        DRAFTERS["dflash"].check_layers(chosen, layers)


def test_the_default_layers_are_those_of_published_drafters() -> None:
    assert DRAFTERS["dspark"].default_layers(36, 5) == (2, 10, 18, 26, 34)
    assert DRAFTERS["dflash"].default_layers(4, 1) == (3,)
    for layers in range(2, 9):
        DRAFTERS["dflash"].check_layers(DRAFTERS["dflash"].default_layers(layers, 5), layers)


def test_a_mask_token_outside_the_vocabulary_is_refused() -> None:
    given: dict[str, Any] = {"num_layers": LAYERS, "drafter_layers": READ}
    with pytest.raises(ValueError, match=r"--drafter-mask-token is 96, .* 96 tokens; give one"):
        our_model(DRAFTS, drafter={**KINDS["dflash"], "drafter_mask_token": VOCABULARY}, **given)


def test_a_confidence_without_rates_to_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--mtp-loss is kd, .* confidence of --drafter dspark"):
        check_loss(MTPConfig(drafter="dspark", mtp_loss="kd"))
    check_loss(MTPConfig(drafter="dspark", mtp_loss="lk"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"drafter": "dflash", "drafter_markov_rank": 4},
            "was given with --drafter dflash; give --drafter dflash2, domino or dspark, or drop it",
        ),
        (
            {"drafter": "eagle3", "drafter_blocks": 4},
            "--drafter-blocks was given with --drafter eagle3; give --drafter dflash",
        ),
        ({"drafter_mask_token": 3}, "--drafter-mask-token was given without --drafter; give --drafter dflash"),
        ({"drafter": "dflash", "drafter_mask_token": -1}, "--drafter-mask-token is -1; give 0 or more"),
        ({"drafter": "dspark", "mtp_token_fraction": 0.5}, "whose blocks are --drafter-blocks; give that"),
    ],
)
def test_flags_of_other_drafters_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MTPConfig(**given)


@pytest.mark.parametrize(("progress", "share"), [(0.0, 1.0), (0.3, 0.7), (1.0, 0.0), (1.2, 0.0)])
def test_dominos_base_share_decays_to_0_over_the_run(progress: float, share: float) -> None:
    """From 1 to 0 over the run; an evaluation measures the actual drafts, with the bias."""
    settings = MTPConfig(**KINDS["domino"])
    assert base_share(settings, progress) == pytest.approx(share)
    with torch.no_grad():
        assert base_share(settings, progress) == 0
    assert base_share(MTPConfig(**KINDS["dflash"]), progress) == 0
