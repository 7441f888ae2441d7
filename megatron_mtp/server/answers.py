"""Responses in OpenAI's form: converts engine updates to the objects of both endpoints, whole or streamed."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import batched
from typing import Any, NamedTuple

from fastapi.sse import format_sse_event

from megatron_mtp.decoding.requests import Update
from megatron_mtp.decoding.sampling import TokenLogprob
from megatron_mtp.server.codec import Codec
from megatron_mtp.server.detokenizer import OutputText
from megatron_mtp.server.protocol import APIError, Body, ChatBody, CompletionBody

MIN_LOGPROB = -9999.0
"""Log-probability of an impossible token: JSON has no infinity."""

DONE = format_sse_event(data_str="[DONE]")


class Delta(NamedTuple):
    """An update's part of an output.

    Attributes:
        text: characters to send; fewer than `pieces` have if a stop string may have begun.
        pieces: characters that each token of the update completes.
        start: number of characters that the output had before.
    """

    update: Update
    text: str
    pieces: list[str]
    start: int


@dataclass
class Choice:
    """One output of a request.

    Attributes:
        index: its index in the response.
        prompt: prompt that it continues.
        text: text of its tokens. The engine reads it too if there are stop strings.
        muted: whether to hide the single generated token, because the client only wants the prompt's log-probabilities.
        tokens: number of tokens so far.
    """

    index: int
    prompt: list[int]
    text: OutputText
    muted: bool = False
    deltas: list[Delta] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    tokens: int = 0
    _characters: int = 0

    def take(self, update: Update) -> Delta:
        """Add an update."""
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
        self.cached_tokens += update.cached_tokens
        if self.muted:
            update = replace(update, tokens=[], logprobs=[], accepted=0, offered=0)
        pieces = [self.text.piece(place, token) for place, token in enumerate(update.tokens, self.tokens)]
        rest = "" if update.finish is None or self.muted else self.text.rest()
        whole, released = [piece.whole for piece in pieces], "".join(piece.released for piece in pieces)
        self.deltas.append(Delta(update, released + rest, whole, self._characters))
        self.tokens += len(whole)
        self._characters += sum(map(len, whole))
        return self.deltas[-1]


class Answer[AnyBody: Body](ABC):
    """Response to one request body, which grows with the updates of its choices."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: AnyBody, choices: list[Choice], model: str, codec: Codec) -> None:
        self._body, self._choices, self._codec = body, choices, codec
        self._head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, updates: AsyncIterable[tuple[int, Update]]) -> dict[str, Any]:
        """Return the complete response, after all choices have ended."""
        async for place, update in updates:
            self._choices[place].take(update)
        entries = [self._entry(choice, choice.deltas, streamed=False) for choice in self._choices]
        return {**self._head, "object": self.whole_object, "choices": entries, "usage": self._usage()}

    async def events(self, updates: AsyncIterable[tuple[int, Update]]) -> AsyncIterator[bytes]:
        """Return server-sent events: one for each update with content, the usage if requested, and [DONE]."""
        for opening in self._openings():
            yield self._event([opening])
        try:
            async for place, update in updates:
                choice = self._choices[place]
                if update.tokens or update.finish is not None:
                    entry = self._entry(choice, [choice.take(update)], streamed=True)
                    sums = _sums(len(choice.prompt), choice.tokens)
                    yield self._event([entry], sums if self._body.stream_options.continuous_usage_stats else None)
        except APIError as error:
            yield format_sse_event(data_str=json.dumps(error.body()))
            return
        if self._body.stream_options.include_usage:
            yield self._event([], self._usage())
        yield DONE

    def _openings(self) -> list[dict[str, Any]]:
        """Yield stream entries that precede all tokens."""
        return []

    @abstractmethod
    def _said(self, choice: Choice, deltas: list[Delta], streamed: bool) -> dict[str, Any]:
        """Return the text of some deltas of a choice, with log-probabilities."""

    def _entry(self, choice: Choice, deltas: list[Delta], streamed: bool) -> dict[str, Any]:
        """Return some deltas of a choice: text, finish reason, weight version, tokens and drafts."""
        last = deltas[-1].update
        entry = {"index": choice.index, **self._said(choice, deltas, streamed), "finish_reason": last.finish}
        entry["policy_version"] = last.policy_version
        if self._body.return_token_ids:
            entry["token_ids"] = [token for delta in deltas for token in delta.update.tokens]
            entry["prompt_token_ids"] = choice.prompt if deltas[0] is choice.deltas[0] else None
        if self._body.return_drafts:
            entry["drafts"] = [
                {"offered": update.offered, "accepted": update.accepted, "pieces": pieces}
                for update, _, pieces, _ in deltas
            ]
        return entry

    def _event(self, entries: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        written = {**self._head, "object": self.chunk_object, "choices": entries}
        if usage is not None or self._body.stream_options.include_usage:
            written["usage"] = usage
        return format_sse_event(data_str=json.dumps(written, ensure_ascii=False))

    def _usage(self) -> dict[str, Any]:
        """Return the totals of the request. A prompt counts once, with the rows that none of its choices has run."""
        groups = [*batched(self._choices, self._body.n)]  # grouped by prompt
        prompts = sum(len(group[0].prompt) for group in groups)
        cached = sum(min(choice.cached_tokens for choice in group) for group in groups)
        completion = sum(choice.tokens for choice in self._choices)
        return {**_sums(prompts, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def _sums(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class CompletionAnswer(Answer[CompletionBody]):
    """Response format of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def _said(self, choice: Choice, deltas: list[Delta], streamed: bool) -> dict[str, Any]:
        prompt = self._codec.decode(choice.prompt) if self._body.echo else ""
        echoed = self._body.echo and deltas[0] is choice.deltas[0]
        text = (prompt if echoed else "") + "".join(delta.text for delta in deltas)
        if self._body.logprobs is None:
            return {"text": text, "logprobs": None}
        listed: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if echoed:
            self._list_prompt(listed, choice)
        for delta in deltas:
            offset = len(prompt) + delta.start
            for one, piece in zip(delta.update.logprobs, delta.pieces, strict=True):
                self._list(listed, one.token, one, offset)
                offset += len(piece)
        return {"text": text, "logprobs": listed}

    def _list_prompt(self, listed: dict[str, Any], choice: Choice) -> None:
        """Add the prompt's tokens; the first one has no probability, because no token precedes it."""
        detokenizer, offset = self._codec.detokenizer([]), 0
        for token, one in zip(choice.prompt, [None, *choice.prompt_logprobs], strict=True):
            self._list(listed, token, one, offset)
            offset += len(detokenizer.add(token))

    def _list(self, listed: dict[str, Any], token: int, one: TokenLogprob | None, offset: int) -> None:
        written, top = self._codec.written, [] if one is None else [*one.top, (one.token, one.logprob)]
        listed["text_offset"].append(offset)
        listed["tokens"].append(written(token)[0])
        listed["token_logprobs"].append(None if one is None else finite(one.logprob))
        listed["top_logprobs"].append({written(id)[0]: finite(logprob) for id, logprob in top} or None)


class ChatAnswer(Answer[ChatBody]):
    """Response format of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _openings(self) -> list[dict[str, Any]]:
        """Yield the role of each choice."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None} for one in self._choices]

    def _said(self, choice: Choice, deltas: list[Delta], streamed: bool) -> dict[str, Any]:
        text, logprobs = "".join(delta.text for delta in deltas), None
        if self._body.logprobs:
            listed = [
                {**self._token(one.token, one.logprob), "top_logprobs": [self._token(*entry) for entry in one.top]}
                for delta in deltas
                for one in delta.update.logprobs
            ]
            logprobs = {"content": listed, "refusal": None}
        if streamed:
            return {"delta": {"content": text} if text else {}, "logprobs": logprobs}
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        written, found = self._codec.written(token)
        return {"token": written, "logprob": finite(logprob), "bytes": found}


def finite(logprob: float) -> float:
    """Return a log-probability as valid JSON. Weights with NaN would produce NaN, which JSON does not allow."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
