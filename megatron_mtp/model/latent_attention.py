"""Multi-latent attention without a norm of uncompressed queries, and without Transformer Engine.

Uncompressed queries (`q_lora_rank` None) have no norm here, as in DeepSeek-V2-Lite and Moonlight. Megatron's own module
adds one inside their projection, after the layer's input norm; only TE has such a projection.

Without TE, the down-projections are column-parallel. Megatron gathers their output and assumes that all ranks have the
same gradients of a gathered tensor. That is false for two of them (megatron-core 0.19.2): the rotary part of the keys
goes directly to each rank's own heads, which gives a partial gradient; and gradients of parameters named `q_layernorm`
are summed over the ranks even if each rank has the complete gradient.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor


class LatentSelfAttention(MLASelfAttention):
    """Megatron's MLA without a norm of uncompressed queries."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the classes of the norms and of the projections after them, by attribute."""
        if self.config.q_lora_rank is not None or not self.config.qk_layernorm:
            resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
            return resolved
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }


PLAIN_QUERIES = {MLASelfAttention: LatentSelfAttention}
"""Modules that replace Megatron's own in specs of Transformer Engine's layers."""


class PortableLatentAttention(LatentSelfAttention):
    """Multi-latent attention on Megatron's own linear layers, with the same gradients as one process.

    Args:
        is_summed: whether Megatron sums gradients of a `q_layernorm` over the ranks in this model, which depends only
            on its trunk.
    """

    def __init__(self, *args: Any, is_summed: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_summed and self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            for weight in self.q_layernorm.parameters():
                weight.register_hook(lambda gradient: gradient / self.tp_group.size())

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return compressed queries, and compressed keys and values followed by the keys' rotary part, both whole."""
        q_compressed, kv_part = super()._qkv_down_projection(hidden_states)
        kv_combined = gather_from_tensor_model_parallel_region(kv_part, group=self.tp_group)
        if self.config.sequence_parallel:  # Megatron gathers the rotary part again and sums its gradient
            return q_compressed, scatter_to_sequence_parallel_region(kv_combined, group=self.tp_group)
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        kv_compressed, rotary = kv_combined.split(widths, dim=-1)
        rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
        return q_compressed, torch.cat([kv_compressed, rotary], dim=-1)
