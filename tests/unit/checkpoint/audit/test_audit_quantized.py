"""Quantized folders: each planted fault is the only finding, with its explanation and the line to change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import Tensors, make, read, write
from quantized_models import FORMS, SIZES, coded, groups, nvfp4, quantized, with_keys
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings

Spoil = Callable[[Path], None]
HEAD = "model.layers.3.self_attn.q_proj."
TRUNK = "model.layers.1.self_attn.q_proj."


def found(folder: Path) -> list[tuple[str, str]]:
    """Return the audit's findings and advice, without notes."""
    return [(one["says"], one["advice"]) for one in audit(folder)["findings"] if one["severity"] != "note"]


def whole(form: str) -> Callable[[Path], Path]:
    """Create a folder whose MTP layer is quantized too, without a list."""

    def made(folder: Path) -> Path:
        make(folder, "glm4_moe", 1, torch.bfloat16, changes=SIZES)
        encode, settings = FORMS[form]
        write(folder, coded(read(folder), encode, ("none",)))
        lists = ("ignore", "modules_to_not_convert", "exclude_modules", "dynamic")
        with_keys(folder, quantization_config={name: value for name, value in settings.items() if name not in lists})
        return folder

    return made


def settings(**changes: Any) -> Spoil:
    def change(folder: Path) -> None:
        keys = json.loads((folder / "config.json").read_text())["quantization_config"]
        with_keys(folder, quantization_config=keys | changes)

    return change


def tensors(change: Callable[[Tensors], Tensors]) -> Spoil:
    def spoil(folder: Path) -> None:
        held = read(folder)
        held |= change(held)
        write(folder, {name: tensor for name, tensor in held.items() if tensor is not GONE})

    return spoil


GONE = torch.empty(0)


def lost(*names: str) -> Spoil:
    return tensors(lambda held: dict.fromkeys(names, GONE))


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    return tensors(lambda held: {name: change(held[name])})


def filled(value: float) -> Callable[[Tensor], Tensor]:
    def fill(scale: Tensor) -> Tensor:
        wide = scale.float()
        wide.view(-1)[0] = value
        return wide.to(scale.dtype)

    return fill


def other_head(form: str) -> Spoil:
    """Replace the MTP layer by one in another format, which no list names."""

    def spoil(folder: Path) -> None:
        held = read(folder)
        head = {name: tensor for name, tensor in held.items() if name.startswith("model.layers.3.")}
        trunk = {name: tensor for name, tensor in held.items() if name not in head}
        write(folder, trunk | coded(head, FORMS[form][0], ("none",)))
        settings(ignore=["lm_head"])(folder)

    return spoil


def in_a_side_file(folder: Path) -> None:
    from safetensors.torch import save_file

    held = read(folder)
    head = {name: held.pop(name) for name in list(held) if name.startswith("model.layers.3.")}
    write(folder, held)
    index = dict.fromkeys(held, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file(head, folder / "mtp.safetensors")


def head_targets(folder: Path) -> None:
    """Let the only group name modules of the trunk."""
    keys = groups(8, "float", "channel")
    keys["config_groups"]["group_0"]["targets"] = [r"re:model\.layers\.[0-2]\..*"]
    with_keys(folder, quantization_config=keys | {"ignore": ["lm_head"]})


SHORT, LONG = (
    "are not quantized, but the config promises",
    "but the config promises no quantization",
)
FAULTS: dict[str, tuple[Callable[[Path], Path] | str, Spoil, str, str]] = {
    "list of fp8 too short": (
        "fp8", settings(modules_to_not_convert=["lm_head"]), f"25 weights of the MTP layers {SHORT}",
        "to 'modules_to_not_convert' in config.json",
    ),
    "list of compressed-tensors too short": (
        "int4", settings(ignore=["lm_head"]), f"25 weights of the MTP layers {SHORT}",
        r"add 're:model\.layers\.3\..*' to 'ignore' in config.json",
    ),
    "pattern that matches nothing": (
        "int4", settings(ignore=["lm_head", "model.layers.3"]),
        f"25 weights of the MTP layers {SHORT}",
        r"add 're:model\.layers\.3\..*' to 'ignore' in config.json",
    ),
    "list of modelopt too short": (
        "modelopt nvfp4", settings(exclude_modules=["lm_head", "*mtp*"]), SHORT,
        "add 'model.layers.3*' to 'exclude_modules' in config.json",
    ),
    "list of AWQ too short": ("awq", settings(modules_to_not_convert=None), SHORT, "to 'modules_to_not_convert'"),
    "list of fp8 too long": (
        whole("fp8"), settings(modules_to_not_convert=["model.layers.3"]), LONG,
        "remove 'model.layers.3' from 'modules_to_not_convert' in config.json",
    ),
    "list of compressed-tensors too long": (
        whole("nvfp4"), settings(ignore=[r"re:.*layers\.3.*"]), LONG, r"remove 're:.*layers\.3.*' from 'ignore'",
    ),
    "list of modelopt too long": (
        whole("modelopt fp8"), settings(exclude_modules=["*layers.3*"]), LONG, "remove '*layers.3*'",
    ),
    "head without its scale": (
        whole("fp8"), lost(f"{HEAD}weight_scale_inv"), f"is FP8 without '{HEAD}weight_scale_inv'",
        "fetch",
    ),
    "scale in blocks of another size": (
        whole("fp8"), changed(f"{HEAD}weight_scale_inv", lambda one: torch.ones(2, 2)), "with scales of shape 2x2", "",
    ),
    "scales transposed": (
        "fp8 rows", changed(f"{TRUNK}weight_scale", lambda one: one.T.contiguous()), "the scales are transposed", "",
    ),
    "scales of NVFP4 transposed": (
        "nvfp4", changed("model.layers.1.mlp.shared_experts.down_proj.weight_scale", lambda one: one.T.contiguous()),
        "has bytes of shape 64x32 with scales of shape 4x64", "",
    ),
    "a scale of zero": (
        "fp8 rows", changed(f"{TRUNK}weight_scale", filled(0.0)), f"'{TRUNK}weight_scale' has zeros", "release",
    ),
    "a scale of NVFP4 of zero": (
        "nvfp4", changed(f"{TRUNK}weight_scale", filled(0.0)), f"'{TRUNK}weight_scale' has zeros", "release",
    ),
    "a scale that is NaN": (
        "fp8", changed(f"{TRUNK}weight_scale_inv",
        filled(float("nan"))), "weight_scale_inv' has numbers that are NaN", "",
    ),
    "a scale of MXFP4 that is NaN": (
        "mxfp4", changed(f"{TRUNK}weight_scale", filled(255)), "weight_scale' has numbers that are NaN", "release",
    ),
    "scale of the whole weight lost": (
        "nvfp4", lost(f"{TRUNK}weight_global_scale"), f"without '{TRUNK}weight_global_scale'", "",
    ),
    "zero points lost": ("awq", lost(f"{TRUNK}qzeros"), f"without '{TRUNK}qzeros'", ""),
    "numbers lost, scales left": ("gptq", lost(f"{TRUNK}qweight"), "scales without the numbers of their weight", ""),
    "scales of GPTQ of another group": (
        "gptq", changed(f"{TRUNK}scales", lambda one: one.repeat(2, 1)), "neither AWQ (GEMM, 4 bits) nor GPTQ", "",
    ),
    "another shape in weight_shape": (
        "int4", changed(f"{TRUNK}weight_shape", lambda one: one * 2), "which are none of a weight of 128x128", "",
    ),
    "scale left beside a whole weight": (
        "fp8", changed(f"{TRUNK}weight", lambda one: one.bfloat16()), "is bfloat16, but",
        "fetch",
    ),
    "head in another form, not listed": (
        "int4", other_head("nvfp4"),
        "25 weights of the MTP layers are stored as NVFP4, compressed-tensors, but the config promises integers",
        "a group in 'config_groups'",
    ),
    "trunk by another method": (
        "awq", settings(quant_method="gptq"), "of the trunk are stored as AWQ, but the config promises GPTQ",
        "'quant_method'",
    ),
    "head that no group targets": (whole("fp8 rows"), head_targets, LONG, "'targets'"),
    "head in a side file": ("fp8", in_a_side_file, "'mtp.safetensors', which no index lists", "hf-to-mcore"),
    "no quantization_config": (
        "fp8", lambda folder: with_keys(folder, quantization_config="absent"), "has no 'quantization_config'",
        "copy the key",
    ),
}  # fmt: skip
"""Faults: a format whose MTP layer is bfloat16, or a folder; what is damaged; the finding and its advice."""


@pytest.mark.parametrize("fault", tiered(FAULTS, [*FAULTS][::3]))
def test_a_planted_fault_is_the_one_finding_with_the_line_to_change(fault: str, tmp_path: Path) -> None:
    base, spoil, says, advises = FAULTS[fault]
    folder = quantized(tmp_path / "hf", base) if isinstance(base, str) else base(tmp_path / "hf")
    assert found(folder) == []
    spoil(folder)
    ((said, advice),) = found(folder)
    assert says in said
    assert advises in advice


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("gptq", "bitsandbytes")])
def test_a_sound_folder_whose_depth_is_quantized_as_well_has_no_finding(form: str, tmp_path: Path) -> None:
    assert found(whole(form)(tmp_path / "hf")) == []


def test_a_list_with_another_prefix_than_the_tensors_is_named(tmp_path: Path) -> None:
    """No attention is quantized, so comparing layers shows nothing; engines would build it quantized anyway."""
    folder = make(tmp_path / "hf", "glm4_moe", 1, torch.bfloat16, changes=SIZES)
    encode, keys = FORMS["modelopt nvfp4"]
    attention = tuple(f"model.layers.{layer}.self_attn" for layer in range(3))
    write(folder, coded(read(folder), encode, (*attention, "model.layers.3")))
    others = ["lm_head", "model.layers.3*"]
    with_keys(folder, quantization_config=keys | {"exclude_modules": [*others, *(f"{one}*" for one in attention)]})
    assert found(folder) == []
    spelled = [f"{one.replace('model', 'language_model')}*" for one in attention]
    settings(exclude_modules=[*others, *spelled])(folder)
    ((said, advice),) = found(folder)
    assert said.startswith("12 weights of the trunk are not quantized, but the config promises NVFP4")
    assert "The list names 'language_model.layers.0.self_attn*', 'language_model.layers.1.self_attn*'" in said
    assert advice == "in config.json, give these entries the prefix of the tensors"


def test_two_quantization_formats_in_two_groups_pass(tmp_path: Path) -> None:
    """Trunk and MTP layers in separate groups, as compressed-tensors declares them."""
    folder = quantized(tmp_path / "hf", "fp8 rows")
    write(
        folder,
        coded(
            read(folder),
            lambda stem, weight: nvfp4(stem, weight),
            ("model.layers.0", "model.layers.1", "model.layers.2"),
        ),
    )
    head = groups(4, "float", "tensor_group")["config_groups"]["group_0"] | {"targets": [r"re:model\.layers\.3\..*"]}
    trunk = groups(8, "float", "channel")["config_groups"]["group_0"]
    settings(config_groups={"group_0": trunk, "group_1": head}, ignore=["lm_head"])(folder)
    assert found(folder) == []
    settings(config_groups={"group_0": trunk})(folder)
    ((said, _),) = found(folder)
    assert "of the MTP layers are stored as NVFP4" in said


CHANNEL, TENSOR = ({"num_bits": 8, "type": "float", "strategy": one} for one in ("channel", "tensor"))
MODULES = [f"model.layers.{layer}.{name}" for layer in (1, 11) for name in ("self_attn.q_proj", "mlp.up_proj")]
TARGETS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "a name before a pattern and a class": (["re:.*q_proj", "Linear"], ["model.layers.1.self_attn.q_proj"], []),
    "a pattern before a class": (["Linear"], [r"re:.*layers\.11\..*"], []),
    "patterns in their order": ([r"re:model\.layers\.1.*"], [r"re:.*\.q_proj"], []),
    "patterns that begin in the middle": (["re:q_proj"], ["re:.*up"], []),
    "names that are parts, and other classes": (["q_proj", "model.layers.1", "linear", "Embedding"], ["Linear"], []),
    "nothing": (["Embedding"], ["re:lm_head"], []),
    "a list": (["Linear"], [], ["re:.*up_proj", "model.layers.1.self_attn.q_proj", "layers.11.self_attn.q_proj"]),
}


@pytest.mark.parametrize("case", TARGETS)
def test_modules_are_in_the_group_in_which_compressed_tensors_puts_them(case: str) -> None:
    """`match_targets` sorts the matches, and the first one decides; classes must match exactly."""
    match = pytest.importorskip("compressed_tensors.utils.match")
    one, other, ignore = TARGETS[case]
    of_target = dict.fromkeys(one, CHANNEL) | dict.fromkeys(other, TENSOR)
    group = {
        "group_0": {"targets": one, "weights": CHANNEL},
        "group_1": {"targets": other or ["no"], "weights": TENSOR},
    }
    says = QuantizationSettings({"quant_method": "compressed-tensors", "config_groups": group, "ignore": ignore})
    for name in MODULES:
        linear = torch.nn.Linear(1, 1)
        theirs = [] if match.is_match(name, linear, ignore) else match.match_targets(name, linear, of_target)
        expected = (
            [{"channel": "FP8, rows", "tensor": "FP8, tensor"}[of_target[theirs[0]]["strategy"]]] if theirs else []
        )
        assert [form.name for form in says.promised(name) or ()] == expected, name


def test_entries_that_name_nothing_and_change_nothing_are_a_note(tmp_path: Path) -> None:
    folder = whole("fp8 rows")(tmp_path / "hf")
    settings(ignore=["lm_head", "re:.*visual.*"])(folder)
    result = audit(folder)
    assert result["ok"]
    assert any("1 match no module: 're:.*visual.*'" in one["says"] for one in result["findings"])


def test_forms_are_described_by_part(tmp_path: Path) -> None:
    (note,) = (one for one in audit(quantized(tmp_path / "hf", "nvfp4"))["findings"] if one["guess"] == "quantization")
    assert note["says"] == (
        "The folder is quantized: quant_method 'compressed-tensors', 57 weights "
        "(trunk: 57 in NVFP4, compressed-tensors)."
    )


def test_mxfp4_of_quark_is_described_and_its_numbers_are_not_read(tmp_path: Path) -> None:
    """amd/GLM-4.7-MXFP4 and others: E2M1 bytes as `weight`, E8M0 bytes as `weight_scale`, one per 32 numbers."""
    folder = quantized(tmp_path / "hf", "mxfp4")
    write(folder, {name.replace("weight_packed", "weight"): tensor for name, tensor in read(folder).items()})
    with_keys(folder, quantization_config={"quant_method": "quark", "exclude": ["lm_head", "re:model.layers.3.*"]})
    assert found(folder) == []
    (note,) = (one["says"] for one in audit(folder)["findings"] if one["guess"] == "quantization")
    assert "quant_method 'quark', 57 weights (trunk: 57 in MXFP4, Quark)" in note
    assert "The numbers of 57 weights are not read" in note
    scale = f"{TRUNK}weight_scale"
    write(folder, {name: tensor for name, tensor in read(folder).items() if name != scale})
    ((said, _),) = found(folder)
    assert f"'{scale}'" in said
