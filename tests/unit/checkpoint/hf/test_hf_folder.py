"""Safetensors folders: FP8 on an example that can be checked by hand, and its conversion."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hf_models import make, read, write
from safetensors.torch import load_file, save_file

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import kept_form
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.hf import folder as folders
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.forms.form import Numbers
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint import reader
from megatron_mtp.megatron.checkpoint.reader import DistReader

QUIET = Options(quiet=True)
NAME = "model.layers.1.mlp.down_proj.weight"


def fp8_folder(folder: Path, scaled: bool = True) -> Path:
    make(folder, "llama", 0, torch.bfloat16)
    tensors = read(folder)
    scale = torch.full((3, 4), 0.5)
    scale[1, 2] = 2.0
    tensors[NAME] = tensors[NAME].to(torch.float8_e4m3fn)
    write(folder, tensors | ({f"{NAME}_scale_inv": scale} if scaled else {}))
    keys = json.loads((folder / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def test_fp8_comes_out_as_bfloat16_without_a_quantization_config(tmp_path: Path) -> None:
    source = fp8_folder(tmp_path / "source")
    folder = HFFolder(source, Numbers(block=(16, 16)))
    expected = folder.read(NAME)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(expected[16:32, 32:48], (read(source)[NAME][16:32, 32:48].float() * 2).bfloat16())
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    assert torch.equal(DistReader(tmp_path / "mcore").read("decoder.layers.1.mlp.linear_fc2.weight"), expected)
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form)
    assert torch.equal(read(tmp_path / "back")[NAME], expected)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    source = fp8_folder(tmp_path / "source", scaled=False)
    with pytest.raises(ValueError, match=f"'{NAME}' is FP8 without"):
        hf_to_mcore(source, tmp_path / "mcore", QUIET)
    assert not (tmp_path / "mcore").exists()


def test_a_file_is_opened_once_for_all_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening parses the whole header: opening per tensor makes reading quadratic."""
    folder = HFFolder(make(tmp_path / "hf", "llama", 0, shards=True))
    opened: list[Path] = []
    whole = folders.safe_open
    monkeypatch.setattr(folders, "safe_open", lambda file, **_: (opened.append(file), whole(file, "pt"))[1])
    for name in sorted(folder.tensors):
        folder.read(name)
    assert len(opened) == len(set(opened)) == 3


def test_an_expert_is_found_without_a_search_through_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_to_mcore(make(tmp_path / "hf", "glm4_moe", 1), tmp_path / "mcore", QUIET)
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    monkeypatch.setattr(reader, "create_read_items_for_chunk_list", lambda *_: pytest.fail("searched"))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", QUIET, form)
    assert read(tmp_path / "back").keys() == read(tmp_path / "hf").keys()


def test_the_index_decides_between_two_files_with_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Overlays store changed tensors in a separate file, and leave the old ones in place."""
    source = make(tmp_path / "hf", "llama", 0, shards=True)
    index = json.loads((source / folders.INDEX).read_text())["weight_map"]
    name = "model.embed_tokens.weight"
    other = next(file for file in sorted(set(index.values())) if file != index[name])
    stale = torch.zeros_like(read(source)[name])
    right = load_file(source / index[name])[name]
    save_file(load_file(source / other) | {name: stale}, source / other)
    opened = HFFolder(source)
    assert torch.equal(opened.read(name), right)
    says = opened.remarks["duplicate tensors"]
    assert says.startswith(
        f"Several files hold '{name}'. model.safetensors.index.json decides: '{index[name]}' is read"
    )
    assert main(["hf-to-mcore", str(source), str(tmp_path / "mcore")]) == 0
    assert says in capsys.readouterr().out
    assert torch.equal(DistReader(tmp_path / "mcore").read("embedding.word_embeddings.weight"), right)


def test_rotary_buffers_are_skipped_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers before 4.32 saved them with the weights."""
    source = make(tmp_path / "hf", "llama", 0)
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(3)}
    write(source, read(source) | buffers)
    assert HFFolder(source).buffers == sorted(buffers)
    assert main(["hf-to-mcore", str(source), str(tmp_path / "mcore")]) == 0
    assert "inv_freq' and 2 more are rotary buffers, which the config implies" in capsys.readouterr().out


def test_a_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="it is a folder or a pipe, not a file; fetch it again"):
        folders.stored_in(tmp_path / "model.safetensors")


def test_a_duplicate_tensor_is_rejected(tmp_path: Path) -> None:
    one, other = (json.dumps({"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}) for at in (0, 1))
    header = f'{{"x": {one}, "x": {other}}}'.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        folders.stored_in(file)
