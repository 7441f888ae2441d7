"""Trees: their rows in the trunk and in the drafter's cache, and what is left after any accepted path."""

from typing import Any

import drafting_single
import pytest
import torch
from drafting_single import (
    first_rows,
    model_of,
    prompts_of,
    read_back,
    run,
    run_every_step_in_python,
    runner_of,
    trained_forward,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_mtp.decoding.draft import Draft, Round, Verdict
from megatron_mtp.decoding.method import Method, config_from, make_method
from megatron_mtp.decoding.proposers import mtp
from megatron_mtp.decoding.proposers.ngram import JacobiWindow, _trie, _window_parents
from megatron_mtp.decoding.proposers.tree import Beam, Tree
from megatron_mtp.decoding.rows import ancestors_of
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.sequences import Sequences
from megatron_mtp.model.trunk_output import AttentionInputs

pytestmark = pytest.mark.usefixtures("megatron")

#     row    0  1  2  3  4  5  6
PARENTS = [0, 0, 1, 2, 2, 5]
PATHS = [[0], [0, 2], [0, 2, 4], [0, 2, 5, 6], [0, 1, 3], [0, 1], [0, 2, 5], [0]]
"""All paths, and one again: a GPU pads batches that are not a power of two."""


def test_ancestors_and_depths_by_hand() -> None:
    ancestors, depth = ancestors_of(torch.tensor([PARENTS]))
    assert depth.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    assert ancestors[0, 6].nonzero().flatten().tolist() == [0, 2, 5, 6]


def prefilled(target: Runner, prompts: list[list[int]]) -> Sequences:
    return drafting_single.prefilled(target, prompts).sequences


def accepting(paths: list[list[int]], rows: int) -> Any:
    """Return a verifier that accepts these rows, whatever the logits, and then token 1."""
    kept_BR = torch.tensor([[row in path for row in range(rows)] for path in paths], device="cuda")
    return lambda *_: Verdict(kept_BR, torch.ones_like(kept_BR[:, 0], dtype=torch.long))


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@torch.inference_mode()
def test_after_any_path_the_cache_is_that_of_the_path_alone(kind: str) -> None:
    """KV for trees: eight sequences, which take all paths; the next logits too."""
    target, twin, prompts = runner_of(kind), model_of(kind), prompts_of(len(PATHS))
    sequences = prefilled(target, prompts)
    config = config_from({"method": "ngram", "num_speculative_tokens": 0})
    method = make_method(target, config, Sampling())
    tokens_BN = torch.arange(10, 10 + len(PARENTS), device="cuda").expand(len(PATHS), -1)
    tree = Draft(tokens_BN, None, torch.tensor(PARENTS, device="cuda").expand(len(PATHS), -1))
    method.verifier = accepting(PATHS, tree.nodes + 1)
    round = Round(Sampling(), sequences.noise, config)
    sequences.accept(tree, method.verifier(target.verify(sequences, tree), tree, round))
    for row, gained in enumerate(read_back(sequences)):
        assert gained == [*(9 + node for node in PATHS[row][1:]), 1]
        sequences.settle(row, gained, ended=False)
    fresh = prefilled(target, [text[:-1] for text in sequences.token_ids])
    for row, text in enumerate(sequences.token_ids):
        ours, theirs = (first_rows(one.memory.cache, one.tables, row, len(text) - 1) for one in (sequences, fresh))
        assert ours[0] is not None
        torch.testing.assert_close(ours, theirs)
    texts = [list(text) for text in sequences.token_ids]
    logits_BRV = target.verify(sequences, Draft(sequences.tokens_BT[:, :0]))
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits_BRV[row, 0], trained_forward(twin, text)[0][-1], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def eagle_reference(twin: GPTModel, text: list[int], path: list[int]) -> Tensor:
    """Return log-probabilities [V] after a draft path, from the module over whole sequences, without a cache."""
    states_SBH = trunk_states(twin, text[:-1])
    tokens = text[1:]
    for step in range(len(path) + 1):
        rows = states_SBH.size(0)
        embedded, mask = embedded_and_mask(twin, tokens[:rows])
        out_SBH = twin.mtp.layers[0](states_SBH, embedded, AttentionInputs(mask, twin.rotary_pos_emb(rows)))
        if step < len(path):
            states_SBH = torch.cat([states_SBH, out_SBH[-1:]])
            tokens = [*tokens, path[step]]
    return twin.output_layer(out_SBH[-1:])[0][0, 0].log_softmax(-1)


@torch.no_grad()
def trunk_states(twin: GPTModel, text: list[int]) -> Tensor:
    """Return h_0 [S, 1, H] from the training forward pass."""
    hidden, mask = embedded_and_mask(twin, text)
    for layer in twin.decoder.layers:
        hidden, _ = layer(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=twin.rotary_pos_emb(len(text)))
    return twin.decoder.final_layernorm(hidden)


def embedded_and_mask(twin: GPTModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return embeddings [S, 1, H], and a mask that is True for rows that are not attended to."""
    rows = len(tokens)
    places_1S = torch.arange(rows, device="cuda").unsqueeze(0)
    mask = torch.ones(1, 1, rows, rows, device="cuda").tril().logical_not()
    return twin.embedding(input_ids=torch.tensor([tokens], device="cuda"), position_ids=places_1S), mask


@torch.inference_mode()
def grown(target: Runner, text: list[int], settings: dict[str, Any]) -> tuple[Draft, Any]:
    """Return the first draft after a text."""
    sequences = prefilled(target, [text[:-1]])
    assert sequences.token_ids == [text]
    method: Method = make_method(target, config_from(settings), Sampling())
    round = Round(Sampling(), sequences.noise, method.config)
    return method.proposer.propose(sequences, round, method.count), method.proposer


@pytest.mark.parametrize("tree", [[1, 1, 1], [2, 2, 2], [3, 1, 2]])
def test_every_node_of_a_tree_is_a_candidate_of_its_own_path(tree: list[int]) -> None:
    """CONF for trees: siblings are the most likely tokens after their path, according to the module without a cache."""
    target, twin = runner_of(), model_of("gqa")
    text = run(target, [[4, 8, 15, 16, 23]], 1, None)[0].token_ids[0]
    draft, _ = grown(target, text, {"method": "mtp_tree", "tree": tree})
    tokens, parents = draft.tokens_BN[0].tolist(), draft.parents()[0].tolist()
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent], token])
    for row in sorted(set(parents)):
        children = [token for token, parent in zip(tokens, parents, strict=True) if parent == row]
        expected = eagle_reference(twin, text, paths[row]).topk(len(children)).indices.tolist()
        assert children == expected


@pytest.mark.parametrize("most", [None, 3])
@torch.inference_mode()
def test_every_row_of_a_tree_or_beam_matches_the_mtp_layer(most: int | None) -> None:
    """CONF for `mtp_tree` (all candidates continued) and `mtp_beam` (the best 3 of a level), every level."""
    target, twin = runner_of(dtype=torch.float32), model_of("gqa", dtype=torch.float32)
    text = run(target, [[4, 8, 15, 16, 23]], 1, None)[0].token_ids[0]
    sequences = prefilled(target, [text[:-1]])
    method = make_method(target, config_from({"method": "mtp_tree"}), Sampling())
    assert isinstance(method.proposer, Tree)
    round = Round(Sampling(), sequences.noise, method.config)
    paths: list[list[int]] = [[]]
    candidates = paths
    for level in method.proposer.grow(sequences, round, [3, 2, 2], most, drawn=False):
        if level.taken_BF is not None:
            paths = [candidates[place] for place in level.taken_BF[0].tolist()]
        for row, path in enumerate(paths):
            said_V = level.probs_BFV[0, row].log()
            torch.testing.assert_close(said_V, eagle_reference(twin, text, path), rtol=1e-5, atol=1e-5)
        pairs = zip(level.rows_BN[0].tolist(), level.tokens_BN[0].tolist(), strict=True)
        candidates = [[*paths[row], token] for row, token in pairs]


def test_drafts_of_a_reused_mtp_layer_match_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONF for `mtp_eagle`: the first position is depth 1 of training, later ones the module on its own states."""
    target, twin = runner_of(dtype=torch.float32), model_of("gqa", dtype=torch.float32)
    text = run(target, [[4, 8, 15, 16, 23]], 1, None)[0].token_ids[0]
    said, real = list[Tensor](), mtp.pick

    def noting(logits_BV: Tensor, round: Round, position: int) -> Any:
        said.append(logits_BV[0])
        return real(logits_BV, round, position)

    run_every_step_in_python(monkeypatch)
    monkeypatch.setattr(mtp, "pick", noting)
    draft, _ = grown(target, text, {"method": "mtp_eagle", "num_speculative_tokens": 5})
    torch.testing.assert_close(said[0], trained_forward(twin, text)[1][0][len(text) - 2], rtol=1e-5, atol=1e-5)
    path = draft.tokens_BN[0].tolist()
    for position, logits_V in enumerate(said):
        expected_V = eagle_reference(twin, text, path[:position])
        torch.testing.assert_close(logits_V.log_softmax(-1), expected_V, rtol=1e-5, atol=1e-5)


def test_a_dynamic_tree_is_the_likeliest_nodes_of_the_whole() -> None:
    target, twin = runner_of(), model_of("gqa")
    text = run(target, [[4, 8, 15]], 1, None)[0].token_ids[0]
    settings = {"method": "mtp_tree", "tree_nodes": 6, "beam_width": 3, "num_speculative_tokens": 2}
    draft, _ = grown(target, text, settings)
    scored: dict[tuple[int, ...], float] = {}
    first = eagle_reference(twin, text, []).topk(3)
    for score, token in zip(first.values.tolist(), first.indices.tolist(), strict=True):
        scored[(token,)] = score
        after = eagle_reference(twin, text, [token]).topk(3)
        for further, child in zip(after.values.tolist(), after.indices.tolist(), strict=True):
            scored[token, child] = score + further
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens_BN[0].tolist(), draft.parents()[0].tolist(), strict=True):
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == set(sorted(scored, key=lambda path: -scored[path])[:6])


BEAM = {"method": "mtp_beam", "beam_width": 8, "num_speculative_tokens": 2, "verifier": "joint"}


def test_a_beam_finds_a_likelier_pair_than_a_greedy_chain() -> None:
    """Of the eight most likely first tokens, the one whose best continuation gives the most likely pair."""
    target, twin = runner_of(), model_of("gqa")
    text = run(target, [[4, 8, 15]], 1, None)[0].token_ids[0]
    draft, proposer = grown(target, text, BEAM)
    assert isinstance(proposer, Beam)
    first = eagle_reference(twin, text, [])
    scores = {
        (token, child): first[token].item() + after.max().item()
        for token in first.topk(8).indices.tolist()
        for after in [eagle_reference(twin, text, [token])]
        for child in [int(after.argmax())]
    }
    assert tuple(draft.tokens_BN[0].tolist()) == max(scores, key=scores.__getitem__)
    assert draft.probs_BNV is not None
    torch.testing.assert_close(draft.probs_BNV[0, 0].log(), first)


@torch.inference_mode()
def test_sampled_trees_carry_the_q_of_their_siblings() -> None:
    target = runner_of()
    sequences = prefilled(target, prompts_of(2))
    config = config_from({"method": "mtp_tree", "tree": [2, 2], "verifier": "spectr"})
    method = make_method(target, config, Sampling(1.0))
    assert isinstance(method.proposer, Tree)
    draft = method.proposer.propose(sequences, Round(Sampling(1.0), sequences.noise, config), 2)
    assert draft.probs_BNV is not None
    assert torch.equal(draft.probs_BNV[:, 2], draft.probs_BNV[:, 3])
    assert not torch.equal(draft.probs_BNV[:, 2], draft.probs_BNV[:, 4])


def test_a_window_makes_ngrams() -> None:
    #   levels a: 5 6, b: 7 8, and the target's words 9 and 4: n-grams (5, 7, 9) and (6, 8, 4)
    window = JacobiWindow([[5, 6], [7, 8]], found=(3, [9, 4]))
    repeated = JacobiWindow([[5, 6], [7, 8]], found=(3, [9, 4]))
    repeated.learn(3, guesses=2)  # no token has arrived since
    assert (repeated.levels, repeated.pool, repeated.found) == ([[5, 6], [7, 8]], {}, None)
    window.learn(4, guesses=2)
    assert window.levels == [[7, 8], [9, 4]]
    assert {first: list(grams) for first, grams in window.pool.items()} == {5: [(7, 9)], 6: [(8, 4)]}
    assert _window_parents(2, 2) == [0, 1, 1, 2]
    assert _trie([(1, 2), (1, 3), (4, 2)], before=4) == ([1, 2, 3, 4, 2], [0, 5, 5, 0, 8])
