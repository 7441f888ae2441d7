"""losses/acceptance.py, with a head that passes logits through: three words, rates countable by hand.

At position i, depth d drafts the token that the trunk predicts at position i + d.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_mtp.data.batch import DepthBatch, LaterPositions, depth_batch
from megatron_mtp.losses import linear_cross_entropy
from megatron_mtp.losses.acceptance import accepted_positions
from megatron_mtp.model.draft_vocabulary import DraftVocabulary
from megatron_mtp.model.head import Head
from megatron_mtp.training.metrics import stats_of

WORDS = 3


@pytest.fixture
def head(megatron: None) -> Head:
    return head_of(torch.eye(WORDS).cuda())


def head_of(weight_VH: Tensor) -> Head:
    def all_at_once(*_: Tensor) -> Tensor:
        raise AssertionError("acceptance takes neither all logits nor a loss")

    group = parallel_state.get_tensor_model_parallel_group()
    return Head(all_at_once, all_at_once, group, weight_VH, whole=lambda states_SBH: states_SBH)


def count_acceptance(trunk_SBV: Tensor, drafts: list[Tensor], head: Head, batch: DepthBatch) -> Tensor:
    """Count on whole sequences; split ones need several processes."""
    later = LaterPositions(batch.positions_S, len(drafts), parallel_state.get_context_parallel_group())
    return accepted_positions(trunk_SBV, drafts, head, batch.loss_mask_DBS, later).sum((2, 3))


def words(*rows: list[int]) -> Tensor:
    """Return logits [S, B, V] whose argmax is the given word at each slot, one list per row."""
    return torch.nn.functional.one_hot(torch.tensor(rows), WORDS).float().transpose(0, 1).cuda()


def document(rows: int, slots: int, depths: int, mask_BS: Tensor | None = None) -> DepthBatch:
    batch = {
        "tokens": None,
        "labels": torch.ones(rows, slots, dtype=torch.long).cuda(),
        "loss_mask": (torch.ones(rows, slots) if mask_BS is None else mask_BS).cuda(),
    }
    return depth_batch(batch, depths)


def lists(counts: Tensor) -> list[list[float]]:
    return counts[:3].tolist()


def test_a_depth_counts_where_the_depths_before_it_were_accepted(head: Head) -> None:
    trunk = words([0, 1, 2, 1])
    first = words([1, 0, 1, 0])  # the trunk predicts 1 2 1: yes no yes; slot 3 has no label
    second = words([2, 1, 0, 0])  # the trunk predicts 2 1: yes, and yes where depth 1 was wrong; slots 2, 3: no label
    counts = count_acceptance(trunk, [first, second], head, document(1, 4, 2))
    assert lists(counts) == [[3, 2], [3, 1], [2, 1]]
    rates = stats_of(counts)
    assert rates.conditional_acceptance == pytest.approx([2 / 3, 1])
    assert rates.expected_length == pytest.approx(1 + 2 / 3 + 2 / 3 * 1)


def test_rates_and_expected_length_of_summed_counts() -> None:
    valid, reached, accepted, overlap = [10.0, 8.0, 6.0], [10.0, 4.0, 1.0], [5.0, 1.0, 0.0], [7.0, 2.0, 3.0]
    rates = stats_of(torch.tensor([valid, reached, accepted, overlap]))
    assert rates.conditional_acceptance == [0.5, 0.25, 0]
    assert rates.overlap == pytest.approx([0.7, 0.25, 0.5])
    assert rates.expected_length == 1 + 0.5 + 0.5 * 0.25


def test_a_depth_that_was_never_reached_has_rate_zero() -> None:
    rates = stats_of(torch.tensor([[4.0, 0], [4, 0], [0, 0], [1, 0]]))
    assert (rates.conditional_acceptance, rates.overlap, rates.expected_length) == ([0, 0], [0.25, 0], 1)


def test_overlap_is_the_sum_of_the_smaller_probabilities(head: Head) -> None:
    target = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])  # the trunk's, slots 0 1 2
    draft = torch.tensor([[0.25, 0.25, 0.5], [0.6, 0.3, 0.1], [1 / 3, 1 / 3, 1 / 3]])
    # slot 0 against the trunk's slot 1: .25 + .25 + .25; slot 1 against slot 2: .1 + .1 + .1; slot 2 has no label
    counts = count_acceptance(
        target.log().unsqueeze(1).cuda(), [draft.log().unsqueeze(1).cuda()], head, document(1, 3, 1)
    )
    assert counts[3].tolist() == pytest.approx([0.75 + 0.3])
    assert stats_of(counts).overlap == pytest.approx([(0.75 + 0.3) / 2])


def test_rows_that_only_pad_the_vocabulary_are_neither_drafted_nor_predicted(megatron: None) -> None:
    """Three of the head's five rows are words. The drafts favor row 4, and the trunk row 3."""
    padded = replace(head_of(torch.eye(5).cuda()), vocab_size=WORDS)
    probabilities_SV = torch.tensor([[0.2, 0.3, 0.5, 0, 0], [0.5, 0.25, 0.25, 0, 0], [0.1, 0.1, 0.8, 0, 0]])
    trunk_SBV = (probabilities_SV + torch.tensor([0, 0, 0, 9, 1e-9])).log().unsqueeze(1).cuda()
    draft_SBV = (probabilities_SV.roll(-1, 0) + torch.tensor([0, 0, 0, 1e-9, 9])).log().unsqueeze(1).cuda()
    rates = stats_of(count_acceptance(trunk_SBV, [draft_SBV], padded, document(1, 3, 1)))
    assert rates.conditional_acceptance == [1]
    assert rates.overlap == pytest.approx([1])


def test_a_perfect_drafter_is_always_accepted(head: Head) -> None:
    slots, depths = 7, 3
    trunk_SBV = torch.randn(slots, 2, WORDS, generator=torch.Generator().manual_seed(3)).cuda()
    ahead = [trunk_SBV.roll(-depth, dims=0) for depth in range(1, depths + 1)]
    rates = stats_of(count_acceptance(trunk_SBV, ahead, head, document(2, slots, depths)))
    assert rates.conditional_acceptance == [1, 1, 1]
    assert rates.overlap == pytest.approx([1, 1, 1])
    assert rates.expected_length == 4


@pytest.mark.parametrize("garbage", [0, 1, 2])
def test_positions_beyond_the_document_do_not_count(head: Head, garbage: int) -> None:
    """Two documents of two slots: only their first slots have a second label, none has a third."""
    batch = {"tokens": None, "labels": torch.ones(1, 4, dtype=torch.long).cuda(), "loss_mask": torch.ones(1, 4).cuda()}
    trunk = words([0, 1, 0, 2])
    drafts = [words([1, garbage, 2, garbage]), words([garbage] * 4)]
    counts = count_acceptance(trunk, drafts, head, depth_batch(batch, 2, torch.tensor([[0, 0, 1, 1]]).cuda()))
    assert lists(counts) == [[2, 0], [2, 0], [2, 0]]
    assert counts[3, 1] == 0


def test_acceptance_depends_on_the_mask_and_not_on_the_label(head: Head) -> None:
    mask_BS = torch.tensor([[1.0, 1, 0, 1]])  # the label at slot 2 is masked: depth 1 at slot 1, depth 2 at slot 0
    counts = count_acceptance(
        words([0, 1, 2, 0]), [words([1, 2, 0, 0]), words([2, 0, 0, 0])], head, document(1, 4, 2, mask_BS)
    )
    assert lists(counts) == [[2, 1], [2, 0], [2, 0]]  # at slot 1 depth 2 is right, but depth 1 was not judged there


def test_counts_are_the_same_as_a_loop_over_positions(head: Head) -> None:
    rows, slots, depths = 3, 30, 3
    generator = torch.Generator().manual_seed(4)

    def random_words() -> Tensor:
        return torch.randint(0, WORDS, (rows, slots), generator=generator)

    trunk, drafts = random_words(), [random_words() for _ in range(depths)]
    mask_BS = (torch.rand(rows, slots, generator=generator) > 0.1).float()
    expected = [[0.0] * depths for _ in range(3)]
    for row in range(rows):
        for slot in range(slots):
            accepted = True
            for depth in range(1, depths + 1):
                valid = slot + depth < slots and mask_BS[row, slot + depth] > 0
                reached = valid and accepted
                accepted = reached and bool(drafts[depth - 1][row, slot] == trunk[row, slot + depth])
                for count, met in zip(expected, (valid, reached, accepted), strict=True):
                    count[depth - 1] += met
    counts = count_acceptance(
        words(*trunk.tolist()),
        [words(*draft.tolist()) for draft in drafts],
        head,
        document(rows, slots, depths, mask_BS),
    )
    assert lists(counts) == expected
    assert expected[2][2] > 0, "the example never comes to the last depth"


@pytest.mark.parametrize("at_once", [1, 4, 9])
def test_counts_do_not_depend_on_chunks(at_once: int, megatron: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 slots of 2 rows, drafts of 5 of 7 words, two depths that share lookups."""
    rows, slots, vocabulary = 2, 10, 7
    generator = torch.Generator().manual_seed(5)
    weight_VH, trunk, *noise = (
        torch.randn(*shape, generator=generator).cuda() for shape in ((vocabulary, 4), *[(slots, rows, 4)] * 3)
    )
    states = [trunk.roll(-depth, dims=0) + 0.5 * noise[depth - 1] for depth in (1, 2)]
    drafts = DraftVocabulary(torch.tensor([0, 2, 3, 4, 6]).cuda(), vocabulary)
    head = replace(head_of(weight_VH), logit_scale=2.0, draft_vocabulary=drafts)
    batch = document(rows, slots, 2, (torch.rand(rows, slots, generator=generator) > 0.2).float())
    whole = count_acceptance(trunk, states, head, batch)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", at_once * rows * vocabulary * 4)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES_CUDA", at_once * rows * vocabulary * 4)
    monkeypatch.setattr(linear_cross_entropy, "LEAST_POSITIONS", 1)
    torch.testing.assert_close(count_acceptance(trunk, states, head, batch), whole, atol=0, rtol=1e-6)
    assert (whole > 0).all()


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor created."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = (tensor.numel() for tensor in tree_leaves(made) if isinstance(tensor, Tensor))
        self.numbers = max(self.numbers, *sizes, 0)
        return made


@pytest.mark.parametrize("strided", [False, True])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(
    strided: bool, megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation at 32k slots of 131k words would otherwise need four times 17 GB for every GPU's slice.

    Regression: states of a block are strided, and torch repeated the head's weight for each of their positions.
    """
    rows, slots, hidden, vocabulary, at_once, depths = 2, 64, 16, 500, 8, 2
    head = head_of(torch.randn(vocabulary, hidden).cuda())
    trunk = torch.randn(slots, rows, hidden).cuda()
    states = list(torch.randn(slots, depths, rows, hidden).cuda().unbind(1))
    if not strided:
        states = [state_SBH.contiguous() for state_SBH in states]
    batch = document(rows, slots, depths)
    for name in ("CHUNK_BYTES", "CHUNK_BYTES_CUDA"):
        monkeypatch.setattr(linear_cross_entropy, name, at_once * rows * vocabulary * 4)
    monkeypatch.setattr(linear_cross_entropy, "LEAST_POSITIONS", 1)
    with Largest() as largest:
        count_acceptance(trunk, states, head, batch)
    assert largest.numbers == (at_once + depths - 1) * rows * vocabulary < slots * rows * vocabulary


def test_measuring_keeps_no_graph(head: Head) -> None:
    trunk = words([0, 1, 2]).requires_grad_()
    counts = count_acceptance(trunk, [words([1, 2, 0]).requires_grad_()], head, document(1, 3, 1))
    assert not counts.requires_grad
