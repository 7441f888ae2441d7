"""The server's paths, as a FastAPI application.

POST  /v1/completions, /v1/chat/completions      GET  /v1/models, /v1/models/NAME
GET   /health, /metrics                          GET  /openapi.json  the fields
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_mtp.server.answers import Served, answered
from megatron_mtp.server.bodies import ChatBody, CompletionBody
from megatron_mtp.server.chat import Chat
from megatron_mtp.server.completions import Completions
from megatron_mtp.server.errors import LONGEST_BODY, APIError, add_handlers, too_long
from megatron_mtp.server.metrics import Metrics
from megatron_mtp.server.service import Service


class Gate:
    """Refuses before a body is read: a wrong key for what costs something, and a body that says that it is too long."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        answering = self._app if scope["type"] != "http" else self._refused(scope) or self._app
        await answering(scope, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if not self._allows(scope["path"], headers.get("authorization", "")):
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`."
            return APIError(401, message, code="invalid_api_key").response()
        if length.isdecimal() and int(length) > LONGEST_BODY:
            return APIError(413, too_long()).response()
        return None

    def _allows(self, path: str, given: str) -> bool:
        if self._key is None or not path.startswith("/v1"):
            return True
        return secrets.compare_digest(given.encode("latin-1"), f"Bearer {self._key}".encode())


def make_app(service: Service, served: Served, metrics: Metrics, key: str | None = None) -> ASGIApp:
    """The application; it starts and ends the service's thread.

    Args:
        service: runs the engine.
        served: the model.
        metrics: those that the service feeds.
        key: that clients must send, if any.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    metrics.read(lambda: service.load)
    app = FastAPI(title="megatron-mtp", lifespan=lifespan, max_body_size=LONGEST_BODY, docs_url=None, redoc_url=None)
    add_handlers(app)
    _add_texts(app, service, served)
    _add_facts(app, service, served, metrics)
    return Gate(app, key)


def _add_texts(app: FastAPI, service: Service, served: Served) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, asked: Request) -> Response:
        return await answered(asked, service, Completions(body, served), body, served)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, asked: Request) -> Response:
        return await answered(asked, service, Chat(body, served), body, served)


def _add_facts(app: FastAPI, service: Service, served: Served, metrics: Metrics) -> None:
    model = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "megatron-mtp",
        "max_model_len": served.positions,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def named(name: str) -> dict[str, Any]:
        if name != served.name:
            raise APIError(404, f"the model '{name}' is not served; '{served.name}' is.", "model", "model_not_found")
        return model

    @app.get("/health")
    async def health() -> Response:
        state = "broken" if service.broken else "draining" if service.draining else "ok"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)
