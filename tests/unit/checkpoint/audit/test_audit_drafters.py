"""Audits of drafter folders: intact ones and equal pairs raise no alarm; planted faults are found and explained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_folders import BLOCK, FAULTS, KINDS, Change, Pairs, change, make_pairs, nothing, spoiled
from judged_models import QUIET
from torch import Tensor

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.edit import changed_args, copied
from megatron_mtp.checkpoint.convert.stream import CheckpointFiles, Conversion
from megatron_mtp.checkpoint.inspecting import inspect
from megatron_mtp.cli.audit import main
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return make_pairs(tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize("name", KINDS)
def test_a_sound_drafter_raises_no_alarm(name: str, pairs: Pairs) -> None:
    folder, saved = pairs[name]
    of_folder, of_checkpoint, *of_pairs = results = [
        audit(*sides) for sides in ([folder], [saved], [folder, saved], [saved, folder], [folder, folder])
    ]
    for result in results:
        assert [found for found in result["findings"] if found["severity"] != "note"] == []
        assert result["ok"]
    assert set(of_checkpoint["sides"][0]["bytes by part"]) == {"trunk", "embedding", "head", "beside"}
    assert {each["compared"]["equal"] for each in of_pairs} == {of_folder["sides"][0]["tensors"]}


def first(result: dict[str, Any]) -> str:
    assert not result["ok"]
    return str(result["findings"][0]["guess"])


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def twice(tensors: dict[str, Tensor]) -> None:
    """Map the second draft to the first one's token."""
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def add(tensors: dict[str, Tensor]) -> None:
    tensors["fc.bias"] = torch.ones(48)


MARKOV, HEAD, PROJECTION = "markov_head.markov_w2.weight", "lm_head.weight", "layers.1.mlp.down_proj.weight"
ALONE: dict[str, tuple[str, Change, dict[str, Any], str]] = {
    "a lost tensor": ("dspark", drop(PROJECTION), {}, "tensor missing"),
    "a lost head": ("eagle3", drop(HEAD), {}, "tensor missing"),
    "a lost list": ("dspark", drop("d2t"), {}, "tensor missing"),
    "an unknown tensor": ("dflash", add, {}, "tensor left over"),
    "NaN": ("eagle3", change("norm.weight", lambda one: one * float("nan")), {}, "not finite"),
    "a transposed matrix": ("dflash", change(PROJECTION, lambda one: one.T), {}, "shape"),
    "rows lost": ("dspark", change(MARKOV, lambda one: one[1:]), {}, "shape"),
    "a token twice": ("eagle3", twice, {}, "draft vocabulary"),
    "two lists that differ": ("dspark", change("t2d", lambda one: ~one), {}, "draft vocabulary"),
    "integers": ("dspark", change(PROJECTION, lambda one: one.int()), {}, "type"),
    "a width that is not the MLP's": ("dspark", nothing, {"intermediate_size": 44}, "shape"),
    "more heads": ("dflash", nothing, {"num_key_value_heads": 4}, "shape"),
    "one layer more": ("dspark", nothing, {"num_hidden_layers": 3}, "tensor missing"),
    "a mask outside": ("dflash", nothing, {"dflash_config": BLOCK | {"mask_token_id": 96}}, "damaged config"),
    "layers that the trunk has not": (
        "dflash", nothing, {"dflash_config": BLOCK | {"target_layer_ids": [0, 5]}}, "damaged config"
    ),
    "a form that is not known": ("dspark", nothing, {"attention_mode": "mla"}, "damaged config"),
    "a lost convolution": ("dflash2", drop("layers.0.mlp_conv.kernel_projection.weight"), {}, "tensor missing"),
    "a lost compression": ("eagle3-latents", drop("midlayer.self_attn.kv_b_proj.weight"), {}, "tensor missing"),
    "another rank": ("eagle3-latents", nothing, {"kv_lora_rank": 13}, "shape"),
    "a lost gate": ("domino", drop("prefix_gru.weight_hh_l0"), {}, "tensor missing"),
    "a lost state of masks": ("peagle", drop("mask_hidden"), {}, "tensor missing"),
    "a lost codebook": ("dflash2", drop("candidate_selector.successor_codebook"), {}, "tensor missing"),
    "no block size": ("dspark", nothing, {"block_size": None}, "damaged config"),
}  # fmt: skip
"""Faults: the kind, changes to its tensors and keys, and the audit's name for it with only the folder."""
OF_NUMBERS = ("NaN", "integers")
"""Faults in drafters that `inspect` does not look for, because it reads no weights."""


@pytest.mark.parametrize("fault", ALONE)
def test_a_fault_in_a_drafter_folder_is_found_and_explained(fault: str, pairs: Pairs, tmp_path: Path) -> None:
    name, spoil, keys, guess = ALONE[fault]
    folder = spoiled(pairs[name][0], tmp_path / "spoiled", spoil, **keys)
    assert first(audit(folder)) == guess
    assert first(audit(pairs[name][1], folder)) != "nothing"
    assert fault in OF_NUMBERS or not inspect(folder)["ok"]


SEEN_AS = {"halves of the input exchanged": "halves swapped", "rows of the kernel exchanged": "halves swapped"}
"""Faults with their own name."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_beside_the_checkpoint_is_found(fault: str, pairs: Pairs, tmp_path: Path) -> None:
    name, spoil, keys, seen = FAULTS[fault]
    folder = spoiled(pairs[name][0], tmp_path / "spoiled", spoil, **keys)
    for sides in ([pairs[name][1], folder], [folder, pairs[name][0]]):
        assert first(audit(*sides)) == SEEN_AS.get(fault, "config" if seen == "settings" else "other numbers")


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_that_lost_a_part_of_its_drafter_is_found(name: str, pairs: Pairs, tmp_path: Path) -> None:
    reader = DistReader(pairs[name][1])
    lost = {key for key in reader.keys if key.endswith("mlp.linear_fc2.weight") and key.startswith("drafter.")}
    parts = [copied(reader, key) for key in reader.keys if key not in lost]
    files = lambda folder, _: CheckpointFiles(folder.path, changed_args(reader))  # noqa: E731
    Conversion((reader.folder,), "", 0, [parts], {}, files, lambda _: None).write(tmp_path / "lost", QUIET)
    result = audit(tmp_path / "lost")
    assert first(result) == "tensor missing"
    assert set(result["findings"][0]["names"]) == lost


def test_a_drafter_is_not_compared_with_its_trunk(pairs: Pairs) -> None:
    for trunk in pairs["trunk"]:
        with pytest.raises(ValueError, match=r"is a drafter, and the other side has none; .* attach-drafter"):
            audit(trunk, pairs["dspark"][0])


def test_the_command_says_what_is_there(pairs: Pairs, capsys: pytest.CaptureFixture[str]) -> None:
    folder, saved = pairs["dspark"]
    assert main([str(saved), str(folder)], "audit") == 0
    said = capsys.readouterr().out
    assert "GPT, drafter dspark\n" in said
    assert "drafter, dspark, reads the trunk after 1 3 layers, drafts 33 tokens, " in said
    assert "32 tensors are equal bit by bit; nothing that matters differs." in said
    assert main([str(folder), "--logits"], "audit") == 2
    assert "is a drafter; leave it out" in capsys.readouterr().err
