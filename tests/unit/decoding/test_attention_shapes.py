"""Attention inputs over 100 tokens of every method: few shapes, and no slot with NaN.

On a GPU, attention may plan, and a CUDA graph must be captured, for every shape of queries and keys.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from drafting_single import kind_for, model_of, prompts_of, run, runner_of, want_few_shapes
from tiers import tiered
from torch import Tensor

from megatron_mtp.decoding import cached_attention
from megatron_mtp.decoding.config import PROPOSERS
from megatron_mtp.decoding.runner import Runner

pytestmark = pytest.mark.usefixtures("megatron")

MOST_SHAPES = 8
NEW_TOKENS = 100

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp_eagle": {"method": "mtp_eagle", "num_speculative_tokens": 5},
    "mtp_tree": {"method": "mtp_tree", "tree": [3, 2, 1]},
    "mtp_tree-dynamic": {"method": "mtp_tree", "tree_nodes": 12, "num_speculative_tokens": 4},
    "mtp_beam": {"method": "mtp_beam", "num_speculative_tokens": 3},
    "parallel_heads": {"method": "parallel_heads"},
    "draft_model": {"method": "draft_model", "model": "-", "num_speculative_tokens": 3},
    "draft_model_tree": {"method": "draft_model_tree", "model": "-", "tree": [3, 2, 1]},
    "exhaustive": {"method": "exhaustive", "num_speculative_tokens": 1},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "lookahead": {"method": "lookahead"},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 5},
    "eagle3_tree": {"method": "eagle3_tree", "tree": [3, 2, 1]},
    "eagle": {"method": "eagle", "num_speculative_tokens": 5},
    "eagle_tree": {"method": "eagle_tree", "tree": [3, 2, 1]},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "dflash2": {"method": "dflash2"},
    "domino": {"method": "domino"},
    "peagle": {"method": "peagle", "num_speculative_tokens": 5},
}
every_method = pytest.mark.parametrize("name", tiered(METHODS, ("plain", "mtp_tree", "dspark", "draft_model")))


class Watched:
    """Torch's attention with recorded shapes of queries and keys."""

    def __init__(self) -> None:
        self.shapes: set[tuple[torch.Size, torch.Size]] = set()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        self.shapes.add((query.shape, key.shape))
        assert key.isfinite().all()
        assert value.isfinite().all()
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **more)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    monkeypatch.setattr(cached_attention, "scaled_dot_product_attention", found)
    return found


def test_no_method_is_left_out() -> None:
    assert {settings["method"] for settings in METHODS.values()} == set(PROPOSERS)


def drafts_by_chance(name: str, dtype: torch.dtype, prompts: list[list[int]], watched: Watched) -> None:
    """Check that outputs match plain decoding, and record shapes while drafting."""
    target = runner_of(kind_for(name), dtype=dtype)
    drafter = Runner(model_of("mha-tied-layernorm", dtype=dtype))
    answers = run(target, prompts, NEW_TOKENS, None)[0].token_ids
    watched.shapes.clear()
    made, _ = run(target, prompts, NEW_TOKENS, METHODS[name], answers, drafter=drafter)
    assert made.token_ids == answers


@every_method
@pytest.mark.parametrize("longest", tiered([8, 50], (50,)))
def test_a_hundred_tokens_have_few_shapes(
    name: str, longest: int, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From short prompts, and from some that outgrow their window; prompts, drafts and verification together.

    Drafts are right or wrong at random, so that the drafter has to catch up on between one and K + 1 tokens.
    """
    want_few_shapes(monkeypatch)
    drafts_by_chance(name, torch.float64, prompts_of(8, longest)[-2:], watched)
    by_texts = Counter(query[0] for query, _ in watched.shapes)  # the longer one continues alone
    assert 1 < max(by_texts.values()) <= MOST_SHAPES, sorted(watched.shapes)


@every_method
@pytest.mark.parametrize("few", tiered([True, False], (True,)))
def test_texts_in_float32_are_those_of_plain_decoding(
    name: str, few: bool, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU's windows, which are padded more, and with a CPU's."""
    if few:
        want_few_shapes(monkeypatch)
    drafts_by_chance(name, torch.float32, prompts_of(8, 50)[-2:], watched)
