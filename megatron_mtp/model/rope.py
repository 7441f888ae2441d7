"""Rotary positions: Megatron's rotary modules with any scaling, and at positions other than 0, 1, 2, ..."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_mtp.megatron.layer_config import yarn_settings
from megatron_mtp.spec.attention import AttentionSizes


def rotary_of(sizes: AttentionSizes, config: TransformerConfig, cp_group: ProcessGroup) -> RotaryEmbedding:
    """Create the rotary module for attention of these sizes, rotating halves of the whole head."""
    scaling = sizes.scaling or {"rope_type": "default"}
    given: dict[str, Any] = {
        "kv_channels": sizes.channels,
        "rotary_percent": 1.0,
        "rotary_base": sizes.theta,
        "use_cpu_initialization": config.use_cpu_initialization,
        "cp_group": cp_group,
    }
    match scaling["rope_type"]:
        case "yarn":
            settings = yarn_settings(scaling)
            return YarnRotaryEmbedding(
                **given,
                **{name.removeprefix("yarn_").removeprefix("rotary_"): value for name, value in settings.items()},
            )
        case "linear":
            given["seq_len_interpolation_factor"] = scaling["factor"]
    made = RotaryEmbedding(**given)
    if scaling["rope_type"] == "llama3":
        numbers = {name: value for name, value in scaling.items() if name != "rope_type"}
        made.inv_freq = made._apply_scaling(made.inv_freq, **numbers)
    return made


def place(module: torch.nn.Module, positions: Sequence[int]) -> None:
    """Set the positions of the rows of every forward pass of `module`, for parts that compute their own angles."""
    for rotary in _rotary_modules(module):
        rotary.forward = partial(_angles, rotary, positions)


@contextmanager
def placed(module: torch.nn.Module, positions: Sequence[int]) -> Iterator[None]:
    """Set the positions of the rows of every forward pass of `module` within this context."""
    place(module, positions)
    try:
        yield
    finally:
        for rotary in _rotary_modules(module):
            del rotary.forward


def _rotary_modules(module: torch.nn.Module) -> Iterator[Any]:
    """Yield rotary modules: only they have `get_emb`, with and without YaRN."""
    return (one for one in module.modules() if hasattr(one, "get_emb"))


def _angles(rotary: Any, positions: Sequence[int], length: int, *_: object, **__: object) -> Any:
    """Replace `forward(length, ...)`: return angles [length, 1, 1, C], with YaRN's factor if the module has one.

    The angles of positions 0 1 2 9 are made in two parts, of the 3 from 0 on and of the 1 from 9 on.
    """
    parts = []
    for _, run in groupby(enumerate(positions), lambda pair: pair[1] - pair[0]):
        together = [position for _, position in run]
        parts.append(rotary.get_emb(len(together), together[0]))
    if isinstance(parts[0], tuple):
        return torch.cat([angles for angles, _ in parts])[:length], parts[0][1]
    return torch.cat(parts)[:length]
