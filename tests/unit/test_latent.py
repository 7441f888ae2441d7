"""Latent attention whose queries are not compressed, as DeepSeek-V2-Lite's and Moonlight's, against transformers."""

from pathlib import Path

import pytest
from hf_models import make

from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.verify.verify import verify

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.usefixtures("megatron")
def test_queries_without_a_rank_are_computed_as_transformers_computes_them(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "deepseek_v3-lean", 1)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True, workers=1))
    checks = verify(source, tmp_path / "mcore")
    assert "depth 1 logits, largest difference" in [check.name for check in checks]
    assert [check for check in checks if not check.ok] == []
