"""Compiled code is built once, completely or not at all; without a compiler, drafting continues with a warning."""

import ctypes
import multiprocessing
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from megatron_mtp.extensions.cpu_rows import compiled, few_rows

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide an empty cache, nothing loaded, and a source that compiles in a moment."""
    source = tmp_path / "few_rows.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(compiled, "SOURCE", source)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    monkeypatch.setattr(compiled, "_loaded", compiled._loaded.__wrapped__)


def with_compiler() -> None:
    try:
        compiled._compiler()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return logged messages, whatever log level other tests have set."""
    said: list[str] = []
    monkeypatch.setattr(compiled._logger, "warning", lambda text, *values: said.append(text % values))
    return said


def test_the_library_is_compiled_once_and_a_message_says_so(
    messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_compiler()
    library = compiled.library(torch.float32)
    assert library is not None
    assert library.answer() == 42
    assert messages == ["compiling few_rows.cpp for this CPU, once; it takes some seconds"]
    monkeypatch.setattr(compiled, "_compiler", lambda: pytest.fail("built again"))
    assert compiled.library(torch.float32) is not None
    assert len(messages) == 1


def test_another_source_or_cpu_gets_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {compiled._key()}
    monkeypatch.setattr(compiled, "_cpu", lambda: "another")
    keys.add(compiled._key())
    compiled.SOURCE.write_text("// another\n")
    keys.add(compiled._key())
    monkeypatch.setattr(torch, "__version__", "0")
    keys.add(compiled._key())
    monkeypatch.setenv("CXX", "another")
    keys.add(compiled._key())
    assert len(keys) == 5


def test_every_type_of_weights_gets_a_file_of_its_own() -> None:
    with_compiler()
    compiled.SOURCE.write_text('struct bfloat16 { short bits; };\nextern "C" int answer() { return sizeof(NUMBER); }\n')
    libraries = [compiled.library(dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert [one.answer() for one in libraries if one is not None] == [4, 2]
    assert sorted(file.name.split("-")[1] for file in compiled.folder().iterdir()) == ["bfloat16", "float"]


def build(where: Path) -> int:
    return int(ctypes.CDLL(str(compiled.built(where, torch.float32))).answer())


def test_processes_may_build_at_the_same_time(tmp_path: Path) -> None:
    with_compiler()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(build, [tmp_path / "shared"] * 3) == [42] * 3
    assert [file.suffix for file in (tmp_path / "shared").iterdir()] == [".so"]


def test_without_a_compiler_drafting_continues(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled.library(torch.float32) is None
    assert few_rows.product_of(torch.ones(4, 4)) is None
    reason = "there is no C++ compiler (no-such-compiler); install g++"
    assert messages[0] == f"drafting runs without compiled code, which is slower: {reason}"


def test_a_failing_compiler_leaves_no_files(messages: list[str]) -> None:
    with_compiler()
    compiled.SOURCE.write_text("int broken(\n")
    assert compiled.library(torch.float32) is None
    assert "slower: the compiler fails: " in messages[-1]
    assert list(compiled.folder().iterdir()) == []


def test_an_interrupted_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(command: list[str], **_: object) -> None:
        Path(command[command.index("-o") + 1]).write_text("half of it")
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(compiled, "_compiler", lambda: "c++")
    monkeypatch.setattr(subprocess, "run", cut_off)
    assert compiled.library(torch.float32) is None
    assert list(compiled.folder().iterdir()) == []


def test_an_unwritable_cache_folder_is_reported(
    messages: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_compiler()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert compiled.library(torch.float32) is None
    assert "Not a directory" in messages[-1]


def test_compiling_can_be_switched_off(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "0")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("built"))
    assert compiled.library(torch.float32) is None
    assert messages == []


def test_a_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    said: list[str] = []
    monkeypatch.setattr(compiled._logger, "warning", lambda text, *_: said.append(text))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compiled, "folder", lambda: Path("/nowhere"))
    compiled._loaded.cache_clear()
    try:
        assert [compiled.library(torch.float32), compiled.library(torch.float32)] == [None, None]
    finally:
        compiled._loaded.cache_clear()
    assert len(said) == 1


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({"TORCH_EXTENSIONS_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a/megatron_mtp"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/megatron_mtp"),
        ({"HOME": "/c"}, "/c/.cache/megatron_mtp"),
    ],
)
def test_compiled_libraries_are_kept_in_the_cache_folder(
    given: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert compiled.folder() == Path(folder)


def test_a_wheel_holds_the_source() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "megatron_mtp" / "extensions" / "cpu_rows"
    globs = data["megatron_mtp.extensions.cpu_rows"]
    assert folder / "native" / "few_rows.cpp" in {found for one in globs for found in folder.glob(one)}
