"""Prompt lookup: what followed the longest suffix of the text when it stood there before (Saxena, 2023).

The draft is deterministic, and empty where no suffix was seen before.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, override

import torch

from megatron_mtp.drafting.proposers.base import Proposer
from megatron_mtp.drafting.settings import Settings, setting
from megatron_mtp.drafting.types import Draft, Round

if TYPE_CHECKING:
    from megatron_mtp.drafting.sequences import Sequences


@dataclass(frozen=True)
class NgramSettings(Settings):
    """Lengths of the suffixes."""

    ngram_min: int = setting(1, "shortest suffix that is looked up", 1, 64)
    ngram_max: int = setting(4, "longest suffix that is looked up", 1, 64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"speculative config: ngram_min is {self.ngram_min}, above ngram_max, {self.ngram_max}; swap them."
            )


class Ngram(Proposer):
    """Looks from `ngram_max` down to `ngram_min` tokens, and takes the latest place."""

    line = "what followed the longest suffix when it was seen before"
    settings_kind = NgramSettings
    settings: NgramSettings

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        shortest, longest = self.settings.ngram_min, self.settings.ngram_max
        found = [
            continuation(text, shortest, longest, count) if live else []
            for text, live in zip(sequences.texts, sequences.live, strict=True)
        ]
        return padded(found, count, sequences.length_B.device)


def continuation(text: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier occurrence of the longest matching suffix.

    [1, 2, 3, 1, 2] continues with 3, 1, 2: its suffix [1, 2] stood at the beginning.
    """
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        suffix = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == suffix:
                return text[start + size : start + size + count]
    return []


def padded(drafts: list[list[int]], count: int, device: torch.device) -> Draft:
    """Chains of unequal length as one draft."""
    tokens = [draft + [0] * (count - len(draft)) for draft in drafts]
    valid = [[place < len(draft) for place in range(count)] for draft in drafts]
    return Draft(torch.tensor(tokens, device=device), valid_BN=torch.tensor(valid, device=device))
