"""Prompt lookup: what followed the longest suffix of the text when it stood there before (Saxena, 2023).

The draft is deterministic, and empty where no suffix was seen before.
"""

import torch

from megatron_mtp.drafting.proposers.base import Proposer
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import Draft, Round


class Ngram(Proposer):
    """Looks from `ngram_max` down to `ngram_min` tokens, and takes the latest place."""

    def propose(self, sequences: Sequences, scene: Round, count: int) -> Draft:
        shortest, longest = self.config.ngram_min, self.config.ngram_max
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
