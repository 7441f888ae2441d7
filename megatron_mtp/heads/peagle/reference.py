"""Reference implementation of P-EAGLE that runs from its folder alone, as in vLLM and speculators; used by `verify`.

Letters: R rows of the text and masks, S positions, K drafts, X states of several layers side by side, H hidden, V
vocabulary.
"""

from typing import override

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_mtp.checkpoint.verify.drafters import Drafts, Reference
from megatron_mtp.heads.peagle.folder import MASKS


class PEagleReference(Reference):
    """P-EAGLE in float32, without the conversion rules."""

    @override
    def drafts(self, states_SX: Tensor, tokens_S: Tensor, words_VH: Tensor, head_VH: Tensor) -> Drafts:
        count, masks = len(states_SX), len(tokens_S) - len(states_SX) - 1
        mask = next(self.keys[name] for name in MASKS if self.keys.get(name) is not None)
        tokens_R = torch.cat([tokens_S[1 : count + 1], tokens_S.new_full((masks,), mask)])
        given_RX = torch.cat([states_SX, self.weights["mask_hidden"][0].expand(masks, -1)])
        feature_RH, position_R = self.linear("fc", given_RX), torch.arange(count + masks, device=tokens_R.device)
        normed_RH = self.norm("layers.0.hidden_norm", feature_RH)
        given = torch.cat([self.norm("layers.0.input_layernorm", words_VH[tokens_R]), normed_RH], dim=-1)
        state_RH = normed_RH if self.keys.get("norm_before_residual") else feature_RH
        for number in range(self.keys["num_hidden_layers"]):
            layer = f"layers.{number}."
            given = self.norm(f"{layer}input_layernorm", state_RH) if number else given
            visible_RR = self.visible(number, position_R, position_R)
            state_RH = state_RH + self.attended(f"{layer}self_attn.", given, given, position_R, visible_RR)
            state_RH = self.through_mlp(layer, state_RH)
        normed_KH = self.norm("norm", state_RH)[-masks - 1 :]
        return {"logits of drafts": self.logits(linear(normed_KH, self.weights.get("lm_head.weight", head_VH)))}
