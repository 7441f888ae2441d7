"""HTTP paths as a FastAPI application, run by uvicorn with graceful shutdown.

POST  /v1/completions, /v1/chat/completions      GET  /v1/models, /v1/models/NAME
GET   /health, /metrics                          GET  /openapi.json  the fields

body -> prompts -> requests -> engine            updates -> choices -> one object, or events, the last one [DONE]
"""

import asyncio
import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Annotated, Any, TextIO, override

import uvicorn
from fastapi import Depends, FastAPI
from fastapi import Request as HTTPRequest
from fastapi.sse import EventSourceResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_mtp.decoding.requests import UNLIMITED, Request, check_prompt
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.server.answers import Answer, ChatAnswer, Choice, CompletionAnswer
from megatron_mtp.server.async_engine import AsyncEngine, Outputs
from megatron_mtp.server.codec import Codec, too_long
from megatron_mtp.server.connections import LoopErrors, TimedProtocol, raise_open_files
from megatron_mtp.server.detokenizer import OutputText
from megatron_mtp.server.metrics import progress
from megatron_mtp.server.protocol import (
    MAX_BODY_BYTES,
    TOO_LONG,
    APIError,
    Body,
    ChatBody,
    CompletionBody,
    add_error_handlers,
    shutting_down,
)

SHUTDOWN_GRACE_S = 10
"""Seconds that clients have to read the end of their responses, after the last token of all requests."""

GONE = 499
"""Status in logs and metrics for a client that disconnected, as in nginx; no client reads it."""

NO_ROUTE = "other"
"""Metrics label for paths that are not served, and for requests refused before routing."""

PROGRESS_S = 10
"""Seconds between two log lines on the engine's progress."""

UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that make proxies pass a stream on without buffering."""


@dataclass(frozen=True)
class Served:
    """The model that is served.

    Attributes:
        name: model name for clients.
        codec: its tokenizer.
        positions: maximum number of tokens of a prompt and its output.
        vocabulary: upper bound on token ids.
        most_outputs: maximum number of outputs of one HTTP request.
        created: Unix time of the start.
    """

    name: str
    codec: Codec
    positions: int
    vocabulary: int
    most_outputs: int
    created: int

    def as_json(self) -> dict[str, Any]:
        """Return the entry for the list of models."""
        named = {"id": self.name, "object": "model", "created": self.created}
        return {**named, "owned_by": "megatron-mtp", "max_model_len": self.positions}

    def check(self, body: Body, prompts: int) -> None:
        """Raise APIError for another model name, or for more outputs than the server accepts."""
        if body.model is not None:
            self.check_name(body.model)
        if (count := prompts * body.n) > self.most_outputs:
            most = f"this server allows {self.most_outputs} at once, so ask for fewer."
            raise APIError(f"the request has {count} outputs; {most}")

    def check_name(self, asked: str) -> None:
        """Raise APIError for another model name."""
        if asked != self.name:
            raise APIError(f"the model '{asked}' is not served; '{self.name}' is.", "model", "model_not_found", 404)

    def check_prompt(self, prompt: list[int], limit: int | None) -> None:
        """Raise APIError for a prompt that cannot be continued by this many tokens."""
        if len(prompt) + max(1 if limit is None else limit, 1) > self.positions:
            raise too_long(str(len(prompt)), self.positions)
        try:
            check_prompt(prompt, self.positions, self.vocabulary)
        except ValueError as error:
            raise APIError(str(error), "prompt") from error


@dataclass(frozen=True)
class ServerSettings:
    """Settings for connections and logging.

    Attributes:
        keep_alive: seconds that an idle connection stays open.
        shutdown_timeout: seconds that running requests get after the first signal; None for no limit.
        access_log: whether to log each request.
    """

    keep_alive: int = 120
    shutdown_timeout: float | None = None
    access_log: bool = False


DEFAULTS = ServerSettings()


def serve(
    engine: AsyncEngine,
    served: Served,
    listening: socket.socket,
    key: str | None = None,
    origins: Sequence[str] = (),
    settings: ServerSettings = DEFAULTS,
) -> int:
    """Serve an engine on a socket until a signal. Return the exit status, which is 1 if the engine has failed."""

    def ready() -> None:
        print(f"> '{served.name}' is served at {address_of(listening)}", flush=True)

    raise_open_files()
    Server(make_app(engine, served, key, origins), engine, ready, settings).run([listening])
    return int(engine.broken)


class Server(uvicorn.Server):
    """Serves an application until its engine has drained or failed.

    The first SIGTERM or Ctrl-C drains: the server exits when all requests have ended or the timeout is over. A second
    one exits at once.
    """

    def __init__(
        self, app: ASGIApp, engine: AsyncEngine, ready: Callable[[], None], settings: ServerSettings = DEFAULTS
    ) -> None:
        config = uvicorn.Config(
            app,
            http=TimedProtocol,
            log_level="warning",
            access_log=settings.access_log,
            timeout_keep_alive=settings.keep_alive,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        )
        if settings.access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        super().__init__(config)
        self._engine, self._ready, self._settings = engine, ready, settings
        self._last, self._end = engine.load, math.inf

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the address."""
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        await super().startup(sockets)
        self._ready()

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, exit at the second."""
        if self._engine.draining:
            os._exit(128 + sig)
        self._engine.draining = True
        if self._settings.shutdown_timeout is not None:
            self._end = time.monotonic() + self._settings.shutdown_timeout
        _say("shutting down after all requests finish; a second signal stops at once", sys.stderr)

    @override
    async def on_tick(self, counter: int) -> bool:
        """Print progress, and exit if everything has ended. Called ten times per second."""
        if counter % (10 * PROGRESS_S) == 0:
            load, before = self._engine.load, self._last
            if line := progress(before, load, PROGRESS_S):
                _say(line, sys.stdout)
            self._last = load
        if time.monotonic() > self._end:
            self._end = math.inf
            self._engine.end_all(shutting_down())
        self.should_exit |= self._engine.broken or (self._engine.draining and self._engine.idle)
        return await super().on_tick(counter)


def _say(line: str, file: TextIO) -> None:
    """Print a line while requests run, and ignore write errors: a full disk or a closed pipe must not end a request."""
    with suppress(OSError):
        print(f"> {line}", file=file, flush=True)


def listener(host: str, port: int) -> socket.socket:
    """Bind a socket to this address. It refuses connections until the server is ready.

    Raises:
        ValueError: the address is not available.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"--port is {port}; give 1 to 65535, or 0 for any that is free.")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host name is too long
        reason = getattr(error, "strerror", error)
        raise ValueError(
            f"cannot listen on --host {host} --port {port} ({reason}); give another one, or --port 0 for any free port."
        ) from error
    return made


def address_of(listening: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def at_the_end() -> AsyncIterator[ExitStack]:
    """Calls to make when a response ends, after its last byte or when its client disconnects."""
    with ExitStack() as calls:
        yield calls


Ending = Annotated[ExitStack, Depends(at_the_end)]


def make_app(engine: AsyncEngine, served: Served, key: str | None = None, origins: Sequence[str] = ()) -> ASGIApp:
    """Create the application. It starts and ends the engine's thread.

    Args:
        engine: handles the requests.
        served: the model.
        key: API key that clients must send; None for no key.
        origins: origins of pages whose scripts may call the server; "*" for all.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.stop()

    app = FastAPI(title="megatron-mtp", lifespan=lifespan, max_body_size=MAX_BODY_BYTES, docs_url=None, redoc_url=None)
    add_error_handlers(app)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, asked: HTTPRequest, ending: Ending) -> Response:
        served.check(body, len(body.prompt))  # check before tokenizing
        encode = partial(served.codec.encode, special=body.add_special_tokens, positions=served.positions)
        prompts = [await run_in_threadpool(encode, one) if isinstance(one, str) else one for one in body.prompt]
        return await _answered(asked, ending, engine, served, body, prompts, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, asked: HTTPRequest, ending: Ending) -> Response:
        served.check(body, 1)
        messages, own = [message.plain() for message in body.messages], body.template_arguments()
        given = messages, own, body.template_variables(), served.positions, body.for_template()
        prompt = await run_in_threadpool(served.codec.chat, *given)
        return await _answered(asked, ending, engine, served, body, [prompt], ChatAnswer)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served.as_json()]}

    @app.get("/v1/models/{name:path}")
    async def named(name: str) -> dict[str, Any]:
        served.check_name(name)
        return served.as_json()

    @app.get("/health")
    async def health() -> Response:
        state = "broken" if engine.broken else "draining" if engine.draining else "ok"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(engine.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    guarded = RequestGuard(app, engine.metrics.answered, key)
    if not origins:
        return guarded
    return CORSMiddleware(guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


class RequestGuard:
    """Rejects requests before their body is read: with a wrong API key, with a body that is too long, or compressed.

    HEAD is answered like GET; uvicorn drops the body. Each response is `counted` by path and status.
    """

    def __init__(self, app: ASGIApp, counted: Callable[[str, int], None], key: str | None) -> None:
        self._app, self._counted, self._key = app, counted, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        answering = self._app if scope["type"] != "http" else self._refused(scope) or self._app
        as_get = {"method": "GET"} if scope.get("method") == "HEAD" else {}
        inner = {**scope, **as_get}

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counted(getattr(inner.get("route"), "path", NO_ROUTE), message["status"])
            await send(message)

        await answering(inner, receive, counting)

    def _refused(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        length, coding = headers.get("content-length", "0"), headers.get("content-encoding", "identity")
        guarded = self._key is not None and scope["path"].startswith("/v1")
        right = secrets.compare_digest(given.strip().encode("latin-1"), f"{self._key}".encode(errors="surrogateescape"))
        if guarded and not (right and scheme.lower() == "bearer"):
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`."
            return APIError(message, code="invalid_api_key", status=401).response()
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            return APIError(TOO_LONG, status=413).response()
        if coding.lower() != "identity":
            message = f"the body has the Content-Encoding {coding}, which is not served; send it as it is."
            return APIError(message, status=415).response()
        return None


async def _answered[AnyBody: Body](
    asked: HTTPRequest,
    ending: ExitStack,
    engine: AsyncEngine,
    served: Served,
    body: AnyBody,
    prompts: list[list[int]],
    form: type[Answer[AnyBody]],
) -> Response:
    """Return the response to a body with these prompts. Raise APIError for what is not served."""
    requests, choices = _requests(body, served, prompts)
    answer, outputs = form(body, choices, served.name, served.codec), Outputs(len(requests))
    ending.callback(engine.forget, outputs)
    if body.stream:
        await engine.submit(requests, outputs)
        return EventSourceResponse(answer.events(outputs), headers=UNBUFFERED)

    async def whole() -> Response:
        await engine.submit(requests, outputs)
        return JSONResponse(await answer.whole(outputs))

    async def gone() -> Response:
        while (await asked.receive())["type"] != "http.disconnect":
            pass
        return Response(status_code=GONE)

    tasks = [asyncio.ensure_future(whole()), asyncio.ensure_future(gone())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()


def _requests(body: Body, served: Served, prompts: list[list[int]]) -> tuple[list[Request], list[Choice]]:
    """Return an engine request and a choice of the answer for each output. Raises APIError."""
    limit, codec = body.limit, served.codec
    for prompt in prompts:
        served.check_prompt(prompt, limit)
    if limit == 0 and not body.echo:
        raise APIError("max_tokens is 0; give 1 or more, or echo for the prompt alone.", "max_tokens")
    if outside := [token for token in body.stop_token_ids if not 0 <= token < served.vocabulary]:
        raise APIError(f"stop_token_ids has {outside[0]}; give 0 to {served.vocabulary - 1}.", "stop_token_ids")
    special = codec.special_stops(body.stop)
    stops = tuple(stop for stop in body.stop if stop not in special)
    stop_ids = (frozenset() if body.ignore_eos else codec.ends) | {*special.values(), *body.stop_token_ids}
    choices = [
        Choice(index, prompt, OutputText(codec.detokenizer(prompt), stops, body.min_tokens), muted=limit == 0)
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(body.n))
    ]
    sampling, penalties, speculative = Sampling.of(body), body.penalties(stop_ids), body.speculative()
    requests = [
        Request(
            prompt=choice.prompt,
            max_new_tokens=UNLIMITED if limit is None else max(limit, 1),
            sampling=sampling,
            seed=seed,
            penalties=penalties,
            stop_ids=stop_ids,
            cut=choice.text if stops else None,
            logprobs=body.top,
            prompt_logprobs=body.top if body.echo else None,
            speculative=speculative,
        )
        for choice, seed in zip(choices, body.seeds(len(choices)), strict=True)
    ]
    return requests, choices
