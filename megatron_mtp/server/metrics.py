"""The page that Prometheus reads at /metrics: the engine's counts as they are, and how long clients wait.

Names end like vLLM's, so that one query reads both: megatron_mtp_num_requests_running for vllm:num_requests_running.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_mtp.decoding.requests import Finish, Load, Update

PREFIX = "megatron_mtp_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Borders of the histograms."""

CANCELLED = "cancelled"
"""Why a request ended whose client has gone."""

Value = Callable[[Load], float]

GAUGES: dict[str, tuple[str, Value]] = {
    "num_requests_running": ("requests in the engine's steps", lambda load: load.running),
    "num_requests_waiting": ("requests that wait for a place", lambda load: load.waiting),
    "cache_blocks": ("blocks of the cache", lambda load: load.blocks),
    "cache_blocks_used": ("blocks that live requests hold", lambda load: load.blocks_used),
    "cache_usage_ratio": (
        "share of blocks that live requests hold",
        lambda load: load.blocks_used / (load.blocks or 1),
    ),
    "recurrent_states": ("requests for whose recurrent states there is room; 0 without any", lambda load: load.states),
    "recurrent_states_used": ("requests that have recurrent states", lambda load: load.states_used),
}
COUNTERS: dict[str, tuple[str, Value]] = {
    "num_preemptions": ("requests put back, to be computed anew", lambda load: load.preempted),
    "prompt_tokens": ("tokens of prompts", lambda load: load.prompt_tokens),
    "prompt_tokens_cached": ("tokens of prompts that the cache already held", lambda load: load.cached_tokens),
    "generation_tokens": ("tokens that were emitted", lambda load: load.stats.emitted),
    "target_forwards": ("forwards of the trunk, counted for every request", lambda load: load.stats.target_forwards),
    "spec_decode_num_drafts": ("drafts that were verified", lambda load: next(iter(load.stats.offered_at), 0)),
    "spec_decode_num_draft_tokens": ("drafted tokens", lambda load: load.stats.drafted),
    "spec_decode_num_accepted_tokens": ("drafted tokens that were accepted", lambda load: load.stats.accepted),
}
BY_POSITION: dict[str, tuple[str, Callable[[Load], list[int]]]] = {
    "spec_decode_num_draft_tokens_per_pos": ("drafted tokens by position", lambda load: load.stats.offered_at),
    "spec_decode_num_accepted_tokens_per_pos": ("accepted tokens by position", lambda load: load.stats.accepted_at),
}


EXPECTED = "spec_decode_expected_acceptance_per_pos"
"""Beside accepted over drafted tokens of a position, which is the measured one."""


class EngineCollector(Collector):
    """Reads the engine's counts when they are asked for."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """All metrics of a load."""
        load = self._load()
        for name, (about, value) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, about, value(load))
        for name, (about, value) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, about, value(load))
        for name, (about, values) in BY_POSITION.items():
            family = CounterMetricFamily(PREFIX + name, about, labels=["position"])
            for position, count in enumerate(values(load)):
                family.add_metric([str(position)], count)
            yield family
        expected = GaugeMetricFamily(PREFIX + EXPECTED, "acceptance by position as recorded", labels=["position"])
        for position, rate in enumerate(load.expected):
            expected.add_metric([str(position)], rate)
        yield expected


class ServerMetrics:
    """All metrics of a server; times are those of `time.perf_counter`."""

    def __init__(self) -> None:
        self._registry, self._requests = CollectorRegistry(), dict[int, tuple[float, float | None]]()

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(PREFIX + name, about, registry=self._registry, buckets=SECONDS)

        self._first = histogram("time_to_first_token_seconds", "from the request to its first token")
        self._between = histogram(
            "time_per_output_token_seconds", "between tokens of an output: time since its last ones, by the new ones"
        )
        self._whole = histogram("e2e_request_latency_seconds", "from the request to its end")
        self._ends = Counter(
            PREFIX + "requests", "requests that have ended, by reason", ["finished_reason"], registry=self._registry
        )
        for reason in (*Finish, CANCELLED):
            self._ends.labels(reason)  # 0 before the first one

    def read(self, load: Callable[[], Load]) -> None:
        """Report the counts of an engine."""
        self._registry.register(EngineCollector(load))

    def page(self) -> bytes:
        """The metrics as Prometheus reads them."""
        return generate_latest(self._registry)

    def began(self, request: int, asked: float) -> None:
        """Note when a request was made that is queued now."""
        self._requests[request] = asked, None

    def grew(self, update: Update, now: float) -> None:
        """Time new tokens; none where a step only ran a part of the prompt."""
        if not update.tokens:
            return
        asked, last = self._requests[update.request]
        if last is None:
            self._first.observe(now - asked)
        else:
            for _ in update.tokens:
                self._between.observe((now - last) / len(update.tokens))
        self._requests[update.request] = asked, now

    def ended(self, request: int, reason: str) -> None:
        """Count a request that has ended, or whose client has gone (`CANCELLED`)."""
        asked, last = self._requests.pop(request)
        self._ends.labels(reason).inc()
        if last is not None and reason != CANCELLED:
            self._whole.observe(last - asked)
