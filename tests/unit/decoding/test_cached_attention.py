"""Attention over a cache: its scale, and the kernels that it may use. test_drafting.py tests the values."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafting_single import model_of
from torch import Tensor

from megatron_mtp.decoding import cached_attention
from megatron_mtp.decoding.cached_attention import CachedAttention, attend
from megatron_mtp.decoding.runner import Runner

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


class OnGPU(torch.Tensor):
    """A tensor that reports a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_cudnn_attention_is_disabled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is allowed again afterwards."""
    seen = []

    def attention(query: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return query

    monkeypatch.setattr(cached_attention, "scaled_dot_product_attention", attention)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    scope: Any = SimpleNamespace(rows=SimpleNamespace(padded=None), mask=lambda *_: None)
    scope.cache = SimpleNamespace(append=lambda _, key, value, __: (key, value))
    for rows in (torch.zeros(1, 2, 3, 4).as_subclass(OnGPU), torch.zeros(1, 2, 3, 4)):
        attend(scope, 0, rows, rows, rows, 1.0)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert seen == [False, True]
