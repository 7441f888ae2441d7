"""Our logits match transformers' for every family, and planted faults are caught.

One transformers process computes all references.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, make, read, write
from judged_models import (
    PLAIN,
    QUIET,
    TRAINED,
    ZERO_CENTRED,
    Judged,
    checks_of,
    judge_all,
    our_logits,
)
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.plan import HFModel
from megatron_mtp.checkpoint.convert.stored import beside
from megatron_mtp.checkpoint.families import Family, Layout
from megatron_mtp.checkpoint.families.rules import Piece, Rule, Same, SwapHalves, Then
from megatron_mtp.checkpoint.hf.config import HFConfig
from megatron_mtp.checkpoint.verify.prompt import Prompt
from megatron_mtp.checkpoint.verify.reference import all_logits
from megatron_mtp.checkpoint.verify.verify import Check, acceptance, reference_logits, round_trip, verify
from megatron_mtp.cli.convert import main
from megatron_mtp.megatron.checkpoint.reader import DistReader

pytestmark = pytest.mark.usefixtures("forked_python")

ALL = {**PLAIN, **TRAINED}
CARRIED = {"exaone_moe": 1, "ernie4_5_moe": 3, "mimo_v2_flash": 3, "longcat_flash": 1, "step3p7": 3, "glm_ocr": 3}
"""Families whose layers are passed through, and the number of MTP layers in the folder."""
AllJudged = dict[tuple[str, bool], Judged]


FIRST = [
    "llama",
    "mimo",
    "kimi_k2",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_5_moe_text-packed",
    "nemotron_h-latent",
    "sarvam_mla",
]
BIGRAMS = [name for name in FIRST if name in TRAINED][::2]
"""Families in the first tier whose bigram model is tested."""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> AllJudged:
    folder = tmp_path_factory.mktemp("folders")
    if pytestconfig.getoption("--all"):
        return judge_all(folder)
    return judge_all(folder, {"llama": None, "glm4_moe": None, **dict.fromkeys(FIRST)}, {"llama", *BIGRAMS})


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", tiered(ALL, FIRST))
def test_logits_of_trunk_and_depths_are_those_of_transformers(name: str, judged: AllJudged, tmp_path: Path) -> None:
    checks = checks_of(name, judged[name, False], tmp_path / "mcore")
    assert len(checks) == (1 if name in PLAIN else 2 + ALL[name])
    assert failed(checks) == []


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", tiered(TRAINED, BIGRAMS))
def test_every_draft_of_the_bigram_model_is_accepted(name: str, judged: AllJudged, tmp_path: Path) -> None:
    logits, theirs = our_logits(judged[name, True], tmp_path / "mcore"), judged[name, True].logits
    numbers = range(1, TRAINED[name] + 1)
    assert [acceptance(theirs, depth) for depth in numbers] == [1.0] * len(numbers)
    slots = theirs["depth 1"].size(0) - len(numbers)  # later slots lack the tokens that their depths need
    ours = {key: value if key == "trunk" else value[:slots] for key, value in logits.items()}
    assert [acceptance(ours, depth) for depth in numbers] == [1.0] * len(numbers)


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.ok]


Plant = Callable[[Rule, str], Rule]


def halves_swapped(rule: Rule, name: str) -> Rule:
    swapped = replace(rule, map=Then((rule.map, SwapHalves())))
    return swapped if rule.mcore and rule.mcore[0].key.endswith("eh_proj.weight") else rule


class WithoutNorm(Same):
    """Multiply by 1 instead of a norm's weight."""

    def __init__(self, value: float) -> None:
        self.value = value

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.full_like(tensor, self.value) for tensor in tensors]


def norm_skipped(rule: Rule, name: str) -> Rule:
    one = 0.0 if name.startswith(ZERO_CENTRED) else 1.0
    skipped = f"mtp.layers.{min(TRAINED[name], 2) - 1}.hnorm.weight"
    return replace(rule, map=WithoutNorm(one)) if rule.mcore and rule.mcore[0].key == skipped else rule


def depth_off_by_one(rule: Rule, name: str) -> Rule:
    key = rule.mcore[0].key if rule.mcore else ""
    if not key.startswith("mtp.layers."):
        return rule
    depth = int(key.split(".")[2])
    return replace(rule, mcore=tuple(moved(piece, depth, (depth + 1) % TRAINED[name]) for piece in rule.mcore))


def moved(piece: Piece, depth: int, to: int) -> Piece:
    keys = [key.replace(f"mtp.layers.{depth}.", f"mtp.layers.{to}.") for key in (piece.key, *piece.aliases)]
    return replace(piece, key=keys[0], aliases=tuple(keys[1:]))


def gate_and_up_exchanged(rule: Rule, name: str) -> Rule:
    gated = ("mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight")
    layers = ("transformer_layer.", "mtp_model_layer.layers.1.")
    keys = [f"mtp.layers.0.{layer}{part}" for layer in layers for part in gated]
    return replace(rule, hf=rule.hf[::-1]) if rule.mcore and rule.mcore[0].key in keys else rule


FAULTS: dict[str, tuple[Plant, int]] = {
    "halves swapped": (halves_swapped, 1),
    "a norm skipped": (norm_skipped, 2),
    "depth off by one": (depth_off_by_one, 1),
    "gate and up exchanged": (gate_and_up_exchanged, 1),
}
"""Faults in the rules themselves, which a round trip cannot show, and the first depth whose logits show it."""
VARIANTS = (
    *("kimi_k2", "glm4_moe-lean", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h-latent", "sarvam_moe", "sarvam_mla"),
    *("glm4v_moe", "intern_s2_preview", "nemotron_h_omni", "nemo_speechlm"),
)
"""Variants of a family whose other folder is tested with every fault."""
PLANTED = [
    (name, fault)
    for name in TRAINED
    for fault in FAULTS
    if name not in VARIANTS
    and (fault != "depth off by one" or TRAINED[name] > 1)
    and (fault != "gate and up exchanged" or not name.startswith("nemotron_h"))  # it has no such MLP
]


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(("name", "fault"), tiered(PLANTED, [case for case in PLANTED if case[0] in FIRST][::3]))
def test_a_planted_fault_is_seen(
    name: str, fault: str, judged: AllJudged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, first = FAULTS[fault]
    rules = Family.all_rules

    def faulty(family: Family, config: HFConfig, layout: Layout) -> list[Rule]:
        return [plant(rule, name) for rule in rules(family, config, layout)]

    monkeypatch.setattr(Family, "all_rules", faulty)
    checks = checks_of(name, judged[name, False], tmp_path / "mcore")
    shown = {f"depth {number}" for number in range(min(first, TRAINED[name]), TRAINED[name] + 1)}
    assert {" ".join(check.split()[:2]) for check in failed(checks) if check.startswith("depth")} == shown
    assert not [check for check in failed(checks) if check.startswith("trunk")]


@pytest.mark.parametrize("name", ["mimo", "glm_ocr"])
def test_a_dropped_rule_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = {**TRAINED, **CARRIED}[name]
    rules, folder = Family.all_rules, make(tmp_path / "hf", name, depths)
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    dropped = f"mtp.layers.{depths - 1}.hnorm.weight"
    monkeypatch.setattr(Family, "all_rules", lambda *a: [r for r in rules(*a) if r.mcore[0].key != dropped])
    with pytest.raises(ValueError, match=r"hnorm|hidden"):
        verify(folder, tmp_path / "mcore")


@pytest.mark.parametrize("name", tiered(CARRIED, ["ernie4_5_moe", "mimo_v2_flash"]))
def test_a_folder_that_lacks_a_carried_tensor_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "hf", name, CARRIED[name])
    tensors = read(folder)
    trunk = next(key for key in tensors if ".layers.1." in key and not key.startswith(("mtp.", "model.mtp.")))
    write(folder, {key: tensor for key, tensor in tensors.items() if key != trunk})
    for dry_run in ([], ["--dry-run"]):
        assert main(["hf-to-mcore", str(folder), str(tmp_path / "mcore"), *dry_run]) == 2
        assert "transformers' class" in capsys.readouterr().err
        assert not (tmp_path / "mcore").exists()
    main(["inspect", str(folder), "--json"])
    assert "transformers' class" in json.loads(capsys.readouterr().out)["why not"]


def test_a_carried_tensor_of_another_shape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "hf", "exaone4_5", 1)
    tensors = read(folder)
    name = next(key for key in tensors if key.endswith("layers.1.mlp.up_proj.weight"))
    write(folder, tensors | {name: tensors[name][1:].contiguous()})
    assert main(["hf-to-mcore", str(folder), str(tmp_path / "mcore")]) == 2
    assert "is 55x48, but transformers' class of 'exaone4_5' has it as 56x48" in capsys.readouterr().err


def test_different_weights_are_detected(tmp_path: Path, judged: AllJudged) -> None:
    hf_to_mcore(judged["llama", False].folder, tmp_path / "mcore", QUIET)
    checks = verify(judged["llama", True].folder, tmp_path / "mcore")
    assert failed(checks) == ["tensors that are equal bit by bit, there and back", "trunk logits, largest difference"]
    assert "first that differs: " in checks[0].witness


def test_a_norm_that_is_stored_twice_is_proved_in_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export returns the original stored next to w - 1, which Megatron uses: only the import shows the fault."""
    folder, key = make(tmp_path / "hf", "qwen3_next", 1), "decoder.layers.0.self_attention.out_norm.weight"
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    original = DistReader.read
    monkeypatch.setattr(DistReader, "read", lambda self, name, *slab: original(self, name, *slab) + (name == key))
    model, reader = HFModel.read(folder), DistReader(tmp_path / "mcore")
    check = round_trip(beside(model, reader).rules, model.folder, reader)
    assert not check.ok
    assert check.witness.endswith("first that differs: model.layers.0.linear_attn.norm.weight")


@pytest.mark.parametrize(("moved", "expected"), [(2e-4, []), (1e-4, ["trunk logits, largest difference"])])
def test_logits_may_differ_by_a_few_times_the_rounding_error(
    moved: float, expected: list[str], tmp_path: Path, judged: AllJudged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For models without states too: SmolLM2-135M amplifies rounding at single positions."""
    folder = judged["llama", False].folder
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)

    def differing(hf: Path, prompt: Prompt, with_depths: bool) -> dict[str, Tensor]:
        logits = reference_logits(hf, prompt)
        logits["trunk"][3, 5] += 1e-3
        return logits

    monkeypatch.setattr("megatron_mtp.checkpoint.verify.verify.reference_logits", differing)
    monkeypatch.setattr("megatron_mtp.checkpoint.verify.verify.rounding", lambda *_: {"trunk": moved})
    assert failed(verify(folder, tmp_path / "mcore")) == expected


def test_an_untrainable_model_is_verified_by_its_round_trip(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "exaone_moe", 1)
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    checks = verify(folder, tmp_path / "mcore")
    assert [(check.name, check.ok, check.made) for check in checks] == [
        ("tensors that are equal bit by bit, there and back", True, True),
        ("settings that differ", True, True),
        ("logits not compared", False, False),
    ]


@pytest.mark.parametrize(
    ("name", "changes", "status", "said"),
    [
        ("llama-biased", {}, 3, "none logits not compared: Megatron cannot run biases"),
        ("llama-biased", {"rms_norm_eps": 1e-3}, 1, "FAIL settings that differ: 1"),
        ("llama", {"hidden_act": "gelu"}, 1, "Megatron runs the checkpoint, but the folder has the activation 'gelu'"),
    ],
)
def test_uncompared_logits_have_their_own_exit_status(
    name: str, changes: dict[str, Any], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "hf", name, 0)
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, **changes}))
    arguments = ["verify", str(folder), str(tmp_path / "mcore")]
    assert main(arguments) == status
    assert said in capsys.readouterr().out
    assert main([*arguments, "--allow-uncompared"]) == (0 if status == 3 else status)


def test_mtp_layers_without_a_reference_are_not_compared(
    tmp_path: Path, judged: AllJudged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers then only runs the trunk, which shows nothing about the MTP layers."""
    folder = judged["glm4_moe", False].folder
    hf_to_mcore(folder, tmp_path / "mcore", QUIET)
    trunk = {"trunk": judged["glm4_moe", False].logits["trunk"]}
    monkeypatch.setattr("megatron_mtp.checkpoint.verify.verify.compare", lambda *_, **__: [])
    monkeypatch.setattr("megatron_mtp.checkpoint.verify.verify.reference_logits", lambda *_: trunk)
    last = verify(folder, tmp_path / "mcore")[-1]
    assert (last.name, last.made) == ("logits of the MTP layers not compared", False)
    assert last.witness == "nothing tells transformers how GLM-4 MoE stores its MTP layers (reference_forms.py)"


def test_experts_of_a_depth_may_stand_apart_or_in_two_tensors(tmp_path: Path) -> None:
    """transformers loads an MTP layer of the whole Qwen3.5 only with stacked experts."""
    model = replace(MODELS["intern_s2_preview"], keys={}, named=lambda tensors: tensors)
    folder = make(tmp_path / "hf", model, 1)
    tensors, part = read(folder), "mtp.layers.0.mlp.experts."
    apart = all_logits(folder, torch.arange(12).unsqueeze(0))
    own = {name: [tensors.pop(f"{part}{e}.{name}_proj.weight") for e in range(6)] for name in ("gate", "up", "down")}
    pairs = zip(own["gate"], own["up"], strict=True)
    tensors[f"{part}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    tensors[f"{part}down_proj"] = torch.stack(own["down"])
    write(folder, tensors)
    stacked = all_logits(folder, torch.arange(12).unsqueeze(0))
    assert sorted(apart) == ["depth 1", "trunk"]
    assert all(torch.equal(apart[name], stacked[name]) for name in stacked)


@pytest.mark.parametrize(
    ("ours", "theirs", "ok"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([0.0, 64.0], [0.5, 64.0], True),  # the tolerance is 0.5 at 64
        ([0.0, 64.0], [0.5625, 64.0], False),
        ([0.0, 0.25], [0.0078125, 0.25], True),  # below 1, relative to 1
        ([0.0, 0.25], [0.015625, 0.25], False),
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([1.0, float("nan")], [1.0, float("nan")], False),
        ([1.0, float("inf")], [1.0, float("inf")], False),
    ],
)
def test_logits_are_close_relative_to_the_largest_and_never_with_nan(
    ours: list[float], theirs: list[float], ok: bool
) -> None:
    check = Check.close("logits", torch.tensor(ours), torch.tensor(theirs), "a list", tolerance=2**-7)
    assert check.ok == ok, f"largest difference {check.figure}"
