"""Unreadable folders: each kind gets one sentence with a remedy, and nothing is written."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make, read, write
from safetensors.torch import save_file

from megatron_mtp.checkpoint.hf.folder import INDEX, SINGLE
from megatron_mtp.cli.convert import main

Spoil = Callable[[Path], None]
NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("published") / "llama", "llama", 0)


def config(**changes: Any) -> Spoil:
    def change(folder: Path) -> None:
        keys = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(keys))

    return change


def quantized(**settings: Any) -> Spoil:
    return config(quantization_config=settings)


def adds(file: str, text: str = "{}") -> Spoil:
    return lambda folder: (folder / file).write_text(text) and None


def adapter(folder: Path) -> None:
    shutil.move(folder / SINGLE, folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/base"}))


def gguf(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "model-q4.gguf")


def typed(dtype: torch.dtype) -> Spoil:
    return lambda folder: write(folder, {**read(folder), NORM: read(folder)[NORM].to(dtype)})


def link(name: str) -> Spoil:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("blobs/absent")

    return change


def truncated(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-10])


def absurd_header(folder: Path) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", 2**62) + b"{}")


def folder_as_file(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


def beside_single(folder: Path) -> None:
    shutil.copy(folder / SINGLE, folder / "mtp.safetensors")


def missing_shard(folder: Path) -> None:
    write(folder, read(folder), files=3)
    for file in (SINGLE, INDEX, "model-00002-of-00003.safetensors"):
        (folder / file).unlink()


def retyped(dtype: torch.dtype) -> Spoil:
    """Change a weight's dtype."""

    def spoil(folder: Path) -> None:
        tensors = read(folder)
        name = "model.layers.1.self_attn.q_proj.weight"
        write(folder, tensors | {name: torch.zeros(tensors[name].shape).to(dtype)})

    return spoil


def lfs(name: str) -> Spoil:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5368709120\n"
    return lambda folder: (folder / name).write_text(pointer) and None


def renamed(change: Callable[[str], str]) -> Spoil:
    return lambda folder: write(folder, {change(name): tensor for name, tensor in read(folder).items()})


def trained_head(folder: Path) -> None:
    """As after merging adapters with `modules_to_save`: the config still ties the trained head."""
    config(tie_word_embeddings=True)(folder)
    write(folder, {**read(folder), HEAD: read(folder)[EMBEDDING] + 1})


def adapter_with_config(folder: Path) -> None:
    keys = (folder / "config.json").read_text()
    adapter(folder)
    (folder / "config.json").write_text(keys)


def stale_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(read(folder), "model-00001.safetensors")}))


def mimo_layer(folder: Path) -> None:
    config(architectures=["MiMoForCausalLM"])(folder)
    write(folder, {**read(folder), "model.mtp_layers.0.input_proj.weight": torch.ones(48, 96)})


KINDS: dict[str, tuple[Spoil, str]] = {
    "bitsandbytes": (quantized(load_in_8bit=True), "is quantized with bitsandbytes"),
    "hqq": (quantized(quant_method="hqq"), "is quantized with hqq"),
    "unnamed": (quantized(bits=3), "is quantized with an unnamed method"),
    "lora": (adapter, "is an adapter (LoRA) of a/base; merge it into that model"),
    "gguf": (gguf, "is a GGUF model"),
    "wrapper": (
        config(model_type="paligemma", text_config={"model_type": "llama"}),
        "the model_type 'paligemma' is unknown here",
    ),
    "int8": (typed(torch.int8), f"'{NORM}' in"),
    "uint8": (typed(torch.uint8), "is of type uint8, but weights are floating-point"),
    "bool": (typed(torch.bool), "is of type bool, but weights are floating-point"),
    "link of the weights": (link(SINGLE), f"{SINGLE} is a link to blobs/absent, which is not there"),
    "link of a tokenizer": (link("tokenizer.json"), "tokenizer.json is a link to blobs/absent"),
    "truncated": (truncated, "is not a whole safetensors file"),
    "absurd header": (absurd_header, "is not a whole safetensors file"),
    "a folder as a file": (folder_as_file, "cannot be read"),
    "a copy beside the single file": (beside_single, "mtp.safetensors; remove the file that does not belong"),
    "an index of absent files beside the model": (stale_index, f"or remove the index, if {SINGLE} is the model"),
    "the type of scales": (retyped(torch.float8_e8m0fnu), "of type float8_e8m0fnu, which is the type of scales; fetch"),
    "FP8 without scales": (retyped(torch.float8_e5m2), "is FP8 without 'model.layers.1.self_attn.q_proj.weight_scale"),
    "a complex type": (retyped(torch.complex64), "of type 'C64', which is none of F64, F32"),
    "unsigned integers": (retyped(torch.uint16), "of type 'U16', which is none of F64, F32"),
    "lora with a config": (adapter_with_config, "is an adapter (LoRA) of a/base; merge it into that model"),
    "lfs pointer": (lfs(SINGLE), f"{SINGLE} is a pointer of Git LFS"),
    "lfs pointer for the config": (lfs("config.json"), "config.json is a pointer of Git LFS"),
    "compiled": (renamed(lambda name: f"_orig_mod.{name}"), "torch.compile put '_orig_mod.' into them"),
    "peft": (renamed(lambda name: f"base_model.model.{name}"), "peft put 'base_model.model.' into them"),
    "trained head under a tie": (trained_head, "'tie_word_embeddings' in config.json makes them one; set it to false"),
    "other class": (mimo_layer, "is not a tensor of a 'llama' model as"),
    "old modelopt": (adds("hf_quant_config.json", '{"quantization": {"quant_algo": "W4A8_AWQ"}}'), "modelopt W4A8_AWQ"),
    "a shard is missing": (missing_shard, "lacks 'model."),
    "config a list": (adds("config.json", "[1]"), "holds a list, not an object of keys"),
    "config a number": (adds("config.json", "3"), "holds a int, not an object of keys"),
    "vocabulary of 10^12": (config(vocab_size=10**12), "'vocab_size' is 1000000000000"),
    "heads a text": (config(num_attention_heads="4"), "'num_attention_heads' is '4'"),
    "epsilon negative": (config(rms_norm_eps=-1.0), "'rms_norm_eps' is -1.0"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_cannot_be_read_is_named(
    kind: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = KINDS[kind]
    folder = Path(shutil.copytree(published, tmp_path / "hf"))
    spoil(folder)
    for dry_run in ([], ["--dry-run"]):
        assert main(["hf-to-mcore", str(folder), str(tmp_path / "mcore"), *dry_run]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert words in said
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


NO_TENSORS = (
    "gguf", "link of the weights", "link of a tokenizer", "truncated", "absurd header", "a folder as a file",
    "lfs pointer", "lora with a config",
)  # fmt: skip
"""Kinds whose tensors the folder reader does not list."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_does_not_convert_is_described(
    kind: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = KINDS[kind]
    folder = Path(shutil.copytree(published, tmp_path / "hf"))
    spoil(folder)
    status = main(["inspect", str(folder), "--json"])
    said = capsys.readouterr()
    if kind == "lora":  # without a config there is nothing to describe
        assert (status, said.out) == (2, "")
        assert words in said.err
        return
    facts = json.loads(said.out)
    assert words in facts["why not"]
    assert status == int("findings" in facts)
    assert (facts["layers"]["files"] == 3) == (kind not in NO_TENSORS)


def test_a_consolidated_copy_of_the_weights_is_ignored(published: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "hf"))
    shutil.copy(folder / SINGLE, folder / "consolidated.safetensors")
    assert main(["inspect", str(folder)]) == 0


def in_a_side_file(folder: Path, indexed: bool) -> None:
    depth = {name: tensor for name, tensor in read(folder).items() if name.startswith("model.mtp_layers.")}
    write(folder, {name: tensor for name, tensor in read(folder).items() if name not in depth})
    save_file(depth, folder / "mtp.safetensors")
    if indexed:
        trunk = dict.fromkeys(read(folder).keys() - depth.keys(), SINGLE)
        (folder / INDEX).write_text(json.dumps({"weight_map": trunk}))


@pytest.mark.parametrize("indexed", [False, True])
def test_depths_in_a_side_file_are_merged(indexed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "hf", "mimo", 1)
    whole = read(folder)
    in_a_side_file(folder, indexed)
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "mcore"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["depths"], facts["also read"]) == (1, "mtp.safetensors")
    assert main(["mcore-to-hf", str(tmp_path / "mcore"), str(tmp_path / "back")]) == 0
    assert [file.name for file in (tmp_path / "back").glob("*.safetensors")] == [SINGLE]
    assert all(torch.equal(tensor, whole[name]) for name, tensor in read(tmp_path / "back").items())


def test_a_tied_head_may_stand_in_the_index_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "llama", 0, changes={"tie_word_embeddings": True})
    listed = {**dict.fromkeys(read(folder), SINGLE), HEAD: SINGLE}
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))
    assert HEAD not in read(folder)
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "mcore")]) == 0


@pytest.mark.parametrize("where", ["config", "side file"])
def test_fp8_of_modelopt_is_read(where: str, published: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "hf"))
    name = "model.layers.1.mlp.down_proj."
    weight, scale = read(folder)[f"{name}weight"].to(torch.float8_e4m3fn), torch.tensor(0.5)
    scales = [f"{name}weight_scale", f"{name}input_scale"]
    cache = [f"model.layers.1.self_attn.{kind}_proj.{kind}_scale" for kind in "kv"]
    write(folder, {**read(folder), f"{name}weight": weight, **{one: scale.clone() for one in scales + cache}})
    if where == "config":
        quantized(quant_method="modelopt", quant_algo="FP8")(folder)
    else:
        adds("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}')(folder)
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "mcore")]) == 0
    assert main(["mcore-to-hf", str(tmp_path / "mcore"), str(tmp_path / "back")]) == 0
    assert torch.equal(read(tmp_path / "back")[f"{name}weight"], (weight.float() / 2).bfloat16())
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()
