"""Pairs that are the same model raise no alarm: conversions, copies by transformers, other files, tied or untied."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make, read, write
from judged_models import QUIET
from transformers import AutoModelForCausalLM

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.edit import Init, plan_attaching, plan_dropping
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.megatron.checkpoint import HF_FILES

pytestmark = pytest.mark.usefixtures("megatron")

FOLDERS = {
    "llama": 0, "llama-tied": 0, "qwen2": 0, "qwen3": 0, "mimo": 3, "deepseek_v3": 1, "glm4_moe": 3, "qwen3_next": 1,
    "nemotron_h": 1, "bailing_moe": 1, "step3p7": 3, "longcat_flash": 1, "qwen3_5": 1, "kimi_k2": 1,
}  # fmt: skip
"""Families, and the number of MTP layers in their folders."""


class Scene:
    """Small models, created when a pair first needs one.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        path = self.root / name
        return path if path.exists() else make(path, name, FOLDERS[name], torch.bfloat16)

    def checkpoint(self, name: str) -> Path:
        path = self.root / f"{name}-mcore"
        if not path.exists():
            hf_to_mcore(self.folder(name), path, QUIET)
        return path

    def exported(self, name: str) -> Path:
        path = self.root / f"{name}-back"
        if not path.exists():
            mcore_to_hf(self.checkpoint(name), path, QUIET, form_of(self.checkpoint(name)))
        return path

    def copy(self, name: str, suffix: str, change: Callable[[Path], object]) -> Path:
        """Return a changed copy of a folder."""
        path = Path(shutil.copytree(self.folder(name), self.root / f"{name}-{suffix}"))
        change(path)
        return path


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("clean"))


def in_files(count: int) -> Callable[[Path], object]:
    """Return a change that splits the tensors into so many files."""

    def change(folder: Path) -> None:
        tensors = read(folder)
        for file in folder.glob("*.safetensors"):
            file.unlink()
        write(folder, dict(sorted(tensors.items())), count)

    return change


def saved_by_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="30KB")


def untied(folder: Path) -> None:
    """Store the head of a tied model as a separate tensor."""
    tensors = read(folder)
    write(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    with_keys(folder, tie_word_embeddings=False)


def with_stored_head(folder: Path) -> None:
    tensors = read(folder)
    write(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def with_keys(folder: Path, **changes: Any) -> None:
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | changes))


def without_copies(folder: Path) -> None:
    """Remove the MTP layers' copies of embedding and head."""
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    tensors = {n: t for n, t in read(folder).items() if not (n.startswith("model.layers.") and n.endswith(copies))}
    write(folder, tensors)


def with_defaults(folder: Path) -> None:
    """Remove a config key whose value is the class's default."""
    keys = json.loads((folder / "config.json").read_text())
    del keys["hidden_act"], keys["attention_bias"]
    (folder / "config.json").write_text(json.dumps(keys))


def grown_back(scene: Scene) -> Path:
    """Return a checkpoint whose MTP layers were dropped and attached again."""
    source = scene.checkpoint("llama")
    plan_attaching(source, 2, Init("random", 1)).write(scene.root / "attached", QUIET)
    plan_dropping(scene.root / "attached", 0).write(scene.root / "dropped", QUIET)
    return scene.root / "dropped"


def renamed_keys(scene: Scene, name: str) -> Path:
    """Return a checkpoint without Hugging Face files, as training saves it."""
    target = scene.root / f"{name}-bare"
    shutil.copytree(scene.checkpoint(name), target)
    shutil.rmtree(target / HF_FILES)
    return target


Sides = Callable[[Scene], tuple[Path, Path]]
OUT = {f"{name}, imported": lambda scene, name=name: (scene.folder(name), scene.checkpoint(name)) for name in FOLDERS}
BACK = {
    f"{name}, exported": lambda scene, name=name: (scene.folder(name), scene.exported(name))
    for name in ("llama-tied", "mimo", "deepseek_v3", "glm4_moe", "qwen3_next", "nemotron_h", "step3p7")
}
OTHERS: dict[str, Sides] = {
    "checkpoint and export": lambda s: (s.checkpoint("glm4_moe"), s.exported("glm4_moe")),
    "three files": lambda s: (s.folder("mimo"), s.copy("mimo", "three", in_files(3))),
    "seven files, hybrid": lambda s: (s.copy("nemotron_h", "seven", in_files(7)), s.folder("nemotron_h")),
    "saved by transformers": lambda s: (s.folder("llama"), s.copy("llama", "saved", saved_by_transformers)),
    "saved by transformers, tied": lambda s: (
        s.folder("llama-tied"),
        s.copy("llama-tied", "sd", saved_by_transformers),
    ),
    "saved by transformers, qwen3": lambda s: (s.folder("qwen3"), s.copy("qwen3", "saved", saved_by_transformers)),
    "tied and untied": lambda s: (s.folder("llama-tied"), s.copy("llama-tied", "untied", untied)),
    "untied and tied": lambda s: (s.copy("llama-tied", "untied2", untied), s.folder("llama-tied")),
    "tied, head stored": lambda s: (s.folder("llama-tied"), s.copy("llama-tied", "head", with_stored_head)),
    "tied, head stored, imported": lambda s: (s.copy("llama-tied", "hd", with_stored_head), s.checkpoint("llama-tied")),
    "copies left out": lambda s: (s.folder("deepseek_v3"), s.copy("deepseek_v3", "lean", without_copies)),
    "copies left out, imported": lambda s: (s.checkpoint("glm4_moe"), s.copy("glm4_moe", "lean", without_copies)),
    "keys at their defaults": lambda s: (s.folder("llama"), s.copy("llama", "default", with_defaults)),
    "depths attached and dropped": lambda s: (s.checkpoint("llama"), grown_back(s)),
    "without the kept files": lambda s: (s.checkpoint("deepseek_v3"), renamed_keys(s, "deepseek_v3")),
}
PAIRS: dict[str, Sides] = {**OUT, **BACK, **OTHERS}
SLOW = (
    "kimi_k2, imported", "bailing_moe, imported", "longcat_flash, imported", "qwen3_5, imported", "qwen2, imported",
    "qwen3, imported", "depths attached and dropped", "step3p7, exported", "seven files, hybrid",
    "nemotron_h, imported", "mimo, imported", "step3p7, imported", "glm4_moe, imported", "qwen3_next, imported",
    "copies left out, imported",
)  # fmt: skip


def pairs() -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.matrix) if name in SLOW else name for name in PAIRS]


@pytest.mark.parametrize("name", pairs())
def test_a_clean_pair_raises_no_alarm(name: str, scene: Scene) -> None:
    result = audit(*PAIRS[name](scene))
    assert [found for found in result["findings"] if found["severity"] != "note"] == []
    assert result["ok"]
    assert result["compared"]["equal"] > 15


def test_there_are_thirty_clean_pairs() -> None:
    assert len(PAIRS) >= 30
