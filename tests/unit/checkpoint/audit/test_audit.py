"""`megatron-mtp audit`: exit status, JSON; output of other programs; differences between plain numbers."""

import json
import pickle
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from audit_faults import config, drop, on, read, rewrite
from hf_models import MODELS, make, write
from judged_models import QUIET
from quantized_folders import blocked_folder, fp8_folder, mxfp4_folder
from torch import Tensor
from trunk_models import SEEING

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.audit.comparing import difference, explain
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import kept_form
from megatron_mtp.checkpoint.convert.hybrid import plan_migration
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.inspecting import inspect
from megatron_mtp.checkpoint.verify.verify import same_logits
from megatron_mtp.cli import main as cli
from megatron_mtp.megatron.checkpoint import HF_FILES, RELEASE, TRACKER
from megatron_mtp.megatron.checkpoint.bits import equal_bits
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("audit") / "glm", "glm4_moe", 1, shards=True)


@pytest.fixture(scope="module")
def saved(glm: Path) -> Path:
    hf_to_mcore(glm, glm.with_name("saved"), QUIET)
    return glm.with_name("saved")


def guesses(result: dict[str, Any]) -> set[str]:
    return {one["guess"] for one in result["findings"] if one["severity"] != "note"}


def test_exit_status_and_json(glm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(glm)]) == 0
    assert capsys.readouterr().out.endswith("sound: nothing is missing, damaged or stale.\n")
    lost = Path(shutil.copytree(glm, tmp_path / "lost"))
    drop(r"layers\.3\.")(lost)
    assert cli.main(["audit", str(glm), str(lost), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"]
    assert [side["depths"] for side in result["sides"]] == [{"config": 1, "files": 1}, {"config": 1, "files": 0}]


def test_a_lost_tracker_and_the_sound_iteration_beside_a_damaged_one_are_named(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    for name in ("iter_0000003", "iter_0000007"):
        shutil.copytree(folder / RELEASE, folder / name)
    shutil.rmtree(folder / RELEASE)
    (folder / TRACKER).write_text("7")
    assert audit(folder)["ok"]
    next((folder / "iter_0000007").glob("*.distcp")).unlink()
    (found, *_) = audit(folder)["findings"]
    assert (found["guess"], found["advice"][-33:]) == ("damaged file", "give another iteration (whole: 3)")
    (folder / "iter_0000007" / "metadata.json").unlink()
    (found,) = audit(folder)["findings"]
    assert "metadata.json is missing" in found["says"]
    assert "give another iteration (whole: 3)" in found["advice"]
    (folder / TRACKER).unlink()
    (found,) = audit(folder)["findings"]
    assert f"lacks the file {TRACKER}" in found["says"]
    assert "(3)" in found["says"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere does not exist; give the folder"),
        (["empty"], "empty holds neither a config nor tensors of a model"),
        (["glm", "empty"], "empty holds neither"),
        (["glm", "--text", "text"], "add --logits, or leave --text out"),
        (["glm", "--logits", "--text", "nowhere"], "which is not a file; give a text"),
    ],
)
def test_bad_input_gives_a_clear_error_with_status_2(
    words: list[str], says: str, glm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "glm").symlink_to(glm)
    given = [word if word.startswith("--") else str(glm if word == "glm" else tmp_path / word) for word in words]
    assert cli.main(["audit", *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert says in said.err


@pytest.mark.matrix
def test_logits_of_both_sides(glm: Path, saved: Path, tmp_path: Path) -> None:
    same = audit(saved, glm, run=same_logits)
    assert same["ok"]
    assert [row["ok"] for row in same["logits"]] == [True] * 3
    changed = Path(shutil.copytree(glm, tmp_path / "changed"))
    on("model.layers.3.eh_proj.weight", lambda tensor: torch.cat(tensor.chunk(2, 1)[::-1], 1))(changed)
    other = audit(saved, changed, run=same_logits)
    assert guesses(other) == {"halves swapped", "logits"}
    assert [row["ok"] for row in other["logits"]][:2] == [True, False]
    with pytest.raises(ValueError, match="compares a Hugging Face folder with a Megatron checkpoint"):
        audit(glm, changed, run=same_logits)


def test_an_export_that_skipped_a_file_is_described(glm: Path, tmp_path: Path) -> None:
    """As in AReaL: a file with MTP layers is not written, and the new index matches the rest."""
    left = Path(shutil.copytree(glm, tmp_path / "left"))
    gone = sorted(left.glob("*.safetensors"))[1]
    names = set(json.loads((left / "model.safetensors.index.json").read_text())["weight_map"])
    gone.unlink()
    index = json.loads((left / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != gone.name}
    (left / "model.safetensors.index.json").write_text(json.dumps(index))
    lost = names - set(index["weight_map"])
    result = audit(left)
    told = {name for one in result["findings"] if one["severity"] == "error" for name in one["names"]}
    assert lost - told <= {"model.layers.3.shared_head.head.weight"}  # a copy, which a folder may omit
    assert len(told) > 20
    assert told <= lost
    assert guesses(result) == {"depth incomplete", "tensor missing"}


def test_a_checkpoint_of_megatron_bridge_is_described_by_its_own_file(saved: Path, tmp_path: Path) -> None:
    """It has no arguments next to the tensors; the model's settings are in run_config.yaml."""
    theirs = without_arguments(saved, tmp_path / "theirs")
    assert guesses(audit(theirs)) == {"damaged config"}
    model = {"num_layers": 3, "mtp_num_layers": 2, "share_embeddings_and_output_weights": False, "_target_": "a.B"}
    (theirs / "release" / "run_config.yaml").write_text(yaml.safe_dump({"model": model}))
    result = audit(theirs)
    assert result["sides"][0]["arguments from"] == "run_config.yaml"
    assert result["sides"][0]["depths"] == {"config": 2, "files": 1}
    assert guesses(result) == {"depth missing"}


def test_a_multimodal_checkpoint_has_its_text_model_under_another_prefix(
    glm: Path, saved: Path, tmp_path: Path
) -> None:
    theirs = Path(shutil.copytree(saved, tmp_path / "theirs"))
    file = theirs / "release" / ".metadata"
    catalogue = pickle.loads(file.read_bytes())
    catalogue.state_dict_metadata = {nested(key): entry for key, entry in catalogue.state_dict_metadata.items()}
    places = catalogue.storage_data.items()
    catalogue.storage_data = {replace(index, fqn=nested(index.fqn)): place for index, place in places}
    file.write_bytes(pickle.dumps(catalogue))
    (theirs / "release" / "checksums.json").unlink()
    assert any(key.startswith("language_model.mtp.") for key in DistReader(theirs).keys)
    result = audit(glm, theirs)
    assert result["ok"]
    assert result["compared"]["equal"] == len(read(glm))


def nested(key: str) -> str:
    return f"language_model.{key}" if key.startswith(("decoder.", "mtp.", "embedding.", "output_layer.weight")) else key


def without_arguments(source: Path, target: Path) -> Path:
    """Copy a checkpoint and replace its common state."""
    shutil.copytree(source, target)
    shutil.rmtree(target / HF_FILES)
    torch.save({"iteration": 3}, target / "release" / "common.pt")
    return target


def test_a_checkpoint_is_compared_with_its_arguments(saved: Path, tmp_path: Path) -> None:
    theirs = Path(shutil.copytree(saved, tmp_path / "theirs"))
    state = DistReader(theirs).state()
    state["args"].mtp_num_layers, state["args"].num_layers = 3, 5
    state["args"].rotary_base = 7
    torch.save(state, theirs / "release" / "common.pt")
    result = audit(saved, theirs)
    assert {"depth missing", "layers missing", "config"} <= guesses(result)
    assert any("'rotary_base'" in one["says"] for one in result["findings"])


def test_a_checkpoint_with_a_truncated_file_lists_its_tensors(saved: Path, tmp_path: Path) -> None:
    theirs = Path(shutil.copytree(saved, tmp_path / "theirs"))
    file = max((theirs / "release").glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-5000])
    result = audit(theirs)
    assert guesses(result) == {"damaged file"}
    assert result["sides"][0]["tensors"] == audit(saved)["sides"][0]["tensors"]


def test_a_gpt_and_its_hybrid_are_compared_by_verify(saved: Path, tmp_path: Path) -> None:
    plan_migration(saved, True).write(tmp_path / "hybrid", QUIET)
    with pytest.raises(ValueError, match=r"a GPT and a hybrid; .*: megatron-mtp convert verify"):
        audit(saved, tmp_path / "hybrid")


def test_an_older_checkpoint_is_named_and_not_opened(tmp_path: Path) -> None:
    rank = tmp_path / "older" / "iter_0000005" / "mp_rank_00"
    rank.mkdir(parents=True)
    (rank / "model_optim_rng.pt").write_bytes(b"junk")
    (tmp_path / "older" / TRACKER).write_text("5")
    result = audit(tmp_path / "older")
    assert guesses(result) == {"damaged file"}
    assert "has Megatron's older format, a file a rank" in result["findings"][0]["says"]


def test_an_unknown_family_is_compared_by_name(tmp_path: Path) -> None:
    one = make(tmp_path / "one", "glm4_moe", 1)
    config(model_type="glm6_unheard_of")(one)
    assert audit(one)["sides"][0]["depths"] == {"config": 1, "files": 1}
    assert guesses(audit(one)) == set()
    two = Path(shutil.copytree(one, tmp_path / "two"))
    rewrite(two, lambda tensors: {n: t for n, t in tensors.items() if "layers.3." not in n})
    assert guesses(audit(one, two)) == {"MTP dropped"}


def test_packed_experts_are_single_ones_in_another_form(tmp_path: Path) -> None:
    """Two folders of one model; one of them stores the MTP layer's experts in two tensors."""
    name = "qwen3_5_moe_text"
    single = make(tmp_path / "single", name, 1)
    packed = Path(shutil.copytree(single, tmp_path / "packed"))
    tensors = read(single)
    experts = [f"mtp.layers.0.mlp.experts.{index}." for index in range(MODELS[name].config["num_experts"])]
    both = [torch.cat([tensors.pop(f"{e}{part}_proj.weight") for part in ("gate", "up")]) for e in experts]
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.stack(both)
    downs = [tensors.pop(f"{e}down_proj.weight") for e in experts]
    tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.stack(downs)
    write(packed, tensors)
    assert guesses(audit(single, packed)) == set()
    tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.stack([downs[1], downs[0], *downs[2:]])
    write(packed, tensors)
    assert guesses(audit(single, packed)) == {"other numbers"}


def test_nan_and_infinite_weights_are_found(glm: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(glm, tmp_path / "odd"))
    on("model.layers.2.input_layernorm.weight", lambda tensor: tensor / 0)(odd)
    found = {one["guess"]: one["names"] for one in audit(odd)["findings"] if one["severity"] != "note"}
    assert found == {"not finite": ("model.layers.2.input_layernorm.weight",)}


def test_a_norm_that_is_stored_twice_is_compared_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import stores w next to w - 1; Megatron trains the second, and an export alone would return the first."""
    folder = make(tmp_path / "hf", "qwen3_next", 1)
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    original = DistReader.read
    key = "decoder.layers.0.self_attention.out_norm.weight"

    def planted(reader: DistReader, name: str, *rest: Any) -> Tensor:
        return original(reader, name, *rest) + (1 if name == key else 0)

    assert guesses(audit(folder, tmp_path / "mcore")) == set()
    monkeypatch.setattr(DistReader, "read", planted)
    result = audit(folder, tmp_path / "mcore")
    assert [one["names"] for one in result["findings"] if one["severity"] == "error"] == [(key,)]
    assert guesses(result) == {"other numbers"}


def test_every_tensor_of_both_sides_is_read_once(
    glm: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits, NaN and copies are checked in one read: the folder's MTP layer repeats embedding and head."""
    reads: Counter[tuple[Path, Any]] = Counter()
    of_checkpoint, of_folder = DistReader.read, HFFolder._read

    def checkpoint(reader: DistReader, *place: Any) -> Tensor:
        reads[reader.folder, place] += 1
        return of_checkpoint(reader, *place)

    def folder(opened: HFFolder, stored: Any, name: str) -> Tensor:
        reads[opened.folder, name] += 1
        return of_folder(opened, stored, name)

    monkeypatch.setattr(DistReader, "read", checkpoint)
    monkeypatch.setattr(HFFolder, "_read", folder)
    copy = Path(shutil.copytree(glm, tmp_path / "copy"))
    for sides in ([glm, saved], [saved, glm], [glm, copy], [glm], [saved]):
        reads.clear()
        result = audit(*sides)
        assert result["ok"]
        assert len(reads) >= sum(side["tensors"] for side in result["sides"])  # packed experts are read slab by slab
        assert set(reads.values()) == {1}


def test_large_tensors_are_read_in_pieces(glm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference in the last row is found, and so are NaN and a stale copy there."""
    monkeypatch.setattr("megatron_mtp.checkpoint.hf.folder.PIECE", 1000)
    name = "model.layers.3.embed_tokens.weight"
    folder = HFFolder(glm)
    assert len(list(folder.pieces(name))) > 10
    for each in folder.tensors:
        assert torch.equal(torch.cat(list(folder.pieces(each))), folder.read(each))
    copy = Path(shutil.copytree(glm, tmp_path / "copy"))
    assert audit(glm, copy)["ok"]
    on(name, lambda tensor: torch.cat([tensor[:-1], tensor[-1:] + 1]))(copy)
    assert guesses(audit(glm, copy)) == {"other numbers", "stale copy"}
    on(name, lambda tensor: torch.cat([tensor[:-1], tensor[-1:] / 0]))(copy)
    assert guesses(audit(copy)) == {"not finite", "stale copy"}
    twice = [one["side"] for one in audit(copy, copy)["findings"] if one["guess"] == "not finite"]
    assert twice == ["A", "B"]


def test_inspect_describes_what_does_not_convert(glm: Path, saved: Path, tmp_path: Path) -> None:
    unknown = Path(shutil.copytree(glm, tmp_path / "unknown"))
    config(model_type="glm6_unheard_of")(unknown)
    found = inspect(unknown)
    assert found["depths"] == {"config": 1, "files": 1}
    assert not found["trainable here"]
    assert "is unknown here" in found["why not"]
    lost = Path(shutil.copytree(glm, tmp_path / "lost"))
    drop(r"layers\.3\.")(lost)
    assert inspect(lost)["findings"] == ["The config says 1 depth, the files hold 0: all tensors of MTP were dropped."]
    assert not inspect(lost)["ok"]
    plan_migration(saved, True).write(tmp_path / "hybrid", QUIET)
    assert inspect(tmp_path / "hybrid")["hybrid layer pattern"] == "*-*E*E/*E"


def test_fp8_weights_are_read_with_their_scales(glm: Path, tmp_path: Path) -> None:
    eight = Path(shutil.copytree(glm, tmp_path / "eight"))
    name = "model.layers.0.mlp.down_proj.weight"
    scale = {f"{name}_scale_inv": torch.full((1, 1), 0.5)}

    def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, name: (tensors[name] * 2).to(torch.float8_e4m3fn), **scale}

    whole = read(eight)
    for file in eight.glob("*.safetensors*"):
        file.unlink()
    write(eight, quantize(whole))
    whole = [other for other in read(eight) if other.endswith("_proj.weight") and other != name]
    plain = [other.removesuffix(".weight") for other in whole]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": plain}
    config(quantization_config=fp8)(eight)
    result = audit(eight)
    assert result["ok"]
    assert result["sides"][0]["quant_method"] == "fp8"
    hf_to_mcore(eight, tmp_path / "mcore", QUIET)
    assert guesses(audit(eight, tmp_path / "mcore")) == set()
    assert guesses(audit(glm, eight)) == {"rounded"}


@pytest.mark.parametrize("make_folder", [fp8_folder, blocked_folder, mxfp4_folder])
def test_quantized_weights_are_compared_as_transformers_reads_them(
    make_folder: Callable[[Path], Path], tmp_path: Path
) -> None:
    """A compressed-tensors or MXFP4 release, its checkpoint, and its bfloat16 export are the same model."""
    folder, mcore = make_folder(tmp_path / "hf"), tmp_path / "mcore"
    hf_to_mcore(folder, mcore, QUIET)
    form = kept_form(mcore)
    assert form is not None
    mcore_to_hf(mcore, tmp_path / "back", QUIET, form)
    alone = audit(folder)
    assert alone["ok"], alone["findings"]
    for other in (mcore, tmp_path / "back"):
        result = audit(folder, other)
        assert guesses(result) - {"config"} == set(), result["findings"]
        assert result["compared"]["equal"] == len(read(tmp_path / "back"))
    name = next(name for name in read(tmp_path / "back") if "down_proj" in name and not name.endswith("bias"))
    on(name, lambda tensor: tensor * 2)(tmp_path / "back")
    assert guesses(audit(folder, tmp_path / "back")) - {"config"} == {"other numbers"}


def test_a_lost_scale_is_seen(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "hf")
    lost = Path(shutil.copytree(folder, tmp_path / "lost"))
    name = "model.layers.1.self_attn.q_proj.weight_scale"
    rewrite(lost, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})
    assert "quantization" in guesses(audit(folder, lost))


def test_a_model_around_a_text_model_is_audited_by_its_rules(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", SEEING["llava"], 0)
    (side,) = audit(folder)["sides"]
    assert side["family"].endswith("inside of llava")
    assert audit(folder)["ok"]
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    assert guesses(audit(folder, tmp_path / "mcore")) == set()
    lost = "language_model.model.layers.1.mlp.up_proj.weight"
    assert lost in read(folder)
    rewrite(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != lost})
    (found,) = [one for one in audit(folder)["findings"] if one["severity"] == "error"]
    assert (found["guess"], found["names"]) == ("tensor missing", (lost,))


def second_index(folder: Path) -> None:
    (folder / "model.fp16.safetensors.index.json").write_text('{"weight_map": {"a": "nowhere.safetensors"}}')


def empty_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"")


def loop(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.unlink()
    file.symlink_to(file.name)


def odd_names(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "model.\u202e\u2028\U0001f9ea.weight": torch.ones(2, 2)})


def list_of_keys(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def huge_header(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(struct.pack("<Q", 2 * 10**9) + b"{}")


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (second_index, set()),
        (empty_shard, {"damaged file"}),
        (loop, {"damaged file"}),
        (odd_names, {"damaged file"}),
        (list_of_keys, {"damaged config"}),
        (huge_header, {"damaged file"}),
        (deep_config, {"damaged config"}),
    ],
)
def test_odd_folders_are_described_without_a_traceback(
    change: Callable[[Path], None], found: set[str], glm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = Path(shutil.copytree(glm, tmp_path / "odd \u00e9\u202e"))
    change(odd)
    assert cli.main(["audit", str(odd)]) == (1 if found else 0)
    assert "Traceback" not in "".join(capsys.readouterr())
    assert found <= guesses(audit(odd))
    assert cli.main(["audit", str(glm), str(odd), "--json"]) == (1 if found else 0)


# --- numbers ---------------------------------------------------------------------------------------------------------

FIVE = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 4], [3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])


@pytest.mark.parametrize(
    ("guess", "change"),
    [
        ("halves swapped", lambda t: t[:, [2, 3, 0, 1]]),
        ("rounded", lambda t: (t + 0.001).bfloat16()),
        ("type", lambda t: t.double()),
        ("not finite", lambda t: t / 0),
        ("other numbers", lambda t: torch.linspace(3, -3, 24).reshape(6, 4).sin()),
        ("shape", lambda t: t[:, :3]),
    ],
)
def test_differences_between_small_tensors_are_explained(guess: str, change: Any) -> None:
    a = FIVE + 0.001 if guess == "rounded" else FIVE
    assert explain(a, change(FIVE).contiguous())[0] == guess


def test_a_single_number_that_differs() -> None:
    few = torch.arange(300.0)
    other = few.clone()
    other[7] = 40
    assert explain(few, other)[0] == "other numbers"
    assert difference(few, other) == 33


@pytest.mark.parametrize("size", [8, 7])
def test_tensors_are_compared_bit_by_bit(size: int) -> None:
    """Including a slice that does not start at a word boundary."""
    zeros = torch.zeros(size + 1, dtype=torch.bfloat16)[1:]
    nothing = torch.full((size,), float("nan"))
    assert equal_bits(zeros, zeros.clone())
    assert not equal_bits(zeros, -zeros)
    assert equal_bits(nothing, nothing.clone())
    other = zeros.clone()
    other[-1] = 1
    assert not equal_bits(zeros, other)


@pytest.mark.parametrize("place", [0, 7, 21])
def test_the_largest_difference_is_that_of_all_parts(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mtp.checkpoint.audit.comparing.PIECE", 8)
    ours, theirs = torch.zeros(22), torch.full((22,), 0.25)
    theirs[place] = -3.0
    assert difference(ours, theirs) == difference(theirs, ours) == 3.0
    theirs[20] = torch.nan
    assert str(difference(ours, theirs)) == "nan"
