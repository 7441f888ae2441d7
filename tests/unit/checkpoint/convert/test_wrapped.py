"""Models around a text model: tensors and keys survive a round trip, and Megatron's logits match the whole model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_models import HIDDEN, differing_keys, make, read, write
from judged_models import PROMPT, QUIET, Logits
from tiers import tiered
from trunk_models import SEEING

from megatron_mtp.checkpoint.convert.edit import NewDrafts, changed
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import kept_form
from megatron_mtp.checkpoint.convert.import_hf import flags_of, hf_to_mcore
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.families import CARRIED
from megatron_mtp.checkpoint.families.wrapped import WRAPPERS
from megatron_mtp.checkpoint.verify.verify import all_reference_logits, compare, megatron_logits, verify
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("forked_python")
TRAINED = [name for name in SEEING if name not in ("exaone4_5", "glm_ocr")]
"""Models whose text model Megatron runs."""
FIRST = ("exaone4_5", "got_ocr2", "internvl", "llava", "mistral3")
"""Models of the first tier."""


def there_and_back(folder: Path) -> Path:
    mcore, back = folder.with_name(f"{folder.name}-mcore"), folder.with_name(f"{folder.name}-back")
    hf_to_mcore(folder, mcore, QUIET)
    form = kept_form(mcore)
    assert form is not None
    mcore_to_hf(mcore, back, QUIET, form)
    return back


@pytest.fixture(scope="module")
def judged(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[str, tuple[Path, Logits, Logits]]:
    """Return a folder of every model, transformers' logits for it, and for its checkpoint's export."""
    root = tmp_path_factory.mktemp("seeing")
    names = SEEING if pytestconfig.getoption("--all") else FIRST
    folders = [make(root / name, SEEING[name], 0) for name in names]
    logits = all_reference_logits([*folders, *map(there_and_back, folders)], PROMPT)
    each = zip(folders, logits[: len(folders)], logits[len(folders) :], strict=True)
    return dict(zip(names, each, strict=True))


def test_every_wrapper_type_is_tested() -> None:
    assert sorted(WRAPPERS) == sorted(SEEING)


@pytest.mark.parametrize("name", tiered(SEEING, FIRST))
def test_the_whole_folder_comes_back(name: str, judged: dict[str, tuple[Path, Logits, Logits]]) -> None:
    folder, theirs, ours = judged[name]
    back = folder.with_name(f"{folder.name}-back")
    before, after = read(folder), read(back)
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
    assert differing_keys(folder, back) == {}
    assert torch.equal(theirs["trunk"], ours["trunk"])


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", tiered(TRAINED, FIRST))
def test_megatrons_logits_are_those_of_the_whole_model(
    name: str, judged: dict[str, tuple[Path, Logits, Logits]]
) -> None:
    folder, theirs, _ = judged[name]
    ours = megatron_logits(folder.with_name(f"{folder.name}-mcore"), PROMPT)
    assert [check.name for check in compare(theirs, ours) if not check.ok] == []


@pytest.mark.usefixtures("megatron")
def test_verify_detects_faults_in_text_model_and_vision_tower(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", SEEING["llava"], 0)
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    tensors = read(folder)
    for part in ("language_model.model.layers.1.mlp.up_proj.weight", "vision_tower"):
        name = next(name for name in tensors if name.startswith(part) and tensors[name].dim() == 2)
        write(folder, {**tensors, name: tensors[name].roll(1, 0)})
        wrong = [check.name for check in verify(folder, tmp_path / "mcore") if not check.ok]
        assert wrong[0] == "tensors that are equal bit by bit, there and back"
        assert len(wrong) == (1 if part == "vision_tower" else 2)


@pytest.mark.parametrize("name", tiered(SEEING, FIRST))
def test_a_wrapped_model_is_trainable_if_its_text_model_is(
    name: str, judged: dict[str, tuple[Path, Logits, Logits]]
) -> None:
    assert (flags_of(HFModel.read(judged[name][0]))[0] is not None) == (name in TRAINED)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", tiered(["llava", "smolvlm", "lighton_ocr"], ("llava",)))
def test_attached_depths_are_exported_with_the_whole_folder(
    name: str, judged: dict[str, tuple[Path, Logits, Logits]], tmp_path: Path
) -> None:
    folder, theirs, _ = judged[name]
    more, back, again = (tmp_path / part for part in ("more", "back", "again"))
    depths = ["--mtp-num-layers", "2", "--mtp-init", "random", "--seed", "3"]
    assert main(["attach-mtp", str(folder.with_name(f"{name}-mcore")), str(more), *depths]) == 0
    assert main(["mcore-to-hf", str(more), str(back)]) == 0
    before, after = read(folder), read(back)
    assert {key for key in after if key not in before and not key.startswith("mtp.layers.")} == set()
    assert [key for key, tensor in before.items() if not torch.equal(tensor, after[key])] == []
    config = json.loads((back / "config.json").read_text())
    assert config["text_config"]["num_nextn_predict_layers"] == 2
    assert torch.equal(all_reference_logits([back], PROMPT)[0]["trunk"], theirs["trunk"])
    checks = verify(back, more)
    assert [check.name for check in checks if not check.ok] == []
    assert "depth 2 logits, largest difference" in {check.name for check in checks}
    hf_to_mcore(back, again, QUIET)
    assert main(["verify", str(back), str(again)]) == 0


SPOILT = ["0.eh_proj", "0.hnorm", "1.enorm", "1.self_attn.o_proj", "0.mlp.up_proj"]


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("part", tiered(SPOILT, ("0.eh_proj",)))
def test_verify_sees_a_fault_of_an_attached_depth(
    part: str, judged: dict[str, tuple[Path, Logits, Logits]], tmp_path: Path
) -> None:
    mcore, more, back = judged["llava"][0].with_name("llava-mcore"), tmp_path / "more", tmp_path / "back"
    assert main(["attach-mtp", str(mcore), str(more), "--mtp-num-layers", "2", "--mtp-init", "random"]) == 0
    assert main(["mcore-to-hf", str(more), str(back)]) == 0
    tensors = read(back)
    name = f"mtp.layers.{part}.weight"
    moved = tensors[name].roll(1, -1) + (0.1 * torch.arange(HIDDEN) if tensors[name].dim() == 1 else 0)
    write(back, {**tensors, name: moved})
    wrong = [check.name for check in verify(back, more) if not check.ok]
    assert f"depth {int(part[0]) + 1} logits, largest difference" in wrong


def test_depths_are_attached_and_the_trunk_comes_back_whole(
    judged: dict[str, tuple[Path, Logits, Logits]], tmp_path: Path
) -> None:
    folder = judged["llava"][0]
    mcore, more, less = folder.with_name("llava-mcore"), tmp_path / "more", tmp_path / "less"
    depths = ["--mtp-num-layers", "1", "--mtp-init", "last-layer"]
    assert main(["attach-mtp", str(mcore), str(more), *depths]) == 0
    assert main(["drop-mtp", str(more), str(less), "--keep", "0"]) == 0
    assert main(["mcore-to-hf", str(less), str(tmp_path / "back")]) == 0
    before, after = read(folder), read(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def as_megatron_saves(converted: Path, saved: Path) -> None:
    """Save the checkpoint of a run from a converted one: Megatron only saves its own modules, and no files."""
    reader = DistReader(converted)
    around = frozenset(key.removeprefix(CARRIED) for key in reader.keys if key.startswith(CARRIED))
    changed(reader, converted, NewDrafts(0, [], {}, dropped=around)).write(saved, QUIET)
    shutil.rmtree(saved / "hf")


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", tiered(["llava", "smolvlm", "lighton_ocr"], ("llava",)))
def test_a_trained_text_model_is_exported_with_its_towers(
    name: str, judged: dict[str, tuple[Path, Logits, Logits]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Towers come from --like, bit by bit, and attached MTP layers are included."""
    folder = judged[name][0]
    converted = folder.with_name(f"{name}-mcore")
    trained, more, back = (tmp_path / part for part in ("trained", "more", "back"))
    as_megatron_saves(converted, trained)
    assert main(["attach-mtp", str(trained), str(more), "--mtp-num-layers", "1", "--mtp-init", "random"]) == 0
    assert main(["mcore-to-hf", str(more), str(back), "--like", str(folder)]) == 0
    before, after = read(folder), read(back)
    around = sum(DistReader(converted).holds(f"{CARRIED}{key}") for key in before)
    assert around
    assert f"carried from: {folder}: {around} tensors that the checkpoint lacks" in capsys.readouterr().out
    assert main(["verify", str(back), str(more)]) == 0
    said = capsys.readouterr().out
    assert f"tensors around the text model that Megatron does not save: {around} " in said
    assert [key for key, tensor in before.items() if not torch.equal(tensor, after[key])] == []
    assert {key for key in after if key not in before and not key.startswith("mtp.layers.")} == set()


@pytest.mark.usefixtures("megatron")
def test_export_without_the_unsaved_towers_requires_like(
    judged: dict[str, tuple[Path, Logits, Logits]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that only kept the folder's files has no towers, and another model's folder cannot provide them."""
    folder, trained = judged["llava"][0], tmp_path / "trained"
    converted = folder.with_name("llava-mcore")
    as_megatron_saves(converted, trained)
    words = ["mcore-to-hf", str(trained), str(tmp_path / "back")]
    assert main([*words, "--like", str(judged["got_ocr2"][0])]) == 2
    assert "give a folder of the same model (--like)" in capsys.readouterr().err
    shutil.copytree(converted / "hf", trained / "hf")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "does not save; give the Hugging Face folder that the model came from (--like FOLDER)." in said
    assert not (tmp_path / "back").exists()
