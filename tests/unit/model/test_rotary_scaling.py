"""Models with scaled positions, such as Llama 3.1 and DeepSeek-V3: transformers agrees on their exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_drafts import drafted_logits, off
from hf_models import make
from megatron_single import randomize
from scalings import LLAMA3, YARN
from tiers import tiered
from trained_folders import save

from megatron_mtp.checkpoint.convert.edit import Init, plan_attaching
from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.verify.prompt import Prompt
from megatron_mtp.checkpoint.verify.verify import megatron_logits, verify
from megatron_mtp.decoding.load import load_checkpoint
from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.model.arguments import config_of
from megatron_mtp.model.build import build
from megatron_mtp.model.stored_arguments import completed

pytestmark = pytest.mark.usefixtures("forked_python")

QUIET = Options(quiet=True, workers=1)
WIDE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
"""YaRN without latent attention, where the channel range need not be rounded; as in gpt-oss, with fewer positions."""
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LENGTH = 100
"""Prompt length, of 128 positions: long enough for logits without the scaling to differ."""
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "llama3 with depths": ("glm4_moe", "llama", 0, LLAMA3),
    "llama3 with MiMo's depths": ("mimo", "llama", 0, LLAMA3),
    "llama3": ("qwen3", "qwen3", 0, LLAMA3),
    "yarn in latent attention": ("deepseek_v3", "deepseek_v3", 1, YARN),
    "yarn": ("qwen3", "qwen3", 0, WIDE_YARN),
    "yarn, truncated": ("qwen2", "qwen2", 0, {**WIDE_YARN, "truncate": True}),
    "yarn with depths": ("glm4_moe", "llama", 0, WIDE_YARN),
    "linear": ("qwen2", "qwen2", 0, LINEAR),
    "linear with depths": ("glm4_moe", "llama", 0, LINEAR),
}
"""The export's family, the model, its MTP layers and its positions."""


def published(folder: Path, name: str, depths: int, rope: dict[str, Any]) -> Path:
    make(folder, name, depths)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "rope_parameters": rope, "rope_theta": 10000.0}))
    (folder / "tokenizer.json").unlink()  # it is not a tokenizer
    return folder


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("case", tiered(CASES, ("llama3 with MiMo's depths",)))
def test_a_scaled_model_is_exported_as_it_was_trained(case: str, tmp_path: Path) -> None:
    family, name, depths, rope = CASES[case]
    source = published(tmp_path / "source", name, depths, rope)
    trained = tmp_path / "mcore"
    hf_to_mcore(source, trained, QUIET)
    if family in ("glm4_moe", "mimo"):
        plan_attaching(trained, 2, Init("random", 1)).write(tmp_path / "start", QUIET)
        trained = tmp_path / "start"
    mcore_to_hf(trained, tmp_path / "back", QUIET, form_of(trained, family=family))
    keys = json.loads((tmp_path / "back" / "config.json").read_text())
    assert keys["rope_parameters"].items() >= rope.items()
    assert [check for check in verify(tmp_path / "back", trained, length=LENGTH) if not check.ok] == []


TINY = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --seq-length 2300 --swiglu "
    "--max-position-embeddings 2300 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --mtp-num-layers 1"
)
SETTINGS = {
    "--rotary-base 500000": 100,
    "--use-rope-scaling --rope-scaling-factor 8": 2200,
    "--use-rope-scaling --rope-scaling-factor 32": 2200,
    "--rotary-percent 0.5": 100,
    "--rotary-interleaved": 100,
    "--rotary-seq-len-interpolation-factor 4": 100,
    "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32": 100,
}
"""Megatron's rotary settings without latent attention, and slots where each takes effect."""


def checkpoint(folder: Path, setting: str) -> Path:
    """Return a checkpoint as training leaves it, always with the same weights."""
    args = parsed([*TINY.split(), *setting.split()], 100)
    made = build(config_of(completed(args)))
    randomize(made)
    return save(made, args, folder)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("setting", tiered(SETTINGS, list(SETTINGS)[1::2]))
def test_drafting_uses_the_rotary_angles_of_training(setting: str, tmp_path: Path) -> None:
    tokens_BS = torch.randint(0, 100, (1, SETTINGS[setting]), generator=torch.Generator().manual_seed(3))
    folder = checkpoint(tmp_path / "set", setting)
    trained, drafted = (
        megatron_logits(folder, Prompt.of(tokens_BS)),
        drafted_logits(load_checkpoint(folder).runner, tokens_BS),
    )
    assert {name: off(logits_SV, trained[name]) < 1e-4 for name, logits_SV in drafted.items()} == {
        "trunk": True,
        "depth 1": True,
    }
    unset = megatron_logits(checkpoint(tmp_path / "unset", ""), Prompt.of(tokens_BS))
    assert off(unset["trunk"], trained["trunk"]) > 1e-2
