"""Fused weight gradients with Transformer Engine and without Apex: Megatron's own layers alone do without them."""

import copy
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any

Init = Callable[..., None]


def fused_where_possible(init: Init) -> Init:
    """`ColumnParallelLinear.__init__`, which takes a plain weight gradient where Apex's extension is missing.

    Transformer Engine's layers read the same setting and fuse by themselves.
    """
    scope = unwrap(init).__globals__

    @wraps(init)
    def make(layer: Any, *sizes: Any, config: Any, **settings: Any) -> None:
        own = config
        if config.gradient_accumulation_fusion and not scope["_grad_accum_fusion_available"]:
            own = copy.copy(config)
            own.gradient_accumulation_fusion = False
        init(layer, *sizes, config=own, **settings)
        layer.config = config  # what Megatron changes in it later counts here too

    return make
