"""spec/head.py: every drafter setting has a value, and what a checkpoint stores of them gives the same drafter."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mtp.spec.attention import AttentionSizes
from megatron_mtp.spec.head import HeadSpec, TrunkSpec
from megatron_mtp.spec.kinds import DRAFTERS, readers_of

TRUNK = TrunkSpec(24, 100, 64, 80, AttentionSizes(8, 2, 8, 1e-6, 1e4))
NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "drafter_steps": st.integers(1, 15),
    "drafter_layers": st.lists(st.integers(1, 23), min_size=3, max_size=3, unique=True).map(sorted),
    "drafter_ffn_hidden_size": st.integers(1, 200),
    "drafter_num_attention_heads": st.sampled_from([2, 4, 8]),
    "drafter_kv_channels": st.sampled_from([2, 8, 16]),
    "drafter_norm_epsilon": st.sampled_from([1e-6, 1e-5]),
    "drafter_rotary_base": st.sampled_from([1e4, 1e6]),
    "drafter_rope_scaling": st.just('{"rope_type": "linear", "factor": 2}'),
    "drafter_window_size": st.integers(1, 64),
    "drafter_num_layers": st.integers(1, 6),
    "drafter_mask_token": st.integers(0, 99),
    "drafter_markov_rank": st.integers(1, 300),
    "drafter_idle_rows": st.sampled_from([0, 1]),
    "drafter_causal": st.sampled_from([0, 1]),
    "drafter_softmax_type": st.sampled_from(["vanilla", "learnable"]),
    "drafter_norm_before_residual": st.sampled_from([0, 1]),
}


@st.composite
def drafters(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a kind, and some settings that it reads."""
    kind = draw(st.sampled_from(sorted(DRAFTERS)))
    read = [name for name in NUMBERS if kind in readers_of(name)]
    return kind, {name: draw(st.none() | NUMBERS[name]) for name in read}


@given(drafters())
def test_stored_settings_give_the_same_drafter(drawn: tuple[str, dict[str, Any]]) -> None:
    kind, settings = drawn
    made = HeadSpec.resolve(kind, settings, TRUNK)
    kept = made.arguments(TRUNK)
    assert HeadSpec.resolve(kind, kept, TRUNK) == made
    for name, value in settings.items():  # given settings are stored, unless they equal the default
        without = HeadSpec.resolve(kind, {**settings, name: None}, TRUNK)
        assert kept[name] == value or without == made or name == "drafter_layers"


@pytest.mark.parametrize(
    ("kind", "layers", "depth", "mask", "rank", "idle"),
    [
        ("eagle", (), 1, None, None, 0),
        ("eagle3", (2, 12, 21), 1, None, None, 0),
        ("dflash", (2, 7, 12, 17, 22), 5, 99, None, 1),
        ("dspark", (2, 7, 12, 17, 22), 5, 99, 256, 0),
        ("dflash2", (2, 7, 12, 17, 22), 5, 99, 256, 1),
        ("domino", (2, 7, 12, 17, 22), 5, 99, 256, 0),
        ("peagle", (2, 12, 21), 4, 99, None, 0),
    ],
)
def test_settings_that_are_not_given_have_defaults(
    kind: str, layers: tuple[int, ...], depth: int, mask: int | None, rank: int | None, idle: int
) -> None:
    made = HeadSpec.resolve(kind, {}, TRUNK)
    assert (made.drafts, made.layers, made.depth, made.ffn, made.vocabulary) == (7, layers, depth, 80, 100)
    assert (made.mask_token, made.idle_rows, made.windows) == (mask, idle, (None,) * depth)
    assert made.own.get("drafter_markov_rank") == rank
    assert made.attention == TRUNK.attention
    assert DRAFTERS[kind].blocks({}) == (512 if depth > 1 else None)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("dflesh", {}, "--drafter is 'dflesh'; choose one of"),
        ("eagle3", {"drafter_layers": [2, 12]}, "give 3 rising numbers from 1 to 23"),
        ("dflash", {"drafter_mask_token": 100}, "--drafter-mask-token is 100, and the vocabulary has 100 tokens"),
        ("dflash", {"drafter_full_layers": [1]}, "--drafter-full-layers is 1, of 5 layers with --drafter-window-size"),
        ("eagle3", {"drafter_num_attention_heads": 3}, "3 heads of 8 channels in 2 groups"),
    ],
)
def test_settings_that_the_trunk_does_not_allow_are_rejected(kind: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HeadSpec.resolve(kind, settings, TRUNK)


def test_a_trunk_with_too_few_layers_for_eagle3_is_rejected() -> None:
    with pytest.raises(ValueError, match="give a trunk of at least 4 layers"):
        HeadSpec.resolve("eagle3", {}, replace(TRUNK, layers=3))


@pytest.mark.parametrize(("kind", "rows"), [("dspark", 1), ("domino", 1), ("dflash", 1)])
def test_given_idle_rows_replace_the_default_rows(kind: str, rows: int) -> None:
    assert HeadSpec.resolve(kind, {"drafter_idle_rows": rows}, TRUNK).idle_rows == rows
