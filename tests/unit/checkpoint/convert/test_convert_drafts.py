"""`convert draft-vocab`: the MTP layers draft only these tokens, and every other tensor is unchanged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_dataset import dataset
from hf_models import make

from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY
from megatron_mtp.megatron.checkpoint.iterations import iteration_folder
from megatron_mtp.megatron.checkpoint.reader import DistReader, stored_draft_vocabulary


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create `mcore`, a checkpoint with an MTP layer, and `trunk`, only the trunk."""
    folder = tmp_path_factory.mktemp("converted")
    assert run("hf-to-mcore", make(folder / "source", "mimo", 1), folder / "mcore") == 0
    assert run("drop-mtp", folder / "mcore", folder / "trunk") == 0
    return folder


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def drafted(checkpoint: Path) -> list[int]:
    tokens = stored_draft_vocabulary(iteration_folder(checkpoint))
    assert tokens is not None
    return tokens.tolist()


def other_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = DistReader(checkpoint)
    return {key: reader.read(key) for key in reader.keys if key != DRAFT_VOCABULARY}


@pytest.mark.usefixtures("megatron")
def test_depths_draft_the_most_frequent_tokens_of_a_corpus(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = dataset(tmp_path / "corpus", [9, 9, 9, 4, 4, 7])
    command = ("draft-vocab", converted / "mcore", tmp_path / "new")
    flags = ("--mtp-draft-vocab-size", 2, "--data-path", corpus)
    plan = told(capsys, *command, *flags, "--dry-run")
    assert not (tmp_path / "new").exists()
    done = told(capsys, *command, *flags)
    assert plan["new"] == [DRAFT_VOCABULARY]
    for found in (plan, done):
        assert found["draft vocabulary"] == f"2 tokens, the most frequent, 83.3% of {corpus}"
    assert (plan["tensors"], plan["depths"]) == (done["tensors"], done["depths"])
    assert drafted(tmp_path / "new") == [4, 9]
    old, new = other_tensors(converted / "mcore"), other_tensors(tmp_path / "new")
    assert list(new) == list(old)
    assert all(torch.equal(new[key], old[key]) for key in old)
    vocabulary = load_model(iteration_folder(tmp_path / "new")).draft_vocabulary
    assert vocabulary is not None
    assert vocabulary.size == 2


def test_a_new_draft_vocabulary_replaces_the_old_one(converted: Path, tmp_path: Path) -> None:
    for number, ids in enumerate(([3, 1], [8, 2, 5]), 1):
        (tmp_path / "ids").write_text("\n".join(map(str, ids)))
        source = converted / "mcore" if number == 1 else tmp_path / "1"
        assert run("draft-vocab", source, tmp_path / str(number), "--mtp-draft-vocab-file", tmp_path / "ids") == 0
        assert drafted(tmp_path / str(number)) == sorted(ids)
    assert DistReader(tmp_path / "2").keys.count(DRAFT_VOCABULARY) == 1


def test_a_list_survives_an_export_whose_head_has_all_rows(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is what SGLang loads as a token map. A checkpoint without a list writes none."""
    (tmp_path / "ids").write_text("9\n4\n")
    assert run("draft-vocab", converted / "mcore", tmp_path / "fast", "--mtp-draft-vocab-file", tmp_path / "ids") == 0
    assert run("mcore-to-hf", tmp_path / "fast", tmp_path / "hf") == 0
    assert torch.load(tmp_path / "hf/draft_vocabulary.pt", weights_only=True) == [4, 9]
    found = told(capsys, "hf-to-mcore", tmp_path / "hf", tmp_path / "again")
    assert found["draft vocabulary"] == "2 tokens, those of draft_vocabulary.pt"
    assert run("graft", tmp_path / "hf", converted / "trunk", tmp_path / "grafted") == 0
    for checkpoint in ("again", "grafted"):
        assert drafted(tmp_path / checkpoint) == [4, 9]
    assert run("mcore-to-hf", tmp_path / "again", tmp_path / "hf2") == 0
    assert torch.load(tmp_path / "hf2/draft_vocabulary.pt", weights_only=True) == [4, 9]
    assert run("mcore-to-hf", converted / "mcore", tmp_path / "whole") == 0
    assert not (tmp_path / "whole/draft_vocabulary.pt").exists()


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ([1, 10**6], "has the id 1000000, and ids are 0 to"),
        ([1.5], "is not a list of token ids"),
        ({}, "is not a list of"),
    ],
)
def test_a_damaged_list_beside_a_model_is_refused(
    listed: object, says: str, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(converted / "source", tmp_path / "hf")
    torch.save(listed, tmp_path / "hf/draft_vocabulary.pt")
    assert run("hf-to-mcore", tmp_path / "hf", tmp_path / "mcore") == 2
    said = capsys.readouterr().err
    assert f"the draft vocabulary is {tmp_path}/hf/draft_vocabulary.pt, which {says}" in said
    assert said.count("\n") == 1


def test_a_draft_vocabulary_beside_only_a_trunk_is_ignored(converted: Path, tmp_path: Path) -> None:
    assert run("mcore-to-hf", converted / "trunk", tmp_path / "hf") == 0
    torch.save([4, 9], tmp_path / "hf/draft_vocabulary.pt")
    assert run("hf-to-mcore", tmp_path / "hf", tmp_path / "again") == 0
    assert DRAFT_VOCABULARY not in DistReader(tmp_path / "again").keys


@pytest.mark.parametrize(
    ("source", "flags", "says"),
    [
        ("mcore", "", "give --mtp-draft-vocab-size and --data-path, or --mtp-draft-vocab-file."),
        ("mcore", "--mtp-draft-vocab-size 4", "give --mtp-draft-vocab-size and --data-path, or"),
        ("mcore", "--mtp-draft-vocab-size 0 --data-path corpus", "--mtp-draft-vocab-size is 0; give 1 or more."),
        ("mcore", "--mtp-draft-vocab-size 9999999 --data-path corpus", "give at most that."),
        ("mcore", "--mtp-draft-vocab-size 4 --data-path nowhere", "nowhere.idx"),
        ("mcore", "--mtp-draft-vocab-file nowhere", "is not a list of token ids"),
        ("mcore", "--mtp-draft-vocab-file ids --data-path corpus", "leave --mtp-draft-vocab-size and --data-path out."),
        ("trunk", "--mtp-draft-vocab-file ids", "has no MTP layers, which alone draft; attach-mtp adds some."),
    ],
)
def test_invalid_draft_vocabularies_give_a_clear_error(
    source: str,
    flags: str,
    says: str,
    converted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset(tmp_path / "corpus", [1, 2, 3, 4])
    (tmp_path / "ids").write_text("1\n")
    assert run("draft-vocab", converted / source, tmp_path / "new", *flags.split()) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("new*"))
