"""Ids that end a text, for every verb that generates: the tokenizer's eos, and those listed in the model's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import make
from judged_models import QUIET

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.cli import main as cli
from megatron_mtp.data.tokenizer import end_tokens, read_tokenizer, sampling_defaults, train_bpe
from megatron_mtp.extensions.predict.source import read_ids

pytestmark = pytest.mark.usefixtures("megatron")

EOD = 0
CONFIGS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "none": ({}, {EOD}),
    "a list of generation": ({"generation_config.json": {"eos_token_id": [5, 6]}}, {EOD, 5, 6}),
    "a number of generation": ({"generation_config.json": {"eos_token_id": 5}}, {EOD, 5}),
    "the config's": ({"config.json": {"eos_token_id": [7]}}, {EOD, 7}),
    "the text config's": ({"config.json": {"text_config": {"eos_token_id": 8}}}, {EOD, 8}),
    "null": ({"config.json": {"eos_token_id": None, "text_config": None}}, {EOD}),
    "all": (
        {"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [0, 5], "top_k": 20}},
        {EOD, 5, 7},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_end_tokens_come_from_all_files_beside_the_tokenizer(name: str, tmp_path: Path) -> None:
    files, ends = CONFIGS[name]
    train_bpe(["abc"], 258, tmp_path)
    for file, found in files.items():
        (tmp_path / file).write_text(json.dumps(found))
    assert end_tokens(read_tokenizer(tmp_path)) == ends


def test_sampling_defaults_are_those_that_change_something(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(train_bpe(["abc"], 258, tmp_path))
    assert sampling_defaults(tokenizer) == {}
    found = {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "do_sample": True, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(found))
    assert sampling_defaults(tokenizer) == {"temperature": 0.6, "top_k": 20}


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(train_bpe(["abc"], 258, tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [')
    with pytest.raises(ValueError, match=r"generation_config.json holds no JSON object; fetch"):
        end_tokens(tokenizer)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder of a random model with a tokenizer, and its conversion."""
    place = tmp_path_factory.mktemp("ends")
    folder = make(place / "hf", "llama", 0, changes={"vocab_size": 258, "max_position_embeddings": 64})
    for file in train_bpe(["abc"], 258, place / "tokenizer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (place / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 8)
    hf_to_mcore(folder, place / "before", QUIET)
    return place


def generated(load: Path) -> list[int]:
    given = ["--load", str(load), "--prompt", "abc", "--max-new-tokens", "12", "--record", str(load)]
    assert cli.main(["generate", *given]) == 0
    (text,) = json.loads((load / "drafts.json").read_text())["texts"]
    return [token for step in text["steps"] for token in step["emitted"]]


def test_every_verb_ends_generation_at_the_end_tokens(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, free = scene, generated(scene / "before")
    end = free[1]
    ends = {EOD, 2, end}  # 2 is the default of Llama's config class
    assert len(free) > 3
    (place / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": [EOD, end]}))
    hf_to_mcore(place / "hf", place / "after", QUIET)
    load = str(place / "after")
    assert generated(place / "after") == free[: free.index(end) + 1]

    assert read_ids([str(place / "text.txt")], place / "after/hf", False)[1] == ends

    served: list[Any] = []
    take: Callable[..., int] = lambda engine, found, listening, *flags: (served.append(found), listening.close(), 0)[2]  # noqa: E731
    monkeypatch.setattr("megatron_mtp.server.api.serve", take)
    assert cli.main(["serve", "--load", load, "--port", "0"]) == 0
    assert served[0].codec.ends == ends

    given = ["--input", str(place / "text.txt"), "--tokenizer", str(place / "tokenizer"), "--workers", "1"]
    assert cli.main(["preprocess", *given, "--output-prefix", str(place / "corpus")]) == 0
    own = ["--data-path", str(place / "corpus"), "--prompt-tokens", "4", "--texts", "1", "--split", "1,0,0"]
    own += ["--temperature", "0", "--max-new-tokens", "12", "--output-prefix", str(place / "own")]
    assert cli.main(["sample", "--load", load, *own]) == 0
    settings, text = map(json.loads, (place / "own.texts.jsonl").read_text().splitlines())
    assert settings["settings"]["ends"] == sorted(ends)
    assert text["finish"] == "length" or text["tokens"][-1] in ends
