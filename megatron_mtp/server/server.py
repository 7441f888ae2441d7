"""uvicorn with a drain: the first SIGTERM or Ctrl-C ends the server when its texts have ended, a second one at once."""

import os
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import override

import uvicorn
from starlette.types import ASGIApp

from megatron_mtp.decoding.requests import Engine
from megatron_mtp.server.answers import Served
from megatron_mtp.server.app import make_app
from megatron_mtp.server.metrics import Metrics
from megatron_mtp.server.service import Service

PATIENCE = 10
"""Seconds in which clients read the end of what they asked for, after the last token of all texts."""


def serve(engine: Engine, served: Served, listening: socket.socket, key: str | None = None) -> int:
    """Serve an engine at a socket until a signal ends it; returns the exit status, 1 if the engine has failed."""
    metrics = Metrics()
    service = Service(engine, metrics)

    def ready() -> None:
        print(f"> '{served.name}' is served at {address_of(listening)}", flush=True)

    Server(make_app(service, served, metrics, key), service, ready).run([listening])
    return int(service.broken)


class Server(uvicorn.Server):
    """Serves an application until its service has drained, or is broken."""

    def __init__(self, app: ASGIApp, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=PATIENCE))
        self._service, self._ready = service, ready

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._ready()

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal."""
        if self._service.draining:
            os._exit(128 + sig)
        self._service.draining = True
        print("> ending when all texts have ended; a second signal ends at once", file=sys.stderr, flush=True)

    @override
    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        self.should_exit |= self._service.broken or (self._service.draining and self._service.idle)
        return await super().on_tick(counter)


def listener(host: str, port: int) -> socket.socket:
    """A socket with this address, which refuses connections until the server is ready.

    Raises:
        ValueError: the address cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"--port is {port}; give 1 to 65535, or 0 for any that is free.")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, UnicodeError) as error:  # the latter for a name of too many letters
        reason = getattr(error, "strerror", error)
        raise ValueError(
            f"--host {host} --port {port} cannot be listened at ({reason}); give another one, or --port 0 for any "
            "that is free."
        ) from error
    return made


def address_of(listening: socket.socket) -> str:
    """The URL of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
