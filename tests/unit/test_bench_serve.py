"""bench-serve against a server whose engine repeats prompts, one that has OpenAI's API and no more, and none."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from parrot import NAME, Parrot, Running, running, words
from starlette.responses import StreamingResponse

from megatron_mtp.cli import main as cli
from megatron_mtp.serving.bench.client import Answer, at_random, by_clients
from megatron_mtp.serving.bench.drafts import acceptance, counts
from megatron_mtp.serving.bench.figures import figures
from megatron_mtp.serving.bench.flags import parser
from megatron_mtp.serving.bench.workload import bodies
from megatron_mtp.serving.server import address_of, listener


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(Parrot(), words(tmp_path_factory.mktemp("tokenizer"))) as served:
        yield served


def measured(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert cli.main(["bench-serve", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_all_tokens_are_counted_and_acceptance_is_the_engines(
    server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.post("/v1/completions", {"prompt": "before", "temperature": 0})
    stats = server.engine.stats
    before = stats.accepted, stats.drafted
    flags = "--requests 10 --words 2:3 --max-tokens 20 --concurrency 4".split()
    found = measured(capsys, server.url, *flags, "--out", str(tmp_path / "results.png"))
    assert (found["model"], found["answered"], found["failed"], found["tokens"]) == (NAME, 10, {}, 200)
    assert found["load"] == "4 clients"
    counted = found["acceptance"]
    assert (counted["accepted"], counted["drafted"]) == (stats.accepted - before[0], stats.drafted - before[1])
    assert counted["accepted_per_position"][0] > counted["accepted_per_position"][1]
    for name in ("time_to_first_token", "time_per_output_token", "time_between_events", "time_per_request"):
        assert 0 < found[name]["p50"] <= found[name]["p99"]
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_random_arrivals_chats_and_a_table(server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "ab"}\n{"messages": [{"role": "user", "content": "x"}]}\n')
    flags = ["--input", str(tmp_path / "asked.jsonl"), "--requests", "4", "--rate", "200", "--max-tokens", "5"]
    assert cli.main(["bench-serve", f"{server.url}/v1/", *flags, "--extra-body", '{"top_k": 3}']) == 0
    rows = dict(row.split("  ", 1) for row in capsys.readouterr().out.splitlines())
    assert rows["requests"].strip().startswith("4 answered, 0 failed")
    assert rows["tokens"].strip().startswith("20 in ")
    assert "acceptance at position 1" in rows


def test_requests_that_fail_are_counted_with_their_reason(
    server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "ab"}\n{"prompt": [7]}\n')
    found = measured(capsys, server.url, "--input", str(tmp_path / "asked.jsonl"), "--requests", "4")
    assert (found["answered"], found["failed"]) == (2, {"status 400: no prompt begins with token 7.": 2})


@contextmanager
def plain_server() -> Iterator[str]:
    """No metrics, no usage, two events with text; the URL."""
    app = FastAPI()

    async def events() -> Any:
        for event in ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}):
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "plain"}]}

    @app.post("/v1/completions")
    def completions() -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    listening = listener("127.0.0.1", 0)
    served = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=served.run, args=([listening],))
    thread.start()
    while not served.started:
        time.sleep(0.01)
    try:
        yield address_of(listening)
    finally:
        served.should_exit = True
        thread.join(30)


def test_a_server_that_has_only_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_server() as url:
        found = measured(capsys, url, "--requests", "3")
    assert (found["model"], found["answered"], found["tokens"], found["acceptance"]) == ("plain", 3, 6, None)


FLAGS: dict[str, tuple[list[str], str]] = {
    "url": (["localhost:8000"], "the URL is 'localhost:8000'; give one like http://127.0.0.1:8000."),
    "no url": (["http://127.0.0.1:x"], "http://127.0.0.1:x does not answer (Invalid port: 'x')"),
    "nested": (["URL", "--extra-body", "[" * 100_000], "--extra-body is not JSON"),
    "nested line": (["URL", "--input", "deep.jsonl"], "which is no JSON object with a 'prompt'"),
    "nobody": (["http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer ("),
    "requests": (["URL", "--requests", "0"], "--requests is 0; give 1 or more."),
    "rate": (["URL", "--rate", "nan"], "--rate is nan; give requests a second, above 0."),
    "both": (["URL", "--rate", "1", "--concurrency", "1"], "--rate and --concurrency were both given"),
    "words": (["URL", "--words", "9:3"], "--words is 9:3; give the least and the most words"),
    "input": (["URL", "--input", "/nowhere"], "--input: '/nowhere' cannot be read"),
    "line": (["URL", "--input", "bad.jsonl"], "has the line '{\"text\": 1}', which is no JSON object with a 'prompt'"),
    "empty": (["URL", "--input", "empty.txt"], "'empty.txt' holds no prompt"),
    "extra": (["URL", "--extra-body", "{"], "--extra-body is not JSON"),
    "object": (["URL", "--extra-body", "[]"], "--extra-body is [], not a JSON object"),
    "out": (["URL", "--out", "x.gif"], "--out is 'x.gif'; give a file that ends in .png, .svg, .pdf."),
    "folder": (["URL", "--out", "/nowhere/x.png"], "whose folder is not there; make it first"),
    "all failed": (["URL", "--model", "gpt"], "no request was answered: status 404: the model 'gpt' is not served"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_bad_input_is_one_sentence(
    name: str, server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": 1}\n')
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("empty.txt").write_text("\n\n")
    flags, said = FLAGS[name]
    assert cli.main(["bench-serve", *(flag.replace("URL", server.url) for flag in flags)]) == 2
    printed = capsys.readouterr()
    assert said in printed.err.splitlines()[-1]
    assert printed.out == ""


def test_a_key_is_sent_and_its_absence_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(Parrot(), words(tmp_path), key="k") as server:
        assert cli.main(["bench-serve", server.url]) == 2
        assert "lists no model (status 401: the API key is missing or wrong" in capsys.readouterr().err
        assert measured(capsys, server.url, "--api-key", "k", "--requests", "2", "--words", "1:2")["answered"] == 2


def test_the_same_seed_asks_the_same() -> None:
    one, other, same = (
        bodies(parser("x").parse_args(["URL", "--seed", seed, "--words", "3:9"]), "m") for seed in ("1", "2", "1")
    )
    assert one == same != other
    assert {len(body["prompt"].split()) for body in one} == set(range(3, 10))


def test_clients_wait_for_their_answers_and_random_arrivals_do_not() -> None:
    live, most = 0, 0

    async def ask(body: dict[str, Any]) -> Answer:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await asyncio.sleep(0.002)
        live -= 1
        return Answer(0.0)

    asyncio.run(by_clients(ask, [{}] * 12, 3, lambda: None))
    assert most == 3
    most = 0
    asyncio.run(at_random(ask, [{}] * 12, 1e6, 0, lambda: None))
    assert most == 12


def test_figures_of_answers_that_a_person_can_check() -> None:
    answers = [
        Answer(0.0, [1.0, 2.0, 4.0], tokens=7, prompt_tokens=3),
        Answer(1.0, [4.0], tokens=1, prompt_tokens=2),
        Answer(2.0, error="why"),
    ]
    found = figures(answers)
    assert (found["answered"], found["failed"], found["tokens"], found["prompt_tokens"]) == (2, {"why": 1}, 8, 5)
    assert (found["seconds"], found["tokens_per_second"], found["requests_per_second"]) == (4.0, 2.0, 0.5)
    assert found["time_to_first_token"]["mean"] == 2.0
    assert found["time_per_output_token"]["mean"] == 0.5
    assert found["time_between_events"]["mean"] == 1.5
    assert found["time_per_request"]["p50"] == 3.5


VLLM = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 20.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 13.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 5.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1.0
"""


def test_vllms_counters_are_read_too() -> None:
    before = counts(VLLM.replace("10.0", "0").replace("20.0", "0").replace("13.0", "1").replace("8.0", "1"))
    found = acceptance(before, counts(VLLM))
    assert found == {"drafted": 20, "accepted": 12, "accepted_per_position": [0.7, 0.0], "accepted_length": 2.2}
    assert acceptance(counts(VLLM), counts(VLLM)) is None
    assert acceptance(None, counts("# TYPE x gauge\nx 1\n")) is None


def test_the_documented_address_is_this_machine() -> None:
    assert httpx2.URL(parser("x").format_help().split("bench-serve ")[1].split()[0]).host == "127.0.0.1"
