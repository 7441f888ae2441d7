"""Minimum latency of any OpenAI-compatible server: one request at a time, strict and relaxed.

    python benchmarks/latency.py --server http://127.0.0.1:8000                 ten requests, 1,024 tokens in, 2,048 out
    python benchmarks/latency.py --server http://127.0.0.1:8000 --relaxed JSON  in turns with relaxed requests
    python benchmarks/latency.py --quick                                        does it run? (the figures mean nothing)

A strict request has temperature 0. A relaxed one also has the fields of --relaxed, for example for `megatron-mtp serve`

    {"speculative_config": {"method": "mtp_eagle", "num_speculative_tokens": 3, "verifier": "relaxed",
                            "think_start": 5, "think_end": 6}}

If acceptance is a server flag (TensorRT-LLM), run the benchmark against one server of each kind. Prompts are random
tokens, the same in every run, so outputs and the benefit of drafts differ from real traffic. Every request uses a new
connection, and the model is warm: one request of each kind precedes those that are timed.
"""

import json
import random
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needed when started by path

from benchmarks.agreeing import agreeing_model
from benchmarks.harness import Found, Goal, Table, count, main
from megatron_mtp.megatron.runtime import prepare

ON_CPU = prepare()

VOCABULARY = 1000
"""Prompts have ids below this."""
SHOWN = ("to the first token, ms", "between tokens, ms", "whole request, s", "tokens a second")
RELAXED = {"method": "mtp", "num_speculative_tokens": 1, "verifier": "relaxed", "think_start": 1, "think_end": 2}
"""The relaxed request of --quick."""

FLAGS: dict[str, dict[str, Any]] = {
    "--server": {"metavar": "URL", "help": "of the API, without /v1"},
    "--model": {"metavar": "NAME", "help": "default: the first one that the server lists"},
    "--requests": {"type": count, "default": 10, "metavar": "N", "help": "of each kind; default: 10"},
    "--prompt-tokens": {"type": count, "default": 1024, "metavar": "N", "help": "default: 1024"},
    "--new-tokens": {"type": count, "default": 2048, "metavar": "N", "help": "default: 2048"},
    "--fields": {
        "type": json.loads,
        "default": {"ignore_eos": True},
        "metavar": "JSON",
        "help": 'of all requests; default: {"ignore_eos": true}, which servers of vLLM\'s kind know',
    },
    "--relaxed": {"type": json.loads, "metavar": "JSON", "help": "further fields of relaxed requests"},
    "--api-key": {"metavar": "KEY", "help": "that the server asks for"},
}


@dataclass(frozen=True)
class Answer:
    """Arrival times of a request's tokens, in seconds after it was sent."""

    first: float
    last: float
    tokens: int

    @property
    def between(self) -> float:
        """Mean seconds between tokens."""
        return (self.last - self.first) / max(self.tokens - 1, 1)

    def figures(self) -> tuple[float, float, float, float]:
        """Return values in the order of `SHOWN`."""
        return 1e3 * self.first, 1e3 * self.between, self.last, self.tokens / self.last


def latency(wanted: Namespace) -> Found:
    """Send requests of both kinds, one after another and in turns."""
    if wanted.quick:
        tiny = {"requests": 2, "prompt_tokens": 8, "new_tokens": 12}
        vars(wanted).update(tiny, relaxed={"speculative_config": RELAXED})
        with own_server() as wanted.server:
            return measured(wanted)
    if wanted.server is None:
        raise SystemExit("latency: --server is missing; give the URL of a server, such as that of megatron-mtp serve.")
    return measured(wanted)


def measured(wanted: Namespace) -> Found:
    """Return times of a server's requests."""
    chance = random.Random(1)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(wanted.prompt_tokens)] for _ in range(wanted.requests)]
    model = wanted.model or json.loads(answer_of(wanted, "/v1/models").read())["data"][0]["id"]
    usual = {"model": model, "max_tokens": wanted.new_tokens, "temperature": 0, **wanted.fields}
    kinds = {"strict": usual} | ({} if wanted.relaxed is None else {"relaxed": {**usual, **wanted.relaxed}})
    for fields in kinds.values():
        ask(wanted, {**fields, "prompt": prompts[0]})
    answers: dict[str, list[Answer]] = {kind: [] for kind in kinds}
    for prompt in prompts:
        for kind, fields in kinds.items():
            answers[kind].append(ask(wanted, {**fields, "prompt": prompt}))
    rows = [
        (kind, *map(statistics.median, zip(*(one.figures() for one in of), strict=True)))
        for kind, of in answers.items()
    ]
    results = {
        "server": wanted.server,
        "model": model,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "new_tokens": {kind: [one.tokens for one in of] for kind, of in answers.items()},
        "seconds": {kind: [[round(one.first, 5), round(one.last, 5)] for one in of] for kind, of in answers.items()},
    }
    goals = []
    if len(rows) == 2:
        strict, relaxed = (row[1 + SHOWN.index("whole request, s")] for row in rows)
        goals = [Goal("relaxed over strict, whole request", relaxed / strict, 1.0)]
    not_run = {} if wanted.relaxed is not None else {"relaxed": "--relaxed has the fields of such requests"}
    return Found(results, goals, [Table("One request at a time, medians", ("requests", *SHOWN), rows)], not_run)


def ask(wanted: Namespace, fields: dict[str, Any]) -> Answer:
    """Send a streamed completion, and record when its pieces arrive."""
    body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}})
    began, times, tokens = time.perf_counter(), list[float](), 0
    with answer_of(wanted, "/v1/completions", body.encode()) as answer:
        for piece in answer:
            text = piece.decode().removeprefix("data:").strip()
            if not text or text == "[DONE]":
                continue
            event = json.loads(text)
            if event.get("choices"):
                times.append(time.perf_counter() - began)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return Answer(times[0], times[-1], tokens)


def answer_of(wanted: Namespace, path: str, body: bytes | None = None) -> Any:
    """Return the server's response on a new connection; an error ends the benchmark with the server's message."""
    key = {} if wanted.api_key is None else {"Authorization": f"Bearer {wanted.api_key}"}
    request = Request(wanted.server.rstrip("/") + path, body, {"Content-Type": "application/json", **key})
    try:
        return build_opener(ProxyHandler({})).open(request, timeout=600)
    except HTTPError as error:
        raise SystemExit(f"latency: the server says {error.code}: {error.read().decode()[:500]}") from None


@contextmanager
def own_server() -> Iterator[str]:
    """Run our server with a tiny random model in a thread; yield its address."""
    from megatron_mtp.decoding.config import SpeculativeConfig
    from megatron_mtp.decoding.engine import Engine
    from megatron_mtp.decoding.runner import Runner
    from megatron_mtp.decoding.scheduler import EngineSettings
    from megatron_mtp.model.build import join_world
    from megatron_mtp.server.api import Served, Server, address_of, listener, make_app
    from megatron_mtp.server.async_engine import AsyncEngine
    from megatron_mtp.server.codec import Codec

    join_world()
    runner = Runner(agreeing_model(layers=2, hidden=64, vocabulary=VOCABULARY, depths=1, noise=0.5))
    engine = AsyncEngine(Engine(runner, EngineSettings(running=1), SpeculativeConfig("mtp")))
    served, listening = Served("tiny", Codec(None), runner.positions, runner.vocab_size, 1, 0), listener("127.0.0.1", 0)
    is_ready = threading.Event()
    server = Server(make_app(engine, served), engine, is_ready.set)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    is_ready.wait()
    try:
        yield address_of(listening)
    finally:
        engine.draining = True
        thread.join()


if __name__ == "__main__":
    main(latency, __doc__, ON_CPU, flags=FLAGS)
