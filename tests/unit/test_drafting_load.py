"""Which modules a checkpoint's model drafts with, where Transformer Engine is and where it is not."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_mtp.drafting import load

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


def test_without_transformer_engine_its_checkpoints_draft_as_well() -> None:
    assert chosen() == chosen(**EXPERTS) == chosen(**LATENT) == "local"
