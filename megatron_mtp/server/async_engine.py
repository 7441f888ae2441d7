"""The thread that owns the engine, and its interface for HTTP handlers.

    event loop    submit -> add        update, update, ...          cancel
                      |                   ^                            |
    thread            +--> commands -> step -> step -> step ... <------+

Handlers wait on the event loop. Only the engine's thread calls the engine; it runs commands between steps. So a request
whose client has disconnected is gone by the next step. A weight update (`update_weights.py`) is such a command.
"""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from megatron_mtp.decoding.requests import Finish, Load, QueueFull, Request, Update
from megatron_mtp.server.metrics import CANCELLED, EngineMetrics, OutputTimes
from megatron_mtp.server.protocol import APIError, failed, shutting_down
from megatron_mtp.server.ranks import RankMessage, broadcast, sent_request

if TYPE_CHECKING:
    from megatron_mtp.decoding.engine import Engine

Emit = Callable[[list[Update]], None]

logger = logging.getLogger(__name__)


class Outputs:
    """Outputs of one HTTP request while they grow. Iterate to get the index of an output and its update.

    Attributes:
        asked: when the request was made, by `time.perf_counter`.
        numbers: request numbers of the engine.
        left: number of outputs that have not ended.
    """

    def __init__(self, count: int) -> None:
        self.asked, self.numbers, self.left = time.perf_counter(), list[int](), count
        self._news = asyncio.Queue[list[tuple[int, Update]] | APIError]()

    def put(self, news: list[tuple[int, Update]] | APIError) -> None:
        """Add the updates of a step with the indices of their outputs, or the error that ends them."""
        if isinstance(news, list):
            self.left -= sum(update.finish is not None for _, update in news)
        self._news.put_nowait(news)

    async def get(self) -> list[tuple[int, Update]]:
        """Return the updates of the next step. Raise APIError if there will be none."""
        news = await self._news.get()
        if isinstance(news, APIError):
            raise news
        return news

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self.left or not self._news.empty():
            for place, update in await self.get():
                if update.finish is Finish.ERROR:
                    raise failed()
                yield place, update


@dataclass
class Owner:
    """The output, by index, that a request generates."""

    outputs: Outputs
    place: int
    times: OutputTimes


class AsyncEngine:
    """An engine for the handlers of one event loop.

    Attributes:
        draining: whether new requests are rejected.
        load: load of the engine after its last step.
        broken: whether a bug has stopped the engine. A bug in a single request ends only that request.
        metrics: metrics for Prometheus.

    Args:
        engine: engine of this rank.
        group: process group of all ranks, if there are several; the others `follow`.
    """

    def __init__(self, engine: "Engine", group: Any = None) -> None:
        self._engine, self._commands = engine, SimpleQueue[Callable[[], None]]()
        self._group, self._new = group, RankMessage()
        self._live, self._owners = set[Outputs](), dict[int, Owner]()  # of the event loop; of the thread
        self._calling = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = self.draining = self.broken = False
        self.load: Load = engine.load
        self.metrics = EngineMetrics(lambda: self.load)

    def start(self) -> None:
        """Start on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step, and the other ranks."""
        self._commands.put(lambda: setattr(self, "_ended", True))
        self._thread.join()
        if not self.broken:
            self._tell_ranks(None)

    @property
    def idle(self) -> bool:
        """Whether no output is being generated."""
        return not any(outputs.left for outputs in self._live)

    async def submit(self, requests: list[Request], outputs: Outputs) -> None:
        """Queue requests for these outputs, all or none. Call `forget` in the end.

        Raises:
            APIError: 400 for invalid requests, 429 if the queue is full, 503 while draining, 500 after a bug.
        """
        if self.broken:
            raise failed()
        if self.draining:
            raise shutting_down()
        self._live.add(outputs)
        self._commands.put(partial(self._add, requests, outputs))
        await outputs.get()

    def forget(self, outputs: Outputs) -> None:
        """Cancel what has not ended, because no client waits for it."""
        self._live.discard(outputs)
        self._commands.put(partial(self._cancel, outputs))

    def between_steps[T](self, call: Callable[["Engine", Emit], T]) -> T:
        """Call a function with the engine on its thread, between steps, and wait. Do not call this on the event loop.

        The function may run steps. It passes their updates to its second argument, which delivers them and handles
        commands that arrive meanwhile.

        Raises:
            ValueError: there are several ranks, or the function raises it.
            RuntimeError: the engine has failed or ended.
        """
        if self._group is not None:
            raise ValueError("the server runs on several ranks, which does not support weight updates; serve on one.")
        with self._calling:
            done = Future[T]()
            self._commands.put(partial(self._call, done, call))
            while not done.done():
                if not self._thread.is_alive():
                    raise RuntimeError("the engine has failed or ended; start another one.")
                wait([done], timeout=1)
            return done.result()

    def end_all(self, why: APIError) -> None:
        """End all running requests with an error; their handlers then call `forget`."""
        for outputs in self._live:
            if outputs.left:
                outputs.put(why)

    def _break(self) -> None:
        self.broken = True
        self.end_all(failed())

    # --- on the engine's thread ---

    def _work(self) -> None:
        try:
            while not self._ended:
                while not self._commands.empty() or not (self._can_step or self._ended):
                    self._commands.get()()
                    self.load = self._engine.load
                if self._can_step and not self._ended:
                    self._tell_ranks(self._new)
                    self._new = RankMessage()
                    updates = self._engine.step()
                    self.load = self._engine.load
                    self._deliver(updates)
        except Exception:
            logger.exception("the engine has failed")
            self._post(self._break)

    @property
    def _can_step(self) -> bool:
        return self._engine.busy and not self._engine.is_torn

    def _call[T](self, done: Future[T], call: Callable[["Engine", Emit], T]) -> None:
        """Call a function, and pass on its result or error; any error except a ValueError has broken the engine."""

        def emit(updates: list[Update]) -> None:
            self._deliver(updates)
            while not self._commands.empty():
                self._commands.get()()
            self.load = self._engine.load

        try:
            done.set_result(call(self._engine, emit))
        except ValueError as error:
            done.set_exception(error)
        except Exception as error:
            done.set_exception(error)
            raise

    def _tell_ranks(self, message: RankMessage | None) -> None:
        if self._group is not None:
            broadcast([message], self._group)

    def _post(self, what: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(what)

    def _add(self, requests: list[Request], outputs: Outputs) -> None:
        """Queue all requests; the first update of each output is empty, or the reason why they were not queued."""
        news: list[tuple[int, Update]] | APIError = []
        try:
            for request in requests:
                outputs.numbers.append(self._engine.add(request))
                self._new.append(sent_request(request))
        except QueueFull:
            news = APIError("the queue is full; ask again later.", code="queue_full", status=429)
        except ValueError as error:
            news = APIError(str(error), code="not_servable")
        except Exception:
            logger.exception("a request cannot be queued")
            news = failed()
        if news:
            self._drop(outputs.numbers)
        else:
            for place, number in enumerate(outputs.numbers):
                self._owners[number] = Owner(outputs, place, OutputTimes(outputs.asked))
        self._post(partial(outputs.put, news))

    def _cancel(self, outputs: Outputs) -> None:
        live = [number for number in outputs.numbers if number in self._owners]
        for number in live:
            self.metrics.ended(self._owners.pop(number).times, CANCELLED)
        self._drop(live)

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self._engine.cancel(number)
        self._new += numbers

    def _deliver(self, updates: list[Update]) -> None:
        """Pass the updates of a step to their owners, and record their times."""
        news, now = defaultdict[Outputs, list[tuple[int, Update]]](list), time.perf_counter()
        for update in updates:
            owner = self._owners[update.request]
            news[owner.outputs].append((owner.place, update))
            self.metrics.grew(owner.times, len(update.tokens), now)
            if update.finish is not None:
                del self._owners[update.request]
                self.metrics.ended(owner.times, update.finish)

        def hand_over() -> None:
            for outputs, some in news.items():
                outputs.put(some)

        self._post(hand_over)
