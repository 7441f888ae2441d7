"""Asks a server, and notes when what arrives: at random times, or by clients that each wait for their answer."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from megatron_mtp.serving.bench.workload import Body

CONNECT = 10
"""Seconds that a connection may take; an answer may take any time."""

UNSENT = httpx2.HTTPError, httpx2.InvalidURL
"""What is raised where no answer comes, or the URL is none."""


@dataclass
class Answer:
    """One request, in seconds since the first one.

    Attributes:
        asked: when it was sent.
        arrivals: when each event with new text came.
        tokens, prompt_tokens: as the server counts them; `tokens` is the events where it does not.
        error: why there is no answer.
    """

    asked: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None


class Server:
    """A server at a URL."""

    def __init__(self, url: str, key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the URL is '{url}'; give one like http://127.0.0.1:8000.")
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx2.Limits(max_connections=None)
        timeout = httpx2.Timeout(None, connect=CONNECT)
        self.client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout)
        self._began = time.perf_counter()

    async def first_model(self) -> str:
        """The name of the first model that it lists.

        Raises:
            ValueError: it does not answer, or lists none.
        """
        try:
            answer = await self.client.get(f"{self.root}/v1/models")
        except UNSENT as error:
            raise ValueError(
                f"{self.root} does not answer ({error or type(error).__name__}); start a server, or give its URL."
            ) from error
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(
                f"{self.root}/v1/models lists no model (status {answer.status_code}: {_said(answer.text)}); give "
                "--model, or --api-key where one is needed."
            ) from None

    async def metrics(self) -> str | None:
        """What it tells Prometheus, if it does."""
        try:
            answer = await self.client.get(f"{self.root}/metrics")
        except UNSENT:
            return None
        return answer.text if answer.status_code == httpx2.codes.OK else None

    async def ask(self, body: Body) -> Answer:
        """Send a request and read its answer to the end."""
        answer = Answer(self._now())
        path = "chat/completions" if "messages" in body else "completions"
        try:
            async with self.client.stream("POST", f"{self.root}/v1/{path}", json=body) as response:
                if response.status_code != httpx2.codes.OK:
                    answer.error = f"status {response.status_code}: {_said((await response.aread()).decode())}"
                    return answer
                async for line in response.aiter_lines():
                    self._read(line, answer)
        except UNSENT as error:
            answer.error = str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError) as error:
            answer.error = f"the stream has an event that is not of OpenAI's form ({error!r})"
        if answer.error is None and not answer.arrivals:
            answer.error = "the stream ended without a token"
        answer.tokens = answer.tokens or len(answer.arrivals)
        return answer

    def _read(self, line: str, answer: Answer) -> None:
        """One line of a stream of events."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = _said(data)
        if any(_brings_text(choice) for choice in event.get("choices", [])):
            answer.arrivals.append(self._now())
        if usage := event.get("usage"):
            answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]

    def _now(self) -> float:
        return time.perf_counter() - self._began


def _brings_text(choice: dict[str, Any]) -> bool:
    """Tokens that complete no letter yet come as an event without text; who speaks comes before any token."""
    if "delta" in choice:
        return "role" not in choice["delta"] or bool(choice["delta"].get("content"))
    return "text" in choice


def _said(text: str) -> str:
    """The message of an error, or what else there is."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200]


Ask = Callable[[Body], Awaitable[Answer]]


async def at_random(ask: Ask, bodies: list[Body], rate: float, seed: int, done: Callable[[], None]) -> list[Answer]:
    """Ask at times that do not depend on answers: gaps are exponential, `rate` requests a second on average."""
    chosen, tasks = random.Random(seed), []
    due = time.perf_counter()
    for body in bodies:
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        tasks.append(asyncio.ensure_future(ask(body)))
        tasks[-1].add_done_callback(lambda _: done())
        due += chosen.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def by_clients(ask: Ask, bodies: list[Body], clients: int, done: Callable[[], None]) -> list[Answer]:
    """Ask by so many clients, of which each sends its next request when the last one is answered."""
    left, answers = iter(bodies), list[Answer]()

    async def client() -> None:
        for body in left:
            answers.append(await ask(body))
            done()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers
