"""Replace Megatron's modules by portable ones on machines without Transformer Engine.

Most modules are fields of a spec. Megatron's MoE layer has no field for its latent projections: it looks up Transformer
Engine's class by name in its own module.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtp.model.attention import PortableAttention, SinkAttention
from megatron_mtp.model.latent_attention import PortableLatentAttention
from megatron_mtp.model.linear import PortableLinear
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.swapped import having, with_modules


def with_portable_modules(spec: Any, config: TransformerConfig) -> Any:
    """Return the spec (a module, a `ModuleSpec`, or a dataclass or list of them) with portable modules."""
    attention = PortableAttention if config.softmax_type == "vanilla" else SinkAttention
    swaps = {
        WrappedTorchNorm: PortableNorm,
        MLASelfAttention: PortableLatentAttention,
        DotProductAttention: attention,
    }
    return with_modules(spec, swaps)


def with_portable_projections(config: TransformerConfig) -> AbstractContextManager[None]:
    """Within this context, MoE layers created without TE support a latent (`--moe-latent-size`)."""
    if config.transformer_impl != "local" or not config.moe_latent_size:
        return nullcontext()
    return having([moe_layer], HAVE_TE=True, TELinear=PortableLinear)
