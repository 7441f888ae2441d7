"""Expert layers for few rows, without reading back to the host which experts the rows are routed to.

Megatron's layer sorts rows by expert, reads the counts back to the host, which a CUDA graph cannot do, and runs the
experts one after another. Here, few rows gather the weights of their experts, and more rows run all experts at once,
with probability 0 for experts that were not chosen. Router functions and shared experts are Megatron's.

Letters in names: S rows of a forward pass, B batch, H hidden, T = S B, E experts, K experts of a row, F hidden size of
an expert.
"""

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_mtp.decoding.cached_attention import StandIn
from megatron_mtp.decoding.dense_layer import activation, default_settings

MOST_ROWS = 1024
"""With more rows, running all experts takes longer than sorting the rows, and much memory."""

COPIES = 3
"""How often a gathered weight moves through memory: read, written and read again."""

KNOWN = frozenset(
    # router settings, implemented by Megatron's functions
    "moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor "
    "moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate "
    "moe_router_topk_limited_devices moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
    # shared experts, which are Megatron's module, and sizes
    "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_ffn_hidden_size moe_layer_freq "
    # dispatch of rows to experts, and training
    "moe_token_dispatcher_type moe_grouped_gemm moe_permute_fusion moe_token_drop_policy moe_layer_recompute "
    "moe_per_layer_logging moe_hybridep_num_sms_preprocessing moe_flex_dispatcher_backend".split()
)
"""Settings of experts that may differ from Megatron's defaults; with any other one, Megatron's layer runs."""

AS_THEY_ARE = ("activation_func_clamp_value", "glu_linear_offset", "use_te_activation_func", "fp8", "fp4")
"""Further settings of an expert's forward, which must have Megatron's defaults."""

BALANCED = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}
"""Kinds of load balancing whose routers choose the most likely experts and read nothing back."""


class StaticExperts(StandIn):
    """Replaces a `MoELayer`, whose expert weights become parts of one tensor."""

    def __init__(self, own: MoELayer) -> None:
        super().__init__()
        self.own = own
        experts = own.experts.local_experts
        self.first_EFH = _joined([expert.linear_fc1 for expert in experts], 0)
        self.second_EFH = _joined([expert.linear_fc2 for expert in experts], 1)
        self._activated = activation(own.config)

    def forward(self, hidden_SBH: Tensor, **_: object) -> tuple[Tensor, None]:
        """Return [S, B, H] and None for the bias, like the replaced layer."""
        rows = hidden_SBH.shape[:2].numel()
        if rows > MOST_ROWS and not torch.cuda.is_current_stream_capturing():
            return self.own(hidden_SBH)
        probs_TK, index_TK = self._routed(hidden_SBH)
        gathers = COPIES * index_TK.numel() < len(self.first_EFH)
        if gathers:  # multiply each row by its K experts
            given_XYH, probs_XYK1 = hidden_SBH.view(rows, 1, -1), probs_TK.view(rows, 1, -1, 1)
            first_XKFH, second_XKFH = self.first_EFH[index_TK], self.second_EFH[index_TK]
        else:  # multiply all rows by all experts
            probs_TE = probs_TK.new_zeros(rows, len(self.first_EFH)).scatter_(1, index_TK, probs_TK)
            given_XYH, probs_XYK1 = hidden_SBH.view(1, rows, -1), probs_TE.view(1, rows, -1, 1)
            first_XKFH, second_XKFH = self.first_EFH.unsqueeze(0), self.second_EFH.unsqueeze(0)
        wide_XYKF = torch.bmm(given_XYH, first_XKFH.flatten(1, 2).mT).unflatten(2, (probs_XYK1.size(2), -1))
        inner_XYKF = (self._activated(wide_XYKF) * probs_XYK1).to(hidden_SBH.dtype)
        if not gathers:
            inner_XYKF = inner_XYKF.masked_fill(probs_XYK1 == 0, 0)  # 0 times an overflow would be NaN
        factors = inner_XYKF.flatten(2), second_XKFH.flatten(1, 2)
        shared_SBH = self.own.shared_experts_compute(hidden_SBH)
        made = torch.bmm(*factors) if shared_SBH is None else torch.baddbmm(shared_SBH.view_as(given_XYH), *factors)
        return made.view_as(hidden_SBH), None

    def _routed(self, hidden_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router's choice for every row: probabilities and expert numbers [T, K]."""
        router, config = self.own.router, self.own.config
        router._maintain_float32_expert_bias()
        return topk_routing_with_score_function(
            router.gating(hidden_SBH).flatten(0, 1),
            config.moe_router_topk,
            config.moe_router_pre_softmax,
            config.moe_router_num_groups,
            config.moe_router_group_topk,
            config.moe_router_topk_scaling_factor,
            config.moe_router_score_function,
            router.expert_bias,
            dense_output=True,
        )


def place_static_experts(layer: TransformerLayer) -> None:
    """Replace a layer's experts by `StaticExperts`, if they are of a supported kind."""
    if isinstance(layer.mlp, MoELayer) and _is_known(layer.mlp):
        layer.mlp = StaticExperts(layer.mlp)


def _is_known(layer: MoELayer) -> bool:
    config, defaults = layer.config, default_settings(layer.config)
    balancing = config.moe_router_load_balancing_type
    return bool(
        type(layer.router) is TopKRouter
        and type(layer.experts) is SequentialMLP
        and len(layer.experts.local_experts) == config.num_moe_experts
        and all(_is_plain(expert) for expert in layer.experts.local_experts)
        and BALANCED.issuperset([balancing] if isinstance(balancing, str) else balancing)
        and all(getattr(config, name) == defaults[name] for name in (*_others(config), *AS_THEY_ARE))
    )


def _is_plain(expert: MLP) -> bool:
    """Return whether the layer is whole on this rank and has no biases."""
    products = (expert.linear_fc1, expert.linear_fc2)
    return all(one.bias is None for one in products) and expert.config.expert_tensor_parallel_size == 1


def _others(config: TransformerConfig) -> list[str]:
    return [name for name in vars(config) if name.startswith("moe_") and name not in KNOWN]


def _joined(products: list[Any], width: int) -> Tensor:
    """Stack the weights into one tensor [E, F, H] and make each a view of it; `width` is the dimension of F."""
    joined_EFH = torch.stack([product.weight.detach().movedim(width, 0) for product in products])
    for product, part_FH in zip(products, joined_EFH, strict=True):
        product.weight.data = part_FH.movedim(0, width)
    return joined_EFH
