"""The tensors of a rule on both sides: a folder's and a checkpoint's, and what each converts to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_mtp.checkpoint.families.rules import Rule

Pair = tuple[str, Tensor, Tensor]
"""A name, the folder's tensor, and the checkpoint's: one as stored, the other converted."""


@dataclass(frozen=True)
class RuleSides:
    """The tensors of one rule on both sides, each read once, and what each side converts to.

        folder    q_proj  k_proj  v_proj    to_mcore ->    linear_qkv   there: equal to the stored one?
                  back: equal to these?        <- to_hf    linear_qkv   checkpoint

    Verification asks whether all pairs are bit-identical (verify/verify.py); an audit explains those that differ
    (audit/comparing.py).

    Attributes:
        rule: the rule.
        theirs: the folder's tensors by name; an audit may lack some.
        ours: the checkpoint's pieces, in the order of the rule.
    """

    rule: Rule
    theirs: Mapping[str, Tensor]
    ours: Sequence[Tensor]

    def back(self) -> Iterator[Pair]:
        """Return the folder's tensors paired with those converted from the checkpoint, by the folder's names.

        Zeros, and norms whose original was lost in training, are computed in float32 and rounded to the folder's dtype.
        """
        for tensor, made in zip(self.rule.hf, self.rule.to_hf(self.ours), strict=True):
            if (held := self.theirs.get(tensor.name)) is not None:
                has_no_type = self.rule.rounds or not self.rule.mcore
                yield tensor.name, held, made.to(held.dtype) if has_no_type else made

    def there(self) -> Iterator[Pair]:
        """Return the checkpoint's tensors paired with those converted from the folder, by the checkpoint's keys.

        Raises:
            ValueError: copies in the folder differ, or zeros are not zero.
        """
        made = self.rule.to_mcore([self.theirs[tensor.name] for tensor in self.rule.hf])
        for piece, one, stored in zip(self.rule.mcore, made, self.ours, strict=True):
            yield piece.key, one, stored
