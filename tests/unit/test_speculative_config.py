"""The settings of drafting: what is taken, and what bad input is told."""

import pytest

from megatron_mtp.drafting.config import METHODS, VERIFIER_NAMES, SpeculativeConfig, parse_config
from megatron_mtp.drafting.verifiers import VERIFIERS


def test_vllms_form() -> None:
    config = parse_config('{"method": "mtp", "num_speculative_tokens": 2}')
    assert config == SpeculativeConfig("mtp", 2)
    assert parse_config('{"method": "mtp_tree", "tree": [4, 2]}').tree == (4, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "'method' is missing"),
        ('{"method": "medusa"}', f"choose one of {', '.join(METHODS)}"),
        ('{"method": "mtp", "k": 2}', "there is no key 'k'; known are method, num_speculative_tokens"),
        ('{"method": "mtp", "verifier": "lucky"}', f"choose one of {', '.join(VERIFIER_NAMES)}"),
        ('{"method": "mtp_eagle", "num_speculative_tokens": 16}', "above the limit of 15"),
        ('{"method": "mtp", "num_speculative_tokens": -1}', "give a number from 0 to 15"),
        ('{"method": "mtp", "num_speculative_tokens": true}', "give a number from 0 to 15"),
        ('{"method": "mtp", "verifier": "joint", "threshold": 2}', "threshold is 2; give a number from 0.0 to 1.0"),
        ('{"method": "mtp", "verifier": "relaxed"}', "think_start and think_end"),
        ('{"method": "ngram", "ngram_min": 5}', "swap them"),
        ('{"method": "draft_model"}', "needs 'model'"),
        ('{"method": "mtp_tree", "tree": []}', "give candidates per level"),
    ],
)
def test_bad_input_is_told_what_exists(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="speculative") as error:
        parse_config(text)
    assert said in str(error.value)


def test_names_of_verifiers_are_the_tables() -> None:
    assert set(VERIFIER_NAMES) == set(VERIFIERS)
    configs = [SpeculativeConfig("mtp", verifier=name, think_start=1, think_end=2) for name in VERIFIER_NAMES]
    assert [config.verifier for config in configs if not config.lossless] == ["relaxed", "joint", "bild"]
