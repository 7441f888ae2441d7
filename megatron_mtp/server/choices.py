"""One text of an answer while it grows: the engine's updates in, letters and log-probabilities for the client out."""

from dataclasses import dataclass, field
from typing import Any

from megatron_mtp.decoding.requests import Finish, TokenLogprob, Update
from megatron_mtp.server.bodies import Body
from megatron_mtp.server.stops import Reading
from megatron_mtp.server.tokens import Ids

LEAST = -9999.0
"""Log-probability of what is impossible: JSON has no infinity."""


@dataclass(frozen=True)
class Delta:
    """What an update adds to a text.

    Attributes:
        text: letters that may go out; fewer than `pieces` have where a stop string may have begun.
        tokens: the new ones.
        pieces: the letters that each of them completes.
        start: letters that the text had before.
        logprobs: of the tokens, if they were asked for.
        accepted, offered: as of the update.
        finish: why the text ended.
    """

    text: str
    tokens: list[int]
    pieces: list[str]
    start: int
    logprobs: list[TokenLogprob]
    accepted: int
    offered: int
    finish: Finish | None


@dataclass
class Choice:
    """A text.

    Attributes:
        index: its place in the answer.
        prompt: what it continues.
        codec: reads its tokens.
        stops: stop strings.
        reading: of its tokens; the engine's too where there are stop strings.
        muted: the one token that is computed does not go out: the client wants the prompt's log-probabilities alone.
    """

    index: int
    prompt: list[int]
    codec: Ids
    stops: tuple[str, ...]
    muted: bool = False
    deltas: list[Delta] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.reading = Reading(self.codec.reader(self.prompt), self.stops)
        self._letters = self._tokens = 0

    def take(self, update: Update) -> Delta:
        """Read an update, and keep what it adds."""
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
        self.cached_tokens += update.cached_tokens
        delta = self._delta(update)
        self.deltas.append(delta)
        return delta

    def _delta(self, update: Update) -> Delta:
        if self.muted:
            return Delta("", [], [], 0, [], 0, 0, update.finish)
        read = [self.reading.letters(place, token) for place, token in enumerate(update.tokens, self._tokens)]
        start, text, pieces = self._letters, "".join(one.text for one in read), [one.piece for one in read]
        self._tokens += len(read)
        self._letters += sum(map(len, pieces))
        if update.finish is not None:
            text += self.reading.rest()
        counts = (update.accepted, update.offered)
        return Delta(text, update.tokens, pieces, start, update.logprobs, *counts, update.finish)

    @property
    def text(self) -> str:
        """All letters that have gone out."""
        return "".join(delta.text for delta in self.deltas)


def finite(logprob: float) -> float:
    """A log-probability for JSON, which has no NaN either: weights that have some make it."""
    return logprob if logprob > LEAST else LEAST


def ended(body: Body, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
    """What both endpoints say of some of a text's deltas beside the letters: why it ended, tokens and drafts."""
    said: dict[str, Any] = {"finish_reason": deltas[-1].finish}
    if body.return_token_ids:
        said["token_ids"] = [token for delta in deltas for token in delta.tokens]
        said["prompt_token_ids"] = choice.prompt if deltas[0] is choice.deltas[0] else None
    if body.return_drafts:
        said["drafts"] = [_draft(delta) for delta in deltas]
    return said


def _draft(delta: Delta) -> dict[str, Any]:
    """How the tokens of a step came about."""
    return {"offered": delta.offered, "accepted": delta.accepted, "pieces": delta.pieces}
