"""Drafting with a separate, smaller model over the same vocabulary.

It has rows 0 .. m in its own cache when it drafts t_{m+1}. A round begins with the rows of what the sequence has gained
and the one before, which is missing where all drafts were accepted.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor

from megatron_mtp.decoding.config import Settings, SpeculativeConfig, setting
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.mtp import OneCache, chain_of, pick, windows
from megatron_mtp.decoding.verifiers import BildSettings

if TYPE_CHECKING:
    from megatron_mtp.decoding.runner import Runner
    from megatron_mtp.decoding.sequences import Sequences


@dataclass(frozen=True)
class DraftModelSettings(Settings):
    """The small model's folder."""

    model: str | None = setting(None, "the draft model's checkpoint folder; required")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None:
            raise ValueError("speculative config: 'draft_model' needs 'model', the draft model's checkpoint folder.")


class DraftModel(OneCache):
    """`drafter` is the small model; it drafts without any state of the target.

    Raises:
        ValueError: the small model is missing, or has other tokens, more or fewer, or fewer positions than the target.
    """

    line = "a small checkpoint of the same vocabulary"
    settings_kind = DraftModelSettings
    recordable = True
    own = -1
    drafter: "Runner"

    def __init__(self, runner: "Runner", config: SpeculativeConfig, drafter: "Runner | None" = None) -> None:
        super().__init__(runner, config)
        if drafter is None:
            raise ValueError("'draft_model' was asked for without a draft model; load one and pass it as drafter.")
        if drafter.vocab_size != runner.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {drafter.vocab_size} tokens and the target one of "
                f"{runner.vocab_size}; give a draft model with the same tokenizer."
            )
        own = {number: token for token, number in (runner.tokens or {}).items()}
        others = {number: token for token, number in (drafter.tokens or {}).items()}
        differ = [number for number, token in others.items() if own.get(number, token) != token]
        if differ:
            number = min(differ)
            raise ValueError(
                f"the draft model has another tokenizer than the target: the id {number} is {others[number]!a} in its "
                f"own, and {own[number]!a} in the target's; give a draft model with the same tokenizer."
            )
        if drafter.positions < runner.positions:
            raise ValueError(
                f"the draft model has {drafter.positions} positions and the target {runner.positions}; give a draft "
                "model with as many."
            )
        self.drafter = drafter

    @property
    @override
    def has_states(self) -> bool:
        return self.drafter.recurrent_trunk

    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        """Drafts also at positions beyond those that the small model was trained for."""
        cache = sequences.memory.drafter
        assert cache is not None
        width = sequences.growth_since(self.own) + 1
        sequences.mark_seen(self.own)
        for first, rows, _ in windows(sequences, width, end=1):
            first_B = sequences.newest_B + first
            tokens_BR = sequences.tokens_at(first_B, rows)
            hidden_SBH = self.drafter.trunk(tokens_BR, sequences.chain(first_B, rows, 0), cache)
        logits_BV = self.drafter.logits(hidden_SBH[-1:])[:, 0]
        picked = [pick(logits_BV, round, 0)]
        sure_B, bild = torch.ones_like(sequences.live_B), round.config.verifier_settings
        valid: list[Tensor] = []
        for position in range(count):
            if isinstance(bild, BildSettings):  # goes on while its best token is likely enough
                sure_B = sure_B & (logits_BV.softmax(dim=-1).amax(dim=-1) >= bild.fallback)
                valid.append(sure_B)
            if position == count - 1:
                break
            row = sequences.chain(sequences.newest_B + 1 + position, 1, count)
            hidden_SBH = self.drafter.trunk(picked[-1][0].unsqueeze(1), row, cache)
            logits_BV = self.drafter.logits(hidden_SBH)[:, 0]
            picked.append(pick(logits_BV, round, position + 1))
        chain = chain_of(picked)
        return replace(chain, valid_BN=torch.stack(valid, dim=1)) if valid else chain
