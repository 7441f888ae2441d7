"""The thread that owns the engine, how handlers of HTTP reach it, what Prometheus reads of it, and other ranks.

    event loop    submit -> add        update, update, ...          cancel
                      |                   ^                            |
    thread            +--> commands -> step -> step -> step ... <------+

Handlers wait on the event loop; the engine is called by its thread alone, which obeys commands between steps. So a
request whose client has gone is out of the next step. New weights (`update_weights.py`) are such a command.

Under tensor parallelism rank 0 answers HTTP, and the other ranks take the same steps:

    rank 0    add, cancel -> its own engine, and a list        send the list, then the step
    others                                                     receive the list -> add, cancel, then the step

Engines with the same requests in the same order do the same, so that their collectives meet. Where K is automatic, rank
0 chooses it for all (`AutoK.choose`), since each rank has a clock of its own.
"""

import asyncio
import logging
import signal
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, override

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_mtp.decoding.requests import Finish, Load, QueueFull, Request, Update
from megatron_mtp.server.codec import Codec
from megatron_mtp.server.detokenizer import OutputText
from megatron_mtp.server.protocol import APIError, failed

if TYPE_CHECKING:
    from megatron_mtp.decoding.engine import Engine

CANCELLED = "cancelled"
"""Why a request ended whose client has gone."""

Emit = Callable[[list[Update]], None]

IDLE_TIMEOUT = timedelta(days=365)
"""How long ranks wait for a request."""

RankMessage = list[tuple[Request, tuple[str, ...], int] | int]
"""Requests with their stop strings and the tokens before these, and numbers of those that are cancelled."""

logger = logging.getLogger(__name__)


class Outputs:
    """The outputs of one HTTP request while they grow; iterating gives the place of an output and its update.

    Attributes:
        asked: when the request was made, by `time.perf_counter`.
        numbers: by which the engine knows them.
        left: how many have not ended.
    """

    def __init__(self, count: int) -> None:
        self.asked, self.numbers, self.left = time.perf_counter(), list[int](), count
        self._news = asyncio.Queue[list[tuple[int, Update]] | APIError]()

    def put(self, news: list[tuple[int, Update]] | APIError) -> None:
        """Add the updates of a step, with the places of their outputs, or the reason why there will be no more."""
        if isinstance(news, list):
            self.left -= sum(update.finish is not None for _, update in news)
        self._news.put_nowait(news)

    async def get(self) -> list[tuple[int, Update]]:
        """The updates of the next step. Raises APIError where there will be none."""
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
    """The output that a request grows, by its place; `last` is the time of its last new tokens."""

    outputs: Outputs
    place: int
    last: float | None = None


class AsyncEngine:
    """An engine for the handlers of one event loop.

    Attributes:
        draining: no request is taken any more.
        load: of the engine after its last step.
        broken: the engine cannot go on after a bug; a bug in a single request ends that request alone.
        metrics: its page for Prometheus.

    Args:
        engine: of this rank.
        group: of all ranks, where there are several; the others `follow`.
    """

    def __init__(self, engine: "Engine", group: Any = None) -> None:
        self._engine, self._commands = engine, SimpleQueue[Callable[[], None]]()
        self._group, self._new = group, RankMessage()
        self._live, self._owners = set[Outputs](), dict[int, Owner]()  # of the event loop, and of the thread
        self._calling = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = self.draining = self.broken = False
        self.load: Load = engine.load
        self.metrics = EngineMetrics(lambda: self.load)

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that runs, and the other ranks."""
        self._commands.put(lambda: setattr(self, "_ended", True))
        self._thread.join()
        if not self.broken:
            self._tell_ranks(None)

    @property
    def idle(self) -> bool:
        """True where no output grows."""
        return not any(outputs.left for outputs in self._live)

    async def submit(self, requests: list[Request], outputs: Outputs) -> None:
        """Queue requests, all or none, to grow these outputs; `forget` must be called in the end.

        Raises:
            APIError: 400 for what cannot be served, 429 if the queue is full, 503 while draining, 500 after a bug.
        """
        if self.broken:
            raise failed()
        if self.draining:
            raise APIError("the server is shutting down; retry on another replica.", code="draining", status=503)
        self._live.add(outputs)
        self._commands.put(partial(self._add, requests, outputs))
        await outputs.get()

    def forget(self, outputs: Outputs) -> None:
        """Cancel what has not ended, since nobody waits for it."""
        self._live.discard(outputs)
        self._commands.put(partial(self._cancel, outputs))

    def between_steps[T](self, call: Callable[["Engine", Emit], T]) -> T:
        """Call with the engine on its thread, and wait; for any thread but the event loop's.

        The call may take steps, and hands their updates to the second argument, which delivers them and obeys what
        handlers ask for meanwhile.

        Raises:
            ValueError: there are several ranks, or the call raises it.
            RuntimeError: the engine has failed or ended.
        """
        if self._group is not None:
            raise ValueError("the server runs on several ranks, where weights are not updated; serve on one.")
        with self._calling:
            done = Future[T]()
            self._commands.put(partial(self._call, done, call))
            while not done.done():
                if not self._thread.is_alive():
                    raise RuntimeError("the engine has failed or ended; start another one.")
                wait([done], timeout=1)
            return done.result()

    def _break(self) -> None:
        self.broken = True
        for outputs in self._live:
            outputs.put(failed())

    # --- on the thread ---

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
        """Call, and hand on the result or the error; any error but a ValueError has broken the engine."""

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
            _broadcast([message], self._group)

    def _post(self, what: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(what)

    def _add(self, requests: list[Request], outputs: Outputs) -> None:
        """Queue all requests; the first news of the outputs are none, or why they were not queued."""
        news: list[tuple[int, Update]] | APIError = []
        try:
            for request in requests:
                outputs.numbers.append(self._engine.add(request))
                cut = (request.cut.stops, request.cut.least) if isinstance(request.cut, OutputText) else ((), 0)
                self._new.append((replace(request, cut=None), *cut))
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
            self._owners |= {number: Owner(outputs, place) for place, number in enumerate(outputs.numbers)}
        self._post(partial(outputs.put, news))

    def _cancel(self, outputs: Outputs) -> None:
        live = [number for number in outputs.numbers if number in self._owners]
        for number in live:
            self.metrics.ended(self._owners.pop(number), CANCELLED)
        self._drop(live)

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self._engine.cancel(number)
        self._new += numbers

    def _deliver(self, updates: list[Update]) -> None:
        """Hand the updates of a step to their owners, and time them."""
        news, now = defaultdict[Outputs, list[tuple[int, Update]]](list), time.perf_counter()
        for update in updates:
            owner = self._owners[update.request]
            news[owner.outputs].append((owner.place, update))
            self.metrics.grew(owner, len(update.tokens), now)
            if update.finish is not None:
                del self._owners[update.request]
                self.metrics.ended(owner, update.finish)

        def hand_over() -> None:
            for outputs, some in news.items():
                outputs.put(some)

        self._post(hand_over)


# --- the page that Prometheus reads ----------------------------------------------------------------------------------

PREFIX = "megatron_mtp_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Borders of the histograms."""

MetricRows = dict[str, tuple[str, Callable[[Load], float | Sequence[float]]]]
"""Name to what it is, and its value, or one for each position of a draft.

Names end like vLLM's, so that one query reads both: megatron_mtp_num_requests_running for vllm:num_requests_running.
"""

GAUGES: MetricRows = {
    "num_requests_running": ("requests in the engine's steps", lambda load: load.running),
    "num_requests_waiting": ("requests that wait for a place", lambda load: load.waiting),
    "cache_blocks": ("blocks of the cache", lambda load: load.blocks),
    "cache_blocks_used": ("blocks that live requests hold", lambda load: load.blocks_used),
    "cache_usage_ratio": ("share of blocks that they hold", lambda load: load.blocks_used / (load.blocks or 1)),
    "recurrent_states": ("requests for whose recurrent states there is room; 0 without any", lambda load: load.states),
    "recurrent_states_used": ("requests that have recurrent states", lambda load: load.states_used),
    # Beside accepted over drafted tokens of a position, which is the measured one.
    "spec_decode_expected_acceptance_per_pos": ("acceptance by position as recorded", lambda load: load.expected),
}
COUNTERS: MetricRows = {
    "num_preemptions": ("requests put back, to be computed anew", lambda load: load.preempted),
    "prompt_tokens": ("tokens of prompts", lambda load: load.prompt_tokens),
    "prompt_tokens_cached": ("tokens of prompts that the cache already held", lambda load: load.cached_tokens),
    "generation_tokens": ("tokens that were emitted", lambda load: load.stats.emitted),
    "target_forwards": ("forwards of the trunk, counted for every request", lambda load: load.stats.target_forwards),
    "spec_decode_num_drafts": ("drafts that were verified", lambda load: next(iter(load.stats.offered_at), 0)),
    "spec_decode_num_draft_tokens": ("drafted tokens", lambda load: load.stats.drafted),
    "spec_decode_num_accepted_tokens": ("drafted tokens that were accepted", lambda load: load.stats.accepted),
    "spec_decode_num_draft_tokens_per_pos": ("drafted tokens by position", lambda load: load.stats.offered_at),
    "spec_decode_num_accepted_tokens_per_pos": ("accepted tokens by position", lambda load: load.stats.accepted_at),
}


class EngineMetrics(Collector):
    """The engine's counts as they are when they are asked for, and how long clients wait."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load, self._registry = load, CollectorRegistry()
        histogram = partial(Histogram, namespace=PREFIX[:-1], registry=self._registry, buckets=SECONDS)
        self._first = histogram("time_to_first_token_seconds", "from the request to its first token")
        self._between = histogram(
            "time_per_output_token_seconds", "between tokens of an output: time since its last ones, by the new ones"
        )
        self._whole = histogram("e2e_request_latency_seconds", "from the request to its end")
        about = "requests that have ended, by reason"
        self._ends = Counter(PREFIX + "requests", about, ["finished_reason"], registry=self._registry)
        for reason in (*Finish, CANCELLED):
            self._ends.labels(reason)  # 0 before the first one
        self._registry.register(self)

    @override
    def collect(self) -> Iterator[Metric]:
        """Metrics of the load, for Prometheus."""
        load = self._load()
        for kind, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (about, value) in rows.items():
                found = value(load)
                if isinstance(found, Sequence):
                    family = kind(PREFIX + name, about, labels=["position"])
                    for position, one in enumerate(found):
                        family.add_metric([str(position)], one)
                    yield family
                else:
                    yield kind(PREFIX + name, about, found)

    def page(self) -> bytes:
        """The metrics as Prometheus reads them."""
        return generate_latest(self._registry)

    def grew(self, owner: Owner, count: int, now: float) -> None:
        """Time the new tokens of an output; none where a step only ran a part of the prompt."""
        if not count:
            return
        if owner.last is None:
            self._first.observe(now - owner.outputs.asked)
        else:
            for _ in range(count):
                self._between.observe((now - owner.last) / count)
        owner.last = now

    def ended(self, owner: Owner, reason: str) -> None:
        """Count an output that has ended, or whose client has gone (`CANCELLED`)."""
        self._ends.labels(reason).inc()
        if owner.last is not None and reason != CANCELLED:
            self._whole.observe(owner.last - owner.outputs.asked)


# --- ranks -----------------------------------------------------------------------------------------------------------


def follow(engine: "Engine", codec: Codec, group: Any) -> None:
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
    return torch.distributed.new_group(backend="gloo", timeout=IDLE_TIMEOUT)


def _broadcast(messages: list[RankMessage | None], group: Any) -> RankMessage | None:
    """The message of rank 0."""
    torch.distributed.broadcast_object_list(messages, src=0, group=group, device=torch.device("cpu"))
    return messages[0]
