"""Models whose positions are scaled, as Llama 3.1's and DeepSeek-V3's: transformers computes their exports alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make

from megatron_mtp.checkpoint.depths import attach_depths
from megatron_mtp.checkpoint.exporting import mcore_to_hf
from megatron_mtp.checkpoint.hf_form import form_of
from megatron_mtp.checkpoint.importing import Options, hf_to_mcore
from megatron_mtp.checkpoint.megatron_args import megatron_arguments
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify import verify
from megatron_mtp.drafting.load import load_checkpoint

QUIET = Options(quiet=True, workers=1)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
SLOTS = 100
"""Of 128: so far from the start, logits without the scaling are seen to differ."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "glm4_moe": ("llama", 0, LLAMA3),
    "mimo": ("llama", 0, LLAMA3),
    "qwen3": ("qwen3", 0, LLAMA3),
    "deepseek_v3": ("deepseek_v3", 1, YARN),
}


def published(folder: Path, name: str, depths: int, rope: dict[str, Any]) -> Path:
    make(folder, name, depths)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "rope_parameters": rope, "rope_theta": 10000.0}))
    (folder / "tokenizer.json").unlink()  # which is no tokenizer
    return folder


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("family", CASES)
def test_a_scaled_model_is_exported_as_it_was_trained(family: str, tmp_path: Path) -> None:
    name, depths, rope = CASES[family]
    source = published(tmp_path / "source", name, depths, rope)
    trained = tmp_path / "mcore"
    hf_to_mcore(source, trained, QUIET, megatron_arguments)
    if family in ("glm4_moe", "mimo"):
        attach_depths(trained, tmp_path / "start", 2, "random", 1, QUIET)
        trained = tmp_path / "start"
    mcore_to_hf(trained, tmp_path / "back", QUIET, form_of(trained, family=family))
    keys = json.loads((tmp_path / "back" / "config.json").read_text())
    assert keys["rope_parameters"].items() >= rope.items()
    assert [check for check in verify(tmp_path / "back", trained, slots=SLOTS) if not check.ok] == []


@pytest.mark.usefixtures("megatron")
def test_a_scaled_model_drafts_at_the_angles_that_are_proved(tmp_path: Path) -> None:
    """Of factor 32, where Megatron's builder has 8 unless it is told."""
    hf_to_mcore(published(tmp_path / "source", "llama", 0, LLAMA3), tmp_path / "mcore", QUIET, megatron_arguments)
    drafting = load_checkpoint(tmp_path / "mcore").runner.model.rotary_pos_emb
    torch.testing.assert_close(
        drafting.inv_freq, load_model(tmp_path / "mcore").rotary_pos_emb.inv_freq, rtol=0, atol=0
    )
