"""Megatron's logits against transformers', for every family that Megatron can run; planted faults are seen.

One process of transformers computes all references: starting it takes longer than the models do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hf_models import MODELS, make, read, write
from torch import Tensor

from megatron_mtp.checkpoint.families import Family, Layout
from megatron_mtp.checkpoint.hf_config import HFConfig
from megatron_mtp.checkpoint.importing import Options, hf_to_mcore
from megatron_mtp.checkpoint.megatron_args import megatron_arguments
from megatron_mtp.checkpoint.rules import Piece, Rule, Same
from megatron_mtp.checkpoint.verify import Check, acceptance, all_reference_logits, compare, megatron_logits, verify

QUIET = Options(quiet=True, workers=1)
PLAIN = [("llama", 0), ("llama-tied", 0), ("qwen2-mha", 0), ("qwen3", 0)]
WITH_DEPTHS = [
    ("mimo", 3),
    ("deepseek_v3", 3),
    ("kimi_k2", 1),
    ("glm4_moe", 3),
    ("glm4_moe-lean", 1),
    ("bailing_moe", 3),
]
TOKENS_BS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(3))
Logits = dict[str, Tensor]


@dataclass(frozen=True)
class Folders:
    """Of one family: as it is published, and what transformers computes of the same weights."""

    random: Path
    bigram: Path
    random_logits: Logits
    bigram_logits: Logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    root = tmp_path_factory.mktemp("folders")
    paths: dict[str, tuple[Path, Path]] = {}
    judged: list[Path] = []
    for name, depths in PLAIN + WITH_DEPTHS:
        random, bigram = make(root / name, name, depths), make(root / f"{name}-bigram", name, depths)
        write(bigram, as_bigram(read(bigram)))
        paths[name] = (random, bigram)
        judged += [random, bigram] if name != "bailing_moe" else bailing_as_glm(root, depths)
    logits = all_reference_logits(judged, TOKENS_BS)
    both = zip(logits[::2], logits[1::2], strict=True)
    return {name: Folders(*path, *pair) for (name, path), pair in zip(paths.items(), both, strict=True)}


def bailing_as_glm(root: Path, depths: int) -> list[Path]:
    """Transformers has no Bailing-MoE V2; the same weights by GLM's names compute the same."""
    glm = replace(MODELS["bailing_moe"], keys={}, named=lambda tensors: tensors)
    MODELS["bailing as glm"] = glm
    random, bigram = make(root / "as-glm", "bailing as glm", depths), make(root / "as-glm-b", "bailing as glm", depths)
    write(bigram, as_bigram(read(bigram)))
    del MODELS["bailing as glm"]
    return [random, bigram]


def as_bigram(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Trunk and depths become the same bigram table: layers add nothing, norms are 1, depths pass on the embedding."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "dense.weight", "down_proj.weight")):
            tensor = torch.zeros_like(tensor)
        elif "norm" in name and tensor.dim() == 1:
            tensor = torch.ones_like(tensor)
        elif name.endswith(("eh_proj.weight", "input_proj.weight")):
            eye, none = torch.eye(tensor.size(0)), torch.zeros(tensor.size(0), tensor.size(0))
            tensor = torch.cat([none, eye] if name.endswith("input_proj.weight") else [eye, none], dim=1)
        out[name] = tensor
    return out


@pytest.fixture
def converted(tmp_path: Path) -> Callable[[Path], Logits]:
    def convert(folder: Path) -> Logits:
        hf_to_mcore(folder, tmp_path / "mcore", QUIET, megatron_arguments)
        return megatron_logits(tmp_path / "mcore", TOKENS_BS)

    return convert


Convert = Callable[[Path], Logits]


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", [name for name, _ in PLAIN + WITH_DEPTHS])
def test_megatron_computes_what_transformers_computes(
    name: str, folders: dict[str, Folders], converted: Convert
) -> None:
    checks = compare(folders[name].random_logits, converted(folders[name].random))
    assert len(checks) == (1 if (name, 0) in PLAIN else 2 + dict(WITH_DEPTHS)[name])
    assert failed(checks) == []


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(("name", "depths"), WITH_DEPTHS)
def test_every_draft_of_the_bigram_model_is_accepted(
    name: str, depths: int, folders: dict[str, Folders], converted: Convert
) -> None:
    logits, theirs = converted(folders[name].bigram), folders[name].bigram_logits
    assert [acceptance(theirs, depth) for depth in range(1, depths + 1)] == [1.0] * depths
    slots = theirs["depth 1"].size(0) - depths  # later ones lack the tokens that their depths add
    ours = {key: value if key == "trunk" else value[:slots] for key, value in logits.items()}
    assert [acceptance(ours, depth) for depth in range(1, depths + 1)] == [1.0] * depths


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.ok]


def halves_swapped(rule: Rule) -> Rule:
    return replace(rule, map=Same()) if rule.mcore[0].key.endswith("eh_proj.weight") else rule


def norm_skipped(rule: Rule) -> Rule:
    class Ones(Same):
        def forward(self, tensors: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
            return [torch.ones_like(tensor) for tensor in tensors]

    return replace(rule, map=Ones()) if rule.mcore[0].key == "mtp.layers.1.hnorm.weight" else rule


def depth_off_by_one(rule: Rule) -> Rule:
    key = rule.mcore[0].key
    if not key.startswith("mtp.layers."):
        return rule
    depth = int(key.split(".")[2])
    return replace(rule, mcore=tuple(moved(piece, depth, (depth + 1) % 3) for piece in rule.mcore))


def moved(piece: Piece, depth: int, to: int) -> Piece:
    keys = [key.replace(f"mtp.layers.{depth}.", f"mtp.layers.{to}.") for key in (piece.key, *piece.aliases)]
    return replace(piece, key=keys[0], aliases=tuple(keys[1:]))


def gate_and_up_exchanged(rule: Rule) -> Rule:
    if rule.mcore[0].key != "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight":
        return rule
    return replace(rule, hf=rule.hf[::-1])


FAULTS = {
    "halves swapped": (halves_swapped, {"depth 1", "depth 2", "depth 3"}),
    "a norm skipped": (norm_skipped, {"depth 2", "depth 3"}),
    "depth off by one": (depth_off_by_one, {"depth 1", "depth 2", "depth 3"}),
    "gate and up exchanged": (gate_and_up_exchanged, {"depth 1", "depth 2", "depth 3"}),
}
"""A fault in the rules themselves, which a round trip cannot see, and the depths whose logits show it."""


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, folders: dict[str, Folders], converted: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, shown = FAULTS[fault]
    rules = Family.all_rules

    def faulty(family: Family, config: HFConfig, layout: Layout) -> list[Rule]:
        return [plant(rule) for rule in rules(family, config, layout)]

    monkeypatch.setattr(Family, "all_rules", faulty)
    checks = compare(folders["mimo"].random_logits, converted(folders["mimo"].random))
    assert {" ".join(name.split()[:2]) for name in failed(checks) if name.startswith("depth")} == shown
    assert not [name for name in failed(checks) if name.startswith("trunk")]


def test_a_dropped_tensor_is_seen(tmp_path: Path, folders: dict[str, Folders], monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Family.all_rules
    hf_to_mcore(folders["mimo"].random, tmp_path / "mcore", QUIET, megatron_arguments)
    dropped = "model.mtp_layers.1.final_layernorm.weight"
    monkeypatch.setattr(Family, "all_rules", lambda *a: [rule for rule in rules(*a) if rule.hf[0].name != dropped])
    with pytest.raises(ValueError, match=dropped.replace(".", r"\.")):
        verify(folders["mimo"].random, tmp_path / "mcore")


def test_other_weights_are_seen(tmp_path: Path, folders: dict[str, Folders]) -> None:
    hf_to_mcore(folders["llama"].random, tmp_path / "mcore", QUIET, megatron_arguments)
    checks = verify(folders["llama"].bigram, tmp_path / "mcore")
    assert len(failed(checks)) == 2
    assert "first that differs: " in checks[0].witness
