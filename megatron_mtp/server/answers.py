"""From a body to requests of the engine, and from its updates to one answer or a stream of events.

body -> prompts -> requests -> service          updates -> choices -> an object
                                                                   -> events, the last one [DONE]
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request as HTTPRequest
from fastapi.sse import format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_mtp.decoding.requests import Request, check_prompt
from megatron_mtp.server.bodies import Body
from megatron_mtp.server.choices import Choice, Delta
from megatron_mtp.server.errors import APIError, refused
from megatron_mtp.server.service import Service, Texts
from megatron_mtp.server.tokens import Ids

GONE = 499
"""Status in logs of a client that went away, as nginx has it; nobody reads it."""

DONE = format_sse_event(data_str="[DONE]")


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        name: of the model.
        codec: its tokenizer.
        positions: of a prompt with its text.
        vocabulary: token ids below this can occur.
        most_texts: of one request.
        created: Unix time of the start.
    """

    name: str
    codec: Ids
    positions: int
    vocabulary: int
    most_texts: int
    created: int


class Form(Protocol):
    """How an endpoint reads prompts and writes texts."""

    prefix: str
    whole_object: str
    chunk_object: str

    def prompts(self) -> list[list[int]]:
        """Token ids of all prompts. Raises APIError."""

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream says of a text before its tokens."""

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A text's part of an event."""

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A text's part of the answer."""


class Answer:
    """The answer to one body, which grows as the service gives updates."""

    def __init__(self, form: Form, body: Body, served: Served, prompts: list[list[int]]) -> None:
        self._form, self._body, self._served = form, body, served
        self.choices = _choices(body, served, prompts)
        self._prompt_tokens = sum(map(len, prompts))
        self._head = {"id": f"{form.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}

    def requests(self) -> list[Request]:
        """What the engine is asked for. Raises APIError for what cannot be served."""
        pairs = zip(self.choices, self._body.seeds(len(self.choices)), strict=True)
        return [_request(choice, seed, self._body, self._served) for choice, seed in pairs]

    async def whole(self, texts: Texts) -> dict[str, Any]:
        """The answer, once all texts have ended."""
        async for place, update in texts:
            self.choices[place].take(update)
        entries = [self._form.whole(choice) for choice in self.choices]
        return {**self._head, "object": self._form.whole_object, "choices": entries, "usage": self._usage()}

    async def events(self, texts: Texts) -> AsyncIterator[bytes]:
        """Server-sent events: of every update that adds something, of the sums if asked for, and [DONE]."""
        for choice in self.choices:
            if (first := self._form.first(choice)) is not None:
                yield self._event([first])
        try:
            async for place, update in texts:
                choice = self.choices[place]
                if update.tokens or update.finish is not None:
                    yield self._event([self._form.part(choice, choice.take(update))])
        except APIError as error:
            yield format_sse_event(data_str=json.dumps(error.body()))
            return
        if self._body.includes_usage:
            yield self._event([], self._usage())
        yield DONE

    def _event(self, entries: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        written = {**self._head, "object": self._form.chunk_object, "choices": entries}
        if self._body.includes_usage:
            written["usage"] = usage
        return format_sse_event(data_str=json.dumps(written, ensure_ascii=False))

    def _usage(self) -> dict[str, Any]:
        completion = sum(len(delta.tokens) for choice in self.choices for delta in choice.deltas)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in self.choices)},
        }


class EventStream(StreamingResponse):
    """Events of texts, which are forgotten however the response ends: with them, or without its client."""

    def __init__(self, service: Service, texts: Texts, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._service, self._texts = service, texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.forget(self._texts)


async def answered(asked: HTTPRequest, service: Service, form: Form, body: Body, served: Served) -> Response:
    """The response to a body. Raises APIError for what is not served."""
    _check_model(body.model, served.name)
    prompts = await run_in_threadpool(form.prompts)
    answer = Answer(form, body, served, prompts)
    requests = answer.requests()
    if body.stream:
        texts = await service.submit(requests)
        return EventStream(service, texts, answer.events(texts))
    written = await _unless_gone(asked, _whole(service, requests, answer))
    return Response(status_code=GONE) if written is None else JSONResponse(written)


async def _whole(service: Service, requests: list[Request], answer: Answer) -> dict[str, Any]:
    texts = await service.submit(requests)
    try:
        return await answer.whole(texts)
    finally:
        service.forget(texts)


async def _unless_gone(asked: HTTPRequest, work: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """What the work gives; None, and the work is cancelled, where the client goes away before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(asked))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _gone(asked: HTTPRequest) -> None:
    while (await asked.receive())["type"] != "http.disconnect":
        pass


def _check_model(asked: str | None, name: str) -> None:
    if asked is not None and asked != name:
        raise APIError(404, f"the model '{asked}' is not served; '{name}' is.", "model", "model_not_found")


def check_texts(count: int, served: Served) -> None:
    """Raises APIError where one request has more texts than the server ever takes."""
    if count > served.most_texts:
        raise refused(f"the request has {count} texts; this server takes {served.most_texts} at once, so send fewer.")


def _choices(body: Body, served: Served, prompts: list[list[int]]) -> list[Choice]:
    check_texts(len(prompts) * body.n, served)
    for prompt in prompts:
        _check_prompt(prompt, body.limit, served)
    all_prompts = [prompt for prompt in prompts for _ in range(body.n)]
    muted = body.limit == 0
    return [Choice(index, prompt, served.codec, body.stops, muted) for index, prompt in enumerate(all_prompts)]


def _check_prompt(prompt: list[int], limit: int | None, served: Served) -> None:
    whole = len(prompt) + max(1 if limit is None else limit, 1)
    if whole > served.positions:
        raise refused(
            f"the prompt has {len(prompt)} tokens, and the model has {served.positions} positions for it and the new "
            "ones; send less, or ask for fewer tokens.",
            "prompt",
            "context_length_exceeded",
        )
    try:
        check_prompt(prompt, served.positions, served.vocabulary)
    except ValueError as error:
        raise refused(str(error), "prompt") from error


def _request(choice: Choice, seed: int, body: Body, served: Served) -> Request:
    if body.stops and served.codec.backend is None:
        raise refused("the checkpoint names no tokenizer to look for stop strings with; use stop_token_ids.", "stop")
    if body.limit == 0 and not body.echoes:
        raise refused("max_tokens is 0; give 1 or more, or echo for the prompt alone.", "max_tokens")
    return Request(
        prompt=choice.prompt,
        max_new_tokens=served.positions - len(choice.prompt) if body.limit is None else max(body.limit, 1),
        sampling=body.sampling(),
        seed=seed,
        penalties=body.penalties(),
        stop_ids=_stop_ids(body, served.codec),
        cut=choice.reading if body.stops else None,
        logprobs=body.top,
        prompt_logprobs=body.top if body.echoes else None,
        speculative=body.speculative(),
    )


def _stop_ids(body: Body, codec: Ids) -> frozenset[int]:
    ends = frozenset() if body.ignore_eos else codec.ends
    return ends | frozenset(body.stop_token_ids or ())
