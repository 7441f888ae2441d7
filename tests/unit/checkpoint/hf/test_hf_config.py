"""checkpoint/hf/config.py: keys that a config.json may omit, and error messages for wrong ones."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_mtp.checkpoint.hf.config import CONFIG, HFConfig, read_json


def config(**keys: Any) -> HFConfig:
    return HFConfig.from_keys({"model_type": "llama", **keys})


def test_a_text_model_inside_another_is_read_and_keeps_the_type_of_the_whole() -> None:
    read = HFConfig.from_keys({"model_type": "outer", "size": 1, "text_config": {"model_type": "inner", "layers": 2}})
    assert read.model_type == "outer"
    assert (read.integer("size"), read.integer("layers")) == (1, 2)


@pytest.mark.parametrize(("top", "text", "tied"), [(True, False, True), (None, True, True), (False, False, False)])
def test_a_head_is_tied_if_either_config_level_says_so(top: bool | None, text: bool, tied: bool) -> None:
    """For a config with only the top-level key, transformers writes true next to `text_config` and false inside it."""
    beside = {} if top is None else {"tie_word_embeddings": top}
    keys = {"model_type": "outer", **beside, "text_config": {"model_type": "inner", "tie_word_embeddings": text}}
    assert HFConfig.from_keys(keys).flag("tie_word_embeddings") is tied


def test_the_first_key_present_is_used_and_null_counts_as_missing() -> None:
    read = config(old=3, new=None, theta=2)
    assert read.integer("new", "old") == 3
    assert read.integer("neither", default=7) == 7
    assert read.number("theta") == 2.0
    assert (read.flag("new"), read.flag("neither")) == (False, False)
    assert (read.has("old"), read.has("new")) == (True, False)
    assert config(kinds=["a", "b", "c"]).words("kinds", 2) == ["a", "b"]
    assert read.words("kinds", 2) is None


def test_a_default_fills_a_missing_key_but_not_null() -> None:
    filled = config(null=None, there=3).with_defaults({"null": 1, "there": 1, "absent": 1})
    assert (filled.has("null"), filled.integer("there"), filled.integer("absent")) == (False, 3, 1)


def test_rotary_settings_are_found_in_all_three_places() -> None:
    assert config(rope_theta=5.0).rope == {"rope_theta": 5.0, "rope_type": "default"}
    older = config(rope_theta=5.0, rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert older == {"rope_theta": 5.0, "type": "linear", "rope_type": "linear", "factor": 2.0}
    nested = config(rope_theta=5.0, rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 9.0})
    assert nested.rope == {"rope_type": "default", "rope_theta": 9.0}


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": "8"}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "low_freq_factor": True}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": "64"}, "original_max_position_embeddings"),
    ],
)
def test_a_rotary_number_that_is_a_text_is_refused_by_name(keys: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: '{name}' is .*; it must be a number.$"):
        _ = config(**keys).rope


def test_older_rotary_settings_replace_newer_ones() -> None:
    """As in transformers, which does not mix them."""
    both = config(rope_scaling={"type": "linear"}, rope_parameters={"rope_theta": 9.0, "factor": 2.0})
    assert both.rope == {"type": "linear", "rope_type": "linear"}


@pytest.mark.parametrize(
    ("keys", "positions"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"original_max_position_embeddings": 16}}, 16),
        ({"original_max_position_embeddings": 8, "rope_scaling": {"original_max_position_embeddings": 16}}, 8),
    ],
)
def test_a_scaling_starts_from_the_positions_that_transformers_finds(keys: dict[str, Any], positions: int) -> None:
    scaled = {"type": "yarn", **keys.get("rope_scaling", {})}
    assert config(**{**keys, "rope_scaling": scaled}).rope["original_max_position_embeddings"] == positions


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: HFConfig.from_keys([]), "config.json has no 'model_type'; give a folder that transformers can load."),
    (lambda: HFConfig.from_keys({"model_type": 3}), "config.json has no 'model_type'"),
    (lambda: config(rope_parameters=7).rope, "'rope_parameters' is 7; it must be an object."),
    (lambda: config(rope_scaling="yarn").rope, "'rope_scaling' is 'yarn'; it must be an object."),
    (lambda: config(text_config=[1]), r"'text_config' is \[1\]; it must be an object."),
    (lambda: config().integer("layers", "n_layer"), "lacks 'layers', which models of type 'llama' must have."),
    (
        lambda: config(layers=0).integer("layers"),
        "'layers' is 0; it must be a whole number of at least 1, and below",
    ),
    (lambda: config(layers=True).integer("layers"), "'layers' is True; it must be a whole number"),
    (lambda: config(layers=2**31).integer("layers"), "'layers' is 2147483648; it must be a whole number"),
    (lambda: config(eps=float("inf")).number("eps"), "'eps' is inf; it must be a number above 0, and"),
    (lambda: config(eps=10**400).number("eps"), "it must be a number above 0, and below 2147483648."),
    (lambda: config(eps="1").number("eps"), "'eps' is '1'; it must be a number above 0, and"),
    (lambda: config(tie=1).flag("tie"), "'tie' is 1; it must be true or false."),
    (lambda: config(kinds=["a"]).words("kinds", 2), "'kinds' must be a list of 2 words, one a layer."),
    (lambda: config(kinds=["a", 2]).words("kinds", 2), "'kinds' must be a list of 2 words, one a layer."),
]


@pytest.mark.parametrize(("read", "said"), WRONG)
def test_mistakes_in_a_config_give_a_clear_error(read: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read()


@pytest.mark.parametrize(
    ("text", "said"), [(None, "does not exist; give a folder"), ("{", "is not JSON"), ("[" * 10**5, "is not JSON")]
)
def test_a_missing_or_invalid_config_file_is_rejected(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=f"{CONFIG} {said}"):
        HFConfig.read(tmp_path)


def test_a_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONFIG)
    with pytest.raises(ValueError, match="it is a folder or a pipe, not a file"):
        read_json(tmp_path / CONFIG)
