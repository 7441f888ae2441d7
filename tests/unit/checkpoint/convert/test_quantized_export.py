"""Quantized exports: exact bits, module lists that every engine reads, and no audit findings."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make, read
from judged_models import QUIET
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf, plan_export
from megatron_mtp.checkpoint.convert.hf_form import kept_form
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.quantizing import Quantize
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.forms.form import Numbers
from megatron_mtp.checkpoint.hf.forms.table import WRITTEN
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings
from megatron_mtp.cli.convert import QUANTIZED, main
from megatron_mtp.data.tokenizer import train_bpe

SIZES = {"hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 32}
FAMILIES = {
    "glm4_moe": SIZES, "deepseek_v3": {}, "qwen3_next": {}, "mimo": {"hidden_size": 64, "intermediate_size": 160},
}  # fmt: skip

DEPTHS = {"glm4_moe": "model.layers.3.", "deepseek_v3": "model.layers.3."}


def exported(folder: Path, family: str, quantize: Quantize, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """Return a folder and its quantized export."""
    source = make(folder / "hf", family, 1, dtype, changes=FAMILIES.get(family, {}))
    hf_to_mcore(source, folder / "mcore", QUIET)
    form = kept_form(folder / "mcore")
    assert form is not None
    mcore_to_hf(folder / "mcore", folder / "coded", Options(quiet=True, quantize=quantize), form)
    return source, folder / "coded"


def alarms(folder: Path) -> list[str]:
    return [one["says"] for one in audit(folder)["findings"] if one["severity"] != "note"]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", tiered(FAMILIES, ("glm4_moe",)))
@pytest.mark.parametrize(
    ("trunk", "depths"),
    tiered(
        [pair for pair in product([None, *QUANTIZED], ["bfloat16", "fp8", "nvfp4"]) if pair != (None, "bfloat16")],
        [(None, "fp8"), (None, "nvfp4"), *((trunk, "bfloat16") for trunk in QUANTIZED)],
    ),
)
def test_a_quantized_export_passes_the_audit_and_reads_back_exactly(
    family: str, trunk: str | None, depths: str, tmp_path: Path
) -> None:
    if "fp8" in (trunk, depths) and {trunk, depths} & {"fp8-channel", "nvfp4"}:
        with pytest.raises(ValueError, match="describes one form"):
            Quantize(trunk, depths)
        return
    source, coded = exported(tmp_path, family, Quantize(trunk, depths))
    assert alarms(coded) == []
    whole, stored = read(source), read(coded)
    folder = HFFolder(coded, QuantizationSettings.of(coded, config_of(coded)).numbers)
    assert folder.tensors.keys() == whole.keys()
    depth = {name for name in whole if name.startswith(("mtp.", "model.mtp_layers.", DEPTHS.get(family, "no")))}
    changed = {name for name, tensor in whole.items() if not torch.equal(folder.read(name), tensor)}
    assert bool(changed & depth) == (depths != "bfloat16")
    assert bool(changed - depth) == (trunk is not None)
    assert all(name.endswith(".weight") and ("proj" in name) and "eh_proj" not in name for name in changed)
    for name in changed:
        assert (folder.read(name).float() - whole[name].float()).norm() < 0.2 * whole[name].float().norm()
    assert config_of(coded)["dtype"] == "bfloat16"
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float32 and "scale" not in name}
    assert wide <= {name for name, tensor in whole.items() if tensor.dtype == torch.float32}


def test_the_list_names_whole_modules_and_the_experts_of_a_layer_once(tmp_path: Path) -> None:
    """vLLM compares full names, and a layer's experts by their common name."""
    _, coded = exported(tmp_path, "glm4_moe", Quantize("fp8", "bfloat16"))
    keys = config_of(coded)["quantization_config"]
    assert keys["weight_block_size"] == [128, 128]
    assert keys["modules_to_not_convert"] == [
        "lm_head", "model.layers.3.shared_head.head", "model.layers.1.mlp.gate", "model.layers.2.mlp.gate",
        "model.layers.3.eh_proj", *(f"model.layers.3.self_attn.{one}_proj" for one in "qkvo"),
        "model.layers.3.mlp.gate",
        *(f"model.layers.3.mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")),
        "model.layers.3.mlp.experts",
    ]  # fmt: skip


def test_modules_of_which_vllm_has_another_name_are_listed_by_both(tmp_path: Path) -> None:
    """vLLM 0.32 builds MiMo's MTP layer as `model.layers.3`: with the folder's names it accepted 1 of 158 drafts."""
    _, coded = exported(tmp_path, "mimo", Quantize("fp8-channel", "bfloat16"))
    keys = config_of(coded)
    ignore = keys["quantization_config"]["ignore"]
    inside = [name.removeprefix("model.mtp_layers.0.") for name in ignore if name.startswith("model.mtp_layers.0.")]
    assert "self_attn.q_proj" in inside
    assert ignore == ["lm_head", *(f"model.{layer}.{one}" for layer in ("mtp_layers.0", "layers.3") for one in inside)]
    keys["quantization_config"]["ignore"] = [name for name in ignore if "layers.3" not in name]
    (coded / "config.json").write_text(json.dumps(keys))
    (said,) = alarms(coded)
    assert "7 weights of the MTP layers are not quantized, and listed so, but vLLM calls their modules by other" in said
    assert "'model.layers.3.mlp.down_proj'" in said


def test_the_depth_of_longcat_is_listed_by_the_names_that_vllm_builds(tmp_path: Path) -> None:
    """vLLM's `LongCatFlashMTP`: layer 2 * `num_layers`, fused projections under their own names, and a bare eh_proj."""
    _, coded = exported(tmp_path, "longcat_flash", Quantize("fp8", "bfloat16"))
    keys = config_of(coded)
    assert keys["num_layers"] == 2
    listed = [name for name in keys["quantization_config"]["modules_to_not_convert"] if ".mtp." not in name]
    attention = [f"model.layers.4.self_attn.{name}" for name in ("fused_qkv_a_proj", "kv_b_proj", "o_proj", "q_b_proj")]
    mlp = [f"model.layers.4.mlp.{name}" for name in ("gate_up_proj", "down_proj")]
    assert sorted(listed[listed.index("eh_proj") :]) == sorted(["eh_proj", *attention, *mlp])
    assert alarms(coded) == []


def test_the_o_proj_of_mimo_v2_mtp_layers_stays_unquantized(tmp_path: Path) -> None:
    """vLLM and SGLang build that `o_proj` unquantized, and the published list does not name it."""
    _, coded = exported(tmp_path, "mimo_v2_flash", Quantize("fp8", "fp8"))
    projections = {name: tensor.dtype for name, tensor in read(coded).items() if name.endswith("_proj.weight")}
    of_depth = {name: dtype for name, dtype in projections.items() if ".mtp." in name and "eh_proj" not in name}
    assert len(of_depth) == 7
    assert [name for name, dtype in of_depth.items() if dtype == torch.bfloat16] == [OUTPUT_OF_MIMO]
    keys = config_of(coded)
    listed = keys["quantization_config"]["modules_to_not_convert"]
    assert OUTPUT_OF_MIMO.removesuffix(".weight") in listed
    assert alarms(coded) == []
    published = [name for name in listed if ".mtp." not in name] + ["model.decoder.self_attn.o_proj"]
    keys["quantization_config"]["modules_to_not_convert"] = published
    (coded / "config.json").write_text(json.dumps(keys))
    assert alarms(coded) == []


OUTPUT_OF_MIMO = "model.mtp.layers.0.self_attn.o_proj.weight"


def test_two_groups_target_a_depth_by_both_of_its_names(tmp_path: Path) -> None:
    _, coded = exported(tmp_path, "mimo", Quantize("fp8-channel", "nvfp4"))
    groups = config_of(coded)["quantization_config"]["config_groups"].values()
    targets = [one["targets"] for one in groups]
    assert targets == [["Linear"], [r"re:model\.mtp_layers\.0\..*", r"re:model\.layers\.3\..*"]]


def test_trunk_and_head_in_two_forms_are_two_groups(tmp_path: Path) -> None:
    _, coded = exported(tmp_path, "glm4_moe", Quantize("fp8-channel", "nvfp4"))
    keys = config_of(coded)["quantization_config"]
    assert keys["format"] == "mixed-precision"
    targets = {one["format"]: one["targets"] for one in keys["config_groups"].values()}
    assert targets == {"float-quantized": ["Linear"], "nvfp4-pack-quantized": [r"re:model\.layers\.3\..*"]}


def test_export_like_a_quantized_folder_omits_its_quant_config(tmp_path: Path) -> None:
    """hf_quant_config.json next to unquantized weights makes engines build quantized layers."""
    source = make(tmp_path / "hf", "mimo", 1, torch.bfloat16)
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    line = ["mcore-to-hf", str(tmp_path / "mcore"), str(tmp_path / "back"), "--like", str(source)]
    assert main(line) == 0
    assert not (tmp_path / "back/hf_quant_config.json").exists()


def test_the_flag_offers_the_forms_of_the_table() -> None:
    assert tuple(WRITTEN) == QUANTIZED


@pytest.mark.parametrize("flag", QUANTIZED)
def test_encoding_loses_no_more_than_the_form(flag: str) -> None:
    """The error is half a step of E4M3, or of E2M1 at the largest number of a group; zeros stay zeros."""
    torch.manual_seed(3)
    weight = torch.randn(200, 144)
    weight[:, 16:32] = 0
    form = WRITTEN[flag]
    assert form.encoding is not None
    assert form.decode is not None
    (parts,) = form.encoding.encode([weight])
    given = form.encoding.parts((200, 144))
    assert given == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in parts.items()}
    back = form.decode(parts, Numbers()).float()
    assert not back[:, 16:32].any()
    groups = weight.unflatten(1, (-1, 16)).abs().amax(2, keepdim=True)
    allowed = 0.2 * groups.expand(-1, -1, 16).flatten(1) if flag == "nvfp4" else 0.07 * weight.abs() + 1e-4
    assert ((back - weight).abs() <= allowed).all()


def test_weights_that_engines_fuse_share_one_global_scale() -> None:
    encoding = WRITTEN["nvfp4"].encoding
    assert encoding is not None
    small, large = encoding.encode([torch.randn(4, 16), 100 * torch.randn(4, 16)])
    assert torch.equal(small["weight_global_scale"], large["weight_global_scale"])


def library(format: str, flag: str, weight: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts that compressed-tensors creates with our scales."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    encoding = WRITTEN[flag].encoding
    assert encoding is not None
    how = QuantizationScheme(targets=["Linear"], weights=dict(encoding.says["weights"]))
    given = {name: tensor for name, tensor in parts.items() if "scale" in name}
    made: dict[str, Tensor] = compressors.BaseCompressor.get_value_from_registry(format).compress(
        {"weight": weight, **{name: one.float() for name, one in given.items()}}, how
    )
    return made


@pytest.mark.parametrize(("flag", "format"), [("fp8-channel", "float-quantized"), ("nvfp4", "nvfp4-pack-quantized")])
def test_numbers_are_rounded_as_compressed_tensors_rounds_them(flag: str, format: str) -> None:
    torch.manual_seed(4)
    weight = torch.randn(37, 48).bfloat16().float()
    encoding = WRITTEN[flag].encoding
    assert encoding is not None
    (parts,) = encoding.encode([weight])
    theirs = library(format, flag, weight, parts)
    numbers = next(iter(parts))
    assert torch.equal(theirs[numbers].view(torch.uint8), parts[numbers].view(torch.uint8))


def test_a_resumed_export_of_another_form_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "hf", "mimo", 1, torch.bfloat16)
    assert main(["hf-to-mcore", str(tmp_path / "hf"), str(tmp_path / "mcore")]) == 0
    line = ["mcore-to-hf", str(tmp_path / "mcore"), str(tmp_path / "coded")]
    assert main([*line, "--quantize", "fp8", "--mtp-dtype", "nvfp4"]) == 2
    assert not (tmp_path / "coded").exists()
    assert main([*line, "--quantize", "fp8", "--dry-run"]) == 0
    assert main([*line, "--quantize", "fp8"]) == 0
    assert alarms(tmp_path / "coded") == []


@pytest.mark.parametrize("quantize", [Quantize("fp8"), Quantize("fp8", "fp8")])
def test_transformers_loads_an_fp8_export_to_the_readers_bits(quantize: Quantize, tmp_path: Path) -> None:
    """On a CPU transformers decodes FP8, correctly if blocks of 128 divide all sizes above 128."""
    said, wrong = loaded_in_transformers(tmp_path, quantize, hidden_size=128, intermediate_size=128)
    assert (said, wrong) == ("vLLM, SGLang, transformers", [])


def test_an_fp8_export_says_which_weights_transformers_reads_wrongly(tmp_path: Path) -> None:
    """192 is a block of 128 and one of 64; transformers uses two of 96, which is correct only for equal scales."""
    said, wrong = loaded_in_transformers(tmp_path, Quantize("fp8"), hidden_size=192, intermediate_size=128)
    assert len(wrong) > 10
    assert all(name.endswith("_proj.weight") for name in wrong)
    assert said == (
        "vLLM, SGLang; transformers reads 21 of 21 weights wrongly, or refuses them, where it decodes FP8 as it loads "
        "(on a CPU): 128 does not divide sizes such as 128x192 of 'model.layers.0.self_attn.q_proj.weight'; "
        "--quantize fp8-channel is free of that"
    )
    form = kept_form(tmp_path / "mcore")
    assert form is not None
    plan = plan_export(tmp_path / "mcore", tmp_path / "no", Options(quantize=Quantize("fp8-channel")), form)
    assert plan.notes["loaded by"] == "vLLM, SGLang, transformers"


def loaded_in_transformers(folder: Path, quantize: Quantize, **sizes: int) -> tuple[str, list[str]]:
    """Return which programs load a Llama export according to its report, and the weights that transformers reads
    differently.
    """
    from transformers import AutoModelForCausalLM

    changes = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4, **sizes}
    source = make(folder / "hf", "llama", 0, torch.bfloat16, changes=changes)
    hf_to_mcore(source, folder / "mcore", QUIET)
    form = kept_form(folder / "mcore")
    assert form is not None
    told = mcore_to_hf(folder / "mcore", folder / "coded", Options(quiet=True, quantize=quantize), form)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "coded", dtype=torch.bfloat16).state_dict()
    ours = HFFolder(folder / "coded", Numbers())
    return told["loaded by"], [name for name in ours.tensors if not torch.equal(loaded[name], ours.read(name))]


@pytest.mark.matrix
@pytest.mark.usefixtures("megatron", "forked_python")
def test_acceptance_before_and_after_matches_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal if nothing is quantized; different if the trunk is in 4 bits."""
    folder = make(
        tmp_path / "hf",
        "mimo",
        1,
        torch.bfloat16,
        changes={**FAMILIES["mimo"], "vocab_size": 260, "max_position_embeddings": 64},
    )
    text = tmp_path / "text.txt"
    text.write_text("some words to make a vocabulary of " * 60)
    train_bpe(["some words to make a vocabulary of"] * 3, 260, tmp_path / "bpe")
    shutil.copytree(tmp_path / "bpe", folder, dirs_exist_ok=True)
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "mcore")]) == 0
    for flags in ([], ["--quantize", "nvfp4", "--mtp-dtype", "nvfp4"]):
        capsys.readouterr()
        out = tmp_path / f"out{len(flags)}"
        line = ["mcore-to-hf", str(tmp_path / "mcore"), str(out), "--text", str(text), "--json", *flags]
        assert main(line) == 0
        told = json.loads(capsys.readouterr().out)["acceptance"]
        assert told["before"].keys() == {"mtp_1 acceptance", "mtp_1 conditional acceptance", "expected accepted length"}
        assert (told["before"] == told["after"]) == (not flags)
