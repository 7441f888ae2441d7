"""What every proposer is: a way to draft, with its facts.

Letters in names: B batch, R rows, V vocabulary.
"""

from typing import Any, ClassVar

from torch import Tensor

from megatron_mtp.decoding.config import Settings, SpeculativeConfig
from megatron_mtp.decoding.draft import Draft, Round

Sequences = Any
"""Stands for `sequences.Sequences`, which imports this room's data."""

HeadKind = str
"""What drafts: MTP layers that continue one another (sequential), heads that all read the trunk's state (parallel), or
a drafter of `spec.kinds.DRAFTERS`."""


class Proposer:
    """A way to draft. A class states its facts; lists, checks, help texts and the pages' tables are made of them.

    Args:
        runner: the target, a `Runner`; its type stands with those that run its layers.
        config: the method's settings among others.
        drafter: the small model, for a method that needs one; else None.

    Attributes:
        line: what it drafts from, in a line.
        settings_kind: the class of its own settings, which `settings` is an object of.
        depths: the kind of MTP layers that it drafts with; None if it needs none.
        drafts_trees: whether a row may have several candidates.
        keeps_states: whether its MTP layers may have recurrent layers: they run chains of rows, leave none out and
            go back by few (`rows.MAX_ROWS_BACK`).
        recordable: whether a draft reads nothing back, and its shapes depend on the batch and K alone (`graphs.py`).
        at_once: whether a draft of any K takes one pass.
        observes: whether it reads the target's logits of every step.
        limit, remedy: where `most` comes from, and what to do about it, for the message to one who asks for more.
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
        """Places where a hybrid may have recurrent layers: trees branch, and so do some rows of an MTP layer."""
        trunk, depths = not cls.drafts_trees, cls.depths is None or cls.keeps_states
        return {(True, True): "yes", (True, False): "in the trunk", (False, True): "in MTP layers"}.get(
            (trunk, depths), "no"
        )

    @property
    def most(self) -> int | None:
        """The largest K that it can be asked for; None without a limit."""
        return None

    @property
    def has_states(self) -> bool:
        """True if recurrent layers draft."""
        return self.depths is not None and self.runner.recurrent_depths

    @property
    def draws_siblings(self) -> bool:
        """True if the candidates of a row are independent samples of one q; a chain has one a row."""
        return not self.drafts_trees

    def nodes(self, count: int) -> int:
        """Rows that a draft of K = `count` adds to the trunk's forward."""
        return count

    def caches(self, count: int) -> tuple[int, ...]:
        """Numbers of the caches in which a draft of `count` runs rows: MTP layers from 0 on, a small model -1."""
        return ()

    def missed(self, sequences: Sequences, count: int) -> int:
        """Tokens of a sequence whose rows the drafter has to run before it drafts `count`; 0 if it runs none."""
        return max(map(sequences.growth_since, self.caches(count)), default=0)

    def mark_seen(self, sequences: Sequences, count: int) -> None:
        """The drafter has run the rows of all tokens so far, in a draft of `count`."""
        sequences.mark_seen(*self.caches(count))

    def passes(self, sequences: Sequences, count: int) -> list[Any] | None:
        """The passes of MTP layers (`backend.Pass`) whose most probable tokens are a greedy draft of `count`.

        None where it drafts otherwise, or has more rows to run than a step has.
        """
        return None if count else []

    def propose(self, sequences: Sequences, round: Round, count: int) -> Draft:
        """A draft of depth `count`, at least 1."""
        raise NotImplementedError

    def catch_up(self, sequences: Sequences, round: Round, count: int) -> None:
        """Run the rows that it has missed before it can draft `count`."""
        self.propose(sequences, round, count)

    def observe(self, sequences: Sequences, draft: Draft, logits_BRV: Tensor) -> None:
        """The target's logits of the rows, before the verdict, for a proposer that `observes`."""
