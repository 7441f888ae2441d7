"""Drafting settings: what is accepted, and the error messages for bad input."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_mtp.decoding.config import COMMON_KEYS, NO_SETTINGS, PROPOSERS, VERIFIERS, SpeculativeConfig, keys
from megatron_mtp.decoding.method import _with_settings, config_from, is_lossless, parse_config
from megatron_mtp.decoding.proposers.ngram import NgramSettings
from megatron_mtp.decoding.proposers.tree import TreeSettings
from megatron_mtp.decoding.verifiers import JointSettings
from megatron_mtp.spec import registry


def test_vllms_config_format_is_parsed() -> None:
    config = parse_config('{"method": "mtp", "num_speculative_tokens": 2}')
    assert config == SpeculativeConfig("mtp", 2)
    assert parse_config('{"method": "mtp_tree", "tree": [4, 2]}').settings == TreeSettings(tree=(4, 2))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ('{"method": "mtp", "num_speculative_tokens": 1, "disable_padded_drafter_batch": false}', {"method": "mtp"}),
        ('{"method": "deepseek_mtp", "num_speculative_tokens": 1}', {"method": "mtp"}),
        ('{"method": "qwen3_5_mtp", "num_speculative_tokens": 1, "quantization": null}', {"method": "mtp"}),
        (
            '{"method": "mtp_eagle", "num_speculative_tokens": 1, "rejection_sample_method": "block"}',
            {"method": "mtp_eagle", "verifier": "block"},
        ),
        (
            '{"method": "mtp", "num_speculative_tokens": 1, "rejection_sample_method": "standard", '
            '"draft_sample_method": "probabilistic"}',
            {"method": "mtp"},
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 2, "prompt_lookup_max": 5}',
            {"method": "ngram", "ngram_min": 2, "ngram_max": 5},
        ),
    ],
)
def test_vllms_method_names_map_to_ours(given: str, meant: dict[str, Any]) -> None:
    assert parse_config(given) == config_from(meant | {"num_speculative_tokens": 1})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rejection_sample_method", "synthetic", "give 'standard' or 'block' or null"),
        ("enforce_eager", True, "enforce_eager is True, which is vLLM's; give false or null, or leave it out."),
        ("disable_padded_drafter_batch", 0, "give false or true or null"),
        ("draft_tensor_parallel_size", 2, "give 1 or null"),
        ("quantization", "fp8", "give null"),
    ],
)
def test_unsupported_keys_of_vllm_are_rejected(key: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match="speculative config: " + key) as error:
        config_from({"method": "mtp", key: value})
    assert said in str(error.value)


def test_one_setting_has_one_name() -> None:
    with pytest.raises(ValueError, match="rejection_sample_method and verifier are the same setting"):
        config_from({"method": "mtp", "rejection_sample_method": "block", "verifier": "block"})


def test_omitted_config_keys_have_their_defaults() -> None:
    config = config_from({"method": "ngram", "verifier": "joint"})
    assert config.settings == NgramSettings(ngram_min=1, ngram_max=4)
    assert config.verifier_settings == JointSettings(threshold=0.5)
    assert config_from(config.flat()) == config == _with_settings(SpeculativeConfig("ngram", verifier="joint"))
    with pytest.raises(ValueError, match="'mtp' was given NgramSettings; give Settings"):
        _with_settings(SpeculativeConfig("mtp", settings=NgramSettings()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"method": "mtp", "num_speculative_tokens": ' + "9" * 5000 + "}", "is not JSON"),
        ("{}", "'method' is missing"),
        ('{"method": "medusa"}', f"choose one of {', '.join(PROPOSERS)}"),
        ('{"method": "mtp_trunk_states"}', "'mtp_trunk_states' was removed; use 'mtp', as it was trained"),
        ('{"method": "mtp", "k": 2}', "there is no key 'k'; known are method, num_speculative_tokens"),
        ('{"method": "mtp", "verifier": "lucky"}', f"choose one of {', '.join(VERIFIERS)}"),
        ('{"method": "mtp_eagle", "num_speculative_tokens": 16}', "above the limit of 15"),
        ('{"method": "mtp", "num_speculative_tokens": -1}', "give a number from 0 to 15"),
        ('{"method": "mtp", "num_speculative_tokens": true}', "give a number from 0 to 15"),
        ('{"method": "mtp", "verifier": "joint", "threshold": 2}', "threshold is 2; give a number from 0.0 to 1.0"),
        ('{"method": "mtp", "verifier": "relaxed"}', "think_start and think_end"),
        ('{"method": "ngram", "ngram_min": 5}', "swap them"),
        ('{"method": "draft_model"}', "needs 'model'"),
        ('{"method": "mtp_tree", "tree": []}', "give candidates per level"),
        ('{"method": "mtp_tree", "tree": 5}', "tree is 5; give a list of whole numbers or null"),
        ('{"method": "mtp_tree", "tree": "4,2"}', "tree is '4,2'; give a list of whole numbers or null"),
        ('{"method": "mtp_tree", "tree": [1.5]}', "tree is (1.5,); give a list of whole numbers or null"),
        ('{"method": "mtp_tree", "tree": [true, 2]}', "give a list of whole numbers or null"),
        ('{"method": "mtp_tree", "tree": [300, 300]}', "of 2 levels and 90300 nodes; give at most 15 levels and 255"),
        ('{"method": "mtp_tree", "tree_nodes": 2.5}', "tree_nodes is 2.5; give a whole number or null"),
        ('{"method": "mtp_beam", "beam_width": null}', "beam_width is None; give a whole number."),
        ('{"method": "ngram", "ngram_min": null}', "ngram_min is None; give a whole number."),
        ('{"method": "mtp", "use_draft_probs": "false"}', "use_draft_probs is 'false'; give true or false."),
        ('{"method": "mtp", "verifier": "bild", "rollback": "3"}', "rollback is '3'; give a number."),
        (
            '{"method": "mtp", "verifier": "relaxed", "think_start": "<t>"}',
            "think_start is '<t>'; give a whole number or null",
        ),
        ('{"method": "draft_model", "model": 5}', "model is 5; give text or null"),
        ('{"method": ["mtp"]}', "method is ['mtp']; choose one of"),
        ('{"method": "mtp", "verifier": 5}', "verifier is 5; choose one of"),
        ('{"method": "mtp", "ngram_min": 2}', "'ngram_min' is a key of the method 'ngram', which was not chosen"),
        ('{"method": "ngram", "window": 2}', "use_draft_probs, ngram_min, ngram_max, the keys of the method 'ngram'."),
        ('{"method": "mtp", "threshold": 0.5}', "'threshold' is a key of the verifier 'joint', which was not chosen"),
        (
            '{"method": "mtp", "verifier": "bild", "threshold": 0.5}',
            "use_draft_probs, fallback, rollback, the keys of the method 'mtp' with the verifier 'bild'.",
        ),
    ],
)
def test_a_bad_config_is_rejected_with_the_valid_choices(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="speculative") as error:
        parse_config(text)
    assert said in str(error.value)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "mtp"])
def test_a_drafter_folder_is_rejected_with_attach_drafter_as_the_fix(method: str) -> None:
    """In vLLM's own command line, the folder is the method's model."""
    with pytest.raises(ValueError, match=f"'{method}' drafts with what the checkpoint .*attach-drafter"):
        config_from({"method": method, "model": "folder", "num_speculative_tokens": 3})


def test_no_two_keys_of_a_config_have_one_name() -> None:
    for method in PROPOSERS.values():
        for verifier in VERIFIERS.values():
            names = [key.name for part in (method, verifier) for key in keys(part.settings_kind)]
            assert len({*COMMON_KEYS, *names}) == len(COMMON_KEYS) + len(names)


def test_rules_that_change_the_distribution_are_known() -> None:
    bounds = {"think_start": 1, "think_end": 2}
    given = [{"method": "mtp", "verifier": name} | (bounds if name == "relaxed" else {}) for name in VERIFIERS]
    assert [config.verifier for config in map(config_from, given) if not is_lossless(config)] == [
        "relaxed",
        "joint",
        "mtjd",
        "bild",
    ]


def test_a_config_with_our_names_looks_up_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up entry points takes as long as many steps of a small model, and every request creates a config."""
    monkeypatch.setattr(registry, "_points", lambda group: pytest.fail("looked for entry points"))
    config = config_from({"method": "ngram", "verifier": "joint", "threshold": 0.2})
    assert is_lossless(replace(config, verifier="greedy", verifier_settings=NO_SETTINGS))
