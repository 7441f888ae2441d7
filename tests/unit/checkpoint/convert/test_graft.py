"""`convert graft`: the donor's MTP layers and the target's trunk, bit by bit, or one sentence on what differs."""

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from added_depth import with_depth
from failing_conversions import failing, files
from grafted_folders import OF_DEPTHS, lost, tensors
from hf_models import COPIES, MODELS, WIDE, differing_keys, make, read, write
from judged_models import QUIET
from mellum import mellum_head
from quantized_folders import quantized
from tiers import tiered
from trained_folders import trained
from trunk_models import LEFT

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert import stream
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.graft import plan_graft
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify.verify import verify
from megatron_mtp.cli.audit import main as audit_main
from megatron_mtp.cli.convert import main
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("megatron", "forked_python")


def checkpoint(folder: Path) -> Path:
    hf_to_mcore(folder, folder.with_name(f"{folder.name}-mcore"), QUIET)
    return folder.with_name(f"{folder.name}-mcore")


def grafted(donor: Path, target: Path, out: Path) -> Path:
    plan_graft(donor, target, QUIET).write(out, QUIET)
    return out


def faults(folder: Path) -> list[dict[str, Any]]:
    return [found for found in audit(folder)["findings"] if found["severity"] != "note"]


def assert_parts(out: Path, donor: Path, trunk: Path) -> None:
    """Check that the checkpoint has the MTP layers of one and the trunk of another, and nothing else."""
    found, theirs, own = tensors(out), tensors(donor), tensors(trunk)
    wanted = {key: tensor for key, tensor in theirs.items() if OF_DEPTHS.match(key)}
    wanted |= {key: tensor for key, tensor in own.items() if not OF_DEPTHS.match(key)}
    assert found.keys() == wanted.keys()
    assert [key for key in found if not torch.equal(found[key], wanted[key])] == []
    weights = [key for key in theirs if key in own and key.endswith("linear_proj.weight")]
    assert not any(torch.equal(theirs[key], own[key]) for key in weights)


GRAFTED = [("mimo", 3), ("glm4_moe", 1), ("deepseek_v3", 3), ("qwen3_next", 1), ("nemotron_h", 3)]


@pytest.mark.parametrize(("name", "depths"), tiered(GRAFTED, [("mimo", 3)]))
def test_a_graft_combines_one_trunk_with_the_others_mtp_layers(name: str, depths: int, tmp_path: Path) -> None:
    donor, whole = make(tmp_path / "donor", name, depths), make(tmp_path / "whole", name, depths, seed=8)
    of_donor, of_whole = checkpoint(donor), checkpoint(whole)
    folder = lost(Path(shutil.copytree(whole, tmp_path / "target")))
    assert main(["drop-mtp", str(of_whole), str(tmp_path / "target-mcore")]) == 0
    mcore_to_hf(of_whole, tmp_path / "again", QUIET, form_of(of_whole))
    for number, (one, other) in enumerate(product((donor, of_donor), (folder, tmp_path / "target-mcore"))):
        out, back = tmp_path / f"{number}", tmp_path / f"{number}-back"
        assert_parts(grafted(one, other, out), of_donor, of_whole)
        assert len(load_model(out).mtp.layers) == depths
        assert audit(out)["findings"] == []
        mcore_to_hf(out, back, QUIET, form_of(out))
        assert read(back).keys() == read(whole).keys()
        assert (back / "config.json").read_text() == (tmp_path / "again/config.json").read_text()


PAIRS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], str | None]] = {
    "MiMo on Qwen2": ("mimo", {}, "qwen2", {}, "mimo"),
    "Kimi on DeepSeek": ("kimi_k2", {}, "deepseek_v3", {}, None),
    "GLM on Ling": ("glm4_moe", {"attention_bias": False}, "bailing_moe", {}, None),
}  # fmt: skip
"""Donor and target of two families that compute the same, with changed configs, and the export's family."""


@pytest.mark.parametrize("pair", tiered(PAIRS, ("MiMo on Qwen2",)))
def test_families_that_share_the_form_of_a_layer_share_mtp_layers(pair: str, tmp_path: Path) -> None:
    one, changes, other, others, family = PAIRS[pair]
    donor = make(tmp_path / "donor", one, 1, changes=changes)
    target = make(tmp_path / "target", other, 0, changes=others, seed=8)
    (target / "tokenizer.json").unlink()
    out = grafted(donor, target, tmp_path / "out")
    assert_parts(out, checkpoint(donor), checkpoint(target))
    mcore_to_hf(out, tmp_path / "hf", QUIET, form_of(out, family=family))
    checks = verify(tmp_path / "hf", out, None)
    assert [check.name for check in checks if check.made and not check.ok] == []
    assert any("depth 1 logits" in check.name for check in checks if check.made)
    assert audit(tmp_path / "hf", out)["ok"]


def test_a_quantized_donor_gives_the_bits_of_its_dequantized_copy(tmp_path: Path) -> None:
    """DeepSeek's FP8: one scale for each block of 16 rows and columns."""
    donor = make(tmp_path / "plain", "glm4_moe", 1, torch.bfloat16)
    target = lost(make(tmp_path / "target", "glm4_moe", 1, torch.bfloat16, seed=8))
    packed = read(donor)
    for name in [name for name in packed if name.endswith("_proj.weight")]:
        packed[name] = packed[name].to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = 1 + torch.rand([-(-size // 16) for size in packed[name].shape])
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    fp8 = quantized(Path(shutil.copytree(donor, tmp_path / "fp8")), packed, settings)
    mcore_to_hf(checkpoint(fp8), tmp_path / "dequantized", QUIET, form_of(tmp_path / "fp8-mcore"))
    found = tensors(grafted(fp8, target, tmp_path / "of-fp8"))
    wanted = tensors(grafted(tmp_path / "dequantized", target, tmp_path / "of-copy"))
    assert found.keys() == wanted.keys()
    assert [key for key in found if not torch.equal(found[key], wanted[key])] == []
    assert {tensor.dtype for key, tensor in found.items() if key.startswith("mtp.")} == {torch.bfloat16, torch.float32}


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **changes}}


LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SMALL = {"first_k_dense_replace": 3}
REFUSED: dict[str, tuple[tuple[str, int, dict[str, Any]], tuple[str, int, dict[str, Any]], str]] = {
    "hidden size": (("mimo", 1, {"hidden_size": 64}), ("qwen2", 0, {}), "hidden_size 64, and the trunk 48"),
    "heads": (("mimo", 1, {"num_attention_heads": 8}), ("qwen2", 0, {}), "num_attention_heads 8, and the trunk 4"),
    "groups": (("mimo", 1, {"num_key_value_heads": 4}), ("qwen2", 0, {}), "num_query_groups 4, and the trunk 2"),
    "head width": (("mimo", 1, {"head_dim": 24}), ("qwen2", 0, {}), "kv_channels 24, and the trunk 16"),
    "MLP": (("mimo", 1, {"intermediate_size": 64}), ("qwen2", 0, {}), "ffn_hidden_size 64, and the trunk 56"),
    "base": (("mimo", 1, rope(rope_theta=5e5)), ("qwen2", 0, {}), "rotary_base 500000, and the trunk 10000"),
    "scaling": (("mimo", 1, rope(rope_type="llama3", **LLAMA_3)), ("qwen2", 0, {}), "rope_scaling True, and the trunk"),
    "epsilon": (("mimo", 1, {"rms_norm_eps": 1e-3}), ("qwen2", 0, {}), "layernorm_epsilon 0.001, and the trunk 1e-06"),
    "inner norms": (("mimo", 1, {}), ("qwen3", 0, {}), "qk_layernorm False, and the trunk True"),
    "biases": (("mimo", 1, {}), ("llama", 0, {"rms_norm_eps": 1e-6}), "'self_attention.linear_qkv.bias' is 128 in"),
    "tied": (("mimo", 1, {}), ("qwen2", 0, {"tie_word_embeddings": True}), "share_embeddings_and_output_weights False"),
    "experts": (("glm4_moe", 1, {"n_routed_experts": 8}), ("glm4_moe", 0, {}), "num_moe_experts 8, and the trunk 6"),
    "last layer": (("glm4_moe", 1, {}), ("glm4_moe", 0, SMALL), "is 6x48x48 in their layer, and absent in"),
    "hybrid": (("qwen3_next", 1, {}), ("qwen2", 0, {}), "is a hybrid, and"),
    "no MTP layers": (("qwen2", 0, {}), ("qwen2", 0, {}), "has no MTP layers to graft; give a donor that has some."),
    "MTP layers": (("mimo", 1, {}), ("mimo", 1, {}), "has MTP layers already; graft on a copy of its trunk"),
    "untrainable": (("exaone_moe", 1, {}), ("qwen2", 0, {}), "is a model that Megatron cannot run (layers"),
    "untrainable trunk": (("mimo", 1, {}), ("exaone_moe", 0, {}), "and {donor} has another."),
    "carried settings": (("glm_ocr", 1, {}), ("glm_ocr", 0, {"rms_norm_eps": 1e-3}), "rms_norm_eps 1e-05, and the"),
    "carried layers": (("ernie4_5_moe", 1, {}), ("ernie4_5_moe", 0, {"num_hidden_layers": 2}), "num_hidden_layers 3"),
}  # fmt: skip
"""Kind, MTP layers and changed config of the donor and of the target, and the error."""


@pytest.mark.parametrize("fault", REFUSED)
def test_incompatible_grafts_are_rejected_with_a_clear_error(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (donor, depths, changes), (target, others, own_changes), says = REFUSED[fault]
    make(tmp_path / "donor", donor, depths, changes=changes)
    make(tmp_path / "target", target, others, changes=own_changes)
    capsys.readouterr()
    for dry in ([], ["--dry-run"]):
        assert main(["graft", *(str(tmp_path / name) for name in ("donor", "target", "out")), *dry]) == 2
        said = capsys.readouterr().err
        assert (says.format(donor=tmp_path / "donor") in said, said.count("\n")) == (True, 1), said
    assert not list(tmp_path.glob("out*"))


def test_a_donor_without_mtp_layers_cannot_be_grafted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    donor, target = lost(make(tmp_path / "donor", "mimo", 1)), lost(make(tmp_path / "target", "mimo", 1))
    capsys.readouterr()
    assert main(["graft", str(donor), str(target), str(tmp_path / "out")]) == 2
    assert f"{donor} has no MTP layers to graft; give a donor that has some." in capsys.readouterr().err


def resized(folder: Path, by: int) -> Path:
    """Return the same trunk with more or fewer tokens, as after fine-tuning; the first rows are unchanged."""
    tensors, keys = read(folder), json.loads((folder / "config.json").read_text())
    text = keys.get("text_config", keys)
    rows, text["vocab_size"] = text["vocab_size"], text["vocab_size"] + by
    assert all(tensors[name].shape[0] == rows for name in tensors if name.endswith(COPIES))
    for name in (name for name in tensors if name.endswith((*COPIES, "lm_head.weight"))):
        tensor = tensors[name]
        tensors[name] = torch.cat([tensor, tensor[:by]]) if by > 0 else tensor[:by].clone()
    write(folder, tensors)
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


RESIZED = [("mimo", 8), ("deepseek_v3", -8), ("qwen3_next", 1), ("glm_ocr", 8), ("ernie4_5_moe", -8)]


@pytest.mark.parametrize(("name", "by"), tiered(RESIZED, [("deepseek_v3", -8)]))
def test_a_trunk_with_another_vocabulary_size_takes_the_mtp_layers(name: str, by: int, tmp_path: Path) -> None:
    """They have no rows of their own; copies of embedding and head are rewritten from the trunk."""
    donor, whole = make(tmp_path / "donor", name, 1), make(tmp_path / "whole", name, 1, seed=8)
    target = resized(lost(Path(shutil.copytree(whole, tmp_path / "target"))), by)
    says = (
        f"rows of the vocabulary: {abs(by)} {'more' if by > 0 else 'fewer'} at the trunk; the MTP layers have none of"
    )
    assert says in plan_graft(donor, target, QUIET).notes["fits"][1]
    for number, side in enumerate((target, checkpoint(resized(whole, by)))):
        if number:
            assert main(["drop-mtp", str(side), str(tmp_path / "trunk")]) == 0
            side = tmp_path / "trunk"
        out, back = grafted(donor, side, tmp_path / f"out{number}"), tmp_path / f"back{number}"
        assert_parts(out, checkpoint(donor) if not number else tmp_path / "donor-mcore", tmp_path / "whole-mcore")
        mcore_to_hf(out, back, QUIET, form_of(out))
        assert faults(back) == []


@pytest.mark.parametrize(
    ("name", "by", "says"),
    [
        ("longcat_flash", 8, "'model.mtp.embed_tokens.weight' has rows for the donor's 96 tokens, and"),
        ("step3p5", -8, "'model.layers.3.transformer.shared_head.output.weight' has rows for the donor's 96 tokens"),
    ],
)
def test_mtp_layers_with_rows_of_their_own_need_the_same_tokens(name: str, by: int, says: str, tmp_path: Path) -> None:
    donor, target = make(tmp_path / "donor", name, 1), lost(make(tmp_path / "target", name, 1, seed=8))
    with pytest.raises(ValueError, match=says):
        plan_graft(donor, resized(target, by), QUIET)


def test_a_draft_vocabulary_with_tokens_missing_in_the_trunk_is_rejected(tmp_path: Path) -> None:
    donor = make(tmp_path / "donor", "mimo", 1)
    torch.save([3, 90], donor / "draft_vocabulary.pt")
    grown = resized(lost(make(tmp_path / "grown", "mimo", 1)), 8)
    assert tensors(grafted(donor, grown, tmp_path / "out"))[DRAFT_VOCABULARY].tolist() == [3, 90]
    with pytest.raises(ValueError, match=r"draft the token 90, .* 88 tokens; give the MTP layers"):
        plan_graft(donor, resized(lost(make(tmp_path / "shrunk", "mimo", 1)), -8), QUIET)


BFLOAT, FLOAT, HALF = torch.bfloat16, torch.float32, torch.float16
CAST = [
    ("glm4_moe", BFLOAT, FLOAT, None),
    ("glm4_moe", FLOAT, BFLOAT, None),
    ("qwen3_next", BFLOAT, FLOAT, None),
    ("glm_ocr", BFLOAT, FLOAT, None),
    ("mimo", BFLOAT, BFLOAT, FLOAT),
    ("mimo", FLOAT, BFLOAT, HALF),
]
"""Model, dtypes of donor and trunk, and --dtype."""


@pytest.mark.parametrize(("name", "donors", "trunks", "given"), tiered(CAST, CAST[:1]))
def test_the_mtp_layers_take_the_type_of_the_trunk(
    name: str, donors: torch.dtype, trunks: torch.dtype, given: torch.dtype | None, tmp_path: Path
) -> None:
    """Upcasting keeps the numbers; router biases stay in float32, and an audit finds nothing."""
    donor, whole = make(tmp_path / "donor", name, 1, donors), make(tmp_path / "whole", name, 1, trunks, seed=8)
    target, theirs = lost(Path(shutil.copytree(whole, tmp_path / "target"))), read(donor)
    assert main(["drop-mtp", str(checkpoint(whole)), str(tmp_path / "trunk")]) == 0
    flags = [] if given is None else ["--dtype", str(given).removeprefix("torch.")]
    for number, (one, other) in enumerate([(donor, target), (checkpoint(donor), tmp_path / "trunk")]):
        out, back = tmp_path / f"{number}", tmp_path / f"{number}-back"
        assert main(["graft", str(one), str(other), str(out), *flags]) == 0
        mcore_to_hf(out, back, QUIET, form_of(out))
        found, own = read(back), read(whole)
        heads = found.keys() - read(target).keys() - {key for key in found if key.endswith(COPIES)}
        assert heads
        for key in found:
            wanted = (theirs if key in heads else own)[key]
            kind = FLOAT if key.endswith(WIDE) else given or trunks
            assert (found[key].dtype, torch.equal(found[key], wanted.to(kind))) == (kind, True), key
        assert faults(back) == []


CARRIED = (
    "glm_ocr ernie4_5_moe exaone4_5 mimo_v2_flash longcat_flash step3p5 step3p7 glm_moe_dsa deepseek_v32 exaone_moe "
    "mellum"
).split()


def carried_model(folder: Path, name: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Return a model with its family's most MTP layers; in GLM-5 and DeepSeek, the last of three layers."""
    depths = MODELS[name].depths[-1] if name in MODELS else 0
    make(folder, LEFT.get(name, name), depths, dtype, seed=seed)
    if name == "mellum":
        mellum_head(folder)
    elif name in LEFT:
        with_depth(folder)
    return folder


@pytest.mark.parametrize("name", tiered(CARRIED, ["glm_ocr"]))
def test_mtp_layers_behind_a_trunk_that_megatron_cannot_run_are_grafted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The MTP bits are the donor's, all others the trunk's, for folders and checkpoints; the audit exits with 0."""
    donor, whole = (carried_model(tmp_path / side, name, seed) for side, seed in (("donor", 7), ("whole", 8)))
    target = lost(Path(shutil.copytree(whole, tmp_path / "target")))
    theirs, own = read(donor), read(target)
    heads = theirs.keys() - own.keys()
    assert heads
    assert not any(torch.equal(theirs[key], read(whole)[key]) for key in heads if key.endswith("proj.weight"))
    assert main(["drop-mtp", str(checkpoint(whole)), str(tmp_path / "trunk")]) == 0
    for number, (one, other) in enumerate([(donor, target), (checkpoint(donor), tmp_path / "trunk")]):
        out, back = tmp_path / f"{number}", tmp_path / f"{number}-back"
        assert main(["graft", str(one), str(other), str(out)]) == 0
        assert main(["mcore-to-hf", str(out), str(back)]) == 0
        found = read(back)
        assert found.keys() == theirs.keys()
        repeated = {key for key in heads if key.endswith(COPIES) and "longcat" not in name}
        wanted = {key: theirs[key].to(found[key].dtype) for key in heads - repeated} | own
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
        assert (audit_main([str(out)], "audit"), audit_main([str(back)], "audit")) == (0, 0), capsys.readouterr().out
        assert differing_keys(back, whole) == {}
    assert main(["graft", str(donor), str(target), str(tmp_path / "x"), "--text", str(donor / "config.json")]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.glob("x*"))


OF_TRUNKS = {
    "--normalization LayerNorm": "normalization 'RMSNorm', and the trunk 'LayerNorm'",
    "--apply-layernorm-1p": "layernorm_zero_centered_gamma False, and the trunk True",
    "--apply-residual-connection-post-layernorm": "apply_residual_connection_post_layernorm False, and the trunk True",
    "--rotary-percent 0.5": "rotary_percent 1.0, and the trunk 0.5",
    "--num-query-groups 1 --group-query-attention": "num_query_groups 2, and the trunk 1",
}
"""Training flags of the trunk that the donor lacked, and the error."""


@pytest.mark.parametrize("flags", OF_TRUNKS)
def test_trunks_that_megatron_trained_with_other_flags_do_not_fit(flags: str, tmp_path: Path) -> None:
    donor, whole = trained(tmp_path / "donor"), trained(tmp_path / "whole", flags)
    assert main(["drop-mtp", str(whole), str(tmp_path / "trunk")]) == 0
    with pytest.raises(ValueError, match=f"do not fit the trunk of .*: the donor has {OF_TRUNKS[flags]}; give the"):
        plan_graft(donor, tmp_path / "trunk", QUIET)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a donor and a target with the same tokenizer."""
    folder = tmp_path_factory.mktemp("sides")
    train_bpe(["some words to make a vocabulary of"] * 3, 260, folder / "bpe")
    changes = {"vocab_size": 260, "max_position_embeddings": 64}
    target = make(folder / "target", "qwen2", 0, changes=changes, seed=8)
    made = make(folder / "donor", "mimo", 1, changes=changes), target
    for side in made:
        shutil.copytree(folder / "bpe", side, dirs_exist_ok=True)
    return made


def swapped(vocabulary: dict[str, int]) -> None:
    """Permute the ids of three tokens."""
    vocabulary["a"], vocabulary["b"], vocabulary["c"] = vocabulary["b"], vocabulary["c"], vocabulary["a"]


def renamed(vocabulary: dict[str, int]) -> None:
    vocabulary["so"] = vocabulary.pop("c")


def changed(folder: Path, change: Callable[[dict[str, int]], None], to: Path) -> Path:
    """Return a copy with another vocabulary."""
    copy = Path(shutil.copytree(folder, to))
    file = copy / "tokenizer.json"
    keys = json.loads(file.read_text())
    change(keys["model"]["vocab"])
    keys["model"]["merges"] = []
    file.write_text(json.dumps(keys))
    return copy


def test_tokens_with_other_ids_are_counted_and_the_first_is_named(sides: tuple[Path, Path], tmp_path: Path) -> None:
    donor, target = sides
    first = json.loads((donor / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    other = changed(target, swapped, tmp_path / "other")
    ids = rf"\({first} at the donor, {first + 1} at the trunk\)"
    says = f"3 of 260 tokens have another id, the first 'a' {ids}; give the MTP layers of"
    with pytest.raises(ValueError, match=says):
        plan_graft(donor, other, QUIET)


def test_tokenizer_facts_are_reported(sides: tuple[Path, Path], tmp_path: Path) -> None:
    donor, target = sides
    assert "tokens: the same tokenizer" in plan_graft(donor, target, QUIET).notes["fits"]
    plan = plan_graft(donor, changed(target, renamed, tmp_path / "other"), QUIET)
    assert "tokens: the same ids for 259 tokens" in plan.notes["fits"]
    assert "tokens: 1 that the donor's tokenizer lacks, the first 'so'" in plan.notes["not known"]
    (tmp_path / "other/tokenizer.json").unlink()
    (tmp_path / "other/tokenizer_config.json").unlink()
    plan = plan_graft(donor, tmp_path / "other", QUIET)
    assert f"tokens: {tmp_path}/other has no tokenizer, so its ids may have another meaning" in plan.notes["not known"]


def test_a_checkpoint_that_megatron_saved_is_donor_and_target(tmp_path: Path) -> None:
    """With vocabulary padding, a repeated layer, and no config next to it."""
    donor = trained(tmp_path / "donor", "--mtp-use-repeated-layer --mtp-num-layers 1")
    assert main(["drop-mtp", str(trained(tmp_path / "whole")), str(tmp_path / "trunk")]) == 0
    out = grafted(donor, tmp_path / "trunk", tmp_path / "out")
    assert_parts(out, donor, tmp_path / "trunk")
    args = DistReader(out).common()["args"]
    assert (args.mtp_num_layers, args.mtp_use_repeated_layer) == (2, True)
    assert audit(out)["findings"] == []


@pytest.mark.matrix
def test_acceptance_on_a_text_matches_evaluate_for_both(
    sides: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the donor's own trunk the graft accepts what the donor accepts; on another trunk it differs."""
    donor, other = sides
    own = lost(Path(shutil.copytree(donor, tmp_path / "own")))
    (tmp_path / "text.txt").write_text("some words to make a vocabulary of " * 60)
    for target in (own, other):
        out = tmp_path / f"{target.name}-out"
        capsys.readouterr()
        assert main(["graft", str(donor), str(target), str(out), "--text", str(tmp_path / "text.txt"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["acceptance"]
        before, after = told["on the donor's trunk"], told["on the new trunk"]
        assert before.keys() == {"mtp_1 acceptance", "mtp_1 conditional acceptance", "expected accepted length"}
        assert (before == after) == (target == own)
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock"))
    assert left == ["own", "own-out", "target-out", "text.txt"]


@pytest.mark.parametrize("side", ["donor", "target"])
def test_a_text_without_a_tokenizer_is_refused_before_anything_is_written(
    side: str, sides: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [Path(shutil.copytree(one, tmp_path / one.name)) for one in sides]
    for file in (tmp_path / side).glob("tokenizer*"):
        file.unlink()
    (tmp_path / "text.txt").write_text("some words " * 9)
    capsys.readouterr()
    words = [*map(str, pair), str(tmp_path / "out"), "--text", str(tmp_path / "text.txt")]
    for dry in ([], ["--dry-run"]):
        assert main(["graft", *words, *dry]) == 2
        says = f"--text cannot be measured, and nothing was written: {tmp_path / side} has no tokenizer; put the files"
        assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("text", "says"), [("some words", "it has 10 tokens; give more than 32."), (None, "no file in")]
)
def test_a_text_that_is_too_short_is_refused_before_anything_is_written(
    text: str | None, says: str, sides: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    if text:
        (tmp_path / "texts" / "a.txt").write_text(text)
    words = [*map(str, sides), str(tmp_path / "out"), "--text", str(tmp_path / "texts")]
    assert main(["graft", *words]) == 2
    said = capsys.readouterr().err
    assert "--text cannot be measured, and nothing was written: " in said
    assert says in said
    assert not list(tmp_path.glob("out*"))


def test_an_interrupted_graft_looks_unfinished_and_resumes(
    sides: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor, target = sides
    words = ["graft", str(donor), str(target), str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 0
    whole = files(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(stream, "write_chunk", failing(stream.write_chunk, 20))
        assert main(words) == 2
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.lock", "out.partial"]
    assert main(words) == 2
    other = lost(Path(shutil.copytree(donor, tmp_path / "other")))
    assert main([*words[:2], str(other), *words[3:], "--resume"]) == 2
    assert main([*words, "--resume"]) == 0
    assert files(tmp_path / "out") == whole
