"""EAGLE (Li et al., arXiv:2401.15077; trees: arXiv:2406.16858): a drafter with one layer on the trunk's last state.

    x_1  = layer(fc([embedding(t_{i+1}); h]))       step 1 at position i, h the trunk's state after its final norm
    x_k  = layer(fc([embedding(t_{i+k}); x_{k-1}]))   step k = 2 .. K
    the drafts' logits are output(x_k)

The layer is Llama's without the norm before attention, and there is no norm before the output layer: each step imitates
the state that the trunk's output layer reads. Training runs K steps on the layer's own states, like EAGLE-3's. The
paper trains one step on the trunk's states with noise.

Letters in names: S sequence, B batch, H hidden.
"""

from typing import Any, override

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_mtp.megatron.layer_config import layer_config
from megatron_mtp.model.drafter import layer_spec
from megatron_mtp.model.mtp import MultiTokenPredictionLayerSubmodules, whole_states
from megatron_mtp.model.norms import PortableNorm
from megatron_mtp.model.one_layer import OneLayer, OneLayerBlock
from megatron_mtp.model.shared_keys import WITH_CHAIN
from megatron_mtp.model.trunk_output import TrunkOutput
from megatron_mtp.spec.head import HeadSpec


class EagleLayer(OneLayer):
    """All weights of the drafter."""

    states_read = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = torch.nn.Identity()

    @override
    def feature(self, states_SBX: Tensor) -> Tensor:
        return states_SBX

    @override
    def merge(self, embedded_SBH: Tensor, given_SBH: Tensor) -> Tensor:
        part, _ = self.fc(torch.cat((embedded_SBH, given_SBH), dim=-1))
        return whole_states(part, self.config, self.tp_group)


class EagleBlock(OneLayerBlock):
    """K steps of the drafter."""

    @classmethod
    @override
    def submodules(cls, drafter: HeadSpec, config: TransformerConfig) -> MultiTokenPredictionLayerSubmodules:
        own = layer_config(config, drafter)
        spec = layer_spec(own, WITH_CHAIN, input_layernorm=IdentityOp)
        return MultiTokenPredictionLayerSubmodules(spec, PortableNorm, shares_kv=True)

    @override
    def make_layer(self, *args: Any) -> EagleLayer:
        return EagleLayer(self.config, self.drafted, *args)

    @override
    def read_states(self, trunk: TrunkOutput) -> Tensor:
        return trunk.hidden_SBH.detach()
