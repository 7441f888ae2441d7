"""`megatron-mtp serve` as clients use it: a trained checkpoint, the official client, curl, hostile bodies, signals."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import launch
import openai
import psutil
import pytest
from documents import DOCUMENTS, blocks
from parrot import TEMPLATE

from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.spec.kinds import DRAFTERS

VERB = [sys.executable, "-m", "megatron_mtp"]
WORKER = Path(__file__).parents[1] / "support" / "serve_worker.py"
ENTRIES = 258
MTP = ["--speculative-config", '{"method": "mtp"}']
HYBRID = "--hybrid-layer-pattern M-*-/M-/M- --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 2"
PROMPTS = ["1,2,3", "9,8", "40,41,42,43,44,45,46,47,48,49,50", "7"]
TIMEOUT = 60


@dataclass
class Served:
    """A running server.

    Attributes:
        url: its address.
        process: its process, which writes to `log`.
    """

    url: str
    process: launch.Ranks
    log: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    def post(self, **fields: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}/v1/completions", json={"temperature": 0, **fields}, timeout=TIMEOUT)

    def metric(self, name: str) -> float:
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"megatron_mtp_{name} ")]
        return float(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"), "--num-layers 4")


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on the mock data until the model continues counting from a prompt, which a drafter can learn."""
    steps = "--train-iters 80 --save-interval 80 --eval-interval 80 --lr 5e-3"
    return trained(tmp_path_factory.mktemp("counting"), f"--num-layers 4 {steps}")


def trained(folder: Path, flags: str = "") -> Path:
    """Train two MTP layers for six steps, with a tokenizer that has a chat template."""
    steps = f"--train-iters 6 --eval-interval 6 --eval-iters 1 --save-interval 6 --save {folder / 'checkpoint'} "
    sizes = f"--vocab-size {ENTRIES} --max-position-embeddings 256"
    launch.run(launch.pretrain(*f"{steps} {sizes} {flags}".split(), "--ckpt-format", "torch_dist"), folder / "log")
    train_bpe(["abc abd"], ENTRIES, folder / "tokenizer")
    config = json.loads((folder / "tokenizer/tokenizer_config.json").read_text())
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


def flags_of(folder: Path) -> list[str]:
    given = ["--load", str(folder / "checkpoint"), "--tokenizer", str(folder / "tokenizer"), "--port", "0"]
    return [*given, *MTP, "--served-model-name", "tiny"]


def start(folder: Path, log: Path, *flags: str, ranks: int = 1) -> Served:
    given = [*flags_of(folder), *flags]
    process = launch.start([*VERB, "serve", *given] if ranks == 1 else launch.torchrun(ranks, WORKER, *given), log)
    until(lambda: "is served at" in log.read_text() or process.poll() is not None, launch.TIMEOUT)
    said = log.read_text()
    assert "> 'tiny' is served at http://127.0.0.1:" in said, said
    return Served(said.split("is served at ")[1].split()[0], process, log)


def until(holds: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run a server; it must exit with status 0 after SIGTERM."""
    server = start(folder, tmp_path_factory.mktemp("served") / "log", "--max-running", "8")
    try:
        yield server
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0, server.log.read_text()
    finally:
        server.process.kill()


def test_the_server_matches_generate_in_text_and_acceptance(served: Served, folder: Path, tmp_path: Path) -> None:
    assert_same_as_generated(served, folder, tmp_path)
    said = served.log.read_text()
    assert "> drafts: mtp, 2 tokens a step, verified by greedy at temperature 0 and rejection above\n" in said
    assert "> cache: 72 blocks of 32 tokens, " in said
    assert " GiB; 8 requests run and 256 wait, at most\n" in said


def assert_same_as_generated(
    served: Served, folder: Path, tmp_path: Path, drafting: list[str] = MTP, ranks: int = 1
) -> None:
    """Send all prompts at once to the server, and generate them as one batch on so many tensor-parallel ranks."""
    flags = [part for prompt in PROMPTS for part in ("--prompt-ids", prompt)]
    given = ["--load", str(folder / "checkpoint"), *flags, "--max-new-tokens", "40", "--batch-size", "4", *drafting]
    command = launch.torchrun(ranks, "generate_gpt.py", *given, "--json")
    there = json.loads(launch.output(command, tmp_path / "generated"))
    names = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    before = [served.metric(name) for name in names]
    ids = [[int(one) for one in prompt.split(",")] for prompt in PROMPTS]
    here = served.post(prompt=ids, max_tokens=40, return_token_ids=True, ignore_eos=True).json()
    assert [choice["token_ids"] for choice in here["choices"]] == there["token_ids"]
    counted = [served.metric(name) - start for name, start in zip(names, before, strict=True)]
    assert counted == [there["drafted"], there["accepted"]]
    assert counted[0] > 0


def test_sampling_by_a_server_matches_the_checkpoint_and_resumes(served: Served, folder: Path, tmp_path: Path) -> None:
    """Chats of two user turns, with a tool; the first command is killed while it waits for a response."""
    turns = [{"role": role, "content": "ab"} for role in ("user", "assistant", "user")]
    tools = [{"type": "function", "function": {"name": "add"}}]
    chats = [{"messages": [{"role": "system", "content": f"{number}"}, *turns], "tools": tools} for number in range(9)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    flags = f"--tokenizer {folder}/tokenizer --chat {tmp_path}/chats.jsonl --split 1 --texts 16 --temperature 0"
    command = [*VERB, "sample", *flags.split(), "--max-new-tokens", "80", "--logprobs"]
    launch.output([*command, "--load", f"{folder}/checkpoint", "--output-prefix", f"{tmp_path}/alone"], tmp_path / "a")
    command += ["--server", served.url, "--output-prefix", f"{tmp_path}/served"]
    file = tmp_path / "served.texts.jsonl"
    killed = launch.start([*command, "--concurrency", "1"], tmp_path / "killed")
    until(lambda: file.exists() and file.read_bytes().count(b"\n") > 3, launch.TIMEOUT)
    killed.kill()
    killed.wait()
    lines = file.read_bytes().split(b"\n")[:-1]
    assert len(lines) < 17
    assert "16 samples" in launch.output([*command, "--concurrency", "4"], tmp_path / "resumed")
    after = file.read_bytes().split(b"\n")[:-1]
    assert after[: len(lines)] == lines
    there, alone = ({one["number"]: one for one in map(json.loads, path.read_bytes().splitlines()[1:])}
                    for path in (file, tmp_path / "alone.texts.jsonl"))  # fmt: skip
    assert len(after) == 17
    assert there.keys() == alone.keys() == set(range(16))
    for number, text in alone.items():
        logprobs = there[number].pop("logprobs")
        assert logprobs == pytest.approx(text.pop("logprobs"), abs=1e-3)
        assert there[number] == text
    for ending in ("bin", "idx", "answers.npy"):
        assert (tmp_path / f"served.{ending}").read_bytes() == (tmp_path / f"alone.{ending}").read_bytes()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_serves_what_it_generates_on_two_ranks(kind: str, counting: Path, tmp_path: Path) -> None:
    """The drafter is trained on a checkpoint's trunk, without its MTP layers."""
    given = f"--use-checkpoint-args --load {counting}/checkpoint --save {tmp_path}/checkpoint --save-interval 40 "
    given += "" if DRAFTERS[kind].reads == 0 else "--drafter-layers 1 2 3 "
    given += f"--drafter {kind} --drafter-steps 3 --seq-length 64 --train-iters 40 --lr 1e-2 "
    given += "--micro-batch-size 2 --global-batch-size 2 --mock-data --eval-iters 0 --eval-interval 100"
    launch.run(launch.python("pretrain_gpt.py", *given.split()), tmp_path / "train")
    (tmp_path / "tokenizer").symlink_to(counting / "tokenizer")
    drafting = ["--speculative-config", json.dumps({"method": kind})]
    server = start(tmp_path, tmp_path / "log", *drafting)
    try:
        assert_same_as_generated(server, tmp_path, tmp_path, drafting, ranks=2)
        # With features in the wrong order, 3 drafts of EAGLE-3 would be accepted, and none of DFlash.
        assert server.metric("spec_decode_num_accepted_tokens_total") >= 10
    finally:
        server.process.kill()


@pytest.mark.matrix
def test_a_hybrid_is_served_as_it_generates(tmp_path: Path) -> None:
    """Two of the four requests wait, and then take over the others' states."""
    folder = trained(tmp_path, HYBRID)
    server = start(folder, tmp_path / "served", "--max-running", "2")
    try:
        assert_same_as_generated(server, folder, tmp_path)
        assert [server.metric(name) for name in ("recurrent_states", "recurrent_states_used")] == [2, 0]
    finally:
        server.process.kill()


def test_the_official_client_chats_and_streams(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list().data] == ["tiny"]
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24}
    asked |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason in ("length", "stop")
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].logprobs is not None
    for entry in whole.choices[0].logprobs.content or []:
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0, "greedy takes the most probable token"
        assert entry.top_logprobs[1].logprob <= entry.logprob
    with pytest.raises(openai.BadRequestError, match="no manners"):
        client.chat.completions.create(model="tiny", messages=[{"role": "rude", "content": "x"}])  # type: ignore[typeddict-item]


def test_a_sampled_text_depends_on_its_seed_alone(served: Served) -> None:
    def texts(n: int) -> list[str]:
        body = {"prompt": "ab", "temperature": 1, "max_tokens": 20, "seed": 5, "n": n, "return_token_ids": True}
        return [choice["token_ids"] for choice in served.post(**body).json()["choices"]]

    alone = [served.post(prompt="ab", temperature=1, max_tokens=20, seed=seed, return_token_ids=True).json()
             ["choices"][0]["token_ids"] for seed in (5, 6, 7)]  # fmt: skip
    assert texts(3) == alone
    assert alone[0] != alone[1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on the PATH; install it")
def test_curl_reads_the_stream(served: Served) -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 12, "stream": True, "temperature": 0})
    words = ["curl", "-sN", f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(words, capture_output=True, text=True, check=True, timeout=TIMEOUT).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")


def test_hostile_bodies_get_an_api_error_and_the_server_continues(served: Served) -> None:
    hostile: list[tuple[bytes, int]] = [
        (b'{"prompt": "a', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (json.dumps({"prompt": [1] * 10**6}).encode(), 400),
        (b'{"prompt": "' + b"a" * 10**7 + b'"}', 413),
        (b'{"prompt": "\\ud800"}', 400),
        (b"[" * 10**5, 400),
    ]
    for body, status in hostile:
        headers = {"Content-Type": "application/json"}
        answer = httpx2.post(f"{served.url}/v1/completions", content=body, headers=headers, timeout=TIMEOUT)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert served.post(prompt="🙂€", max_tokens=4).status_code == 200


def test_64_connections_at_once(served: Served) -> None:
    async def ask(client: httpx2.AsyncClient, number: int) -> list[int]:
        body = {"prompt": [number + 1, 5], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        answer = await client.post(f"{served.url}/v1/completions", json=body)
        return answer.json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]

    async def everyone() -> list[list[int]]:
        async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=64), timeout=TIMEOUT) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    together = asyncio.run(everyone())
    prompts = [[number + 1, 5] for number in range(64)]
    again = served.post(prompt=prompts, max_tokens=12, return_token_ids=True).json()["choices"]
    assert together == [choice["token_ids"] for choice in again]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_sequences(served: Served, stream: bool) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "ab", "n": 96, "max_tokens": 200, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    reasons = [f'requests_total{{finished_reason="{reason}"}}' for reason in ("length", "cancelled")]
    before = [served.metric(reason) for reason in reasons]
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: served.metric("num_requests_running") == 8)
    until(lambda: served.metric("num_requests_running") == 0)
    assert served.metric("cache_blocks_used") == 0
    ended, cancelled = (served.metric(reason) - start for reason, start in zip(reasons, before, strict=True))
    assert ended + cancelled == 96
    assert cancelled > 0


@pytest.mark.skipif(
    shutil.which("guidellm") is None,
    reason="guidellm is not on PATH; install it into an environment of its own and put that one's bin/ at PATH's end",
)
def test_guidellm_can_benchmark_the_server(served: Served, folder: Path, tmp_path: Path) -> None:
    """The command of docs/guides/serve.md, with fewer requests and without a network."""
    page = blocks(DOCUMENTS["docs/guides/serve.md"].read_text(), "bash")
    (command,) = (block for _, block in page if block.startswith("guidellm run"))
    here = {
        "http://127.0.0.1:8000": served.url,
        "runs/quickstart/data/corpus-tokenizer": str(folder / "tokenizer"),
        "count=300": "count=6",
    }
    for shown, given in here.items():
        assert shown in command
        command = command.replace(shown, given)
    before = served.metric("spec_decode_num_drafts_total")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True, timeout=launch.TIMEOUT)
    (found,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert found["metrics"]["output_token_count"]["successful"]["total_sum"] == 6 * 64
    assert served.metric("spec_decode_num_drafts_total") > before


def test_a_signal_drains_and_a_second_one_ends_at_once(folder: Path, tmp_path: Path) -> None:
    server = start(folder, tmp_path / "log")
    try:
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        stream = iter(server.client().completions.create(**body, stream=True))
        next(stream)
        os.kill(server.process.pid, signal.SIGTERM)
        until(lambda: "shutting down after all requests finish" in server.log.read_text())
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        assert server.process.wait(TIMEOUT) == 0
    finally:
        server.process.kill()
    server = start(folder, tmp_path / "log2", "--max-running", "1", "--max-model-len", "150")
    try:
        assert server.client().models.retrieve("tiny").model_dump()["max_model_len"] == 150
        chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}  # without max_tokens
        done = httpx2.post(f"{server.url}/v1/chat/completions", json=chat, timeout=TIMEOUT).json()
        assert done["usage"]["total_tokens"] == 150
        body |= {"n": 20, "max_tokens": 100}
        stream = iter(server.client().completions.create(**body, stream=True))
        next(stream)
        for _ in range(2):
            os.kill(server.process.pid, signal.SIGINT)
            time.sleep(0.1)
        assert server.process.wait(TIMEOUT) == 128 + signal.SIGINT
    finally:
        server.process.kill()


def answers(server: Served) -> list[Any]:
    """Return greedy and sampled outputs, with a stop string, from several clients at once."""
    bodies: list[dict[str, Any]] = [
        {"prompt": [[int(one) for one in prompt.split(",")] for prompt in PROMPTS], "max_tokens": 30},
        {"prompt": "ab", "temperature": 1, "seed": 3, "n": 3, "max_tokens": 30},
        {"prompt": "ab", "temperature": 1, "seed": 9, "n": 6, "max_tokens": 100, "stop": ["a", "b", "c", "d"]},
    ]
    with ThreadPoolExecutor() as clients:
        done = list(clients.map(lambda body: server.post(**body, return_token_ids=True).json(), bodies))
    return [(choice["token_ids"], choice["finish_reason"]) for one in done for choice in one["choices"]]


@pytest.mark.matrix
def test_two_ranks_serve_the_same_text_as_one(served: Served, folder: Path, tmp_path: Path) -> None:
    """They warm up, idle, take requests, abort one whose client disconnected, and end when the first rank drains."""
    server = start(folder, tmp_path / "log", "--warm-up", "--max-running", "3", ranks=2)
    try:
        assert "> warm-up: " in server.log.read_text()
        expected = answers(served)
        assert answers(server) == expected
        assert any(reason == "stop" for _, reason in expected)
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 200, "stream": True}
        ):
            pass
        until(lambda: server.metric("num_requests_running") == 0)
        assert answers(server) == expected
        automatic = {"method": "mtp", "num_speculative_tokens": "auto"}  # rank 0 chooses for both ranks
        same = [one.post(prompt="ab", max_tokens=150, return_token_ids=True, **more).json()["choices"][0]["token_ids"]
                for one, more in ((served, {}), (server, {"speculative_config": automatic}))]  # fmt: skip
        assert same[0] == same[1]
        assert len(same[0]) > 20
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0, server.log.read_text()
    finally:
        server.process.kill()


@pytest.mark.matrix
def test_a_killed_rank_ends_the_job(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = launch.start_torchrun(launch.torchrun(2, WORKER, *flags_of(folder)), log)
    try:
        until(lambda: "is served at" in log.read_text() or process.poll() is not None, launch.TIMEOUT)
        url = log.read_text().split("is served at ")[1].split()[0]
        assert httpx2.get(f"{url}/health").status_code == 200
        workers = psutil.Process(process.pid).children(recursive=True)
        (second,) = [worker for worker in workers if worker.environ().get("RANK") == "1"]
        second.kill()
        assert process.wait(TIMEOUT) != 0
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health")
    finally:
        if process.poll() is None:
            launch.kill(process)


def test_bad_input_is_rejected_with_a_clear_error(folder: Path, tmp_path: Path) -> None:
    load = ["--load", str(folder / "checkpoint")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        bad = {
            "taken": ([*load, "--port", port], f"--port {port} (Address already in use)"),
            "port": ([*load, "--port", "99999"], "--port is 99999; give 1 to 65535"),
            "checkpoint": (["--load", "/nowhere", "--port", "0"], "--load: /nowhere does not exist"),
            "method": ([*load, "--port", "0", "--speculative-config", "{}"], "'method' is missing"),
            "cache": ([*load, "--port", "0", "--cache-gib", "nan"], "--cache-gib is nan"),
            "running": ([*load, "--port", "0", "--max-running", "0"], "--max-running is 0; give 1 or more"),
            "length": ([*load, "--port", "0", "--max-model-len", "257"], "the model has 256 positions; give no more"),
        }
        for name, (flags, said) in bad.items():
            process = launch.start([*VERB, "serve", *flags], tmp_path / name)
            assert process.wait(launch.TIMEOUT) == 2, name
            printed = (tmp_path / name).read_text()
            assert printed.count("megatron-mtp serve: error: ") == 1, printed
            assert said in printed
