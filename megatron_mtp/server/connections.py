"""Limits on how long a request may take to arrive, and on the number of open files."""

import asyncio
import logging
import resource
import time
from typing import Any, override

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL_S = 30.0
"""Seconds from the first byte of a connection or a request to the request's last byte; then the connection is closed.
"""

OPEN_FILES = 2**16
"""Soft limit of open files that the server requests; each connection is one. The usual limit is 1,024."""

REPEAT_S = 60.0
"""Seconds between two log lines that no connection can be accepted."""

logger = logging.getLogger(__name__)


class TimedProtocol(H11Protocol):
    """Uvicorn's protocol that also closes a connection whose request does not arrive in time.

    Uvicorn itself limits only the time between requests (`timeout_keep_alive`).
    """

    _arriving: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_request()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_request()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait_for_request(self) -> None:
        """Start, continue or stop the timeout of a request, by whether all of its bytes have arrived."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif self._arriving is None:
            self._arriving = self.loop.call_later(ARRIVAL_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None


def raise_open_files() -> None:
    """Raise the soft limit of open files to `OPEN_FILES`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LoopErrors:
    """Exception handler of the event loop that logs at most one line a minute if connections cannot be accepted.

    asyncio logs a traceback for each attempt, up to 2,048 per second.
    """

    def __init__(self) -> None:
        self._last = -REPEAT_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the loop."""
        if not str(context.get("message")).startswith("socket.accept() out of"):
            loop.default_exception_handler(context)
        elif (now := time.monotonic()) >= self._last + REPEAT_S:
            self._last = now
            logger.warning("no connection can be accepted: %s; raise the limit of open files", context.get("exception"))
