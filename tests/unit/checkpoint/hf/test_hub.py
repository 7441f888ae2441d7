"""checkpoint/hf/hub.py against a local Hub: what is downloaded, and how interrupted downloads resume."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = bytes(range(256)) * 2**17
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "modeling.py": b"raise SystemExit"}
CUT = len(WEIGHTS) // 2
"""Bytes before a download breaks off: more than huggingface_hub reads at a time, which is 10 MiB."""


class Hub(BaseHTTPRequestHandler):
    """The endpoints that huggingface_hub uses for a snapshot.

    Attributes:
        asked: file and first byte of every download.
        cuts: number of weight downloads that break off after `CUT` bytes.
    """

    asked: ClassVar[list[tuple[str, int]]] = []
    cuts: ClassVar[int] = 0

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/own/model/tree/"):
            return self._send(json.dumps([entry(name) for name in FILES]).encode(), {}, with_body)
        if path.startswith("/api/models/own/model"):
            siblings = [{"rfilename": name} for name in FILES]
            whole = {"_id": "1", "id": "own/model", "sha": COMMIT, "siblings": siblings}
            return self._send(json.dumps(whole).encode(), {}, with_body)
        name = path.rpartition("/")[2]
        if not path.startswith(f"/own/model/resolve/{COMMIT}/") or name not in FILES:
            return self.send_error(404)
        etag = {"ETag": f'"{hashlib.sha256(FILES[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if with_body:
            Hub.asked.append((name, first))
        return self._send(FILES[name], etag, with_body, first)

    def _send(self, body: bytes, headers: dict[str, str], with_body: bool, first: int = 0) -> None:
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        for key, value in {**headers, "Content-Length": str(len(body) - first)}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body and body is WEIGHTS and Hub.cuts:
            Hub.cuts -= 1
            self.wfile.write(body[first : first + CUT])
            self.close_connection = True
        elif with_body:
            self.wfile.write(body[first:])


def entry(name: str) -> dict[str, object]:
    """Return a file's entry in the repository listing."""
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": hashlib.sha1(FILES[name]).hexdigest()}


@pytest.fixture
def hub() -> Iterator[str]:
    """Return the address of a Hub with one model."""
    Hub.asked.clear()
    Hub.cuts = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def download(hub: str, cache: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run `local_folder` in a separate process, since huggingface_hub reads its settings at import."""
    proxies = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    code = "import sys; from megatron_mtp.checkpoint.hf.hub import local_folder; print(local_folder(sys.argv[1]))"
    words = [sys.executable, "-c", code, name]
    return subprocess.run(words, env={**proxies, **settings}, capture_output=True, text=True, timeout=300)


def test_an_interrupted_download_resumes(hub: str, tmp_path: Path) -> None:
    Hub.cuts = 1
    done = download(hub, tmp_path, "own/model")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().splitlines()[-1])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]  # and no code
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    began, resumed = (first for name, first in Hub.asked if name == "model.safetensors")
    assert (began, 0 < resumed <= CUT) == (0, True)

    Hub.asked.clear()
    again = download(hub, tmp_path, "own/model@main")
    assert again.stdout == done.stdout
    assert Hub.asked == []


def test_an_unreachable_hub_error_asks_for_a_folder(tmp_path: Path) -> None:
    done = download("http://127.0.0.1:9", tmp_path, "own/model")
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.endswith("could not be downloaded from the Hugging Face Hub: the Hub cannot be reached, and the model "
                         "is not in the cache; give a folder.")  # fmt: skip
