"""Multi-latent attention, without a norm of queries that are not compressed, and without Transformer Engine.

Queries that are not compressed (`q_lora_rank` None) have no norm here, as in DeepSeek-V2-Lite and Moonlight.
Megatron's own module puts one inside their projection, behind the layer's input norm; only TE has such a projection.

Without TE the down-projections are column-parallel. Megatron gathers their output, and takes the gradients of a
gathered tensor to be the same on all ranks. Two are not (megatron-core 0.19.2): the rotary part of the keys goes
straight to each rank's own heads, which is a part of its gradient; and gradients of anything called `q_layernorm` are
summed over the ranks, also where each rank has all of it.
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
    """Megatron's MLA, without a norm of queries that are not compressed."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Classes of the norms and of the projections behind them, by attribute."""
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
"""What stands in specs of Transformer Engine's layers for Megatron's own module."""


class PortableLatentAttention(LatentSelfAttention):
    """Multi-latent attention on Megatron's own linear layers, with the gradients of one process.

    Args:
        is_summed: whether the model is one in which Megatron sums gradients of a `q_layernorm` over the ranks, which
            depends on its trunk alone.
    """

    def __init__(self, *args: Any, is_summed: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_summed and self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            for weight in self.q_layernorm.parameters():
                weight.register_hook(lambda gradient: gradient / self.tp_group.size())

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed queries, and compressed keys and values with the rotary part of the keys behind, both whole."""
        q_compressed, kv_part = super()._qkv_down_projection(hidden_states)
        kv_combined = gather_from_tensor_model_parallel_region(kv_part, group=self.tp_group)
        if self.config.sequence_parallel:  # Megatron gathers the rotary part again, and sums its gradient
            return q_compressed, scatter_to_sequence_parallel_region(kv_combined, group=self.tp_group)
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        kv_compressed, rotary = kv_combined.split(widths, dim=-1)
        rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
        return q_compressed, torch.cat([kv_compressed, rotary], dim=-1)
