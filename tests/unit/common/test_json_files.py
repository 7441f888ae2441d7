"""checkpoint/audit/folder.py: values of types that no loader accepts are found, and rejected in one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hf_models import make

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.hf.folder import INDEX
from megatron_mtp.cli import main as cli

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("json") / "llama", "llama", 0, shards=True)


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def change(folder: Path, file: str = "config.json", **keys: Any) -> None:
    kept = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**kept, **keys}))


OBJECT, NUMBER, SIZE = "it must be an object", "it must be a number above 0", "it must be a whole number of at least 1"
WRONG: list[tuple[str, Any, str]] = [
    *(("quantization_config", value, OBJECT) for value in (3, "fp8", [1], True)),
    ("compression_config", 3, OBJECT),
    *(("architectures", value, "it must be a list of words") for value in ([1], "LlamaForCausalLM", {"a": 1})),
    ("layer_types", [[1]], "it must be a list of words"),
    ("auto_map", "x", OBJECT),
    ("text_config", [1], OBJECT),
    *(("rope_scaling", value, OBJECT) for value in (False, 0, "")),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "1e4"}, "it must be a number"),
    ("hidden_act", 3, "it must be a word"),
    ("dtype", 1.5, "it must be a type such as bfloat16, or an object of types"),
    ("torch_dtype", "64", "it must be a type such as bfloat16, or an object of types"),
    ("dtype", {"text_config": "flaot16"}, "it must be a type such as bfloat16, or an object of types"),
    *(("eos_token_id", value, "it must be a token's id, or a list of them") for value in ("2", True, [[2]], 1e400)),
    *(("hidden_size", value, SIZE) for value in ("48", True, -1, 0, 10**30, 48.5, [48], {})),
    ("hidden_size", None, "lacks 'hidden_size'"),
    ("num_attention_heads", 5, "is not a multiple of"),
    *(("rms_norm_eps", value, NUMBER) for value in ("1e-6", float("nan"), float("inf"), -1.0)),
    ("attention_bias", 0, "it must be true or false"),
    ("tie_word_embeddings", "false", "it must be true or false"),
]


@pytest.mark.parametrize(("key", "value", "says"), WRONG, ids=[f"{key}-{str(value)[:9]}" for key, value, _ in WRONG])
def test_an_invalid_config_value_is_found_and_not_converted(
    key: str, value: Any, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, **{key: value})
    assert cli.main(["audit", str(folder)]) == 1
    (found,) = [said for said in capsys.readouterr().out.splitlines() if said.startswith("error ")]
    assert found.startswith("error    damaged config: ")
    assert f"'{key}'" in found or key in ("num_attention_heads", "rope_parameters")
    assert says in found
    for words, status in ((["inspect"], (1, 2)), (["hf-to-mcore", "--dry-run", str(folder.with_name("target"))], (2,))):
        command, *flags = words
        assert cli.main(["convert", command, str(folder), *flags]) in status
        shown = capsys.readouterr()
        assert says in shown.out + shown.err
        assert shown.err.count("\n") <= 1


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("tokenizer_config.json", '{"eos_token": "<', "tokenizer_config.json is not JSON"),
        ("tokenizer.json", "[1]", "'tokenizer.json' holds [1]; it must be an object"),
        ("generation_config.json", "3", "'generation_config.json' holds 3; it must be an object"),
        ("generation_config.json", '{"eos_token_id": "2"}', "generation_config.json: 'eos_token_id' is '2'"),
        ("anything.json", "\x00", "anything.json is not JSON"),
        (INDEX, '{"weight_map": {"a": 1}}', "has no 'weight_map' from tensors to files"),
        (INDEX, '{"weight_map": [["a", "b"]]}', "has no 'weight_map' from tensors to files"),
        (INDEX, "null", "has no 'weight_map' from tensors to files"),
    ],
)
def test_a_damaged_file_beside_the_config_is_found(file: str, text: str, says: str, folder: Path) -> None:
    (folder / file).write_text(text)
    found = [one["says"] for one in audit(folder)["findings"] if one["severity"] == "error"]
    assert len(found) == 1
    assert says in found[0]


def test_configs_that_loaders_accept_pass(folder: Path) -> None:
    change(folder, eos_token_id=[2, 3], pad_token_id=-1, rope_scaling=None, quantization_config=None, auto_map={})
    change(folder, dtype={"": "float32"}, architectures=None)
    change(folder, "generation_config.json", eos_token_id=2, temperature=0.6)
    change(folder, "tokenizer_config.json", eos_token="x")
    (folder / "modules.json").write_text("[1]")
    assert audit(folder)["findings"] == []


def test_a_family_that_is_unknown_here_has_the_same_kinds(folder: Path) -> None:
    change(folder, model_type="heron", quantization_config=3, architectures=[1])
    errors = [one["names"] for one in audit(folder)["findings"] if one["severity"] == "error"]
    assert errors == [("quantization_config",), ("architectures",)]
