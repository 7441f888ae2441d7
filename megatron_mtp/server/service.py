"""The thread that owns the engine, and how handlers of requests reach it.

    event loop    submit -> add        update, update, ...          cancel
                      |                   ^                            |
    thread            +--> commands -> step -> step -> step ... <------+

Handlers wait on the event loop; the engine is called by its thread alone, which obeys commands between steps. So a
text whose client has gone is out of the next step.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from typing import Any

from megatron_mtp.decoding.requests import Engine, Finish, Load, QueueFull, Request, Update
from megatron_mtp.server.errors import APIError, failed
from megatron_mtp.server.metrics import GONE, Metrics

logger = logging.getLogger(__name__)


class Texts:
    """The texts of one HTTP request while they grow; iterating gives the place of a text and its update."""

    def __init__(self, count: int) -> None:
        self.numbers: list[int] = []
        self._live, self._updates = count, asyncio.Queue[tuple[int, Update] | APIError]()

    def put(self, item: tuple[int, Update] | APIError) -> None:
        """What the engine said of a text, by its place, or why there will be no more."""
        self._updates.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self._live:
            item = await self._updates.get()
            if isinstance(item, APIError):
                raise item
            self._live -= item[1].finish is not None
            yield item


class Service:
    """Serves an engine to handlers of one event loop.

    Attributes:
        draining: no request is taken any more.
        load: of the engine after its last step.
        broken: the engine cannot go on after a bug; one of a single text ends with that text.
    """

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._owners: dict[int, tuple[Texts, int]] = {}
        self._asked, self._ended = set[asyncio.Future[None]](), False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.draining, self.broken = False, False
        self.load: Load = engine.load

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that runs."""
        self._commands.put(self._end)
        self._thread.join()

    @property
    def idle(self) -> bool:
        """Whether no request has a text that has not ended."""
        return not self._owners and not self._asked

    async def submit(self, requests: list[Request]) -> Texts:
        """Queue requests, all or none; `forget` must be called in the end.

        Raises:
            APIError: 400 for what cannot be served, 429 if the queue is full, 503 while draining, 500 after a bug.
        """
        if self.broken:
            raise failed()
        if self.draining:
            raise APIError(503, "the server is ending; ask another one.", code="draining")
        texts = Texts(len(requests))
        await self._added(requests, texts)
        return texts

    def forget(self, texts: Texts) -> None:
        """Cancel what has not ended, since nobody waits for it."""
        live = [number for number in texts.numbers if self._owners.pop(number, None) is not None]
        for number in live:
            self._metrics.ended(number, GONE)
        if live:
            self._commands.put(lambda: self._cancel(live))

    async def _added(self, requests: list[Request], texts: Texts) -> None:
        answer = asyncio.get_running_loop().create_future()
        asked = time.perf_counter()
        self._commands.put(lambda: self._add(requests, texts, answer, asked))
        self._asked.add(answer)
        try:
            await answer
        except QueueFull:
            raise APIError(429, "the queue is full; ask again later.", code="queue_full") from None
        except ValueError as error:
            raise APIError(400, str(error), code="not_servable") from error
        finally:
            self._asked.discard(answer)

    # --- on the event loop, called by the thread ---

    def _registered(self, numbers: list[int], texts: Texts, answer: "asyncio.Future[None]", asked: float) -> None:
        """From here on the texts have an owner, unless it has gone meanwhile."""
        if answer.done():
            self._commands.put(lambda: self._cancel(numbers))
            return
        texts.numbers = numbers
        for place, number in enumerate(numbers):
            self._owners[number] = (texts, place)
            self._metrics.began(number, asked)
        answer.set_result(None)

    def _refused(self, answer: "asyncio.Future[None]", error: Exception) -> None:
        if not answer.done():
            answer.set_exception(error)

    def _deliver(self, updates: list[Update], now: float) -> None:
        for update in updates:
            owner = self._owners.get(update.request)
            if owner is None:
                continue
            texts, place = owner
            self._metrics.grew(update, now)
            if update.finish is not None:
                del self._owners[update.request]
                self._metrics.ended(update.request, update.finish)
            texts.put(failed() if update.finish is Finish.ERROR else (place, update))

    def _break(self) -> None:
        self.broken = True
        for answer in self._asked:
            self._refused(answer, failed())
        for texts, _ in self._owners.values():
            texts.put(failed())
        self._owners.clear()

    # --- on the thread ---

    def _work(self) -> None:
        try:
            while not self._ended:
                self._obey()
                if self._engine.busy and not self._ended:
                    updates = self._engine.step()
                    self.load = self._engine.load
                    self._post(self._deliver, updates, time.perf_counter())
        except Exception:
            logger.exception("the engine has failed")
            self._post(self._break)

    def _obey(self) -> None:
        """All commands that are there; the next one, if there is nothing to do."""
        while not self._commands.empty() or not (self._engine.busy or self._ended):
            self._commands.get()()
            self.load = self._engine.load

    def _add(self, requests: list[Request], texts: Texts, answer: "asyncio.Future[None]", asked: float) -> None:
        numbers: list[int] = []
        try:
            for request in requests:
                numbers.append(self._engine.add(request))
        except Exception as error:
            if not isinstance(error, QueueFull | ValueError):
                logger.exception("a request cannot be queued")
                error = failed()
            self._cancel(numbers)
            self._post(self._refused, answer, error)
            return
        self._post(self._registered, numbers, texts, answer, asked)

    def _cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            self._engine.cancel(number)

    def _end(self) -> None:
        self._ended = True

    def _post(self, what: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(what, *arguments)
