"""Intact folders from many tools raise no alarm, and each planted fault of a single folder gets its own message."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, Tensors, make, read, write
from judged_models import QUIET
from quantized_models import with_keys
from safetensors.torch import load_file, save_file
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.edit import Init, plan_attaching, plan_dropping
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore

pytestmark = pytest.mark.usefixtures("megatron")

Spoil = Callable[[Path], None]
INDEX = "model.safetensors.index.json"
DEPTH, SECOND, LAST = "model.layers.3.", "model.layers.4.", "model.layers.2."


def on(names: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    """Change the tensors whose names match the pattern."""
    return renamed(lambda name, held: change(held[name]) if re.search(names, name) else held[name])


def copied(names: str, to: str | Callable[[re.Match[str]], str]) -> Spoil:
    """Copy values into tensors whose names match the pattern, from the names that the replacement gives."""

    def value(name: str, held: Tensors) -> Tensor:
        other = held.get(re.sub(names, to, name), held[name])
        return other if other.shape == held[name].shape else held[name]

    return renamed(value)


def renamed(value: Callable[[str, Tensors], Tensor]) -> Spoil:
    """Give every tensor a value."""

    def spoil(folder: Path) -> None:
        held = read(folder)
        write(folder, {name: value(name, held).clone() for name in held})

    return spoil


def keys(**changes: Any) -> Spoil:
    return lambda folder: with_keys(folder, **changes)


def saved(name: str, **held: Any) -> Spoil:
    """Write a JSON file next to the model."""
    return lambda folder: (folder / name).write_text(json.dumps(held)) and None


def both(*spoils: Spoil) -> Spoil:
    def spoil(folder: Path) -> None:
        for one in spoils:
            one(folder)

    return spoil


def without(names: str) -> Spoil:
    def spoil(folder: Path) -> None:
        write(folder, {name: tensor for name, tensor in read(folder).items() if not re.search(names, name)})

    return spoil


def added(**tensors: Tensor) -> Spoil:
    return lambda folder: write(folder, read(folder) | {name.replace("__", "."): one for name, one in tensors.items()})


def rows(matrix: Tensor, first: int, last: int) -> Tensor:
    """Return the matrix with some rows set to zero."""
    matrix = matrix.clone()
    matrix[first:last] = 0
    return matrix


def constant(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a trunk of 3 layers with 2 MTP layers; 6 experts in all layers but the first."""
    return make(tmp_path_factory.mktemp("tables") / "whole", "glm4_moe", 2, torch.bfloat16)


def alarms(folder: Path) -> list[dict[str, Any]]:
    return [one for one in audit(folder)["findings"] if one["severity"] != "note"]


# --- damage -----------------------------------------------------------------------------------------------------------

NEVER = "as in a weight that was never loaded or trained"
HEADS = r"lm_head.weight|shared_head.head.weight"
DAMAGED: dict[str, tuple[Spoil, str, str]] = {
    "a depth is another one": (
        copied(r"layers\.4\.", "layers.3."), "implausible numbers", "Depth 2 is a copy of depth 1 bit by bit",
    ),
    "a depth's layer is the trunk's": (
        copied(r"layers\.3\.", "layers.2."), "implausible numbers",
        "The layer of depth 1 is the trunk's layer 2 (counted from 0) bit by bit",
    ),
    "eh_proj of zeros": (
        on(r"3\.eh_proj", torch.zeros_like), "implausible numbers",
        f"'{DEPTH}eh_proj.weight': all numbers are 0, {NEVER}",
    ),
    "eh_proj of 1e30": (
        on(r"3\.eh_proj", lambda one: one * 1e30), "implausible numbers", "no training produces such weights",
    ),
    "a projection of 1e-30": (
        on(r"3\.eh_proj", lambda one: one * 1e-30), "implausible numbers", "they compute as zeros",
    ),
    "a constant projection": (
        on(r"1\.self_attn\.o_proj", constant(0.02)), "implausible numbers", "all numbers are 0.02",
    ),
    "a depth of zeros": (
        on(r"layers\.4\.(self|mlp|eh|\w*norm)", torch.zeros_like), "implausible numbers",
        f"all numbers are 0, {NEVER}",
    ),
    "a norm of zeros": (
        on(r"2\.input_layernorm", torch.zeros_like), "implausible numbers",
        f"'{LAST}input_layernorm.weight': all numbers are 0, {NEVER}",
    ),
    "a norm of 1e38": (on(r"^model\.norm", constant(1e38)), "implausible numbers", "values go up to 1e+38"),
    "enorm is hnorm": (
        copied(r"3\.hnorm", "3.enorm"), "implausible numbers",
        f"'{DEPTH}enorm.weight' and '{DEPTH}hnorm.weight' are equal bit by bit",
    ),
    "an expert is another one": (
        copied(r"2\.mlp\.experts\.4\.", "2.mlp.experts.1."), "implausible numbers",
        "Experts 1, 4 of 'model.layers.2.mlp.experts' are equal bit by bit",
    ),
    "half of the rows lost": (
        on(r"1\.self_attn\.o_proj", lambda one: rows(one, 24, 48)), "implausible numbers",
        "self_attn.o_proj.weight': rows 24 to 47 of 48 are zeros, as if a shard",
    ),
    "a quarter of the columns lost": (
        on(r"2\.experts\.1\.down_proj|1\.self_attn\.o_proj", lambda one: rows(one.T, 0, 16).T),
        "implausible numbers", "columns 0 to 15 of 64 are zeros",
    ),
    "half of the rows twice": (
        on(r"0\.mlp\.up_proj", lambda one: torch.cat([one[:28]] * 2)), "implausible numbers",
        "mlp.up_proj.weight': rows 28 to 55 repeat rows 0 to 27 bit by bit",
    ),
    "half of the columns twice": (
        on(r"0\.mlp\.up_proj", lambda one: torch.cat([one[:, :24]] * 2, 1)), "implausible numbers",
        "columns 24 to 47 repeat columns 0 to 23 bit by bit",
    ),
    "one shard of four in another's place": (
        on(r"2\.self_attn\.q_proj", lambda one: torch.cat([one[:16], one[32:48], one[32:]])), "implausible numbers",
        "rows 32 to 47 repeat rows 16 to 31 bit by bit",
    ),
    "half of the embedding lost": (
        on(r"embed_tokens", lambda one: rows(one, 48, 96)), "implausible numbers",
        "'model.embed_tokens.weight': the rows of 48 tokens are zeros: '48', '49', '50' and 45 more",
    ),
    "rows of the head lost": (
        on(r"lm_head|shared_head\.head", lambda one: rows(one, 7, 9)), "implausible numbers",
        "'lm_head.weight': the rows of 2 tokens are zeros: '7', '8'",
    ),
    "rows of the tokenizer's last tokens lost": (
        both(
            saved("tokenizer.json", model={"vocab": {f"t{token}": token for token in range(90)}}),
            on(r"embed_tokens", lambda one: rows(one, 88, 96)),
        ),
        "implausible numbers", "the rows of 2 tokens are zeros: 't88 (88)', 't89 (89)'",
    ),
    "a layer of the trunk twice": (
        copied(r"^model\.layers\.2\.", "model.layers.1."), "implausible numbers",
        "The trunk's layer 2 is layer 1 (counted from 0) bit by bit",
    ),
    "a matrix of the layer before": (
        copied(r"^model\.layers\.2\.self_attn\.q_", "model.layers.1.self_attn.q_"), "implausible numbers",
        f"'{LAST}self_attn.q_proj.weight': as in the trunk's layer 1",
    ),
    "the head is the embedding": (
        both(copied(HEADS, "model.embed_tokens.weight"), copied(r"model\.layers.*head", "lm_head")),
        "implausible numbers", "but the config says that head and embedding are apart",
    ),
    "more experts a token than experts": (
        keys(num_experts_per_tok=7), "damaged config",
        "'num_experts_per_tok' is 7, which is more than 'n_routed_experts', 6",
    ),
    "two bases of the angles": (
        keys(rope_theta=5.0, rope_scaling={"rope_type": "default", "rope_theta": 9.0}), "damaged config",
        "rope_theta is 5.0 and rope_theta of rope_scaling is 9.0",
    ),
    "more groups chosen than groups": (keys(topk_group=3), "damaged config", "'topk_group' is 3, which is more than"),
    "MiniMax's count": (
        both(without(r"layers\.[34]\."), keys(num_nextn_predict_layers=0, use_mtp=True, num_mtp_modules=3)),
        "MTP dropped", "The config says 3 depths, the files hold 0",
    ),
    "Inkling's count": (
        both(without(r"layers\.[34]\."), keys(num_nextn_predict_layers=0, mtp_config={"num_nextn_predict_layers": 8})),
        "MTP dropped", "The config says 8 depths, the files hold 0",
    ),
    "an end without a row": (
        keys(eos_token_id=[2, VOCABULARY]), "token id",
        f"config.json: 'eos_token_id' is {VOCABULARY}, but the embedding has {VOCABULARY} rows",
    ),
    "padding without a row": (saved("generation_config.json", pad_token_id=500), "token id", "'pad_token_id' is 500"),
    "a token of the tokenizer without a row": (
        saved("tokenizer.json", model={"vocab": {"a": 0, "b": 96}}, added_tokens=[{"id": 97, "content": "<end>"}]),
        "token id", "The tokenizer has 2 tokens for which the embedding of 96 rows has none: 'b (96)', '<end> (97)'",
    ),
    "an added token without a row": (
        saved("tokenizer_config.json", added_tokens_decoder={"99": {"content": "<think>"}}), "token id", "<think> (99)",
    ),
    "a copy is stale": (on(r"3\.shared_head\.head", lambda one: one + 1), "stale copy", "but the numbers differ"),
    "infinite numbers": (on(r"4\.eh_proj", lambda one: one / 0), "not finite", "some numbers are NaN or infinite"),
    "a type that rounds": (
        keys(dtype="float16"), "type", "The config says 'float16', most tensors are 'bfloat16': loaders that follow",
    ),
    "a promise of FP8": (
        keys(quantization_config={"quant_method": "fp8"}), "quantization", "but no weight is quantized",
    ),
    "a depth lost": (without(r"layers\.4\."), "depth missing", "The config says 2 depths, the files hold 1"),
}  # fmt: skip
"""The planted fault, the finding's explanation, and a part of its sentence."""
QUICK = ("a depth is another one", "a norm of zeros", "enorm is hnorm", "an expert is another one",
         "the head is the embedding", "MiniMax's count", "an end without a row", "half of the rows lost",
         "a quarter of the columns lost", "half of the columns twice", "one shard of four in another's place",
         "half of the embedding lost", "a type that rounds",
         "rows of the tokenizer's last tokens lost", "a layer of the trunk twice",
         "a token of the tokenizer without a row")  # fmt: skip


@pytest.mark.parametrize("damage", tiered(DAMAGED, QUICK))
def test_damage_is_found_with_the_right_message(damage: str, folder: Path, tmp_path: Path) -> None:
    spoil, guess, says = DAMAGED[damage]
    spoilt = Path(shutil.copytree(folder, tmp_path / "spoilt"))
    spoil(spoilt)
    (found,) = alarms(spoilt)
    assert found["guess"] == guess
    assert says in found["says"]
    assert found["advice"]


# --- sound folders ----------------------------------------------------------------------------------------------------


def overlaid(folder: Path) -> None:
    """Store a tensor in two shards, with the index naming the first."""
    held = read(folder)
    (folder / "model.safetensors").unlink()
    write(folder, held, files=3)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(one for one in index if index[one].startswith("model-00001"))
    last = folder / "model-00003-of-00003.safetensors"
    save_file(load_file(last) | {name: held[name] * 2}, last)


def in_three_files(folder: Path) -> None:
    held = read(folder)
    (folder / "model.safetensors").unlink()
    write(folder, held, files=3)


def with_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    saved("tokenizer_config.json", tokenizer_class="LlamaTokenizer", added_tokens_decoder={"2": {"content": "</s>"}})(
        folder
    )


ROTARY = {f"model__layers__{layer}__self_attn__rotary_emb__inv_freq": torch.ones(8) for layer in range(3)}
NOTHING: Spoil = lambda folder: None  # noqa: E731
BF16, F32 = torch.bfloat16, torch.float32
CLEAN: dict[str, tuple[str, int, torch.dtype, Spoil]] = {
    "a wrapper with a vision tower": ("qwen3_5", 1, BF16, NOTHING),
    "depths inside of a language_model": ("glm_ocr", 1, BF16, NOTHING),
    "an overlay": ("glm4_moe", 1, BF16, overlaid),
    "rotary buffers": ("llama", 0, BF16, added(**ROTARY)),
    "sentencepiece": ("llama", 0, BF16, with_sentencepiece),
    "a tied model": ("llama-tied", 0, BF16, NOTHING),
    "a tied model whose head is stored": (
        "llama-tied", 0, BF16, lambda folder: write(folder, read(folder) | {
            "lm_head.weight": read(folder)["model.embed_tokens.weight"].clone()}),
    ),
    "several shards": ("deepseek_v3", 3, BF16, in_three_files),
    "depths without copies": ("glm4_moe-lean", 1, BF16, NOTHING),
    "depths with shared heads": ("deepseek_v3", 1, BF16, NOTHING),
    "own heads": ("step3p7", 3, BF16, NOTHING),
    "a hybrid": ("nemotron_h", 3, BF16, NOTHING),
    "a hybrid with new norms around 1 + w": ("qwen3_next", 1, BF16, on(r"mtp\..*norm", torch.zeros_like)),
    "a copy in float32": ("mimo", 1, F32, NOTHING),
    "new norms and biases": (
        "glm4_moe", 1, BF16, both(on(r"norm\.weight$", torch.ones_like), on(r"bias$", torch.zeros_like)),
    ),
    "one layer for all depths": (
        "glm4_moe", 3, BF16, both(copied(r"layers\.[45]\.", "layers.3."), keys(mtp_use_repeated_layer=True)),
    ),
    "routers that choose all experts": (
        "glm4_moe", 1, BF16, both(on(r"gate\.weight$", torch.zeros_like), keys(num_experts_per_tok=6)),
    ),
    "rows that pad embedding and head": (
        "glm4_moe", 1, BF16, on(r"embed_tokens|lm_head|shared_head\.head", lambda one: rows(one, 60, 96)),
    ),
    "rows behind the tokenizer's": (
        "llama", 0, BF16, both(
            saved("tokenizer.json", model={"vocab": {f"t{token}": token for token in range(40)}}),
            on(r"embed_tokens|lm_head", lambda one: rows(one, 40, 96)),
        ),
    ),
    "rows of special tokens": (
        "llama", 0, BF16, both(
            saved("tokenizer.json", model={"vocab": {"<pad>": 0, "[unused5]": 5, **{f"t{i}": i for i in range(6, 96)}}},
                  added_tokens=[{"id": 8, "content": "t8"}]),
            on(r"embed_tokens", lambda one: rows(rows(rows(one, 0, 1), 5, 6), 8, 9)),
        ),
    ),
    "experts of zeros in a stack": (
        "qwen3_5_moe_text-packed", 1, BF16, on(r"mtp\S*experts", lambda one: rows(one, 3, 6)),
    ),
    "experts that are alike in a stack": (
        "qwen3_5_moe_text-packed", 1, BF16, on(r"mtp\S*experts", lambda one: one[:1].expand_as(one).clone()),
    ),
    "a merge that repeats layers": (
        "llama", 0, BF16, both(
            copied(r"^model\.layers\.2\.", "model.layers.1."), saved("mergekit_config.yml", merge_method="passthrough"),
        ),
    ),
    "an image's token without a row": (
        "llama", 0, BF16, saved("added_tokens.json", **{"<image_soft_token>": VOCABULARY}),
    ),
    "a type that holds every number": ("llama", 0, BF16, keys(dtype="float32")),
    "padding that is none": ("llama", 0, BF16, keys(pad_token_id=-1)),
    "MiniMax's count, switched off": ("llama", 0, BF16, keys(use_mtp=False, num_mtp_modules=3)),
}  # fmt: skip
"""A family of `hf_models`, number of MTP layers, dtype, and a change."""
FIRST = ("an overlay", "rotary buffers", "sentencepiece", "a hybrid with new norms around 1 + w",
         "new norms and biases", "one layer for all depths", "routers that choose all experts",
         "rows that pad embedding and head", "rows of special tokens", "experts of zeros in a stack",
         "a merge that repeats layers")  # fmt: skip


@pytest.mark.parametrize("name", tiered(CLEAN, FIRST))
def test_a_sound_folder_raises_no_alarm(name: str, tmp_path: Path) -> None:
    family, depths, dtype, change = CLEAN[name]
    made = make(tmp_path / "hf", family, depths, dtype)
    change(made)
    assert alarms(made) == []


# --- compared with the original ---------------------------------------------------------------------------------------

HOLDS = "side B's {} holds side A's {}"
BESIDE: dict[str, tuple[Spoil, str, str]] = {
    "layers exchanged": (
        copied(r"^model\.layers\.([12])\.", lambda found: f"model.layers.{3 - int(found[1])}."),
        "other numbers", HOLDS.format("model.layers.1", LAST[:-1]),
    ),
    "norms exchanged": (
        renamed(lambda name, held: held[_exchanged(name, "enorm", "hnorm")]), "other numbers",
        HOLDS.format(f"{DEPTH}enorm", f"{DEPTH}hnorm"),
    ),
    "experts rotated": (
        copied(r"2\.mlp\.experts\.(\d)\.", lambda found: f"2.mlp.experts.{(int(found[1]) + 1) % 6}."),
        "other numbers", HOLDS.format(f"{LAST}mlp.experts.0", f"{LAST}mlp.experts.1"),
    ),
    "a layer written over": (
        copied(r"layers\.2\.", "layers.1."), "other numbers", HOLDS.format(LAST[:-1], "model.layers.1"),
    ),
    "other numbers": (on(r"3\.eh_proj", lambda one: one * 2), "other numbers", "has other numbers"),
    "another value of a key": (keys(rope_parameters={"rope_type": "default", "rope_theta": 7.0}), "config", "theta"),
}  # fmt: skip
"""The fault planted in side B, the finding's explanation, and a part of its sentence."""
SAME: dict[str, tuple[Spoil, str]] = {
    "a key that no class knows": (keys(pretraining_tp=1, my_note="x"), "'my_note' of the config differ, which"),
    "float32 of the same numbers": (
        both(renamed(lambda name, held: held[name].float()), keys(dtype="float32")),
        "equal numbers in another type: float32, not bfloat16",
    ),
}
"""A change without effect, and the note."""


def _exchanged(name: str, one: str, other: str) -> str:
    parts = {one: other, other: one}
    return ".".join(parts.get(part, part) for part in name.split("."))


@pytest.mark.parametrize("damage", tiered(BESIDE, ("layers exchanged", "experts rotated", "another value of a key")))
def test_damage_is_found_beside_the_original(damage: str, folder: Path, tmp_path: Path) -> None:
    spoil, guess, says = BESIDE[damage]
    spoilt = Path(shutil.copytree(folder, tmp_path / "spoilt"))
    spoil(spoilt)
    found = [one for one in audit(folder, spoilt)["findings"] if one["severity"] == "error"]
    assert {one["guess"] for one in found} == {guess}
    assert any(says in one["says"] for one in found)


@pytest.mark.parametrize("change", SAME)
def test_harmless_differences_are_notes(change: str, folder: Path, tmp_path: Path) -> None:
    spoil, says = SAME[change]
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    spoil(other)
    result = audit(folder, other)
    assert result["ok"]
    assert any(says in one["says"] for one in result["findings"])


def test_a_copy_of_another_layer_is_named(folder: Path, tmp_path: Path) -> None:
    hf_to_mcore(folder, tmp_path / "saved", QUIET)
    spoilt = Path(shutil.copytree(folder, tmp_path / "spoilt"))
    copied(r"layers\.2\.", "layers.1.")(spoilt)
    says = [one["says"] for one in audit(tmp_path / "saved", spoilt)["findings"] if one["severity"] == "error"]
    assert HOLDS.format(LAST[:-1], "model.layers.1") in says[0]


def test_a_renamed_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    write(other, {name.replace("3.enorm", "3.norm_e"): tensor for name, tensor in read(folder).items()})
    notes = [one["says"] for one in audit(folder, other)["findings"] if one["severity"] == "note"]
    assert any(HOLDS.format(f"{DEPTH}norm_e", f"{DEPTH}enorm") in one for one in notes)


def test_depths_that_were_just_attached_are_a_note(folder: Path, tmp_path: Path) -> None:
    """New MTP layers are copies of the trunk's last layer."""
    hf_to_mcore(folder, tmp_path / "saved", QUIET)
    plan_dropping(tmp_path / "saved", 0).write(tmp_path / "trunk", QUIET)
    plan_attaching(tmp_path / "trunk", 2, Init("last-layer", 1)).write(tmp_path / "grown", QUIET)
    result = audit(tmp_path / "grown")
    assert result["ok"]
    assert any("is the trunk's layer 2 (counted from 0)" in one["says"] for one in result["findings"])
