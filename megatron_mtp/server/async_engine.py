"""The thread that owns the engine, how handlers of HTTP reach it, and its steps on other ranks.

    event loop    submit -> add        update, update, ...          cancel
                      |                   ^                            |
    thread            +--> commands -> step -> step -> step ... <------+

Handlers wait on the event loop; the engine is called by its thread alone, which obeys commands between steps. So a
request whose client has gone is out of the next step.

Under tensor parallelism rank 0 answers HTTP, and the other ranks take the same steps:

    rank 0    add, cancel -> its own engine, and a list        step -> send the list, then the step
    others                                                     receive the list -> add, cancel, then the step

Engines with the same requests in the same order do the same, so that their collectives meet. Where K is automatic, rank
0 chooses it for all (`AutoK.choose`), since each rank has a clock of its own.
"""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

from megatron_mtp.decoding.requests import EngineCore, Finish, Load, QueueFull, Request, Update
from megatron_mtp.server.detokenizer import Codec, OutputText
from megatron_mtp.server.metrics import CANCELLED, ServerMetrics
from megatron_mtp.server.protocol import APIError, failed

IDLE = timedelta(days=365)
"""How long ranks wait for a request."""

Message = list[tuple[Request, tuple[str, ...], int] | int]
"""Requests with their stop strings and the tokens before these, and numbers of those that are cancelled."""

logger = logging.getLogger(__name__)


class Outputs:
    """The outputs of one HTTP request while they grow; iterating gives the place of an output and its update."""

    def __init__(self, count: int) -> None:
        self.numbers: list[int] = []
        self._live, self._updates = count, asyncio.Queue[tuple[int, Update] | APIError]()

    def put(self, item: tuple[int, Update] | APIError) -> None:
        """Add an update of an output, by its place, or the reason why there will be no more."""
        self._updates.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self._live:
            item = await self._updates.get()
            if isinstance(item, APIError):
                raise item
            self._live -= item[1].finish is not None
            yield item


class AsyncEngine:
    """An engine for the handlers of one event loop.

    Attributes:
        draining: no request is taken any more.
        load: of the engine after its last step.
        broken: the engine cannot go on after a bug; a bug in a single request ends that request alone.
    """

    def __init__(self, engine: EngineCore, metrics: ServerMetrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._owners: dict[int, tuple[Outputs, int]] = {}
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
        self._commands.put(lambda: setattr(self, "_ended", True))
        self._thread.join()

    @property
    def idle(self) -> bool:
        """True where no request is live."""
        return not self._owners and not self._asked

    async def submit(self, requests: list[Request]) -> Outputs:
        """Queue requests, all or none; `forget` must be called in the end.

        Raises:
            APIError: 400 for what cannot be served, 429 if the queue is full, 503 while draining, 500 after a bug.
        """
        if self.broken:
            raise failed()
        if self.draining:
            raise APIError(503, "the server is ending; ask another one.", code="draining")
        outputs, asked = Outputs(len(requests)), time.perf_counter()
        answer = asyncio.get_running_loop().create_future()
        self._commands.put(lambda: self._add(requests, outputs, answer, asked))
        self._asked.add(answer)
        try:
            await answer
        except QueueFull:
            raise APIError(429, "the queue is full; ask again later.", code="queue_full") from None
        except ValueError as error:
            raise APIError(400, str(error), code="not_servable") from error
        finally:
            self._asked.discard(answer)
        return outputs

    def forget(self, outputs: Outputs) -> None:
        """Cancel what has not ended, since nobody waits for it."""
        live = [number for number in outputs.numbers if self._owners.pop(number, None) is not None]
        for number in live:
            self._metrics.ended(number, CANCELLED)
        if live:
            self._commands.put(lambda: self._cancel(live))

    # --- on the event loop, called by the thread ---

    def _registered(self, numbers: list[int], outputs: Outputs, answer: "asyncio.Future[None]", asked: float) -> None:
        """From here on the requests have an owner, unless it has gone meanwhile."""
        if answer.done():
            self._commands.put(lambda: self._cancel(numbers))
            return
        outputs.numbers = numbers
        for place, number in enumerate(numbers):
            self._owners[number] = (outputs, place)
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
            outputs, place = owner
            self._metrics.grew(update, now)
            if update.finish is not None:
                del self._owners[update.request]
                self._metrics.ended(update.request, update.finish)
            outputs.put(failed() if update.finish is Finish.ERROR else (place, update))

    def _break(self) -> None:
        self.broken = True
        for answer in self._asked:
            self._refused(answer, failed())
        for outputs, _ in self._owners.values():
            outputs.put(failed())
        self._owners.clear()

    # --- on the thread ---

    def _work(self) -> None:
        try:
            while not self._ended:
                while not self._commands.empty() or not (self._engine.busy or self._ended):
                    self._commands.get()()
                    self.load = self._engine.load
                if self._engine.busy and not self._ended:
                    updates = self._engine.step()
                    self.load = self._engine.load
                    self._post(self._deliver, updates, time.perf_counter())
        except Exception:
            logger.exception("the engine has failed")
            self._post(self._break)

    def _add(self, requests: list[Request], outputs: Outputs, answer: "asyncio.Future[None]", asked: float) -> None:
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
        self._post(self._registered, numbers, outputs, answer, asked)

    def _cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            self._engine.cancel(number)

    def _post(self, what: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(what, *arguments)


class Leader:
    """The engine of rank 0, which tells the other ranks what it does; see `requests.EngineCore`."""

    def __init__(self, engine: EngineCore, group: Any) -> None:
        self._engine, self._group = engine, group
        self._new: Message = []

    def add(self, request: Request) -> int:
        """Queue a request, here and with the next step everywhere."""
        number = self._engine.add(request)
        stops, least = (request.cut.stops, request.cut.least) if isinstance(request.cut, OutputText) else ((), 0)
        self._new.append((replace(request, cut=None), stops, least))
        return number

    def cancel(self, request: int) -> None:
        """Forget a request."""
        self._engine.cancel(request)
        self._new.append(request)

    def step(self) -> list[Update]:
        """Run one step on all ranks."""
        new, self._new = self._new, []
        _broadcast([new], self._group)
        return self._engine.step()

    @property
    def busy(self) -> bool:
        """True until all requests have ended."""
        return self._engine.busy

    @property
    def load(self) -> Load:
        """How busy it is."""
        return self._engine.load

    def end(self) -> None:
        """Let the other ranks end."""
        _broadcast([None], self._group)


def follow(engine: EngineCore, codec: Codec, group: Any) -> None:
    """Take the steps of rank 0 until it ends; signals are for rank 0, which drains."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while (new := _broadcast([None], group)) is not None:
        for one in new:
            if isinstance(one, int):
                engine.cancel(one)
            else:
                request, stops, least = one
                cut = OutputText(codec.detokenizer(request.prompt), stops, least) if stops else None
                engine.add(replace(request, cut=cut))
        engine.step()


def group_of_all() -> Any:
    """A group on the hosts, which may be idle for as long as nobody asks for anything."""
    return torch.distributed.new_group(backend="gloo", timeout=IDLE)


def _broadcast(messages: list[Message | None], group: Any) -> Message | None:
    """The message of rank 0."""
    torch.distributed.broadcast_object_list(messages, src=0, group=group, device=torch.device("cpu"))
    return messages[0]
