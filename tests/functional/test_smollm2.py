"""A real model, SmolLM2-135M-Instruct: bit-identical after a round trip, with the same perplexity of a real text.

Optional: `scripts/test_smollm2.sh` downloads the model and runs this; otherwise skipped.
"""

from pathlib import Path

import launch
import pytest

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.verify.verify import verify
from megatron_mtp.megatron.runtime import prepare

prepare()

MODEL = launch.ROOT / "runs" / "smollm2" / "hf"
TEXT = launch.ROOT / "LICENSE"
TENSORS = 272

pytestmark = pytest.mark.skipif(
    not (MODEL / "config.json").exists(),
    reason="SmolLM2-135M is not there; scripts/test_smollm2.sh gets it into runs/smollm2 and runs this",
)


def test_a_real_model_is_the_same_in_megatron(tmp_path: Path) -> None:
    options = Options(quiet=True, workers=1)
    hf_to_mcore(MODEL, tmp_path / "mcore", options)
    checks = verify(MODEL, tmp_path / "mcore", TEXT)
    for check in checks:
        print(f"{check.name}: {check.figure:.6f} ({check.witness})")
    assert [check for check in checks if not check.ok] == []
    assert [check.name.split()[0] for check in checks] == ["tensors", "settings", "trunk", "perplexity"]
    assert checks[0].figure == TENSORS
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", options, form_of(tmp_path / "mcore"))
    assert (tmp_path / "back" / "model.safetensors").stat().st_size == (MODEL / "model.safetensors").stat().st_size
    assert [check for check in verify(tmp_path / "back", tmp_path / "mcore") if not check.ok] == []
