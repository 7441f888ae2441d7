"""Drafters on trunks of all kinds, with their own heads and rotary angles: they draft as trained, losslessly."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting_single import VOCABULARY, Recorder, p_value_of, prompts_of, run, trained_forward
from hybrid_single import drafting_hybrid
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron_single import LATENT, our_model
from tiers import tiered

from megatron_mtp.decoding.runner import Runner
from megatron_mtp.model.attachment import attached_of
from megatron_mtp.spec.kinds import DRAFTERS as KINDS

pytestmark = pytest.mark.usefixtures("megatron")

STEPS = 3
OWN: dict[str, Any] = {
    "drafter_num_attention_heads": 6,
    "drafter_num_query_groups": 3,
    "drafter_kv_channels": 4,
    "drafter_norm_epsilon": 1e-3,
    "drafter_rotary_base": 500.0,
    "drafter_rope_scaling": json.dumps(
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 4}
    ),
}
"""Sizes that no trunk here has; 24 channels in all heads are not its hidden size."""

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"drafter": "eagle3", "drafter_layers": (1, 2, 3)},
    "dflash": {"drafter": "dflash", "drafter_layers": (1, 3), "drafter_num_layers": 2, "drafter_mask_token": 7},
    "dspark": {
        "drafter": "dspark",
        "drafter_layers": (1, 3),
        "drafter_num_layers": 2,
        "drafter_mask_token": 7,
        "drafter_markov_rank": 6,
        "drafter_idle_rows": 1,
    },
    "dflash2": {
        "drafter": "dflash2",
        "drafter_layers": (1, 3),
        "drafter_num_layers": 2,
        "drafter_mask_token": 7,
        "drafter_markov_rank": 6,
    },
    "domino": {
        "drafter": "domino",
        "drafter_layers": (1, 3),
        "drafter_num_layers": 2,
        "drafter_mask_token": 7,
        "drafter_markov_rank": 6,
        "drafter_gru_size": 10,
    },
    "peagle": {"drafter": "peagle", "drafter_layers": (1, 2, 3), "drafter_num_layers": 2, "drafter_mask_token": 7},
}


def gpt(settings: dict[str, Any], dtype: torch.dtype, **changes: Any) -> LanguageModule:
    own = dict(settings)
    model = our_model(STEPS, num_layers=4, drafter_layers=own.pop("drafter_layers"), drafter=own, **changes)
    model.max_sequence_length = 160
    return model.to(dtype).eval()


def hybrid(pattern: str) -> Callable[..., LanguageModule]:
    def make(settings: dict[str, Any], dtype: torch.dtype) -> LanguageModule:
        passes = {"mtp_num_layers": STEPS, "mtp_use_repeated_layer": True}
        return drafting_hybrid(pattern, dtype, settings={**settings, "mtp_train_only": True}, **passes)

    return make


WINDOWED: dict[str, Any] = {"window_size": (5, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}
"""Windows of six positions in every other layer, and sinks in all."""

TRUNKS: dict[str, Callable[..., LanguageModule]] = {
    "latent": lambda settings, dtype: gpt(settings, dtype, **LATENT),
    "windows and sinks": lambda settings, dtype: gpt(settings, dtype, **WINDOWED),
    "pairs of delta rule and MLP": hybrid("G-G-*-G-"),
    "Mamba": hybrid("M*EM"),
}

WINDOWS: dict[str, dict[str, Any]] = {
    "window": {"drafter_window_size": 5},
    "window below the drafts": {"drafter_window_size": 2},
    "sinks": {"drafter_softmax_type": "learnable"},
    "causal": {"drafter_causal": 1},
    "causal windows with sinks": {
        "drafter_window_size": 4,
        "drafter_causal": 1,
        "drafter_softmax_type": "learnable",
        "drafter_full_layers": [2],
    },
    "windows beside a full layer": {"drafter_window_size": 4, "drafter_full_layers": [2]},
    "causal windows beside a full layer": {
        "drafter_window_size": 4,
        "drafter_full_layers": [1],
        "drafter_causal": 2,
    },
}
"""Windows on a trunk without windows; drafts are three, and blocks of four rows."""

WINDOWED_CASES = [
    (name, kind)
    for name, given in WINDOWS.items()
    for kind in DRAFTERS
    if {*given} <= {"drafter_window_size", *KINDS[kind].settings}
]
LATENTS = {
    "drafter_multi_latent_attention": [10, 12, 6, 4, 6],
    "drafter_num_attention_heads": 6,
    "drafter_rope_scaling": json.dumps(
        {
            "rope_type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 16,
            "beta_fast": 4,
            "mscale_all_dim": 0.8,
        }
    ),
}
"""Latent attention, on a trunk with grouped queries."""
WINDOWS |= {
    "norm before the residual": {"drafter_norm_before_residual": 1},
    "latents": LATENTS,
    "latents without a rank of queries": {"drafter_multi_latent_attention": [0, 12, 6, 4, 6]},
    "latents in a window": {**LATENTS, "drafter_window_size": 2},
}
WINDOWED_CASES += [("norm before the residual", "peagle")]
WINDOWED_CASES += [(name, "eagle3") for name in WINDOWS if name.startswith(("norm", "latents"))]
WINDOWED_FIRST = (
    ("window below the drafts", "eagle3"),
    ("causal windows with sinks", "dflash"),
    ("window", "dspark"),
    ("latents", "eagle3"),
)

CASES = [(trunk, kind) for trunk in TRUNKS for kind in DRAFTERS]
FIRST = (
    ("latent", "eagle3"),
    ("windows and sinks", "dspark"),
    ("pairs of delta rule and MLP", "dspark"),
    ("Mamba", "dflash"),
)


def drafting_model(trunk: str, kind: str, dtype: torch.dtype = torch.float64) -> LanguageModule:
    return TRUNKS[trunk]({**DRAFTERS[kind], **OWN}, dtype)


def check_drafts(make: Callable[[], LanguageModule], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ID and CONF along a sequence, after accepted and rejected drafts."""
    target, twin = Runner(make()), make()
    prompts, settings = prompts_of(3), {"method": kind, "num_speculative_tokens": STEPS}
    answers = run(target, prompts, 60, None)[0].token_ids
    assert run(target, prompts, 40, settings)[0].token_ids == [
        text[: len(prompt) + 40] for text, prompt in zip(answers, prompts, strict=True)
    ]
    recorder = Recorder(monkeypatch)
    run(target, prompts[:1], 40, settings, answers[:1])
    drafts = {(length, position): logits_BV[0] for (length,), position, logits_BV in recorder.drafts}
    steps = [length for length, position in drafts if position == STEPS - 1]
    assert len(set(torch.tensor(steps).diff().tolist())) > 2
    for length in steps:
        drafted = [drafts[length, position] for position in range(STEPS)]
        longer = [*answers[0][:length], *(int(logits_V.argmax()) for logits_V in drafted)]
        for depth, trained_SV in enumerate(trained_forward(twin, longer)[1]):
            torch.testing.assert_close(drafted[depth], trained_SV[length - 2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("trunk", "kind"), tiered(CASES, FIRST))
def test_drafts_match_the_training_forward_and_change_no_token(
    trunk: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafts(lambda: drafting_model(trunk, kind), kind, monkeypatch)


@pytest.mark.parametrize(("name", "kind"), tiered(WINDOWED_CASES, WINDOWED_FIRST))
def test_a_drafter_with_windows_or_sinks_drafts_as_it_was_trained(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**DRAFTERS[kind], **WINDOWS[name]}
    check_drafts(lambda: gpt(settings, torch.float64), kind, monkeypatch)


@pytest.mark.matrix
def test_a_drafter_with_its_trunks_latent_attention_drafts_as_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**DRAFTERS["eagle3"], "drafter_multi_latent_attention": []}
    check_drafts(lambda: gpt(settings, torch.float64, **LATENT), "eagle3", monkeypatch)


@pytest.mark.matrix
@pytest.mark.parametrize(("trunk", "kind"), CASES)
def test_sampled_texts_have_the_targets_distribution(trunk: str, kind: str) -> None:
    """CHI, with rejection sampling."""
    pair = drafting_model(trunk, kind, torch.float32), drafting_model(trunk, kind)
    assert p_value_of({"method": kind}, pair=pair) > 0.001


def test_layers_of_pairs_are_counted_as_in_the_folder() -> None:
    """Layer 3 of G-G-*-G- ends with Megatron's sixth; M*EM has four layers."""
    assert attached_of(drafting_model("pairs of delta rule and MLP", "eagle3")).drafter.layers == (2, 4, 6)
    assert attached_of(drafting_model("Mamba", "eagle3")).drafter.layers == (1, 2, 3)
    assert attached_of(drafting_model("latent", "eagle3")).drafter.vocabulary == VOCABULARY
