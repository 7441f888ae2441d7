"""Cached latents against cached keys and values of every head."""

from typing import Any

import pytest
import torch
from drafting_single import LATENT, model_of, prompts_of, run, runs
from torch import Tensor

from megatron_mtp.decoding import runner
from megatron_mtp.decoding.cached_attention import LatentAttention
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.runner import Runner

pytestmark = pytest.mark.usefixtures("megatron")

KINDS: dict[str, dict[str, Any]] = {
    "compressed queries": {},
    "queries that are not compressed": {"q_lora_rank": None},
    "norms": {"qk_layernorm": True},
    "yarn": {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 32},
}


def logits_of(target: Runner, tokens_BR: Tensor) -> tuple[Tensor, KVCache]:
    """Return logits of a sequence that runs in two parts."""
    tables = runs(*tokens_BR.shape)
    cache = KVCache(target.trunk_layers, tables)
    found = []
    for first, part_BR in zip((0, 7), tokens_BR.tensor_split([7], dim=1), strict=True):
        rows = Rows(torch.full((part_BR.size(0),), first), part_BR.size(1), tokens_BR.size(1), tables)
        found.append(target.logits(target.trunk(part_BR, rows, cache)))
    return torch.cat(found, dim=1), cache


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_all_heads_keys_and_values(
    kind: str, dtype: torch.dtype, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the largest logit; a cache of latents holds one head, and no values."""
    tokens_BR = torch.randint(1, 90, (3, 12), generator=torch.Generator().manual_seed(1))
    made, cache = logits_of(Runner(model_of("mla", dtype=dtype, **KINDS[kind])), tokens_BR)
    monkeypatch.setattr(runner, "cache_latents", lambda _: None)
    wanted, full = logits_of(Runner(model_of("mla", dtype=dtype, **KINDS[kind])), tokens_BR)
    torch.testing.assert_close(made, wanted, rtol=0, atol=allowed * wanted.abs().max().item())
    for key, value, full_key, full_value in zip(cache.keys, cache.values, full.keys, full.values, strict=True):
        assert value is None
        assert full_value is not None
        assert key is not None
        assert full_key is not None
        assert key.shape[1:] == (1, 13, LATENT["kv_lora_rank"] + LATENT["qk_pos_emb_head_dim"])
        assert full_key.shape[1] > 1


def test_latents_draft_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, settings = prompts_of(3), {"method": "mtp_eagle", "num_speculative_tokens": 3}
    cores = [layer.self_attention.core_attention for layer in Runner(model_of("mla-moe")).model.decoder.layers]
    assert all(isinstance(core, LatentAttention) for core in cores)
    texts = run(Runner(model_of("mla-moe")), prompts, 30, settings)[0].token_ids
    monkeypatch.setattr(runner, "cache_latents", lambda _: None)
    assert run(Runner(model_of("mla-moe")), prompts, 30, settings)[0].token_ids == texts
