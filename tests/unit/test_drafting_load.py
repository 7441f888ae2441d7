"""Which modules a checkpoint's model drafts with, and in which precision; conversions draft as they are."""

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch

from megatron_mtp.checkpoint.importing import Options, hf_to_mcore
from megatron_mtp.checkpoint.megatron_args import megatron_arguments
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.drafting import generate, load

pytestmark = pytest.mark.usefixtures("megatron")

EXPERTS, LATENT = {"num_experts": 4}, {"multi_latent_attention": True}


def chosen(**changes: Any) -> str:
    trained = {"transformer_impl": "transformer_engine", "num_experts": None, "multi_latent_attention": False}
    return load._adapted(Namespace(**{**trained, **changes})).transformer_impl


def test_short_layers_come_before_transformer_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense model that TE has trained drafts with layers that can be recorded as a CUDA graph."""
    monkeypatch.setattr(load, "transformer_engine_works", lambda: True)
    assert chosen() == chosen(**EXPERTS, transformer_impl="local") == "local"
    assert chosen(**EXPERTS) == chosen(**LATENT) == "transformer_engine"


def test_without_transformer_engine_its_checkpoints_draft_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "transformer_engine_works", lambda: False)
    assert chosen() == chosen(**EXPERTS) == chosen(**LATENT) == "local"


@pytest.mark.parametrize(("dtype", "weights"), [(None, torch.bfloat16), (torch.float32, torch.float32)])
def test_a_converted_model_drafts_in_its_own_precision(
    dtype: torch.dtype | None, weights: torch.dtype, tmp_path: Path
) -> None:
    """With its depths and its tokenizer, before any training here."""
    source = hf_models.make(tmp_path / "hf", "mimo", 1, torch.bfloat16)
    shutil.copytree(train_bpe(["abc"], 258, tmp_path / "tokenizer"), source, dirs_exist_ok=True)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True), megatron_arguments)
    loaded = load.load_checkpoint(tmp_path / "mcore", dtype=dtype)
    assert {weight.dtype for weight in loaded.runner.model.parameters()} == {weights}
    assert loaded.tokenizer == tmp_path / "mcore" / "hf"
    drafted = generate(loaded.runner, [[1, 2, 3]], 8, speculative={"method": "mtp"})
    if weights == torch.float32:  # bfloat16 rounds several rows otherwise than one
        assert drafted.token_ids == generate(loaded.runner, [[1, 2, 3]], 8).token_ids
    assert drafted.stats.drafted > 0


def test_a_conversion_that_megatron_cannot_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    source = hf_models.make(tmp_path / "hf", "nemotron_h", 1)
    hf_to_mcore(source, tmp_path / "mcore", Options(quiet=True), megatron_arguments)
    with pytest.raises(ValueError, match=r"--load is .*, which was converted from .* cannot run: it has Mamba layers"):
        load.load_checkpoint(tmp_path / "mcore")
