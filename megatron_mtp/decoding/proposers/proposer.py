"""Base class of all proposers: a drafting method with its facts.

Letters in names: B batch, R rows, V vocabulary.
"""

from typing import Any, ClassVar

from torch import Tensor

from megatron_mtp.decoding.config import Settings, SpeculativeConfig
from megatron_mtp.decoding.draft import Draft, Round

Sequences = Any
"""Stand-in for `sequences.Sequences`, which imports this module."""

HeadKind = str
"""What drafts: MTP layers in sequence (sequential), heads that all read the trunk's state (parallel), or a drafter of
`spec.kinds.DRAFTERS`.
"""


class Proposer:
    """A drafting method. Each class declares its facts, from which lists, checks, help texts and tables are generated.

    Args:
        runner: the target, a `Runner`.
        config: settings, including the method's own.
        drafter: the small model, for a method that needs one; otherwise None.

    Attributes:
        line: one-line description of what it drafts from.
        settings_kind: class of its own settings, of which `settings` is an instance.
        depths: kind of MTP layers that it drafts with; None if it needs none.
        drafts_trees: whether a row may have several candidates.
        keeps_states: whether its MTP layers may be recurrent. They must run chains of rows without gaps and go back
            only a few rows (`rows.MAX_ROWS_BACK`).
        recordable: whether drafting reads nothing back to the host and its shapes depend only on the batch and K
            (`graphs.py`).
        at_once: whether a draft of any K takes one pass.
        observes: whether it reads the target's logits of every step.
        limit, remedy: reason for the limit `most` and how to raise it, for error messages.
    """

    line: ClassVar[str]
    settings_kind: ClassVar[type[Settings]] = Settings
    depths: ClassVar[HeadKind | None] = None
    drafts_trees: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False
    recordable: ClassVar[bool] = False
    at_once: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    limit: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    drafter: Any = None
    runner: Any

    def __init__(self, runner: Any, config: SpeculativeConfig, drafter: Any = None) -> None:
        self.runner, self.config, self.settings = runner, config, config.settings

    @classmethod
    def recurrent_layers(cls) -> str:
        """Places where a hybrid model may have recurrent layers.

        Trees and some rows of MTP layers branch, which they do not support.
        """
        trunk, depths = not cls.drafts_trees, cls.depths is None or cls.keeps_states
        return {(True, True): "yes", (True, False): "in the trunk", (False, True): "in MTP layers"}.get(
            (trunk, depths), "no"
        )

    @property
    def most(self) -> int | None:
        """Largest allowed K; None if unlimited."""
        return None

    @property
    def has_states(self) -> bool:
        """Whether recurrent layers draft."""
        return self.depths is not None and self.runner.recurrent_depths

    @property
    def draws_siblings(self) -> bool:
        """Whether the candidates of a row are independent samples of one q; a chain has one candidate per row."""
        return not self.drafts_trees

    def nodes(self, count: int) -> int:
        """Return the number of rows that a draft with K = `count` adds to the trunk's forward pass."""
        return count

    def caches(self, count: int) -> tuple[int, ...]:
        """Return the numbers of the caches that a draft of `count` writes: MTP layers from 0, a small model -1."""
        return ()

    def missed(self, sequences: Sequences, count: int) -> int:
        """Return the number of a sequence's tokens that the drafter must run before it drafts `count`.

        0 if it runs none.
        """
        return max(map(sequences.growth_since, self.caches(count)), default=0)

    def mark_seen(self, sequences: Sequences, count: int) -> None:
        """Record that the drafter has run the rows of all tokens so far, in a draft of `count`."""
        sequences.mark_seen(*self.caches(count))

    def passes(self, sequences: Sequences, count: int) -> list[Any] | None:
        """Return the passes of MTP layers (`backend.Pass`) whose most probable tokens are a greedy draft of `count`.

        None if it drafts in another way, or has more rows to run than a step has.
        """
        return None if count else []

    def propose(self, sequences: Sequences, round: Round, count: int) -> Draft:
        """Draft `count` tokens, at least 1."""
        raise NotImplementedError

    def catch_up(self, sequences: Sequences, round: Round, count: int) -> None:
        """Run the missed rows so that it can draft `count` tokens."""
        self.propose(sequences, round, count)

    def observe(self, sequences: Sequences, draft: Draft, logits_BRV: Tensor) -> None:
        """Process the target's logits of the rows before the verdict. Called if `observes` is set."""
