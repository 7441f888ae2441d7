"""Latent attention with uncompressed queries, as in DeepSeek-V2-Lite and Moonlight, against transformers."""

from pathlib import Path

import pytest
from hf_models import make
from transformers import AutoModelForCausalLM

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.checkpoint.verify.verify import verify

QUIET = Options(quiet=True, workers=1)
pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.usefixtures("megatron")
def test_queries_without_a_rank_are_computed_as_transformers_computes_them(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "deepseek_v3-lean", 1)
    hf_to_mcore(source, tmp_path / "mcore", QUIET)
    checks = verify(source, tmp_path / "mcore")
    assert "depth 1 logits, largest difference" in [check.name for check in checks]
    assert [check for check in checks if not check.ok] == []


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(("epsilon", "inside"), [(1e-6, {1e-6}), (1e-5, {1e-5, 1e-6})])
def test_an_epsilon_ignored_by_transformers_is_noted_both_ways(
    epsilon: float, inside: set[float], tmp_path: Path
) -> None:
    source = make(tmp_path / "source", "deepseek_v3", 1, changes={"rms_norm_eps": epsilon})
    model = AutoModelForCausalLM.from_pretrained(source)
    assert {module.variance_epsilon for module in model.modules() if hasattr(module, "variance_epsilon")} == inside
    mcore = tmp_path / "mcore"
    done = [hf_to_mcore(source, mcore, QUIET), mcore_to_hf(mcore, tmp_path / "back", QUIET, form_of(mcore))]
    notes = [told.get("norms inside latent attention", "") for told in done]
    assert [note.startswith(f"Megatron and vLLM have the epsilon {epsilon} in them") for note in notes] == [
        len(inside) > 1
    ] * 2
    norms = [module.eps for name, module in load_model(mcore).named_modules() if name.endswith("kv_layernorm")]
    assert set(norms) == {epsilon}
