"""Reference implementation of Domino that runs from its folder alone, as SpecForge computes it; used by `verify`.

Letters: S positions, K drafts, X states of several layers side by side, H hidden, V vocabulary.
"""

from typing import override

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_mtp.checkpoint.verify.drafters import Drafts, Reference


class DominoReference(Reference):
    """Domino in float32, with torch's own GRU."""

    @override
    def biased(self, logits_KN: Tensor, state_KH: Tensor, tokens_K: Tensor, words_VH: Tensor) -> Drafts:
        size = self.keys["gru_hidden_dim"]
        gru = torch.nn.GRU(words_VH.size(1), size, bias=False, device=words_VH.device)
        gru.load_state_dict({name: self.weights[f"prefix_gru.{name}"] for name in gru.state_dict()})
        memory_KG, _ = gru(words_VH[tokens_K])
        made = silu(self.linear("embed_proj.0", torch.cat([state_KH, memory_KG], dim=-1)))
        bias_KN = self.linear("embed_proj.2", made)
        bias_KN[: self.keys["pure_draft_prefix_len"]] = 0
        return {"logits of drafts": self.logits(logits_KN + bias_KN)}
