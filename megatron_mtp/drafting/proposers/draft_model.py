"""Drafting with a separate, smaller model over the same vocabulary.

It has rows 0 .. m in its own cache when it drafts t_{m+1}. A round begins with the rows of what the text has gained and
the one before, which is missing where all drafts were accepted.
"""

import torch

from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.kv_cache import KVCache
from megatron_mtp.drafting.proposers.base import Proposer, pick
from megatron_mtp.drafting.proposers.mtp import chain_of, windows
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import Draft, Round


class DraftModel(Proposer):
    """`drafter` is the small model; what it drafts needs no state of the target's."""

    def __init__(self, runner: Runner, config: SpeculativeConfig, drafter: Runner) -> None:
        super().__init__(runner, config)
        self.drafter = drafter

    def start(self, sequences: Sequences) -> None:
        batch = len(sequences.texts)
        self.cache = KVCache(self.drafter.trunk_layers, batch, sequences.capacity)
        self._seen = [0] * batch

    @torch.inference_mode()
    def propose(self, sequences: Sequences, scene: Round, count: int) -> Draft:
        """Positions beyond those that the small model was trained for are asked of it as well."""
        logits_BV = self._catch_up(sequences)
        picked = [pick(logits_BV, scene, 0)]
        sure_B = torch.ones_like(sequences.live_B)
        valid = []
        for position in range(count):
            if scene.config.verifier == "bild":
                sure_B = sure_B & (logits_BV.softmax(dim=-1).amax(dim=-1) >= scene.config.fallback)
            valid.append(sure_B)
            if position == count - 1:
                break
            rows = sequences.chain(sequences.newest_B + 1 + position, 1, count)
            hidden_SBH = self.drafter.trunk(picked[-1][0].unsqueeze(1), rows, self.cache)
            logits_BV = self.drafter.logits(hidden_SBH)[:, 0]
            picked.append(pick(logits_BV, scene, position + 1))
        chain = chain_of(picked)
        return Draft(chain.tokens_BN, chain.probs_BNV, valid_BN=torch.stack(valid, dim=1))

    def _catch_up(self, sequences: Sequences) -> torch.Tensor:
        """Run the rows up to t_m; the small model's logits there, [B, V]."""
        width = sequences.growth_since(self._seen) + 1
        self._seen = sequences.lengths()
        for before_B, count, _ in windows(sequences, width):
            first_B = before_B + 1
            rows = sequences.chain(first_B, count, 0)
            hidden_SBH = self.drafter.trunk(sequences.tokens_at(first_B, count), rows, self.cache)
        return self.drafter.logits(hidden_SBH[-1:])[:, 0]
