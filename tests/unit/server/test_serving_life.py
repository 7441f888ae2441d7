"""Server lifecycle: full queues, disconnecting clients, draining, many connections, a broken engine, metrics."""

import asyncio
import contextlib
import json
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import Mock

import httpx2
import openai
import pytest
from parrot import NAME, Parrot, Running, Text, running, words

from megatron_mtp.common.acceptance import AcceptanceStats
from megatron_mtp.decoding.requests import Finish, Load, Request, Update
from megatron_mtp.server import api, connections
from megatron_mtp.server.api import Served, ServerSettings, listener
from megatron_mtp.server.async_engine import AsyncEngine, Outputs
from megatron_mtp.server.codec import Codec
from megatron_mtp.server.metrics import EngineMetrics, OutputTimes, progress
from megatron_mtp.server.protocol import APIError, shutting_down
from megatron_mtp.server.ranks import sent_request

TIMEOUT = 20


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return words(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def server(codec: Codec) -> Iterator[Running]:
    """Run a server where two requests run and two wait."""
    with running(Parrot(running=2, waiting=2), codec) as served:
        yield served


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def raw(server: Running, body: dict[str, object]) -> socket.socket:
    """Open a connection, request a completion, and leave the response unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close"]
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
    connection.sendall(head.encode() + content)
    return connection


def answer(connection: socket.socket) -> bytes:
    """Read the whole response."""
    with connection.makefile("rb") as file:
        return file.read()


def live(server: Running) -> int:
    load = server.engine.load
    return load.running + load.waiting


def test_a_full_queue_returns_429_for_the_whole_request(server: Running) -> None:
    server.engine.go.clear()
    first = raw(server, {"prompt": "ab", "n": 3, "max_tokens": 4})
    until(lambda: live(server) == 3)
    server.engine.go.set()
    assert b"200 OK" in answer(first)
    server.engine.go.clear()
    held = raw(server, {"prompt": "ab", "n": 1, "max_tokens": 4})
    until(lambda: live(server) == 1)
    waits = raw(server, {"prompt": "ab", "n": 4, "max_tokens": 4})
    time.sleep(0.05)
    server.engine.go.set()
    said = answer(waits)
    if b"429" in said:  # unless the held one ended first
        assert b"retry-after: 1" in said.lower()
    assert b"200 OK" in answer(held)
    until(lambda: live(server) == 0)


def test_a_request_for_more_completions_than_fit_is_rejected(server: Running) -> None:
    server.engine.go.clear()
    with pytest.raises(openai.RateLimitError, match="the queue is full; ask again later") as error:
        server.client().completions.create(model=NAME, prompt="ab", n=5)
    assert error.value.code == "queue_full"
    assert error.value.response.headers["retry-after"] == "1"
    assert live(server) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_sequences_in_the_next_step(stream: bool, server: Running) -> None:
    server.engine.go.clear()
    connection = raw(server, {"prompt": "ab", "n": 2, "max_tokens": 400, "stream": stream})
    until(lambda: live(server) == 2)
    connection.close()
    until(lambda: server.service.idle)
    steps = server.engine.steps
    server.engine.go.set()
    until(lambda: live(server) == 0)
    assert server.engine.steps <= steps + 1, "the step that ran, and none after it"
    assert server.engine.cancelled == 2
    assert server.metric("num_requests_running") == 0
    assert 'requests_total{finished_reason="cancelled"} 2.0' in httpx2.get(f"{server.url}/metrics").text


def test_a_client_may_disconnect_before_its_request_is_queued(server: Running) -> None:
    server.engine._pace = 0.01  # on a busy machine, 400 tokens finished before the event loop ran
    server.engine.go.clear()
    first = raw(server, {"prompt": "ab", "max_tokens": 4})
    until(server.engine.held.is_set)
    gone = raw(server, {"prompt": "ab", "max_tokens": 400})
    until(lambda: len(server.service._live) == 2)
    gone.close()
    until(lambda: len(server.service._live) == 1)
    server.engine.go.set()
    assert b"200 OK" in answer(first)
    until(lambda: server.engine.cancelled == 1 and live(server) == 0)


def test_other_ranks_get_a_request_before_its_cancellation() -> None:
    """Both between two steps. In the other order they would continue it, in steps that rank 0 does not take."""
    service, outputs = AsyncEngine(Parrot()), Outputs(1)
    service._loop = Mock()
    request = Request([5, 6], 4)
    service._add([request], outputs)
    service._cancel(outputs)
    assert service._new == [sent_request(request), *outputs.numbers]


def test_draining_finishes_running_requests_and_rejects_new_ones(codec: Codec) -> None:
    with running(Parrot(), codec) as server:
        server.engine.go.clear()
        began = raw(server, {"prompt": "ab", "max_tokens": 4, "temperature": 0})
        until(lambda: live(server) == 1)
        server.server.handle_exit(15, None)
        time.sleep(0.3)  # the server checks three times whether it may end
        with pytest.raises(
            openai.InternalServerError, match="the server is shutting down; retry on another replica"
        ) as error:
            server.client().completions.create(model=NAME, prompt="ab")
        assert error.value.status_code == 503
        health = httpx2.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        server.engine.go.set()
        assert b'"text":"abab"' in answer(began)


def test_a_broken_engine_fails_all_texts_and_ends_the_server(codec: Codec) -> None:
    with running(Parrot(pace=0.01), codec) as server:
        stream = server.client().completions.create(model=NAME, prompt="ab", max_tokens=400, stream=True)
        assert next(iter(stream)).choices[0].text
        server.engine.bug = RuntimeError("planted")
        with pytest.raises(openai.APIError, match="the engine has failed"):
            list(stream)
        until(lambda: server.server.should_exit)
        assert server.service.broken


def test_an_engine_error_fails_only_its_own_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine, "add", lambda request: 1 // 0)
    done = server.post("/v1/completions", {"prompt": "ab"})
    assert (done.status_code, done.json()["error"]["type"]) == (500, "server_error")
    monkeypatch.undo()
    assert server.post("/v1/completions", {"prompt": "ab"}).status_code == 200
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_sequence_that_fails_in_a_step_returns_500_alone(
    stream: bool, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two outputs of a request fails; another request, which shares the steps, is not affected."""
    real, failing = Parrot._update, list[int]()

    def update(self: Parrot, number: int, text: Text) -> Update:
        if text.request.prompt[0] != 4 or failing:
            return real(self, number, text)
        failing.append(number)
        return Update(number, [], finish=Finish.ERROR)

    monkeypatch.setattr(Parrot, "_update", update)
    with running(Parrot(pace=0.01), codec) as server:
        good = raw(server, {"prompt": [5, 6], "max_tokens": 100})
        until(lambda: live(server) == 1)
        bad = answer(raw(server, {"prompt": [4, 5], "n": 2, "max_tokens": 400, "stream": stream}))
        assert b"engine_failed" in bad
        assert stream or b"500 Internal" in bad
        assert b"200 OK" in answer(good)
        until(lambda: live(server) == 0)
        assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}
        assert 'requests_total{finished_reason="error"} 1.0' in httpx2.get(f"{server.url}/metrics").text


def test_64_connections_at_once(codec: Codec) -> None:
    """Streams and whole responses, each with its own text."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        prompt, settings = f"[{number}]", {"model": NAME, "max_tokens": 40, "temperature": 0}
        if number % 2:
            return (await client.completions.create(prompt=prompt, **settings)).choices[0].text
        parts = await client.completions.create(prompt=prompt, stream=True, **settings)
        return "".join([part.choices[0].text async for part in parts])

    async def everyone(url: str) -> list[str]:
        limits = httpx2.Limits(max_connections=64)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="x", max_retries=0, http_client=httpx2.AsyncClient(limits=limits, timeout=60)
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    with running(Parrot(running=16, waiting=64), codec) as server:
        texts = asyncio.run(everyone(server.url))
    assert texts == [(f"[{number}]" * 20)[:40] for number in range(64)]


def test_metrics_are_the_engines_counts(codec: Codec) -> None:
    with running(Parrot(), codec) as server:
        for prompt in ("ab", "abc"):
            server.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 20})
        stats = server.engine.stats
        assert server.metric("generation_tokens_total") == stats.emitted == 40
        assert server.metric("prompt_tokens_total") == 5
        assert server.metric("num_preemptions_total") == 3
        assert server.metric("spec_decode_num_accepted_tokens_total") == stats.accepted > 0
        for position in range(2):
            for name, counts in (("accepted", stats.accepted_at), ("draft", stats.offered_at)):
                label = f'{{position="{position}"}}'
                assert server.metric(f"spec_decode_num_{name}_tokens_per_pos_total{label}") == counts[position]
        assert server.metric("time_to_first_token_seconds_count") == 2
        assert server.metric("time_per_output_token_seconds_count") == 40 - 2
        assert server.metric("e2e_request_latency_seconds_count") == 2
        assert server.metric('requests_total{finished_reason="length"}') == 2
        assert server.metric("cache_blocks") == 1000


def test_inter_token_time_is_a_steps_time_over_its_tokens() -> None:
    """The first token after 2 s, then 4 tokens after 3 s more, which count as 4 times 0.75 s."""
    metrics, times = EngineMetrics(lambda: Parrot().load), OutputTimes(asked=10.0)
    for count, now in ((0, 11.0), (1, 12.0), (4, 15.0)):
        metrics.grew(times, count, now)
    metrics.ended(times, Finish.STOP)
    page = metrics.page().decode().splitlines()
    for name, count, total in (
        ("time_to_first_token_seconds", 1, 2),
        ("time_per_output_token_seconds", 4, 3),
        ("e2e_request_latency_seconds", 1, 5),
    ):
        assert f"megatron_mtp_{name}_count {count:.1f}" in page
        assert f"megatron_mtp_{name}_sum {total:.1f}" in page


def held(server: Running, sent: bytes) -> socket.socket:
    """Return a connection that has sent this and waits."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), TIMEOUT)
    connection.sendall(sent)
    return connection


HALVES = {
    "nothing": b"",
    "header": b"GET /health HTTP/1.1\r\nHos",
    "body": b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"prompt"',
}


@pytest.mark.parametrize("half", HALVES)
def test_a_request_that_does_not_arrive_ends_its_connection(
    half: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a byte arrives now and then; a request that has arrived may take as long as it needs."""
    monkeypatch.setattr(connections, "ARRIVAL_S", 0.3)
    server.engine.go.clear()
    arrived = raw(server, {"prompt": "ab", "max_tokens": 4})
    connection = held(server, HALVES[half])
    connection.settimeout(0.02)
    ended = False
    for _ in range(TIMEOUT * 50):
        with contextlib.suppress(TimeoutError):
            ended = connection.recv(999) == b""
        if ended:
            break
        with contextlib.suppress(OSError):
            connection.sendall(b"a" if half == "header" else b"")
    assert ended
    server.engine.go.set()
    assert b"200 OK" in answer(arrived)
    until(lambda: server.service.idle)


def test_a_connection_is_kept_as_long_as_the_setting_says(codec: Codec) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(Parrot(), codec) as server:
        assert server.server.config.timeout_keep_alive > 90, "pools of clients and proxies keep them for 60 to 90 s"
    with running(Parrot(), codec, settings=ServerSettings(keep_alive=0)) as server:
        assert b"200 OK" in answer(held(server, request)), "and the end"


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_ends_after_its_time(stream: bool, codec: Codec) -> None:
    with running(Parrot(pace=0.02), codec, settings=ServerSettings(shutdown_timeout=0.2)) as server:
        connection = raw(server, {"prompt": "ab", "max_tokens": 400, "stream": stream})
        until(lambda: live(server) == 1)
        server.server.handle_exit(15, None)
        said = answer(connection)
        assert b"the server is shutting down" in said
        assert stream == (b"503 Service Unavailable" not in said)
        until(lambda: server.server.should_exit)
        assert server.engine.cancelled == 1


def test_a_progress_line_describes_the_engine(
    codec: Codec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Load(0, 0, 0, 8, 0, 100, 0, AcceptanceStats())
    stats = AcceptanceStats()
    stats.count(2, 1, 160)
    now = replace(before, running=2, waiting=1, blocks_used=2, prompt_tokens=125, stats=stats)
    assert progress(before, before, 10) == ""
    assert progress(before, now, 10) == (
        "16.0 tokens/s, 2.5 tokens/s of prompts; 2 running, 1 waiting; 25% of the cache used; 50% of 2 drafted tokens "
        "accepted"
    )
    assert "drafted" not in progress(now, now, 10)
    monkeypatch.setattr(api, "PROGRESS_S", 0.1)
    with running(Parrot(), codec) as server:
        server.engine.go.clear()
        connection = raw(server, {"prompt": "ab", "max_tokens": 4})
        printed: list[str] = []
        until(lambda: (printed.append(capsys.readouterr().out), "1 running" in printed[-1])[1])
        server.engine.go.set()
        answer(connection)
    assert "> 0.0 tokens/s" in "".join(printed)


def test_a_log_that_cannot_be_written_ends_no_request(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []

    def full(line: str, **_: object) -> None:
        failed.append(line)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(api, "PROGRESS_S", 0.1)
    with running(Parrot(pace=0.02), codec) as server:
        monkeypatch.setattr(api, "print", full, raising=False)
        connection = raw(server, {"prompt": "ab", "max_tokens": 60})
        until(lambda: bool(failed))
        server.server.handle_exit(15, None)
        assert b"200 OK" in answer(connection)
    assert any("shutting down after all" in line for line in failed)


def test_responses_are_counted_and_optionally_logged(codec: Codec, capsys: pytest.CaptureFixture[str]) -> None:
    for settings in (ServerSettings(), ServerSettings(access_log=True)):
        with running(Parrot(), codec, key="secret", settings=settings) as server:
            authorized = {"Authorization": "Bearer secret"}
            for body, headers in (({"prompt": "a"}, authorized), ({}, authorized), ({}, {})):
                server.post("/v1/completions", body, headers=headers)
            httpx2.get(f"{server.url}/nowhere/{'x' * 99}")
            httpx2.get(f"{server.url}/v1/models/{NAME}", headers=authorized)
            for path, status, count in (
                ("/v1/completions", 200, 1),
                ("/v1/completions", 400, 1),
                ("/v1/models/{name:path}", 200, 1),
                ("other", 401, 1),
                ("other", 404, 1),
            ):
                assert server.metric(f'http_requests_total{{path="{path}",status="{status}"}}') == count
        printed = capsys.readouterr().out
        assert ('"POST /v1/completions HTTP/1.1" 200' in printed) == settings.access_log


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 2**20), (2**16, 2**20)),
        ((1024, resource.RLIM_INFINITY), (2**16, resource.RLIM_INFINITY)),
        ((2**17, 2**20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_the_limit_of_open_files_is_raised(
    limits: tuple[int, int], wanted: tuple[int, int] | None, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server accepts requests."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(api.Server, "run", lambda self, sockets: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: given.append(both))
    with listener("127.0.0.1", 0) as listening:
        assert api.serve(AsyncEngine(Parrot()), Served(NAME, codec, 9, 9, 9, 0), listening) == 0
    assert given == ([] if wanted is None else [wanted])


def test_connections_that_cannot_be_accepted_are_logged_once_a_minute(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    loop = server.service._loop
    assert loop is not None
    for message in [*["socket.accept() out of system resource"] * 2048, "something else"]:
        context = {"message": message, "exception": OSError(24)}
        loop.call_soon_threadsafe(loop.call_exception_handler, context)
    assert httpx2.get(f"{server.url}/health").status_code == 200, "after these calls"
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "no connection can be accepted",
        "something else",
    ]


def test_an_answer_that_is_complete_stays_complete_when_the_server_ends() -> None:
    service, done, grows = AsyncEngine(Parrot()), Outputs(0), Outputs(1)
    service._live |= {done, grows}
    service.end_all(shutting_down())

    async def read(outputs: Outputs) -> None:
        async for _ in outputs:
            pass

    asyncio.run(read(done))
    with pytest.raises(APIError, match="shutting down"):
        asyncio.run(read(grows))


@pytest.mark.matrix
def test_1500_slow_connections_do_not_block_other_requests(codec: Codec) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections.raise_open_files()
    try:
        with running(Parrot(), codec) as server, contextlib.ExitStack() as slow:
            for _ in range(1500):
                slow.enter_context(held(server, HALVES["header"]))
            assert httpx2.get(f"{server.url}/health").status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_host_name_that_is_too_long_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"^cannot listen on --host a{70}\.b --port 0 "):
        listener(f"{'a' * 70}.b", 0)


def test_an_address_in_use_gives_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen on .* --port {port} \(Address already in use\)"):
            listener("127.0.0.1", port)
    for host, port, said in (
        ("no.such.host.invalid", 80, "no.such.host.invalid"),
        ("127.0.0.1", 70000, "70000"),
    ):
        with pytest.raises(ValueError, match=said):
            listener(host, port)


@pytest.mark.matrix
def test_2000_requests_with_random_disconnects_leak_nothing(codec: Codec) -> None:
    """Half of the clients disconnect: before the response, or after some events."""
    chosen = random.Random(0)

    async def ask(client: httpx2.AsyncClient, url: str) -> None:
        body = {"prompt": "abc", "max_tokens": chosen.randint(1, 24), "n": chosen.randint(1, 3), "stream": True}
        patience = chosen.choice([10**9, chosen.randint(0, 8)])
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if not patience:
                return
            async for _ in answer.aiter_lines():
                patience -= 1
                if not patience:
                    return

    async def everyone(url: str) -> None:
        left = iter(range(2000))
        limits = httpx2.Limits(max_connections=40)

        async def one_after_another(client: httpx2.AsyncClient) -> None:
            for _ in left:
                await ask(client, url)

        async with httpx2.AsyncClient(limits=limits, timeout=60) as client:
            await asyncio.gather(*(one_after_another(client) for _ in range(40)))

    with running(Parrot(running=16, waiting=256, pace=0.004), codec) as server:
        asyncio.run(everyone(server.url))
        until(lambda: server.service.idle and not server.engine.busy)
        ended = [
            line
            for line in httpx2.get(f"{server.url}/metrics").text.splitlines()
            if "requests_total{finished_reason=" in line
        ]
        assert sum(float(line.split()[-1]) for line in ended) == server.engine._count > 2000
        assert server.engine.cancelled > 200
        assert server.engine.load.blocks_used == 0
        assert not server.service._owners
        assert len(server.server.server_state.tasks) <= 1
