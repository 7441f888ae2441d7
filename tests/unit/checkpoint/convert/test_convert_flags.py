"""Flags of the conversions: each takes effect where it is offered, and invalid combinations fail before any work."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import WIDE, make, read
from trained_folders import trained

from megatron_mtp.checkpoint.convert.export_hf import with_dtype
from megatron_mtp.checkpoint.convert.stream import Entry
from megatron_mtp.cli.convert import main
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.megatron.checkpoint.reader import DistReader


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    assert run("hf-to-mcore", make(tmp_path / "source", "mimo", 1), tmp_path / "mcore") == 0
    return tmp_path / "mcore"


TYPE_KEYS = ("dtype", "torch_dtype")
ACTING = {
    "hf-to-mcore": {"--dtype", "--workers", "--resume"},
    "mcore-to-hf": {"--dtype", "--max-shard-size", "--workers", "--resume", "--trust-remote-code"},
    "attach-mtp": {"--workers", "--resume"},
    "drop-mtp": {"--workers", "--resume"},
    "draft-vocab": {"--workers", "--resume"},
    "verify": {"--trust-remote-code"},
    "inspect": set(),
}


@pytest.mark.parametrize("command", ACTING)
def test_a_flag_is_offered_only_where_it_has_an_effect(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    said = capsys.readouterr().out.split("examples:")[0]
    assert {flag for flag in ACTING["mcore-to-hf"] if flag in said} == ACTING[command]


@pytest.mark.parametrize("bad", ["absent", "empty", "file"])
def test_a_folder_without_a_tokenizer_is_refused_before_the_conversion(
    bad: str, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert run("mcore-to-hf", converted, tmp_path / "back", "--tokenizer", tmp_path / bad) == 2
    assert f"--tokenizer is {tmp_path / bad}, where there is no tokenizer" in capsys.readouterr().err
    assert not list(tmp_path.glob("back*"))


def test_a_broken_tokenizer_gives_a_clear_error(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make` writes {} as tokenizer.json."""
    assert run("mcore-to-hf", converted, tmp_path / "back", "--family", "mimo") == 2
    said = capsys.readouterr().err
    assert "holds no tokenizer that transformers can load" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["mimo", "qwen3_5"])
def test_the_config_says_the_type_of_the_tensors(name: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", name, 1)
    add_type(source / "config.json", "float32")
    assert run("hf-to-mcore", source, tmp_path / "mcore", "--dtype", "bfloat16") == 0
    assert run("mcore-to-hf", tmp_path / "mcore", tmp_path / "back") == 0
    assert run("mcore-to-hf", tmp_path / "mcore", tmp_path / "like", "--like", source) == 0
    assert run("mcore-to-hf", tmp_path / "mcore", tmp_path / "half", "--dtype", "float16") == 0
    assert {folder: types_of(tmp_path / folder) for folder in ("source", "back", "like", "half")} == {
        "source": {"float32"},
        "back": {"bfloat16"},
        "like": {"bfloat16"},
        "half": {"float16"},
    }
    assert str(read(tmp_path / "back")["model.embed_tokens.weight" if name == "mimo" else "mtp.fc.weight"].dtype) == (
        "torch.bfloat16"
    )


@pytest.mark.parametrize("name", ["qwen3_next", "glm4_moe"])
def test_a_dtype_flag_keeps_float32_tensors_in_float32(name: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", name, 1)
    assert run("hf-to-mcore", source, tmp_path / "mcore", "--dtype", "bfloat16") == 0
    assert run("mcore-to-hf", tmp_path / "mcore", tmp_path / "back", "--dtype", "bfloat16") == 0
    theirs, ours = read(source), read(tmp_path / "back")
    wide = {key for key in theirs if key.endswith(WIDE)}
    assert {key for key, tensor in ours.items() if tensor.dtype != torch.bfloat16} == wide
    assert [key for key in wide if not torch.equal(theirs[key], ours[key])] == []
    assert wide


def test_the_config_dtype_is_that_of_most_numbers() -> None:
    """A model has more norms and biases than matrices."""
    norms = [Entry([f"norm.{number}"], (4,), torch.float32) for number in range(3)]
    tokens = Entry(["tokens"], (1000,), torch.int64)
    tensors = [*norms, Entry(["weight"], (16, 16), torch.bfloat16), tokens]
    assert with_dtype({"dtype": "float16", "torch_dtype": ""}, tensors) == dict.fromkeys(TYPE_KEYS, "bfloat16")
    assert with_dtype({"hidden_size": 8}, tensors) == {"hidden_size": 8}


def add_type(file: Path, name: str) -> None:
    keys = json.loads(file.read_text())
    if "text_config" in keys:
        keys["text_config"]["dtype"] = name
    file.write_text(json.dumps({**keys, "dtype": name, "torch_dtype": name}))


def types_of(folder: Path) -> set[str]:
    """Return all dtypes that the config states for the text model."""
    keys = json.loads((folder / "config.json").read_text())
    parts: list[dict[str, Any]] = [keys, keys.get("text_config", {})]
    return {part[key] for part in parts for key in TYPE_KEYS if key in part}


@pytest.fixture(scope="module")
def own_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tokenizer whose class exists only in its folder, as Kimi-K2's."""
    folder = train_bpe(["some words to make a vocabulary of"] * 3, 260, tmp_path_factory.mktemp("tokenizer") / "own")
    keys = json.loads((folder / "tokenizer_config.json").read_text())
    keys |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return folder


@pytest.mark.usefixtures("megatron")
@pytest.mark.usefixtures("forked_python")
def test_a_tokenizers_own_code_runs_only_when_it_is_trusted(
    own_class: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "n")
    source = trained(tmp_path / "mcore", vocabulary=300, tokenizer=own_class)
    assert run("mcore-to-hf", source, tmp_path / "back") == 2
    said = capsys.readouterr().err
    assert "whose code is run only with --trust-remote-code; read it, and give the flag." in said
    assert said.count("\n") == 1
    assert asked == []
    assert not list(tmp_path.glob("back*"))
    assert run("mcore-to-hf", source, tmp_path / "back", "--trust-remote-code") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 300
    text = tmp_path / "text"
    text.write_text("some words to make")
    assert run("verify", tmp_path / "back", source, "--text", text, "--trust-remote-code") == 0


def test_attached_depths_have_the_type_of_the_trunk(converted: Path, tmp_path: Path) -> None:
    assert run("drop-mtp", converted, tmp_path / "trunk") == 0
    assert run("attach-mtp", tmp_path / "trunk", tmp_path / "start", "--mtp-num-layers", 1) == 0
    reader = DistReader(tmp_path / "start")
    assert len({reader.dtype(key) for key in reader.keys}) == 1
