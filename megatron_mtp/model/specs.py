"""Replace Megatron's modules by portable ones on machines without Transformer Engine.

Most modules are fields of a spec. Megatron's MoE layer has no field for its latent projections: it looks up Transformer
Engine's class by name in its own module.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtp.model.attention import PortableAttention, SinkAttention
from megatron_mtp.model.latent_attention import PortableLatentAttention
from megatron_mtp.model.linear import PortableLinear
from megatron_mtp.model.norms import PortableNorm


def with_portable_modules(spec: Any, config: TransformerConfig) -> Any:
    """Return the spec (a module, a `ModuleSpec`, or a dataclass or list of them) with portable modules."""
    attention = PortableAttention if config.softmax_type == "vanilla" else SinkAttention
    swaps = {
        WrappedTorchNorm: PortableNorm,
        MLASelfAttention: PortableLatentAttention,
        DotProductAttention: attention,
    }
    return with_modules(spec, swaps)


def with_modules(spec: Any, swaps: dict[Any, Any]) -> Any:
    """Return the spec with classes replaced by `swaps`, wherever they occur."""
    if isinstance(spec, list):
        return [with_modules(one, swaps) for one in spec]
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(
            spec, module=with_modules(spec.module, swaps), submodules=with_modules(spec.submodules, swaps)
        )
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        swapped = {field.name: with_modules(getattr(spec, field.name), swaps) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **swapped)
    return swaps.get(spec, spec) if isinstance(spec, type) else spec


def with_portable_projections(config: TransformerConfig) -> AbstractContextManager[None]:
    """Within this context, MoE layers created without TE support a latent (`--moe-latent-size`)."""
    if config.transformer_impl != "local" or not config.moe_latent_size:
        return nullcontext()
    return having([moe_layer], HAVE_TE=True, TELinear=PortableLinear)


@contextmanager
def having(modules: list[ModuleType], **values: Any) -> Iterator[None]:
    """Within this context, set these names to other values in all modules that have them."""
    before = [(module, name, getattr(module, name)) for module in modules for name in values if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, values[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
