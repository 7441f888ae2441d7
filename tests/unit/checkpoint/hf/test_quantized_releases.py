"""Folders that llm-compressor and transformers create on a CPU: no findings, and they convert."""

from pathlib import Path

import pytest
import torch
from hf_models import make
from judged_models import QUIET

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore

SCHEMES = "FP8_DYNAMIC FP8_BLOCK NVFP4A16 MXFP4A16 W4A16 W4A16_ASYM W8A16 INT8".split()
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_of_llm_compressor_has_no_finding_and_converts(scheme: str, tmp_path: Path) -> None:
    llmcompressor = pytest.importorskip("llmcompressor", reason="pip install llmcompressor")
    modifiers = pytest.importorskip("llmcompressor.modifiers.quantization")
    from transformers import AutoModelForCausalLM

    source = make(tmp_path / "hf", "llama", 0, torch.bfloat16, changes=SIZES)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    recipe = modifiers.QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    llmcompressor.oneshot(model=model, recipe=recipe)
    model.save_pretrained(tmp_path / "coded", save_compressed=True)
    found = audit(tmp_path / "coded")["findings"]
    assert [one["says"] for one in found if one["severity"] != "note"] == []
    assert any("21 weights (trunk: 21 in" in one["says"] for one in found)
    assert hf_to_mcore(tmp_path / "coded", tmp_path / "mcore", QUIET)["tensors"] == 30
