"""Drafting with a separate, smaller model over the same vocabulary.

It has rows 0 .. m in its own cache when it drafts t_{m+1}. A round begins with the rows of what the sequence has gained
and the one before, which is missing where all drafts were accepted.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor

from megatron_mtp.decoding.config import Settings, SpeculativeConfig, setting
from megatron_mtp.decoding.kv_cache import KVCache
from megatron_mtp.decoding.proposers.base import OneCache, pick
from megatron_mtp.decoding.proposers.mtp import chain_of, windows
from megatron_mtp.decoding.types import Draft, Round
from megatron_mtp.decoding.verifiers.lossy import BildSettings

if TYPE_CHECKING:
    from megatron_mtp.decoding.runner import Runner
    from megatron_mtp.decoding.sequences import Sequences


@dataclass(frozen=True)
class DraftModelSettings(Settings):
    """Where the small model is."""

    model: str | None = setting(None, "the draft model's checkpoint folder; required")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None:
            raise ValueError("speculative config: 'draft_model' needs 'model', the draft model's checkpoint folder.")


class DraftModel(OneCache):
    """`drafter` is the small model; it drafts without any state of the target.

    Raises:
        ValueError: the small model is missing, or has another vocabulary or fewer positions than the target.
    """

    line = "a small checkpoint of the same vocabulary"
    settings_kind = DraftModelSettings
    recordable = True
    own = -1
    drafter: "Runner"

    def __init__(self, runner: "Runner", config: SpeculativeConfig, drafter: "Runner | None" = None) -> None:
        super().__init__(runner, config)
        self.drafter = _fitting(drafter, runner)

    @property
    @override
    def has_states(self) -> bool:
        return self.drafter.recurrent_trunk

    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        """Drafts also at positions beyond those that the small model was trained for."""
        cache = sequences.memory.drafter
        assert cache is not None
        logits_BV = self._catch_up(sequences, cache)
        picked = [pick(logits_BV, round, 0)]
        sure_B = torch.ones_like(sequences.live_B)
        valid = []
        for position in range(count):
            sure_B = sure_B & _is_sure(logits_BV, round)
            valid.append(sure_B)
            if position == count - 1:
                break
            rows = sequences.chain(sequences.newest_B + 1 + position, 1, count)
            hidden_SBH = self.drafter.trunk(picked[-1][0].unsqueeze(1), rows, cache)
            logits_BV = self.drafter.logits(hidden_SBH)[:, 0]
            picked.append(pick(logits_BV, round, position + 1))
        chain = chain_of(picked)
        return Draft(chain.tokens_BN, chain.probs_BNV, valid_BN=torch.stack(valid, dim=1))

    def _catch_up(self, sequences: "Sequences", cache: KVCache) -> Tensor:
        """Run the rows up to t_m; the small model's logits there, [B, V]."""
        width = sequences.growth_since(self.own) + 1
        sequences.mark_seen(self.own)
        for first_B, count, _ in windows(sequences, width, end=1):
            rows = sequences.chain(first_B, count, 0)
            hidden_SBH = self.drafter.trunk(sequences.tokens_at(first_B, count), rows, cache)
        return self.drafter.logits(hidden_SBH[-1:])[:, 0]


def _is_sure(logits_BV: Tensor, round: Round) -> Tensor:
    """Whether each sequence's drafter goes on: always, but with `bild` while its best token is likely enough."""
    settings = round.config.verifier_settings
    if not isinstance(settings, BildSettings):
        return torch.ones_like(logits_BV[:, 0], dtype=torch.bool)
    return logits_BV.softmax(dim=-1).amax(dim=-1) >= settings.fallback


def _fitting(drafter: "Runner | None", target: "Runner") -> "Runner":
    if drafter is None:
        raise ValueError("'draft_model' was asked for without a draft model; load one and pass it as drafter.")
    if drafter.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {drafter.vocab_size} tokens and the target one of "
            f"{target.vocab_size}; give a draft model with the same tokenizer."
        )
    if drafter.positions < target.positions:
        raise ValueError(
            f"the draft model has {drafter.positions} positions and the target {target.positions}; give a draft model "
            "with as many."
        )
    return drafter
