"""Prompt lookup: what followed the longest suffix of the sequence when it stood there before (Saxena, 2023).

The draft is deterministic, and empty where no suffix was seen before.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_mtp.decoding.config import Settings, setting
from megatron_mtp.decoding.types import Draft, Proposer, Round

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences


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
    """The suffix has `ngram_min` to `ngram_max` tokens; of its earlier places the latest one counts."""

    line = "what followed the longest suffix when it was seen before"
    settings_kind = NgramSettings
    settings: NgramSettings
    recordable = True

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        shortest, longest = self.settings.ngram_min, self.settings.ngram_max
        tokens_BW = sequences.tokens_BT[:, : sequences.window(0)]
        drafted_BN, valid_BN = continuation(tokens_BW, sequences.length_B, shortest, longest, count)
        return Draft(drafted_BN, valid_BN=valid_BN & sequences.live_B.unsqueeze(1))


def continuation(tokens_BW: Tensor, length_B: Tensor, shortest: int, longest: int, count: int) -> tuple[Tensor, Tensor]:
    """Up to `count` tokens that followed the latest earlier place of the longest suffix seen before, and which are any.

    An earlier place ends at slot e, at most m - 1. Going back from e and from m = `length_B` - 1, so many tokens agree:

        slot      0  1  2  3  4  5          m = 5; the suffix 1, 2 ends at e = 1 and at e = 3 too,
        token     1  2  1  2  1  2          where 4 tokens agree, so that e = 3 counts
        agree     0  2  0  4  0             drafted: what follows e = 3, which is 1, 2
    """
    newest_B1 = length_B.clamp(max=tokens_BW.size(1)).unsqueeze(1) - 1  # a sequence that has ended may be longer
    end_W = torch.arange(tokens_BW.size(1), device=tokens_BW.device)
    longest = min(longest, end_W.numel())
    suffix_BL = tokens_BW.gather(1, (newest_B1 - end_W[:longest].flip(0)).clamp(min=0))
    ending_BWL = pad(tokens_BW, (longest - 1, 0), value=-1).unfold(1, longest, 1)  # the tokens up to slot e
    agree_BWL = (ending_BWL == suffix_BL.unsqueeze(1)) & (end_W < newest_B1).unsqueeze(2)
    agreed_BW = agree_BWL.flip(2).cumprod(dim=2).sum(dim=2)
    end_B1 = (agreed_BW * end_W.numel() + end_W).argmax(dim=1, keepdim=True)  # the longest, and then the latest
    place_BN = end_B1 + 1 + torch.arange(count, device=tokens_BW.device)
    valid_BN = (place_BN <= newest_B1) & (agreed_BW.gather(1, end_B1) >= shortest)
    return tokens_BW.gather(1, place_BN.clamp(max=end_W.numel() - 1)) * valid_BN, valid_BN
