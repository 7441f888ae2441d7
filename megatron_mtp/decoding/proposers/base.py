"""What every proposer is: it looks at the sequences and offers a draft. A method is one with its verifier."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, override

from torch import Tensor

from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.decoding.config import Settings, SpeculativeConfig
from megatron_mtp.decoding.sampling import DRAFT, Sampling, SamplingOfEach, draw
from megatron_mtp.decoding.types import Draft, Round
from megatron_mtp.decoding.verifiers.base import Rule

if TYPE_CHECKING:
    from megatron_mtp.decoding.sequences import Sequences

Kind = Literal["sequential", "parallel", "eagle3", "dflash", "dspark"]
"""Depths that continue one another, heads that all read the trunk's state, or a drafter (`config.DRAFTERS`)."""


class Proposer:
    """A way to draft. A class states its facts; lists, checks, help texts and the pages' tables are made of them.

    Args:
        runner: the target, a `Runner`; its type stands with those that run its layers.
        config: the method's settings among others.
        drafter: the small model, for a method that needs one; else None.

    Attributes:
        line: what it drafts from, in a line.
        settings_kind: the class of its own settings, which `settings` is an object of.
        depths: the kind of depths that it drafts with; None if it needs none.
        drafts_trees: whether a row may have several candidates.
        keeps_states: whether its depths may have recurrent layers: they run chains of rows, leave none out and go
            back by few (`recurrent_state.ROLLED_BACK`).
        leaves_rows_out: whether the rows that it runs follow from where its rounds began, so that a sequence that
            begins anew repeats its rounds (`Progress.rounds`), and no other sequence may use its rows. Rows left out
            are zero.
        recordable: whether a draft reads nothing back, and its shapes depend on the batch and K alone (`graphs.py`).
        at_once: whether a draft of any K takes one pass.
        limit, remedy: where `most` comes from, and what to do about it, for the message to one who asks for more.
    """

    line: ClassVar[str]
    settings_kind: ClassVar[type[Settings]] = Settings
    depths: ClassVar[Kind | None] = None
    drafts_trees: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False
    leaves_rows_out: ClassVar[bool] = False
    recordable: ClassVar[bool] = False
    at_once: ClassVar[bool] = False
    limit: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    drafter: Any = None
    runner: Any

    def __init__(self, runner: Any, config: SpeculativeConfig, drafter: Any = None) -> None:
        self.runner, self.config, self.settings = runner, config, config.settings

    @classmethod
    def recurrent_layers(cls) -> str:
        """Where a hybrid may have recurrent layers: trees branch, and so do some rows of a depth."""
        trunk, depths = not cls.drafts_trees, cls.depths is None or cls.keeps_states
        return {(True, True): "yes", (True, False): "in the trunk", (False, True): "in depths"}.get(
            (trunk, depths), "no"
        )

    @property
    def most(self) -> int | None:
        """The largest K that it can be asked for; None without a limit."""
        return None

    @property
    def has_states(self) -> bool:
        """Whether recurrent layers draft."""
        return self.depths is not None and self.runner.recurrent_depths

    @property
    def draws_siblings(self) -> bool:
        """Whether the candidates of a row are independent samples of one q; a chain has one a row."""
        return not self.drafts_trees

    def nodes(self, count: int) -> int:
        """Rows that a draft of K = `count` adds to the trunk's forward."""
        return count

    def missed(self, sequences: "Sequences", count: int) -> int:
        """Tokens of a sequence whose rows the drafter has to run before it drafts `count`; 0 if it runs none."""
        return 0

    def mark_seen(self, sequences: "Sequences", count: int) -> None:
        """The drafter has run the rows of all tokens so far, in a draft of `count`."""

    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        """A draft of depth `count`, at least 1."""
        raise NotImplementedError

    def catch_up(self, sequences: "Sequences", round: Round, count: int) -> None:
        """Run the rows that it has missed before it can draft `count`."""
        self.propose(sequences, round, count)

    def observe(self, sequences: "Sequences", draft: Draft, logits_BRV: Tensor) -> None:
        """The target's logits of the rows, before the verdict."""


@dataclass
class Method:
    """A proposer with its verifier (method.py makes one).

    Attributes:
        config: with the verifier's name filled in.
        count: K of every step.
        auto: whether K of each step is picked by cost and acceptance; `count` is the largest then.
        stats: what the last step has cost and gained.
    """

    proposer: Proposer
    verifier: Rule
    config: SpeculativeConfig
    sampling: Sampling | SamplingOfEach
    count: int
    auto: bool = False
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def slots(self) -> int:
        """Slots behind the tokens of a sequence that two steps may write."""
        return 2 + self.proposer.nodes(self.count) + self.count


class Plain(Proposer):
    """Plain decoding: nothing is drafted, and every forward of the trunk gives one token."""

    line = "nothing: one token a forward"
    limit = "since it is plain decoding"
    remedy = "choose another method"
    recordable = True

    @property
    @override
    def most(self) -> int:
        return 0

    @override
    def propose(self, sequences: "Sequences", round: Round, count: int) -> Draft:
        return Draft(sequences.tokens_BT[:, :0])


class OneCache(Proposer):
    """A drafter whose rows are all in one cache, which may fall behind the sequences.

    Attributes:
        own: the number of its cache, by which `Sequences.progress` knows it; depths have theirs, from 0 on.
    """

    own: ClassVar[int] = 0

    @override
    def missed(self, sequences: "Sequences", count: int) -> int:
        return sequences.growth_since(self.own) if count else 0

    @override
    def mark_seen(self, sequences: "Sequences", count: int) -> None:
        if count:
            sequences.mark_seen(self.own)


def pick(logits_BV: Tensor, round: Round, position: int) -> tuple[Tensor, Tensor | None]:
    """The drafted token [B] at a position of the draft, and the q [B, V] that it was sampled from; greedy has none."""
    if round.sampling.greedy:
        return logits_BV.argmax(dim=-1), None
    q_BV = round.sampling.probabilities(logits_BV)
    token_B = draw(q_BV, round.noise.uniform(DRAFT, position + 1)[:, position])
    return token_B, q_BV if round.config.use_draft_probs else None
