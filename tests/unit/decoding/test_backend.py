"""An external backend runs the models that it supports; the trained modules run all others."""

from typing import Any

import pytest
import torch
from drafting_single import model_of, prompts_of
from torch import Tensor

from megatron_mtp.decoding import backend
from megatron_mtp.decoding.backend import BACKENDS, Modules, Unfit, in_tensors
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sequences import Sequences

pytestmark = pytest.mark.usefixtures("megatron")

MTP = {"method": "mtp", "num_speculative_tokens": 3}
EAGLE = {"method": "mtp_eagle", "num_speculative_tokens": 4}


class Half(Modules):
    """Supports float32 models; drafts all tokens at once, greedily, with the core's methods."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if self.model.embedding.word_embeddings.weight.dtype != torch.float32:
            raise Unfit
        self.calls: list[int] = []

    def product(self, weight: Tensor) -> Any:
        self.__dict__.setdefault("multiplied", []).append(tuple(weight.shape))
        return super().product(weight)

    def run(self, number: int, *given: Any) -> Tensor:
        self.calls.append(number)
        return super().run(number, *given)

    def draft(self, sequences: Sequences, passes: Any) -> Tensor:
        states_SBH = None
        assert self.head_VH is not None
        in_order, drafted_BN = in_tensors(sequences, passes)
        for place, one in enumerate(in_order):
            given_SBH = one.given_SBH
            if given_SBH is None:
                assert states_SBH is not None
                given_SBH = states_SBH[-one.tokens_BR.size(1) :]
            number = 1 + (one.depth - 1) % (len(self.stacks) - 1)
            states_SBH = super().run(number, one.tokens_BR, given_SBH, one.rows, one.cache)
            drafted_BN[:, place] = (states_SBH[-1] @ self.head_VH.T).argmax(dim=-1)
        return drafted_BN


def with_half(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32, kind: str = "gqa") -> Runner:
    monkeypatch.setattr(backend, "BACKENDS", {"half": Half, "modules": Modules})
    return Runner(model_of(kind, dtype=dtype))


def plain(monkeypatch: pytest.MonkeyPatch, kind: str = "gqa") -> Runner:
    monkeypatch.setattr(backend, "BACKENDS", {"modules": Modules})
    return Runner(model_of(kind, dtype=torch.float32))


def test_the_first_one_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(with_half(monkeypatch).backend) is Half
    assert type(with_half(monkeypatch, torch.float64).backend) is Modules


def test_the_default_backend_table_has_our_modules() -> None:
    assert BACKENDS["modules"] is Modules
    assert BACKENDS.group == "megatron_mtp.backends"


@pytest.mark.parametrize("speculative", [None, MTP, EAGLE])
def test_drafts_in_one_call_match_drafts_one_by_one(speculative: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, right = with_half(monkeypatch), plain(monkeypatch)
    texts = [generate(one, prompts_of(3), 20, speculative=speculative) for one in (ours, right)]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].stats.accepted == texts[1].stats.accepted
    assert isinstance(ours.backend, Half)
    assert {*ours.backend.calls} == {0}, "all MTP layers ran in drafts at once"


def test_a_backend_computes_all_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk's two layers and three MTP layers with 4 each; 3 that merge; and the head."""
    ours = with_half(monkeypatch)
    assert len(vars(ours.backend)["multiplied"]) == 5 * 4 + 3 + 1


@pytest.mark.parametrize("kind", ["moe", "mha-tied-layernorm", "parallel"])
def test_other_layers_run_through_it_as_well(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, right = with_half(monkeypatch, kind=kind), plain(monkeypatch, kind)
    method = "parallel_heads" if kind == "parallel" else "mtp"
    texts = [generate(one, prompts_of(2), 12, speculative={"method": method}).token_ids for one in (ours, right)]
    assert texts[0] == texts[1]
