"""What every proposer is: it looks at the texts and offers a draft."""

from torch import Tensor

from megatron_mtp.drafting.config import SpeculativeConfig
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.drafting.sampling import DRAFT, draw
from megatron_mtp.drafting.sequences import Sequences
from megatron_mtp.drafting.types import Draft, Round


class Proposer:
    """A way to draft.

    Attributes:
        most: the largest K that it can be asked for; None without a limit.
        limit, remedy: where `most` comes from, and what to do about it, for the message to one who asks for more.
        recordable: whether a draft reads nothing back and has shapes that hang on the batch and K alone (`graphs.py`).
    """

    most: int | None = None
    limit: str = ""
    remedy: str = ""
    recordable: bool = False

    def __init__(self, runner: Runner, config: SpeculativeConfig) -> None:
        self.runner, self.config = runner, config

    def nodes(self, count: int) -> int:
        """Rows that a draft of K = `count` adds to the trunk's forward."""
        return count

    def start(self, sequences: Sequences) -> None:
        """A new batch, whose prompts the trunk has run."""

    def propose(self, sequences: Sequences, scene: Round, count: int) -> Draft:
        """A draft of depth `count`, at least 1."""
        raise NotImplementedError

    def observe(self, sequences: Sequences, draft: Draft, logits_BRV: Tensor) -> None:
        """The target's logits of the rows, before the verdict."""


def pick(logits_BV: Tensor, scene: Round, position: int) -> tuple[Tensor, Tensor | None]:
    """The drafted token [B] at a position of the draft, and the q [B, V] that it was sampled from; greedy has none."""
    if scene.sampling.greedy:
        return logits_BV.argmax(dim=-1), None
    q_BV = scene.sampling.probabilities(logits_BV)
    token_B = draw(q_BV, scene.noise.uniform(DRAFT, position + 1)[:, position])
    return token_B, q_BV if scene.config.use_draft_probs else None
