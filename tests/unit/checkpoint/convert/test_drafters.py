"""verify/drafters.py: drafter folders match their checkpoints, and planted faults are caught."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_folders import (
    FAULTS,
    KINDS,
    LAYERS,
    OWN_LATENTS,
    OWN_SIZES,
    YARN,
    Change,
    Pairs,
    make_drafter,
    make_pairs,
    make_trunk,
    spoiled,
)
from safetensors.torch import load_file
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.convert import drafter_codec
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf.folder import drafter_kind
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify.drafters import verify_drafter
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("megatron")


FAMILIES: dict[str, dict[str, object]] = {
    "deepseek_v3": {},
    "qwen3_next": {},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba", "attention"]},
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return make_pairs(tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize("name", KINDS)
def test_a_drafter_folder_matches_its_checkpoint(name: str, pairs: Pairs) -> None:
    checks = verify_drafter(*pairs[name])
    assert [check for check in checks if not check.ok or not check.made] == []
    assert len(checks) == (4 if name.startswith("dspark") else 3)
    assert checks[0].figure == len(load_file(pairs[name][0] / "model.safetensors"))


@pytest.mark.parametrize(
    ("family", "name"),
    tiered(
        [(family, name) for family in FAMILIES for name in ("eagle3", "dflash", "dspark", "dflash2")],
        (("qwen3_next", "dspark"),),
    ),
)
def test_a_drafter_with_its_own_sizes_survives_a_round_trip(family: str, name: str, tmp_path: Path) -> None:
    _, trunk = make_trunk(tmp_path, family, **FAMILIES[family])
    exported, saved = make_drafter(tmp_path, name, trunk, {**OWN_SIZES, "rope_scaling": YARN})
    keys = json.loads((exported / "config.json").read_text())
    assert {key: keys[key] for key in OWN_SIZES} == OWN_SIZES
    assert (keys["rope_scaling"], keys["num_target_layers"]) == (YARN, LAYERS)
    checks = verify_drafter(exported, saved)
    assert [check for check in checks if not check.ok or not check.made] == []
    assert len(checks) == (4 if name == "dspark" else 3)


LATENT_CASES = [(family, rank) for family in ("llama", "deepseek_v3") for rank in (10, None)]


@pytest.mark.parametrize(("family", "rank"), tiered(LATENT_CASES, (("deepseek_v3", 10),)))
def test_a_drafter_with_latent_attention_survives_a_round_trip(family: str, rank: int | None, tmp_path: Path) -> None:
    _, trunk = make_trunk(tmp_path, family)
    sizes = {**OWN_LATENTS, "q_lora_rank": rank}
    exported, saved = make_drafter(tmp_path, "eagle3", trunk, sizes)
    keys = json.loads((exported / "config.json").read_text())
    assert {key: keys[key] for key in sizes} == sizes
    assert (keys["architectures"], keys["model_type"]) == (["Eagle3DeepseekV2ForCausalLM"], "deepseek_v3")
    checks = verify_drafter(exported, saved)
    assert [check for check in checks if not check.ok or not check.made] == []


def test_positions_of_latent_attention_are_read_from_either_key(pairs: Pairs, tmp_path: Path) -> None:
    folder, saved = pairs["eagle3-latents"]
    theta = {"rope_theta": OWN_LATENTS["rope_theta"]}
    keys = {"rope_scaling": None, "rope_theta": None, "rope_parameters": {**OWN_LATENTS["rope_scaling"], **theta}}
    checks = verify_drafter(spoiled(folder, tmp_path / "other", lambda _: None, **keys), saved)
    assert [check for check in checks if not check.ok or not check.made] == []


@torch.no_grad()
@pytest.mark.parametrize("rank", [10, None])
def test_latent_attention_is_that_of_transformers(rank: int | None, tmp_path: Path) -> None:
    """DeepseekV3Attention with the folder's tensors; without the last product, its output is as wide as its input."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    folder, saved = make_drafter(tmp_path, "eagle3", make_trunk(tmp_path)[1], {**OWN_LATENTS, "q_lora_rank": rank})
    keys, rows = json.loads((folder / "config.json").read_text()), 12
    wide = {**keys, "hidden_size": 2 * keys["hidden_size"]}
    config = DeepseekV3Config(**{name: value for name, value in wide.items() if name != "eagle_config"})
    config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(config, 0).eval()
    theirs.o_proj = torch.nn.Linear(theirs.o_proj.in_features, keys["hidden_size"], bias=False)
    place, tensors = "midlayer.self_attn.", load_file(folder / "model.safetensors")
    for norm in (theirs.kv_a_layernorm, *([theirs.q_a_layernorm] if rank else [])):
        norm.variance_epsilon = keys["rms_norm_eps"]  # as in vLLM; transformers always uses 1e-6
    theirs.load_state_dict({name.removeprefix(place): one for name, one in tensors.items() if name.startswith(place)})
    given_1SX = torch.randn(1, rows, config.hidden_size, generator=torch.Generator().manual_seed(1))
    angles = DeepseekV3RotaryEmbedding(config)(given_1SX, torch.arange(rows)[None])
    mask = torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)[None, None]
    wanted = theirs(hidden_states=given_1SX, position_embeddings=angles, attention_mask=mask)[0][0]
    ours = load_model(saved).mtp.layer.tf_layer.self_attention
    made = ours(given_1SX.transpose(0, 1).cuda(), attention_mask=None)[0][:, 0].cpu()
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, pairs: Pairs, tmp_path: Path) -> None:
    name, change_tensors, keys, seen = FAULTS[fault]
    folder, saved = pairs[name]
    checks = verify_drafter(spoiled(folder, tmp_path / "spoiled", change_tensors, **keys), saved)
    failed = [check.name for check in checks if not check.ok and check.made]
    assert failed[0].startswith(seen)
    assert seen == "settings" or "logits of drafts, largest difference" in failed or fault == "one bit"


def test_a_fault_of_the_rules_shows_in_the_drafts(
    pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both conversions share the fault, so a round trip restores the tensors."""
    rules = drafter_codec.mlp_rules

    def exchanged(*given: object) -> list[Rule]:
        return [replace(rule, hf=rule.hf[::-1]) for rule in rules(*given)]

    monkeypatch.setattr(drafter_codec, "mlp_rules", exchanged)
    checks = verify_drafter(*make_drafter(tmp_path, "dspark", pairs["trunk"][1]))
    assert [check.name.split(",")[0] for check in checks if not check.ok] == [
        "logits of drafts",
        "confidence of drafts",
    ]


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": ["a", "b"]}, "has eagle_aux_hidden_state_layer_ids ['a', 'b']"),
        ("eagle3", {"eagle_config": [1]}, "has eagle_config [1], which no drafter has; fetch the folder again."),
        ("eagle3", {"num_attention_heads": "4", "head_dim": None}, "has num_attention_heads '4'"),
        ("dspark", {"dflash_config": {"target_layer_ids": 3, "mask_token_id": 7}}, "has target_layer_ids 3, which"),
        ("dflash", {"rope_scaling": "yarn"}, "has rope_scaling 'yarn', which"),
    ],
)
def test_values_of_other_types_are_rejected_with_a_clear_error(
    pairs: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, keys: dict[str, object], said: str
) -> None:
    bad = spoiled(pairs[name][0], tmp_path / "spoiled", lambda _: None, **keys)
    assert main(["attach-drafter", str(pairs["trunk"][1]), str(bad), str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err


def plain_rows(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "_conv." in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "architecture", "said"),
    [
        (plain_rows, "DFlash2DraftModel", "'layers.0.attention_conv.base_kernel' is absent, and a drafter of this"),
        (lambda _: None, "DFlashDraftModel", "has conv_kernel_size, a form of drafters that is not known here"),
    ],
    ids=["without convolutions", "as DFlash"],
)
def test_no_convolution_is_dropped(
    pairs: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, architecture: str, said: str
) -> None:
    """Neither a DFlash2 folder without them nor one that is labeled DFlash is read as DFlash."""
    bad = spoiled(pairs["dflash2"][0], tmp_path / "bad", change, architectures=[architecture])
    assert main(["attach-drafter", str(pairs["trunk"][1]), str(bad), str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err
    keys = json.loads((bad / "config.json").read_text())
    block = {name: value for name, value in keys["dflash_config"].items() if name[:4] not in ("conv", "sele")}
    (bad / "config.json").write_text(json.dumps({**keys, "dflash_config": block}))
    assert main(["attach-drafter", str(pairs["trunk"][1]), str(bad), str(tmp_path / "new")]) == 2
    lacks = "lacks conv_kernel_size" if architecture == "DFlash2DraftModel" else "'candidate_selector.hidden_projection"
    assert lacks in capsys.readouterr().err


def test_draft_vocabulary_order_does_not_change_the_drafter(pairs: Pairs, tmp_path: Path) -> None:
    def mix(tensors: dict[str, Tensor]) -> None:
        order_N = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(1))
        tokens_N = tensors["d2t"] + torch.arange(len(order_N))
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            tensors[name] = tensors[name][order_N]
        tensors["d2t"] = tokens_N[order_N] - torch.arange(len(order_N))

    folder, saved = pairs["dspark"]
    assert all(check.ok for check in verify_drafter(spoiled(folder, tmp_path / "mixed", mix), saved))


def test_verify_prints_its_checks_and_sets_the_exit_status(
    pairs: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, saved = pairs["dspark"]
    assert main(["verify", str(folder), str(saved)]) == 0
    assert "ok   confidence of drafts, largest difference" in capsys.readouterr().out
    assert main(["verify", str(folder), str(pairs["dflash"][1])]) == 1
    said = capsys.readouterr().out
    assert "FAIL settings that differ: " in said
    assert "kind 'dflash', but it is 'dspark'" in said
    assert "FAIL tensors that are equal bit by bit, there and back: 0" in said
    lost = spoiled(folder, tmp_path / "lost", lambda tensors: tensors.pop("fc.weight"))
    refused = {
        (folder, pairs["trunk"][1], ""): "has no drafter to compare with",
        (lost, saved, ""): "'fc.weight' is absent",
        (folder, saved, __file__): "is not a model's folder; leave --text out",
    }
    for (source, target, text), sentence in refused.items():
        assert main(["verify", str(source), str(target), *(["--text", text] if text else [])]) == 2
        assert sentence in capsys.readouterr().err


def llama_alone(folder: Path, target: Path, **keys: object) -> Path:
    """Create a folder of a published EAGLE drafter, whose architecture is that of a whole model."""
    return spoiled(folder, target, lambda _: None, architectures=["LlamaForCausalLM"], **keys)


def test_an_eagle_drafter_is_recognized_by_its_tensors(pairs: Pairs, tmp_path: Path) -> None:
    folder, saved = pairs["eagle"]
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLMEagle",
        "LlamaForCausalLM",
    ]
    published = llama_alone(folder, tmp_path / "published")
    assert drafter_kind(published) == "eagle"
    assert drafter_kind(pairs["trunk"][0]) is None
    assert drafter_kind(llama_alone(pairs["eagle3"][0], tmp_path / "eagle3")) is None
    assert [check for check in verify_drafter(published, saved) if not check.ok] == []


def biased(tensors: dict[str, Tensor]) -> None:
    tensors["fc.bias"] = torch.zeros(len(tensors["fc.weight"]))


def other_words(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].flip(0).contiguous()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (biased, "), and a drafter of this trunk has it as none; give a drafter that was trained for this trunk."),
        (other_words, "'embed_tokens.weight' is not the trunk's embedding, which drafters here draft with; give a"),
    ],
)
def test_forms_of_eagle_drafters_that_are_not_known_are_refused(
    pairs: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, said: str
) -> None:
    bad = spoiled(pairs["eagle"][0], tmp_path / "bad", change)
    assert main(["attach-drafter", str(pairs["trunk"][1]), str(bad), str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_an_embedding_is_attached_as_well(pairs: Pairs, tmp_path: Path) -> None:
    folder, saved = pairs["eagle"]
    small = spoiled(folder, tmp_path / "small", lambda tensors: tensors.pop("embed_tokens.weight"))
    assert main(["attach-drafter", str(pairs["trunk"][1]), str(small), str(tmp_path / "new")]) == 0
    ours, theirs = DistReader(tmp_path / "new"), DistReader(saved)
    assert [key for key in theirs.keys if not torch.equal(ours.read(key), theirs.read(key))] == []
