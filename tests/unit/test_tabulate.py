"""`megatron-mtp tabulate`: rows are what drafting and foretell say, are kept, and do not wait for a broken folder."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hf_models import make
from judged_models import QUIET

from megatron_mtp.checkpoint.convert.importing import hf_to_mcore
from megatron_mtp.checkpoint.convert.megatron_flags import megatron_arguments
from megatron_mtp.cli import main as cli
from megatron_mtp.cli import tabulate
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.foretell.table.measuring import objective_of
from megatron_mtp.foretell.table.rows import Asked, digest_of, file_of

pytestmark = pytest.mark.usefixtures("megatron")
SMALL = ("--prompts", 2, "--prompt-tokens", 6, "--new-tokens", 12)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GLM-4 MoE of two depths as a folder and a checkpoint, a model without depths, a tokenizer, a text."""
    place = tmp_path_factory.mktemp("table")
    text = "".join(f"the model drafts {number} tokens and keeps {number % 7}\n" for number in range(200))
    (place / "text.txt").write_text(text)
    train_bpe([text], 258, place / "tokenizer")
    sizes = {"vocab_size": 258, "max_position_embeddings": 128}
    make(place / "glm", "glm4_moe", 2, changes=sizes)
    make(place / "llama", "llama", 0, changes=sizes)
    hf_to_mcore(place / "glm", place / "saved", QUIET, megatron_arguments)
    return place


@pytest.fixture
def told(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    def run(*words: object) -> tuple[int, dict[str, Any], str]:
        given = ["--text", scene / "text.txt", "--tokenizer", scene / "tokenizer", "--output", tmp_path / "rows"]
        status = cli.main(["tabulate", *map(str, (*words, *given, *SMALL)), "--json"])
        shown = capsys.readouterr()
        return status, json.loads(shown.out or "{}"), shown.err

    return run


def test_a_row_is_what_drafting_accepts_and_what_foretell_says(
    told: Callable[..., tuple[int, dict[str, Any], str]], scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result, said = told(scene / "glm", scene / "saved", "--engine", "vllm", "llama.cpp", "transformers")
    assert status == 0, said
    folder, saved = result["rows"]
    assert (folder["family"], folder["depths"], folder["drafts"], folder["objective"]) == ("glm4_moe", 2, 2, "unknown")
    same = ("family", "depths", "drafts", "acceptance", "accepted_length", "tokens", "foretold")
    assert [folder[name] for name in same] == [saved[name] for name in same]
    assert folder["tokens"] == 24
    given = ["--text", scene / "text.txt", "--tokenizer", scene / "tokenizer", *SMALL]
    assert cli.main(["foretell", *map(str, (scene / "glm", "--engine", "vllm", *given, "--json"))]) == 0
    foretold = json.loads(capsys.readouterr().out)
    assert folder["foretold"]["vllm"]["acceptance"] == foretold["acceptance"]
    assert folder["foretold"]["vllm"]["accepted_length"] == pytest.approx(1 + foretold["accepted_per_round"], abs=1e-3)


@pytest.mark.matrix
def test_finished_rows_are_kept_and_other_settings_are_other_rows(
    told: Callable[..., tuple[int, dict[str, Any], str]], scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int | None] = []
    original = tabulate.measure

    def measure(asked: Any, step: Any) -> Any:
        made.append(asked.drafts)
        return original(asked, step)

    monkeypatch.setattr(tabulate, "measure", measure)
    copy = Path(shutil.copytree(scene / "saved", scene / "changing"))
    first = told(copy)[1]["rows"]
    assert told(copy)[1]["rows"] == first
    assert made == [None]
    rows = told(copy, "--num-speculative-tokens", 1, 2)[1]["rows"]
    assert made == [None, 1, 2]
    assert [row["drafts"] for row in rows] == [1, 2, 2]
    assert len(rows[0]["acceptance"]) == 1
    (copy / "release" / ".metadata").touch()
    file = next((copy / "release").glob("*.distcp"))
    file.touch()
    assert len(told(copy)[1]["rows"]) == 4


def test_a_row_is_another_where_anything_it_depends_on_is(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    given = Asked(str(tmp_path / "one"), 2, ("vllm",), ("text",), "digest", 4, 8, 16, "tokenizer")
    others: dict[str, Any] = {
        "checkpoint": str(tmp_path / "two"),
        "drafts": None,
        "engines": ("vllm", "sglang"),
        "digest": "other",
        "prompts": 5,
        "prompt_tokens": 9,
        "new_tokens": 17,
        "tokenizer": None,
    }
    assert others.keys() == {field.name for field in fields(Asked)} - {"text", "trust_remote_code"}
    asked = [given, *(replace(given, **{name: value}) for name, value in others.items())]
    files = {file_of(tmp_path, each.settings()) for each in asked}
    assert len(files) == len(asked)
    assert file_of(tmp_path, replace(given, text=("copy",)).settings()) in files
    (tmp_path / "one" / "config.json").write_text("{ }")
    assert file_of(tmp_path, given.settings()) not in files


def test_a_text_is_known_by_what_it_holds(tmp_path: Path) -> None:
    for name, text in {"one": "words", "two": "words", "three": "word"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    one, two, three = (digest_of([str(tmp_path / f"{name}.txt")]) for name in ("one", "two", "three"))
    assert one == two != three


def test_others_go_on_where_a_folder_cannot_be_read(
    told: Callable[..., tuple[int, dict[str, Any], str]], scene: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(scene / "glm", tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"junk")
    status, result, said = told("nowhere", scene / "llama", broken, scene / "saved", "--html", tmp_path / "page.html")
    assert status == 1
    assert [Path(row["checkpoint"]).name for row in result["rows"]] == ["saved"]
    reasons = {Path(one["checkpoint"]).name: one["reason"] for one in result["failed"]}
    assert list(reasons) == ["nowhere", "llama", "broken"]
    assert reasons["nowhere"] == "nowhere does not exist; give a Megatron checkpoint or a Hugging Face folder."
    assert "has no depths to draft with" in reasons["llama"]
    assert "is not a whole safetensors file" in reasons["broken"]
    assert all(f"{name}: {reason}" in said for name, reason in reasons.items())
    page = (tmp_path / "page.html").read_text()
    assert "Without a row" in page
    assert "glm4_moe" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-speculative-tokens", 0], "--num-speculative-tokens is 0; give 1 to 15"),
        (["--text", "nowhere"], "matches no file or folder"),
        (["--html", "saved/page.html"], "page.html lies inside"),
        (["--output", "saved/rows"], "rows lies inside"),
    ],
)
def test_bad_flags_are_one_sentence(
    flags: list[object], says: str, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = (scene / one if isinstance(one, str) and one.startswith("saved/") else one for one in flags)
    given = [scene / "saved", "--text", scene / "text.txt", *inside]
    assert cli.main(["tabulate", *map(str, given)]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert says in shown.err


def test_the_objective_is_what_the_training_says() -> None:
    assert objective_of(Namespace(mtp_loss="kd", params_dtype="x", mtp_train_only=True)) == "kd, trunk frozen"
    mixed = Namespace(mtp_loss="mix", mtp_loss_mix="ce=1,kd=1", params_dtype="x", mtp_unroll=3)
    assert objective_of(mixed) == "mix ce=1,kd=1, 3 passes"
    assert objective_of(Namespace(mtp_loss="ce")) == "unknown"
