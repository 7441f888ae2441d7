"""Resumed conversions: parts of the interrupted one are reused if their checksums match."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_conversions import failing, files
from hf_models import make

from megatron_mtp.checkpoint.convert import stream
from megatron_mtp.checkpoint.hf.writer import HFShards
from megatron_mtp.cli import main as cli
from megatron_mtp.megatron.checkpoint.writer import write_chunk


def run(*arguments: object) -> int:
    return cli.run("convert", "convert.py", [*map(str, arguments), "--workers", "1"])


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hf") / "mimo", "mimo", 2)


@pytest.fixture
def source(hf: Path, tmp_path: Path) -> Path:
    """Return a folder with a Hugging Face model and its checkpoint."""
    assert run("hf-to-mcore", hf, tmp_path / "mcore") == 0
    return Path(shutil.copytree(hf, tmp_path / "hf"))


COMMANDS: dict[str, tuple[str, list[str], object, str, Callable[..., Any], str]] = {
    "hf-to-mcore": ("hf", [], stream, "write_chunk", write_chunk, "release/__0_0.distcp"),
    "mcore-to-hf": ("mcore", [], HFShards, "write", HFShards.write, "model.safetensors"),
    "drop-mtp": ("mcore", ["--keep", "1"], stream, "write_chunk", write_chunk, "release/__0_0.distcp"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_part_is_written_again(
    command: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, flags, owner, attribute, function, part = COMMANDS[command]
    words = [command, tmp_path / name, tmp_path / "out", *flags]
    assert run(*words) == 0
    whole = files(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    total = count(lambda: run(*words), owner, attribute, function, monkeypatch)
    shutil.rmtree(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, failing(function, total - 1))
        assert run(*words) == 2
    file = tmp_path / "out.partial" / part
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if command != "mcore-to-hf" else len(data) - len(data) // 3] ^= 1
    file.write_bytes(bytes(data))
    capsys.readouterr()
    assert run(*words, "--resume") == 0
    assert "is damaged; making it again" in capsys.readouterr().err
    assert files(tmp_path / "out") == whole


def count(
    work: Callable[[], int], owner: object, attribute: str, function: Callable[..., Any], patcher: pytest.MonkeyPatch
) -> int:
    """Count the calls of a function."""
    calls: list[None] = []
    with patcher.context() as patch:
        patch.setattr(owner, attribute, lambda *arguments: (calls.append(None), function(*arguments))[1])
        assert work() == 0
    return len(calls)


def other_config(folder: Path) -> None:
    keys = json.loads((folder / "hf" / "config.json").read_text())
    (folder / "hf" / "config.json").write_text(json.dumps({**keys, "rms_norm_eps": 7e-3}))


def other_content(folder: Path) -> None:
    """Change the content but not names and sizes."""
    file = folder / "mcore" / "release" / "__1_0.distcp"
    file.write_bytes(file.read_bytes())


OF_ANOTHER = "is left from a conversion of another source or with other options; remove it"


def stopped_early(command: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str | Path], list[str]]:
    """Return the command's arguments and flags, after a run whose disk was full after three writes."""
    name, flags, owner, attribute, function, _ = COMMANDS[command]
    words = [command, root / name, root / "out"]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, failing(function, 3))
        assert run(*words, *flags) == 2
    return words, flags


@pytest.mark.parametrize(
    ("command", "change"), [("hf-to-mcore", other_config), ("drop-mtp", other_content), ("mcore-to-hf", other_content)]
)
def test_a_conversion_of_another_source_is_not_resumed(
    command: str,
    change: Callable[[Path], None],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, flags = stopped_early(command, tmp_path, monkeypatch)
    change(tmp_path)
    assert run(*words, *flags, "--resume") == 2
    assert OF_ANOTHER in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "other"),
    [
        ("hf-to-mcore", ["--dtype", "bfloat16"]),
        ("hf-to-mcore", ["--trunk-only"]),
        ("mcore-to-hf", ["--dtype", "bfloat16"]),
        ("mcore-to-hf", ["--max-shard-size", "1MB"]),
        ("drop-mtp", ["--keep", "0"]),
    ],
)
def test_a_conversion_with_other_options_is_not_resumed(
    command: str,
    other: list[str],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Otherwise half of the tensors would have another dtype, or another number of layers."""
    words, _ = stopped_early(command, tmp_path, monkeypatch)
    assert run(*words, *other, "--resume") == 2
    assert OF_ANOTHER in capsys.readouterr().err
