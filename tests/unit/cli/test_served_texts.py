"""`sample --server` with a server that fails as real ones do: 429, 500, dropped connections, another tokenizer."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, override

import pytest
from parrot import tokenizer_in

from megatron_mtp.cli import main as cli
from megatron_mtp.cli import served_texts

EOD, BCD = 0, [67, 68, 69]
Answer = dict[str, Any] | int | None
"""A response body, the status of a failure, or None for a dropped connection."""


class Stub(BaseHTTPRequestHandler):
    """Answer every prompt with the characters b c d, after the failures of `failing`."""

    failing: list[int | None]
    bodies: list[dict[str, Any]]
    choice: dict[str, Any]
    models: Answer

    def do_GET(self) -> None:
        self._send(self.models)

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        done = {"choices": [{"index": 0, "text": "bcd", "finish_reason": "length", **self.choice}]}
        counted = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        self._send(self.failing.pop(0) if self.failing else {**done, "object": "text_completion", "usage": counted})

    def _send(self, answer: Answer) -> None:
        if answer is None:
            self.close_connection = True
            return
        body = json.dumps(answer if isinstance(answer, dict) else {"error": {"message": "no room"}}).encode()
        self.send_response(200 if isinstance(answer, dict) else answer)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", len(body)), ("retry-after-ms", 1)):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def stub() -> Iterator[type[Stub]]:
    models = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 64}]}
    Own: Any = type("Own", (Stub,), {"failing": [], "bodies": [], "choice": {}, "models": models})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    Own.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("saved")
    tokenizer_in(
        made / "tokenizer", "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def sample(
    stub: Any, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')

    def run(*flags: object) -> tuple[int, str, str]:
        given = ["--server", stub.url, "--tokenizer", tokenizer, "--chat", tmp_path / "chats.jsonl", "--split", 1]
        given += ["--texts", 3, "--output-prefix", tmp_path / "own", "--max-new-tokens", 12, "--concurrency", 1]
        status = cli.main(["sample", *map(str, (*given, *flags))])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def texts(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "own.texts.jsonl").read_text().splitlines()[1:]]


def test_a_text_without_ids_is_encoded_again_with_its_end(
    stub: Any, sample: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    stub.choice = {"finish_reason": "stop"}
    status, shown, said = sample("--temperature", 0.6, "--top-k", 5, "--seed", 2)
    assert status == 0, said
    assert "3 samples" in shown
    assert [text["tokens"] for text in texts(tmp_path)] == [[*BCD, EOD]] * 3
    body, text = stub.bodies[1], texts(tmp_path)[1]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_k"]) == ("tiny", 12, 0.6, 5)
    assert (body["seed"], body["stop_token_ids"], body["prompt"]) == ((2 << 32) + 1, [EOD], text["prompt"])


def test_ids_and_log_probabilities_of_the_server_are_kept(
    stub: Any, sample: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    stub.choice = {"token_ids": BCD, "logprobs": {"token_logprobs": [-0.5, -1.0, -2.0]}}
    assert sample("--logprobs")[0] == 0
    assert [(text["tokens"], text["logprobs"]) for text in texts(tmp_path)] == [(BCD, [-0.5, -1.0, -2.0])] * 3
    assert {body["logprobs"] for body in stub.bodies} == {0}


def test_failures_are_tried_again(stub: Any, sample: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    stub.failing = [429, 500, None, 503]
    status, _, said = sample()
    assert status == 0, said
    assert len(stub.bodies) == 7
    assert sorted(text["number"] for text in texts(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (500, "answers 500 for text 1 9 times (Error code: 500"),
        (None, " for text 1 ("),
        (400, "answers 400 for text 1 and is not asked again (Error code: 400"),
        (401, "set OPENAI_API_KEY to its key"),
    ],
)
def test_a_broken_server_gives_a_clear_error_and_the_command_resumes(
    failure: int | None, says: str, stub: Any, sample: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert sample("--texts", 1)[0] == 0
    stub.failing = [failure] * (served_texts.RETRIES + 1)
    status, _, said = sample()
    assert (status, "Traceback" in said) == (2, False)
    assert says in said.splitlines()[-1]
    assert said.endswith("finished samples are kept, and the same command continues.\n")
    stub.failing.clear()
    assert sample()[0] == 0
    assert [text["number"] for text in texts(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (
            {"token_ids": [67, 68, 70]},
            "gives the token ids [67, 68, 70] for 'bcd', and here they are 'bce'; serve the model",
        ),
        ({"text": "bcdbcdbcd"}, "counts 3 tokens in 'bcdbcdbcd', and here they are 9; serve the model"),
        ({"text": None}, "sends text 0 in a format other than OpenAI's; correct the URL."),
        ({"finish_reason": "abort"}, "text 0 ended by 'abort'; see the server's log."),
    ],
)
def test_malformed_server_responses_are_rejected(
    choice: dict[str, Any], says: str, stub: Any, sample: Callable[..., tuple[int, str, str]]
) -> None:
    stub.choice = choice
    status, _, said = sample()
    assert status == 2
    assert says in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "other"], "serves tiny, and --model is other; give one of these."),
        (["--dtype", "float32"], "--dtype was given with --server, which runs the model as it was started; leave"),
        (["--server", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9 for the list of models ("),
    ],
)
def test_bad_input_is_rejected_with_a_clear_error(
    flags: list[str], says: str, sample: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, said = sample(*flags)
    assert (status, said.count("\n")) == (2, 1)
    assert says in said


def test_texts_of_another_model_are_refused(stub: Any, sample: Callable[..., tuple[int, str, str]]) -> None:
    assert sample("--texts", 1)[0] == 0
    stub.models = {"object": "list", "data": [{"id": "larger", "object": "model"}]}
    assert "holds samples made with another --model; add" in sample()[2]
