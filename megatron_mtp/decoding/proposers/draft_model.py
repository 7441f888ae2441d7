"""Drafting with a separate, smaller model with the same vocabulary: a chain, the best of a beam, or a tree.

It has rows 0 .. m in its own cache when it drafts t_{m+1}. A round begins with the rows of the newly accepted tokens,
plus the row before them, which is missing if all drafts were accepted.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, override

import torch
from torch import Tensor

from megatron_mtp.decoding.config import Settings, SpeculativeConfig, setting
from megatron_mtp.decoding.draft import Draft, Round
from megatron_mtp.decoding.proposers.mtp import chain_of, pick, windows
from megatron_mtp.decoding.proposers.tree import Beam, Grower, Tree, TreeSettings
from megatron_mtp.decoding.rows import Rows
from megatron_mtp.decoding.verifiers import BildSettings

if TYPE_CHECKING:
    from megatron_mtp.decoding.runner import Runner
    from megatron_mtp.decoding.sequences import Sequences


@dataclass(frozen=True)
class SmallModelSettings(Settings):
    """Folder of the small model."""

    model: str | None = setting(None, "the draft model's checkpoint folder; required")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None:
            raise ValueError(
                "speculative config: a method that drafts with a small model needs 'model', its checkpoint folder."
            )


@dataclass(frozen=True)
class DraftModelSettings(SmallModelSettings):
    """The small model, and the number of chains in its beam."""

    beam_width: int = setting(1, "W, chains that are extended in parallel; the likeliest is the draft", 1, 64)


@dataclass(frozen=True)
class DraftModelTreeSettings(TreeSettings, SmallModelSettings):
    """The small model and the shape of its tree."""


class SmallModel(Grower):
    """Base class of methods with a small model, `drafter`, which drafts without any state of the target.

    Raises:
        ValueError: the small model is missing, has a different vocabulary or fewer positions than the target, or has
            recurrent layers although its rows would branch.
    """

    depths = None
    own = -1
    past: ClassVar[int] = 1
    drafter: "Runner"

    def __init__(self, runner: "Runner", config: SpeculativeConfig, drafter: "Runner | None" = None) -> None:
        super().__init__(runner, config)
        if drafter is None:
            raise ValueError(f"'{config.method}' was asked for without a draft model; load one and pass it as drafter.")
        _check_fit(drafter, runner)
        if drafter.recurrent_trunk and (self.drafts_trees or self.beam > 1):
            raise ValueError(
                "the draft model has recurrent layers, whose states do not branch; draft a chain: draft_model with "
                "beam_width 1."
            )
        self.drafter = drafter

    @property
    @override
    def has_states(self) -> bool:
        return self.drafter.recurrent_trunk

    @property
    @override
    def drafted(self) -> int:
        return self.runner.vocab_size

    @property
    @override
    def keeps_rows(self) -> bool:
        return True

    @override
    def newest(self, sequences: "Sequences") -> Tensor:
        """Draft even at positions beyond those that the small model was trained for."""
        cache = sequences.memory.drafter
        assert cache is not None
        width = sequences.growth_since(self.own) + 1
        sequences.mark_seen(self.own)
        for first, rows, _ in windows(sequences, width, end=1):
            first_B = sequences.newest_B + first
            tokens_BR = sequences.tokens_at(first_B, rows)
            hidden_SBH = self.drafter.trunk(tokens_BR, sequences.chain(first_B, rows, 0), cache)
        return hidden_SBH[-1:]

    @override
    def level(self, sequences: "Sequences", given_SBH: Tensor, tokens_BF: Tensor, where: Rows) -> Tensor:
        cache = sequences.memory.drafter
        assert cache is not None
        return self.drafter.trunk(tokens_BF, where, cache)

    @override
    def logits(self, states_SBH: Tensor) -> Tensor:
        return self.drafter.logits(states_SBH)


class DraftModel(SmallModel, Beam):
    """Drafts a sampled chain, or the most likely chain of a beam.

    Raises:
        ValueError: a beam is combined with early stopping where the small model is unsure.
    """

    line = "a small checkpoint of the same vocabulary"
    settings_kind = DraftModelSettings

    def __init__(self, runner: "Runner", config: SpeculativeConfig, drafter: "Runner | None" = None) -> None:
        super().__init__(runner, config, drafter)
        if self.beam > 1 and isinstance(config.verifier_settings, BildSettings):
            raise ValueError(
                "speculative config: the verifier 'bild' ends a chain where the draft model is unsure, and a beam has "
                "several; give beam_width 1, or choose joint."
            )

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        return self._chain(sequences, round, count) if self.beam == 1 else super().propose(sequences, round, count)

    def _chain(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        cache = sequences.memory.drafter
        assert cache is not None
        logits_BV = self.logits(self.newest(sequences))[:, 0]
        picked = [pick(logits_BV, round, 0)]
        sure_B, bild = torch.ones_like(sequences.live_B), round.config.verifier_settings
        valid: list[Tensor] = []
        for position in range(count):
            if isinstance(bild, BildSettings):  # BiLD drafts on while the most likely token is likely enough
                sure_B = sure_B & (logits_BV.softmax(dim=-1).amax(dim=-1) >= bild.fallback)
                valid.append(sure_B)
            if position == count - 1:
                break
            tokens_B1, row = picked[-1][0].unsqueeze(1), sequences.chain(sequences.newest_B + 1 + position, 1, count)
            logits_BV = self.logits(self.drafter.trunk(tokens_B1, row, cache))[:, 0]
            picked.append(pick(logits_BV, round, position + 1))
        chain = chain_of(picked)
        return replace(chain, valid_BN=torch.stack(valid, dim=1)) if valid else chain


class DraftModelTree(SmallModel, Tree):
    """Drafts a tree with several candidates per position."""

    line = "a tree grown with a small checkpoint of the same vocabulary"
    settings_kind = DraftModelTreeSettings


def _check_fit(drafter: "Runner", runner: "Runner") -> None:
    """Raise ValueError for a small model without the target's tokens and positions."""
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
