"""A stand-in engine that repeats its prompt with two drafts per step, and a server around it in a thread.

Sampled outputs start as many tokens later in the prompt as the seed. Tests pause the engine and inspect its blocks.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.data.tokenizer import read_tokenizer, train_bpe
from megatron_mtp.decoding.requests import Finish, Load, QueueFull, Request, Update
from megatron_mtp.decoding.sampling import TokenLogprob
from megatron_mtp.server.api import DEFAULTS, Served, Server, ServerSettings, address_of, listener, make_app
from megatron_mtp.server.async_engine import AsyncEngine
from megatron_mtp.server.codec import Codec

POSITIONS, BLOCK, NAME = 512, 16, "parrot"
TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}{% if enable_thinking is false %}/no_think"
    "\n{% endif %}{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'rude' %}{{ raise_exception('no manners') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{% if 'tool_calls' in m %}{% for call in m.tool_calls %} call "
    "{{ call.function.arguments | tojson }}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass
class Text:
    request: Request
    emitted: list[int] = field(default_factory=list)
    prefilled: bool = False


class Parrot:
    """Steps wait until `go` is set; a step raises `bug`, if set."""

    def __init__(self, running: int = 8, waiting: int = 64, pace: float = 0.0) -> None:
        self._most, self._waiting, self._pace = running, waiting, pace
        self._texts: dict[int, Text] = {}
        self._count, self._prompt_tokens, self.stats = 0, 0, AcceptanceStats()
        self._seen = set[tuple[int, ...]]()
        self.policy_version, self.is_torn = 0, False
        self.go, self.bug, self.steps, self.cancelled = threading.Event(), None, 0, 0
        self.bug: Exception | None
        self.go.set()
        self.held = threading.Event()  # set while a step waits

    def add(self, request: Request) -> int:
        if request.prompt[0] == 7:
            raise ValueError("no prompt begins with token 7.")
        if len(self._texts) >= self._most + self._waiting:
            raise QueueFull
        self._count += 1
        self._texts[self._count] = Text(request)
        self._prompt_tokens += len(request.prompt)
        return self._count

    def cancel(self, request: int) -> None:
        self.cancelled += self._texts.pop(request, None) is not None

    def step(self) -> list[Update]:
        while not self.go.wait(0.01) and self.bug is None:
            self.held.set()
        self.held.clear()
        if self._pace:
            threading.Event().wait(self._pace)
        if self.bug is not None:
            raise self.bug
        self.steps += 1
        live = list(self._texts.items())[: self._most]
        updates = [self._update(number, text) for number, text in live]
        for update in updates:
            if update.finish is not None:
                del self._texts[update.request]
        return updates

    def _update(self, number: int, text: Text) -> Update:
        request = text.request
        if not text.prefilled:
            text.prefilled = True
            return Update(number, [])
        first = not text.emitted
        accepted = 0 if first else len(text.emitted) % 3
        new = [self._next(request, len(text.emitted) + place) for place in range(1 + accepted)]
        tokens, finish = _cut(request, text.emitted, new)
        accepted = min(accepted, len(tokens))
        text.emitted += tokens
        self.stats.count(0 if first else 2, accepted, len(tokens))
        listed = [] if request.logprobs is None else [_logprob(token, request.logprobs) for token in tokens]
        scored = request.prompt_logprobs
        prompt = [_logprob(token, scored) for token in request.prompt[1:]] if first and scored is not None else []
        cached, version = self._found(request.prompt) if first else 0, self.policy_version
        return Update(
            number, tokens, accepted, 0 if first else 2, finish, listed, prompt, cached, policy_version=version
        )

    def _found(self, prompt: list[int]) -> int:
        """Return the number of prompt tokens that an earlier sequence has run; the last one always runs."""
        known = tuple(prompt) in self._seen
        self._seen.add(tuple(prompt))
        return len(prompt) - 1 if known else 0

    def _next(self, request: Request, place: int) -> int:
        shift = 0 if request.sampling.greedy else request.seed
        return request.prompt[(place + shift) % len(request.prompt)]

    @property
    def busy(self) -> bool:
        return bool(self._texts)

    @property
    def load(self) -> Load:
        running = min(len(self._texts), self._most)
        used = sum(-(-len(text.request.prompt + text.emitted) // BLOCK) for text in self._texts.values())
        counts = (self._prompt_tokens, 0)
        return Load(running, len(self._texts) - running, used, 1000, 3, *counts, self.stats)


def _cut(request: Request, before: list[int], new: list[int]) -> tuple[list[int], Finish | None]:
    """Return the new tokens up to the output's end."""
    for count, token in enumerate(new, start=1):
        if token in request.stop_ids:
            new = new[:count]
            kept = None if request.cut is None else request.cut([*before, *new])
            return (new if kept is None else new[: kept - len(before)]), Finish.STOP
    most = min(request.max_new_tokens, POSITIONS - len(request.prompt))
    new = new[: most - len(before)]
    if request.cut is not None and (kept := request.cut([*before, *new])) is not None:
        return new[: kept - len(before)], Finish.STOP
    return new, Finish.LENGTH if len(before) + len(new) == most else None


def _logprob(token: int, count: int) -> TokenLogprob:
    top = [(token, -0.5), (2, -1.5), (3, float("-inf"))]
    return TokenLogprob(token, -0.5, top[:count])


def tokenizer_in(folder: Path, template: str | None = TEMPLATE) -> Any:
    """Create a byte-level tokenizer with almost no merges, so that a character can be several tokens."""
    tokenizer = read_tokenizer(train_bpe(["abc abd"], 258, folder))
    tokenizer.chat_template = template
    return tokenizer


@dataclass
class Running:
    """A running server.

    Attributes:
        url: its address.
        engine, service, server: its parts.
    """

    url: str
    engine: Parrot
    service: AsyncEngine
    server: Server

    def client(self, **settings: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "any", "max_retries": 0, **settings})

    def post(self, path: str, body: Any, **settings: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, **({"json": body} if isinstance(body, dict) else {"content": body}),
                           timeout=30, **settings)  # fmt: skip

    def metric(self, name: str) -> float:
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"megatron_mtp_{name} ")]
        return float(value)


@contextmanager
def running(
    engine: Any,
    codec: Codec,
    key: str | None = None,
    origins: tuple[str, ...] = (),
    settings: ServerSettings = DEFAULTS,
) -> Iterator[Running]:
    """Run a server in a thread, on its own port."""
    service, ready = AsyncEngine(engine), threading.Event()
    served = Served(NAME, codec, POSITIONS, 258, 128, 0)
    listening: socket.socket = listener("127.0.0.1", 0)
    server = Server(make_app(service, served, key, origins), service, ready.set, settings)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        assert ready.wait(30)
        yield Running(address_of(listening), engine, service, server)
    finally:
        if isinstance(engine, Parrot):
            engine.go.set()
        service.draining = True
        thread.join(30)
        assert not thread.is_alive()


def words(folder: Path, template: str | None = TEMPLATE) -> Codec:
    """Return the codec of `tokenizer_in`."""
    return Codec(tokenizer_in(folder, template))
