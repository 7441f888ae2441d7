"""A headless Chromium, controlled over its DevTools pipe: open a page and report its requests, messages and drawing."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
TIMEOUT = 60
"""Seconds for a page to load."""
SETTLED = 0.5
"""Seconds after loading in which a page may still print messages."""


def find_browser() -> str | None:
    """Return the command of a Chromium: the variable CHROMIUM, or one on the PATH."""
    named = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else list(NAMES)
    return next((path for name in named if (path := shutil.which(name))), None)


class Browser:
    """One process; commands go to its descriptor 3, and responses come from 4, as JSON terminated by a zero byte."""

    def __init__(self, command: str, profile: Path) -> None:
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe"
        shell = f'exec "$0" {flags} --user-data-dir="$1" 3<&{from_us} 4>&{to_us}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, command, str(profile)], pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL
        )
        os.close(from_us)
        os.close(to_us)
        os.set_blocking(self._read, False)
        self._received, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def open(self, page: Path | str) -> None:
        """Load a page, a file or an address, and wait until it has settled."""
        self.events.clear()
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        deadline = time.monotonic() + TIMEOUT
        while not self.named("Page.loadEventFired"):
            self._take(deadline)
        time.sleep(SETTLED)
        self.evaluate("0")  # earlier events have now been read

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """Return console messages of the page and the browser, and errors."""
        return [*self.named("Runtime.consoleAPICalled"), *self.named("Runtime.exceptionThrown"),
                *self.named("Log.entryAdded")]  # fmt: skip

    def requests(self) -> list[str]:
        """Return requested addresses, including the page's own."""
        return [event["params"]["request"]["url"] for event in self.named("Network.requestWillBeSent")]

    def named(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("method") == method]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command; events that arrive before it are stored."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while (answer := self._take(deadline)).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _take(self, deadline: float) -> dict[str, Any]:
        """Return the next message."""
        while b"\0" not in self._received:
            assert time.monotonic() < deadline, "the browser does not answer"
            assert self._process.poll() is None, f"the browser ended with status {self._process.returncode}"
            try:
                self._received += os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        first, self._received = self._received.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        self.events.append(message)
        return message
