"""Drafters for a model of Megatron's own class: resolves their settings from the model and builds them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.random import _fork_rng
from torch import Tensor

from megatron_mtp.megatron.checkpoint import DRAFTER
from megatron_mtp.megatron.patterns import symbols_of_a_layer
from megatron_mtp.model.heads import BLOCKS, DraftHeads, HeadPlan
from megatron_mtp.model.initialize import draw_anew
from megatron_mtp.model.passed_states import PassedStates
from megatron_mtp.model.stock import as_trunk
from megatron_mtp.spec.attention import AttentionSizes, LatentSizes
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import HeadSpec, TrunkSpec

ROPE = ("rope", "yarn")
BASE = 10_000.0
"""RoPE base of a drafter whose trunk does not use RoPE."""
SPECS = "mtp_drafters"
"""Attribute of every pipeline stage with the drafters of the last stage, by module name."""


def described(chunk: Any, settings: MTPConfig, tokens: int | None) -> HeadSpec:
    """Resolve the settings of a drafter on this trunk, which reads layers by Megatron's numbers.

    Args:
        chunk: any stage of the model.
        settings: settings of the drafter.
        tokens: number of tokens of the vocabulary; None if every row of the output layer is one.

    Raises:
        ValueError: the trunk does not support this drafter.
    """
    kind, symbols = settings.drafter, symbols_of_a_layer(getattr(chunk, "hybrid_layer_pattern", None))
    assert kind is not None
    trunk = trunk_of(chunk, symbols, settings.drafter_rope_scaling)
    made = HeadSpec.resolve(kind, vars(settings), trunk if tokens is None else replace(trunk, vocabulary=tokens))
    return replace(made, layers=tuple(symbols * number for number in made.layers))


def add_drafters(chunk: Any, drafters: Mapping[str, HeadSpec], drafted: Mapping[str, Tensor]) -> None:
    """Add new drafters to the last stage, by module name; earlier stages pass on the states that they read.

    Args:
        drafted: the tokens [N] of drafters with a draft vocabulary, ascending.
    """
    setattr(chunk, SPECS, dict(drafters))
    if not chunk.post_process:
        PassedStates(chunk, tuple(sorted({number for drafter in drafters.values() for number in drafter.layers})))
        return
    for name, drafter in drafters.items():
        block = BLOCKS[drafter.kind]
        plan = HeadPlan(name, partial(block, drafter), block.submodules(drafter, chunk.config))
        heads = DraftHeads([plan], lacks_vocabulary=False)
        with _fork_rng():
            heads.build(chunk, drafted.get(name))
        draw_anew(getattr(chunk, name), DRAFTER, torch.initial_seed())
        as_trunk(getattr(chunk, name), chunk)


def trunk_of(chunk: Any, symbols: int, scaling: str | None) -> TrunkSpec:
    """Return the trunk facts that a drafter depends on, for a trunk of Megatron's class.

    Args:
        chunk: the model, on one stage.
        symbols: pattern symbols of one of its layers.
        scaling: RoPE scaling given for the drafter.

    Raises:
        ValueError: the trunk's RoPE is scaled, which cannot be read from its modules, and no scaling was given.
    """
    config, rotary = chunk.config, getattr(chunk, "rotary_pos_emb", None)
    is_latent = config.multi_latent_attention
    base = getattr(config, "rotary_base", None) or getattr(chunk, "rotary_base", None) or _base_of(rotary)
    if scaling is None and chunk.position_embedding_type in ROPE and (is_latent or rotary is not None):
        is_scaled = config.rotary_scaling_factor != 1 if is_latent else not _is_plain(rotary, base)
        if is_scaled and (not is_latent or config.rope_type == "yarn"):
            raise ValueError(
                "the trunk scales its rotary positions, and a model of Megatron's does not keep how; give "
                "drafter_rope_scaling in the settings, as rope_scaling in config.json, or "
                """'{"rope_type": "default"}'."""
            )
    attention = AttentionSizes(
        config.num_attention_heads,
        config.num_query_groups or config.num_attention_heads,
        config.kv_channels or config.hidden_size // config.num_attention_heads,
        config.layernorm_epsilon,
        base,
        None,
        LatentSizes.of(partial(getattr, config)) if is_latent else None,
    )
    layers = config.num_layers // symbols
    return TrunkSpec(layers, chunk.vocab_size, config.hidden_size, config.ffn_hidden_size, attention)


def _base_of(rotary: Any) -> float:
    """Return the base of unscaled angles, from the first two frequencies."""
    if rotary is None:
        return BASE
    first, second = (float(one) for one in rotary.inv_freq[:2].double())
    return float(round((first / second) ** len(rotary.inv_freq)))


def _is_plain(rotary: Any, base: float) -> bool:
    """Return whether the frequencies come from a base alone, and positions are not divided."""
    frequencies: Tensor = rotary.inv_freq
    count = len(frequencies)
    plain = base ** -(torch.arange(count, dtype=torch.float64) / count)
    divides = getattr(rotary, "seq_len_interpolation_factor", None) not in (None, 1)
    return not divides and torch.allclose(frequencies.double().cpu(), plain, rtol=1e-5)
