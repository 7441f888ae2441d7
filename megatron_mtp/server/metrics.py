"""Prometheus metrics of the server: engine load and client latencies; progress lines for the log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import override

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_mtp.decoding.requests import Finish, Load

CANCELLED = "cancelled"
"""Finish reason of a request whose client disconnected."""

PREFIX = "megatron_mtp_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bucket boundaries of the histograms."""

MetricRows = dict[str, tuple[str, Callable[[Load], float | Sequence[float]]]]
"""Name of a metric to its description, and its value, or one value for each position of a draft. Names end like vLLM's,
so that one query reads both: megatron_mtp_num_requests_running for vllm:num_requests_running.
"""

GAUGES: MetricRows = {
    "num_requests_running": ("requests in the engine's steps", lambda load: load.running),
    "num_requests_waiting": ("requests that wait for a place", lambda load: load.waiting),
    "cache_blocks": ("blocks of the cache", lambda load: load.blocks),
    "cache_blocks_used": ("blocks held by live requests", lambda load: load.blocks_used),
    "cache_usage_ratio": ("share of blocks that they hold", lambda load: load.blocks_used / (load.blocks or 1)),
    "recurrent_states": ("requests whose recurrent states fit; 0 for models without", lambda load: load.states),
    "recurrent_states_used": ("requests that have recurrent states", lambda load: load.states_used),
    # The expected rate; the measured one is accepted divided by drafted tokens at a position.
    "spec_decode_expected_acceptance_per_pos": ("acceptance by position as recorded", lambda load: load.expected),
}
COUNTERS: MetricRows = {
    "num_preemptions": ("requests preempted, to be recomputed", lambda load: load.preempted),
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


@dataclass
class OutputTimes:
    """When an output was requested and when it last grew, by `time.perf_counter`; None before its first token."""

    asked: float
    last: float | None = None


class EngineMetrics(Collector):
    """The engine's current counts and client latencies."""

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
            self._ends.labels(reason)  # export 0 from the start
        about = "HTTP requests that were answered, by path and status"
        self._answers = Counter(PREFIX + "http_requests", about, ["path", "status"], registry=self._registry)
        self._registry.register(self)

    @override
    def collect(self) -> Iterator[Metric]:
        """Return the metrics of the load, for Prometheus."""
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
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def grew(self, times: OutputTimes, count: int, now: float) -> None:
        """Record the time of an output's new tokens; there are none if a step only ran part of the prompt."""
        if not count:
            return
        if times.last is None:
            self._first.observe(now - times.asked)
        else:
            for _ in range(count):
                self._between.observe((now - times.last) / count)
        times.last = now

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP response; the path is one of a fixed set."""
        self._answers.labels(path, status).inc()

    def ended(self, times: OutputTimes, reason: str) -> None:
        """Count an output that has ended, or whose client has disconnected (`CANCELLED`)."""
        self._ends.labels(reason).inc()
        if times.last is not None and reason != CANCELLED:
            self._whole.observe(times.last - times.asked)


def progress(before: Load, now: Load, seconds: float) -> str:
    """Return a line about the engine's work in the last seconds; empty if it was idle."""
    tokens, prompts = now.stats.emitted - before.stats.emitted, now.prompt_tokens - before.prompt_tokens
    if not (tokens or prompts or now.running or now.waiting):
        return ""
    line = f"{tokens / seconds:.1f} tokens/s, {prompts / seconds:.1f} tokens/s of prompts; {now.running} running, "
    line += f"{now.waiting} waiting; {now.blocks_used / now.blocks:.0%} of the cache used"
    drafted, accepted = now.stats.drafted - before.stats.drafted, now.stats.accepted - before.stats.accepted
    return line + (f"; {accepted / drafted:.0%} of {drafted} drafted tokens accepted" if drafted else "")
