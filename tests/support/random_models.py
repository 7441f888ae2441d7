"""Random small models of every kind that Megatron can run, by seed: sizes, attention, routers, MTP layers, positions.

Some seeds have a rotary scaling that Megatron cannot compute; these must be rejected.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_models import make

KINDS = ("llama", "qwen2", "qwen3", "mimo", "deepseek_v3", "kimi_k2", "glm4_moe", "bailing_moe")
LATENT_KINDS = ("deepseek_v3", "kimi_k2")
Keys = dict[str, Any]


@dataclass(frozen=True)
class RandomModel:
    """One model.

    Attributes:
        kind: a key of `hf_models.MODELS`.
        config: changes to its config.
        rope: its rotary settings.
        slots: prompt slots beyond the positions where a scaling takes effect.
        refused: part of the error for Megatron's flags; None if Megatron computes the model.
        spread: whether `config.json` has rotary settings like older folders (`rope_scaling` and `rope_theta`).
    """

    kind: str
    config: Keys
    rope: Keys
    depths: int
    slots: int
    refused: str | None
    spread: bool

    def write(self, folder: Path, seed: int) -> Path:
        changes = {**self.config, "rope_parameters": dict(self.rope)}
        make(folder, self.kind, self.depths, changes=changes, seed=seed)
        (folder / "tokenizer.json").unlink()  # it is not a tokenizer
        keys = json.loads((folder / "config.json").read_text())
        if self.kind == "bailing_moe":
            keys |= {"num_experts": keys["n_routed_experts"], "num_shared_experts": keys["n_shared_experts"]}
        if self.spread:
            rope = keys.pop("rope_parameters")
            keys |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
            keys["rope_scaling"] = None if rope["rope_type"] == "default" else {**rope, "type": rope.pop("rope_type")}
        (folder / "config.json").write_text(json.dumps(keys))
        return folder


def random_model(seed: int) -> RandomModel:
    """Return the model of a seed; kinds and their rotary scalings take turns."""
    rng = random.Random(seed)
    kind, turn = KINDS[seed % len(KINDS)], seed // len(KINDS)
    config = _sizes(rng, kind)
    if kind in LATENT_KINDS:
        config |= _latent(rng, config["num_attention_heads"])
    if kind not in ("llama", "qwen2", "qwen3", "mimo"):
        config |= _experts(rng, turn)
    ropes = LATENT_ROPES if kind in LATENT_KINDS else ROPES
    rope, slots, refused = ropes[turn % len(ropes)](rng)
    rope["rope_theta"] = rng.choice((10000.0, 500000.0, 50000.0, 1000000.0))
    if kind in ("glm4_moe", "bailing_moe"):
        rope["partial_rotary_factor"] = rng.choice((0.5, 1.0, 0.25))
    config["max_position_embeddings"] = slots + 16
    depths = 0 if kind in ("llama", "qwen2", "qwen3") else rng.choice((1, 2))
    return RandomModel(kind, config, rope, depths, slots, refused, rng.random() < 0.3)


def _sizes(rng: random.Random, kind: str) -> Keys:
    heads, groups = rng.choice(((4, 4), (4, 2), (4, 1), (6, 2), (2, 1)))
    keys = {
        "hidden_size": heads * rng.choice((8, 12, 16)),
        "intermediate_size": rng.choice((40, 56, 64)),
        "num_hidden_layers": rng.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": rng.choice((16, 24, 32)),
        "vocab_size": rng.choice((96, 131, 256)),
        "rms_norm_eps": 1e-6 if kind in LATENT_KINDS else rng.choice((1e-5, 1e-6, 1e-3)),
        "tie_word_embeddings": kind in ("llama", "qwen2", "qwen3") and rng.random() < 0.4,
    }
    if kind == "glm4_moe":
        keys |= {"use_qk_norm": rng.random() < 0.5, "attention_bias": rng.random() < 0.5}
    return keys


def _latent(rng: random.Random, heads: int) -> Keys:
    positions = rng.choice((16, 32))
    return {
        "head_dim": positions,
        "num_key_value_heads": heads,
        "q_lora_rank": rng.choice((None, 16, 20)),
        "kv_lora_rank": rng.choice((12, 16)),
        "qk_nope_head_dim": rng.choice((8, 16)),
        "qk_rope_head_dim": positions,
        "v_head_dim": rng.choice((8, 12)),
    }


def _experts(rng: random.Random, turn: int) -> Keys:
    """Return experts in groups, selected by the sum of two scores or all, or experts without groups."""
    groups, some, chosen, experts = ((1, 1, 2, 6), (2, 1, 2, 6), (4, 2, 4, 12), (2, 2, 3, 8))[turn % 4]
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "n_group": groups,
        "topk_group": some,
        "moe_intermediate_size": rng.choice((16, 24)),
        "n_shared_experts": rng.choice((1, 2)),
        "first_k_dense_replace": rng.choice((0, 1)),
        "routed_scaling_factor": rng.choice((1.0, 1.5, 2.5)),
        "num_hidden_layers": rng.choice((2, 3)),
    }


Rope = tuple[Keys, int, str | None]
"""Rotary settings, prompt slots that show them, and the reason if they are rejected."""


def _plain(rng: random.Random) -> Rope:
    return {"rope_type": "default"}, 40, None


def _llama3(rng: random.Random, **changes: float) -> Rope:
    """Return a scaling that changes wavelengths from 2,048 on."""
    keys = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, **changes}
    refused = "Llama 3 rotary scaling" if changes else None
    return {"rope_type": "llama3", "factor": rng.choice((8.0, 32.0, 3.5)), **keys}, 2200, refused


def _yarn(rng: random.Random, **changes: Any) -> Rope:
    """Return latent attention's YaRN; every setting without a Megatron flag is one of the changes."""
    original = rng.choice((64, 256))
    keys: Keys = {"rope_type": "yarn", "factor": rng.choice((4.0, 40.0)), "original_max_position_embeddings": original}
    refused = "truncate" if changes.get("truncate") is False else None
    return {**keys, **changes}, 3 * original + 10, refused


def _other(kind: str, **changes: Any) -> Callable[[random.Random], Rope]:
    return lambda rng: ({"rope_type": kind, "factor": 4.0, **changes}, 40, f"'{kind}'")


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
ROPES: tuple[Callable[[random.Random], Rope], ...] = (
    _llama3,
    _plain,
    lambda rng: _llama3(rng, high_freq_factor=2.0),
    _other("linear"),
    _llama3,
    _other("dynamic"),
    _plain,
    lambda rng: _llama3(rng, original_max_position_embeddings=1024),
    _llama3,
    _other("yarn", original_max_position_embeddings=16),
    _llama3,
)
BOTH = {"mscale": 1.0, "mscale_all_dim": 1.0}
LATENT_ROPES: tuple[Callable[[random.Random], Rope], ...] = (
    lambda rng: _yarn(rng, **BOTH, beta_fast=1.0, beta_slow=1.0),
    lambda rng: _yarn(rng, mscale=0.707),
    lambda rng: _yarn(rng, mscale_all_dim=0.8),
    lambda rng: _yarn(rng, attention_factor=1.3),
    _plain,
    lambda rng: _yarn(rng, truncate=False, **BOTH),
    lambda rng: _yarn(rng, attention_factor=0.9, mscale_all_dim=0.5, beta_fast=16.0, beta_slow=2.0),
    lambda rng: _yarn(rng, mscale=0.7, mscale_all_dim=1.0, beta_fast=8),
    _yarn,
    _other("linear"),
    lambda rng: _yarn(rng, mscale=0.5, mscale_all_dim=0.0),
)
"""Rotary settings of latent attention, Kimi-K2's first."""
