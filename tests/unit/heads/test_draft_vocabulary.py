"""A model whose MTP layers draft only some tokens: its checkpoint, its loss, and its behavior in the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_single import model_of, p_value_of, prompts_of, run, run_every_step_in_python
from megatron.core import dist_checkpointing
from megatron_single import VOCABULARY, forward_ours, make_batch, our_model, randomize
from tiers import tiered

from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.losses.mtp_loss import mtp_loss, trunk_states
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY
from megatron_mtp.megatron.checkpoint.reader import stored_draft_vocabulary
from megatron_mtp.model.draft_vocabulary import DraftVocabulary, tokens_of_file

pytestmark = pytest.mark.usefixtures("megatron")

DRAFTED = [2, 3, 5, 17, 40, 41, 77, 95]


def test_draft_rows_of_two_ranks_match_a_hand_computed_example() -> None:
    """The example of model/draft_vocabulary.py: vocabulary 0 .. 7, draft vocabulary 1 2 6."""
    first, second = (DraftVocabulary(torch.tensor([1, 2, 6]), 4, 2, rank) for rank in (0, 1))
    assert (first.rows_K.tolist(), first.first) == ([1, 2], 0)
    assert (second.rows_K.tolist(), second.first) == ([2], 2)
    assert first.index_V.tolist() == second.index_V.tolist() == [-1, 0, 1, -1, -1, -1, 2, -1]
    assert second.drafted_W.tolist() == [False, False, True, False]
    assert first.size == second.size == 3


@pytest.mark.parametrize("tokens", [[6, 1, 2], [1, 1, 2]])
def test_ids_that_do_not_ascend_are_refused(tokens: list[int]) -> None:
    """Draft indices count rows of the head in order: in another order an index would be another token."""
    with pytest.raises(ValueError, match="do not ascend"):
        DraftVocabulary(torch.tensor(tokens), 8)


@pytest.mark.parametrize("lacks", [False, True], ids=["stored", "not yet stored"])
def test_the_map_is_saved_with_the_depths_and_loaded(lacks: bool, tmp_path: Path) -> None:
    saved, loading = our_model(2, drafted=None if lacks else DRAFTED), our_model(2, drafted=DRAFTED)
    randomize(loading, seed=3)
    dist_checkpointing.save({"model": saved.sharded_state_dict()}, str(tmp_path))
    stored = stored_draft_vocabulary(tmp_path)
    assert (None if stored is None else stored.tolist()) == (None if lacks else DRAFTED)

    loading.mtp.absent = ("draft_vocabulary",) if lacks else ()
    state = dist_checkpointing.load({"model": loading.sharded_state_dict()}, str(tmp_path))["model"]
    assert (DRAFT_VOCABULARY in state) != lacks
    loading.load_state_dict(state)
    assert loading.mtp.draft_vocabulary is not None
    assert loading.mtp.draft_vocabulary.tolist() == DRAFTED
    for ours, theirs in zip(loading.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert DRAFT_VOCABULARY in loading.sharded_state_dict()


def test_undrafted_rows_get_gradients_only_from_the_trunk_loss() -> None:
    model, batch = our_model(2, drafted=DRAFTED), make_batch(2)
    hidden_SBH = trunk_states(model, batch["tokens"])
    made = mtp_loss(hidden_SBH, model, batch["tokens"], batch["labels"], batch["loss_mask"])
    made.loss.backward()
    gradient_VH = model.output_layer.weight.grad
    assert gradient_VH is not None
    assert gradient_VH.abs().sum(1).nonzero()[:, 0].tolist() == DRAFTED
    output = forward_ours(model, batch)
    assert made.depth_means.tolist() == pytest.approx(
        [float(sums.total / sums.tokens) for sums in output.heads[0].depths]
    )


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp": ("gqa", {"method": "mtp", "num_speculative_tokens": 3}),
    "tied": ("mha-tied-layernorm", {"method": "mtp", "num_speculative_tokens": 3}),
    "mtp_eagle": ("gqa", {"method": "mtp_eagle", "num_speculative_tokens": 4}),
    "mtp_tree": ("gqa", {"method": "mtp_tree", "tree": [20, 2]}),
    "mtp_tree-dynamic": ("gqa", {"method": "mtp_tree", "tree_nodes": 12, "num_speculative_tokens": 4}),
    "mtp_beam": ("gqa", {"method": "mtp_beam", "num_speculative_tokens": 3}),
    "parallel_heads": ("parallel", {"method": "parallel_heads", "num_speculative_tokens": 3}),
}


@pytest.mark.parametrize("name", METHODS)
def test_drafts_use_the_draft_vocabulary_and_output_is_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, settings = METHODS[name]
    target, prompts = Runner(model_of(kind, drafted=DRAFTED)), prompts_of(4)
    drafts: list[int] = []
    observe = type(run_method(target, settings)).observe

    def noting(self: Any, sequences: Any, draft: Any, logits_BRV: Any) -> None:
        drafts.extend(draft.tokens_BN[draft.valid()].tolist())
        observe(self, sequences, draft, logits_BRV)

    run_every_step_in_python(monkeypatch)
    monkeypatch.setattr(type(run_method(target, settings)), "observe", noting)
    answers = generate(Runner(model_of(kind)), prompts, 40).token_ids
    assert generate(target, prompts, 40, speculative=settings).token_ids == answers
    assert len(set(drafts)) > 1
    assert set(drafts) <= set(DRAFTED)
    assert not {token for answer in answers for token in answer} <= set(DRAFTED)


def run_method(target: Runner, settings: dict[str, Any]) -> Any:
    return run(target, [[1]], 2, settings)[1].proposer


SAMPLED: dict[str, dict[str, Any]] = {
    "mtp-rejection": {"method": "mtp", "num_speculative_tokens": 2},
    "mtp-block": {"method": "mtp", "num_speculative_tokens": 2, "verifier": "block"},
    "tree-specinfer": {"method": "mtp_tree", "tree": [2, 2], "verifier": "specinfer"},
    "tree-spectr": {"method": "mtp_tree", "tree": [2, 2], "verifier": "spectr"},
}


@pytest.mark.parametrize("name", tiered(SAMPLED, ("mtp-rejection",)))
def test_sampled_texts_keep_the_targets_distribution(name: str) -> None:
    """CHI: two of the three tokens are drafted, and all three occur with the target's frequencies."""
    assert p_value_of(SAMPLED[name], drafted=[0, 2]) > 0.001


def test_a_draft_head_is_a_subset_of_the_head_rows() -> None:
    target = Runner(model_of("gqa", drafted=DRAFTED), vocab_size=90)
    states_SBH = torch.randn(3, 2, target.hidden_size, generator=torch.Generator().manual_seed(1)).to(
        "cuda", target.dtype
    )
    whole_BRV, drafts_BRV = target.logits(states_SBH), target.draft_logits(states_SBH)
    inside = torch.isin(torch.arange(90), torch.tensor(DRAFTED)).cuda()
    torch.testing.assert_close(drafts_BRV[..., inside], whole_BRV[..., inside])
    assert (drafts_BRV[..., ~inside] == -torch.inf).all()
    assert (target.drafted, Runner(model_of("gqa")).drafted) == (len(DRAFTED) - 1, VOCABULARY)
    assert Sampling(1.0).probabilities(drafts_BRV)[..., ~inside].sum() == 0


def test_a_file_of_ids_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("7\n2\n\n5\n")
    assert tokens_of_file(tmp_path / "ids.txt", 8) == [2, 5, 7]


@pytest.mark.parametrize("listed", [[7, 2, 5], torch.tensor([7, 2, 5]), torch.tensor([7, 2, 5], dtype=torch.int32)])
def test_a_token_map_of_fr_spec_is_read(listed: object, tmp_path: Path) -> None:
    """FR-Spec publishes Python lists, saved by torch."""
    torch.save(listed, tmp_path / "freq.pt")
    assert tokens_of_file(tmp_path / "freq.pt", 8) == [2, 5, 7]


def test_a_pickle_with_code_is_not_opened(tmp_path: Path) -> None:
    torch.save(Path, tmp_path / "freq.pt")
    with pytest.raises(ValueError, match=r"^the list is .*freq.pt, .* not a list of token ids"):
        tokens_of_file(tmp_path / "freq.pt", 8, "the list")
