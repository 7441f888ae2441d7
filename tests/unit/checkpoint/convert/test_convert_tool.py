"""The command line: its output, and that bad input costs one sentence and nothing else."""

import errno
import hashlib
import json
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_server
import pytest
import torch
from hf_models import make, read, write
from safetensors.torch import save_file
from tiers import tiered

from megatron_mtp.checkpoint.convert import stream
from megatron_mtp.checkpoint.hf.folder import INDEX
from megatron_mtp.checkpoint.hf.writer import HFShards
from megatron_mtp.checkpoint.verify import verify
from megatron_mtp.cli import main as cli
from megatron_mtp.cli.convert import COMMANDS
from megatron_mtp.megatron.checkpoint.reader import CATALOGUE, DistReader

TOOL = Path(__file__).parents[4] / "tools" / "checkpoint" / "convert.py"
FIRST = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("published") / "mimo", "mimo", 2, shards=True)


@pytest.fixture
def source(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "source"))


def digest(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def run(*arguments: object) -> int:
    return cli.run("convert", "convert.py", [str(argument) for argument in arguments])


def truncate(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[: len(data) // 2])


def corrupt_header(folder: Path) -> None:
    (folder / FIRST).write_bytes(struct.pack("<Q", 20) + b"{not json at all....")


def pickle_inside(folder: Path) -> None:
    (folder / FIRST).write_bytes(pickle.dumps({"a": 1}))


def only_pickles(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def in_folder(prefix: str) -> Callable[[Path], None]:
    """Move the first file to another folder, and let the index name it there."""

    def change(folder: Path) -> None:
        (folder / prefix).mkdir(exist_ok=True)
        (folder / FIRST).rename(folder / prefix / FIRST)
        index = folder / "model.safetensors.index.json"
        keys = json.loads(index.read_text())
        weights = {name: prefix + file if file == FIRST else file for name, file in keys["weight_map"].items()}
        index.write_text(json.dumps(keys | {"weight_map": weights}))

    return change


def missing_file(folder: Path) -> None:
    (folder / FIRST).unlink()


def missing_in_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.absent.weight"] = FIRST
    (folder / INDEX).write_text(json.dumps(index))


def twice(folder: Path) -> None:
    """Without an index, it is undefined which one counts."""
    second = "model-00002-of-00003.safetensors"
    other = {key: value for key, value in read(folder).items() if index_of(folder)[key] == second}
    first = next(key for key, file in index_of(folder).items() if file == FIRST)
    save_file(other | {first: read(folder)[first]}, folder / second)
    (folder / INDEX).unlink()


def index_of(folder: Path) -> dict[str, str]:
    weights: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weights


def leftover(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "model.layers.0.extra.weight": torch.zeros(3)})


def dropped(folder: Path) -> None:
    rewrite(
        folder, lambda tensors: {n: t for n, t in tensors.items() if n != "model.mtp_layers.1.input_layernorm.weight"}
    )


def other_shape(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "model.norm.weight": torch.zeros(7)})


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = change(read(folder))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write(folder, tensors)


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        keys = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(keys))

    return change


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated shard": (truncate, f"{FIRST} is not a whole safetensors file"),
    "corrupted header": (corrupt_header, FIRST),
    "pickle as safetensors": (pickle_inside, FIRST),
    "pickles": (only_pickles, "pytorch_model.bin is a pickle"),
    "file of the index missing": (missing_file, FIRST),
    "file of the index in a folder": (in_folder("sub/"), f"into 'sub/{FIRST}', but shards must be plain file names"),
    "file of the index outside": (in_folder("../"), f"into '../{FIRST}', but shards must be plain file names"),
    "tensor of the index missing": (missing_in_index, "model.absent.weight"),
    "tensor in two files": (twice, "is both in"),
    "tensor left over": (leftover, "model.layers.0.extra.weight"),
    "tensor missing": (dropped, "model.mtp_layers.1.input_layernorm.weight"),
    "shape that contradicts the config": (other_shape, "'model.norm.weight'"),
    "unknown model_type": (config(model_type="gpt9"), "'gpt9' is unknown"),
    "other depths than said": (config(num_nextn_predict_layers=1), "2 depth(s)"),
    "no number": (config(hidden_size="wide"), "'hidden_size' is 'wide'"),
    "heads that do not divide": (config(num_key_value_heads=3), "not a multiple"),
    "more layers than tensors": (config(num_hidden_layers=40), "model.layers.3."),
    "absurd layers": (config(num_hidden_layers=2**30), "more than any model has"),
    "two bases of the angles": (
        config(rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 9.0}),
        "rope_theta is 5.0 and rope_theta of rope_parameters is 9.0",
    ),
    "no config": (no_config, "config.json does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_a_clear_error_and_changes_nothing(
    case: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = BAD[case]
    spoil(source)
    before = digest(source)
    assert run("hf-to-mcore", source, tmp_path / "mcore") == 2
    said = capsys.readouterr()
    assert said.err.startswith("convert.py: error: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert digest(source) == before
    assert not (tmp_path / "mcore").exists()


def test_a_full_disk_leaves_what_resume_completes(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stream.write_chunk
    calls = []

    def fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, "No space left on device", "mcore")
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "write_chunk", fails)
        assert run("hf-to-mcore", source, tmp_path / "mcore", "--workers", 1) == 2
    assert "no space is left" in capsys.readouterr().err
    assert not (tmp_path / "mcore").exists()
    assert run("hf-to-mcore", source, tmp_path / "mcore") == 2
    assert "--resume" in capsys.readouterr().err
    calls.clear()
    monkeypatch.setattr(stream, "write_chunk", lambda *a: (calls.append(a), whole(*a))[1])
    assert run("hf-to-mcore", source, tmp_path / "mcore", "--resume") == 0
    resumed = len(calls)
    shutil.rmtree(tmp_path / "mcore")
    calls.clear()
    assert run("hf-to-mcore", source, tmp_path / "mcore") == 0
    assert 0 < resumed < len(calls)  # finished layers were not repeated


def test_an_output_folder_that_is_not_empty_stays_as_it_is(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mcore").mkdir()
    (tmp_path / "mcore" / "mine").write_text("precious")
    assert run("hf-to-mcore", source, tmp_path / "mcore") == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mcore").iterdir()] == ["mine"]


def test_no_command_writes_into_its_source_or_around_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("hf-to-mcore source mcore", "drop-mtp mcore trunk", "gpt-to-hybrid trunk hybrid"):
        command, *paths = words.split()
        assert run(command, *(tmp_path / path for path in paths)) == 0
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "leads-in").symlink_to(tmp_path / "mcore" / "new")
    (tmp_path / "tokens").write_text("1\n2\n")
    before = digest(tmp_path)
    capsys.readouterr()
    sources = {"hf-to-mcore": "source", "attach-mtp": "trunk", "gpt-to-hybrid": "trunk", "hybrid-to-gpt": "hybrid"}
    writing = [name for name, command in COMMANDS.items() if list(command.operands.values()) == ["SRC", "DST"]]
    needed = {"attach-mtp": ["--mtp-num-layers", 1], "draft-vocab": ["--mtp-draft-vocab-file", tmp_path / "tokens"]}
    writing.remove("drafter-to-hf")  # in tests/functional/test_drafter_commands.py
    writing.remove("fit-drafter")  # in test_fitting_drafter.py
    assert len(writing) == 7
    for command in writing:
        name = sources.get(command, "mcore")
        more = needed.get(command, [])
        inner = [tmp_path / name / "new", tmp_path / "link" / name / "hf" / "deep" / "new"]
        inner += [tmp_path / "leads-in"] if name == "mcore" else []
        said = dict.fromkeys(inner, "which it is made from; name a place outside") | {tmp_path: f"holds {tmp_path}/"}
        for target, dry in product(said, ([], ["--dry-run"])):
            assert run(command, tmp_path / name, target, *more, *dry) == 2
            shown = capsys.readouterr().err
            assert (said[target] in shown, shown.count("\n")) == (True, 1)
    assert digest(tmp_path) == before


def test_an_output_folder_that_cannot_be_created_is_rejected(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("hf-to-mcore", source, tmp_path / "file" / "mcore") == 2
    assert capsys.readouterr().err.count("\n") == 1


FAILURES = {
    "no space": (errno.ENOSPC, "no space is left"),
    "read-only": (errno.EROFS, "cannot be used"),
    "no permission": (errno.EACCES, "cannot be used"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_export_that_cannot_be_written_leaves_no_folder(
    failure: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("hf-to-mcore", source, tmp_path / "mcore") == 0
    before, number, words = digest(tmp_path / "mcore"), *FAILURES[failure]

    def fails(*_: Any) -> None:
        raise OSError(number, "as the system calls it", str(tmp_path / "back"))

    with monkeypatch.context() as patch:
        patch.setattr(HFShards, "write", fails)
        assert run("mcore-to-hf", tmp_path / "mcore", tmp_path / "back") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
    assert str(tmp_path / "back") in said
    assert digest(tmp_path / "mcore") == before
    assert not (tmp_path / "back").exists()
    assert run("mcore-to-hf", tmp_path / "mcore", tmp_path / "back", "--resume") == 0
    assert read(tmp_path / "back").keys() == read(source).keys()


def test_a_read_only_parent_folder_gives_a_clear_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", fails)  # root, who runs tests in containers, can write anywhere
    assert run("hf-to-mcore", source, tmp_path / "mcore") == 2
    said = capsys.readouterr().err
    assert "cannot be used (Permission denied); correct the path, or the rights on it" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "mcore").exists()


def _limited(folder: Path, target: Path) -> str:
    """Return the tool's message when no file may exceed 50 kB."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
    code = f"{limit}import runpy, sys; sys.argv[1:] = ['hf-to-mcore', {str(folder)!r}, {str(target)!r}]; "
    code += f"runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    done = fork_server.run([sys.executable, "-c", code])
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_file_size_limit_gives_a_clear_error(source: Path, tmp_path: Path) -> None:
    said = [line for line in _limited(source, tmp_path / "mcore").splitlines() if "convert.py: error:" in line]
    assert len(said) == 1
    assert "File too large" in said[0]
    assert not (tmp_path / "mcore").exists()


def test_import_inspect_export_and_verify_work_together(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: object) -> dict[str, Any]:
        assert run(*arguments, "--json") == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    assert said("hf-to-mcore", source, tmp_path / "mcore", "--dtype", "bfloat16")["depths"] == 2
    assert said("inspect", source)["eh_proj in the Hugging Face folder"] == "hidden half first"
    assert said("inspect", tmp_path / "mcore")["dtypes"] == ["bfloat16"]
    assert said("drop-mtp", tmp_path / "mcore", tmp_path / "trunk")["depths"] == 0
    assert said("drop-mtp", tmp_path / "mcore", tmp_path / "one", "--keep", 1)["depths"] == 1
    kept = {key for key in DistReader(tmp_path / "mcore").keys if not key.startswith("mtp.layers.1.")}
    assert set(DistReader(tmp_path / "one").keys) == kept
    assert run("drop-mtp", tmp_path / "one", tmp_path / "none", "--keep", 1) == 2
    assert "--keep is 1, but" in capsys.readouterr().err
    attach = said("attach-mtp", tmp_path / "trunk", tmp_path / "three", "--mtp-num-layers", 3, "--mtp-init", "random")
    assert attach["depths"] == 3
    exported = said("mcore-to-hf", tmp_path / "three", tmp_path / "back", "--max-shard-size", "50KB", "--workers", 2)
    assert exported["family"] == "MiMo-7B"
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 3
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    assert said("inspect", tmp_path / "back")["depths"] == 3


def in_fork(words: list[str], env: dict[str, str], **_: Any) -> "subprocess.CompletedProcess[str]":
    return fork_server.run(words, env=env)


@pytest.mark.parametrize("verified", tiered(["hf-to-mcore mcore-to-hf", "mcore-to-hf"], ["mcore-to-hf"]))
def test_the_verify_flag_checks_the_written_folder(
    verified: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers runs in a fork, which takes less time than the new process of a command."""
    monkeypatch.setattr(verify, "subprocess", SimpleNamespace(run=in_fork))
    mcore = tmp_path / "mcore"
    for command, written, target in (("hf-to-mcore", source, mcore), ("mcore-to-hf", mcore, tmp_path / "back")):
        proof = ["--verify"] if command in verified.split() else []
        assert run(command, written, target, *proof, "--json") == 0
        said = json.loads(capsys.readouterr().out)
        assert said["depths"] == 2
        assert not proof or said.items() >= {"ok": True, "compared": True}.items()

    whole = stream.Conversion.write

    def damaged(self: stream.Conversion, target: Path, how: stream.Options) -> dict[str, Any]:
        done = whole(self, target, how)
        tensors = read(target)
        tensors["model.norm.weight"] += 1
        write(target, tensors)
        return done

    monkeypatch.setattr(stream.Conversion, "write", damaged)
    assert run("mcore-to-hf", mcore, tmp_path / "other", "--verify", "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_checkpoint_metadata_with_foreign_classes_is_not_loaded(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("hf-to-mcore", source, tmp_path / "mcore") == 0

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "mcore" / "release" / CATALOGUE).write_bytes(pickle.dumps(Evil()))
    assert run("mcore-to-hf", tmp_path / "mcore", tmp_path / "back") == 2
    assert "is not a catalogue" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    assert "examples:" in capsys.readouterr().out
