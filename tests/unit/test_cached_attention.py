"""Attention over a cache: the scale of the core attention whose place it takes. test_drafting.py tests the values."""

from typing import Any

import pytest
import torch
from drafting_single import model_of

from megatron_mtp.drafting.cached_attention import CachedAttention
from megatron_mtp.drafting.runner import Runner

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(
    ("kind", "changes"), [("gqa", {}), ("gqa", {"softmax_scale": 0.75}), ("moe", {}), ("mla", {}), ("mla-moe", {})]
)
def test_the_scale_is_known_without_the_core_attention(kind: str, changes: dict[str, Any]) -> None:
    """Transformer Engine's core attention has neither `scale` nor `softmax_scale`; an empty module stands in for it."""
    model = model_of(kind, depths=1, **changes)
    attentions = [layer.self_attention for layer in model.decoder.layers]
    scales = [attention.core_attention.scale for attention in attentions]
    for attention in attentions:
        attention.core_attention = torch.nn.Module()
    Runner(model)
    cached = [attention.core_attention for attention in attentions]
    assert all(isinstance(core, CachedAttention) for core in cached)
    assert [core.scale for core in cached] == scales
    assert (scales[0] == 0.75) == bool(changes)
