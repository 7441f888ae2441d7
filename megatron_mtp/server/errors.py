"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}} and an HTTP status.

400  what cannot be served, and what is no JSON        405  another method than the path has
401  a wrong key                                       413  a body that is too long
404  a path or a model that is not here                429  the queue is full
500  the engine has failed                             503  the server is ending
"""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

RETRIED_AFTER = {"Retry-After": "1"}
"""Seconds after which a client should ask again."""


class APIError(Exception):
    """What a client is answered instead of a text.

    Attributes:
        status: of HTTP.
        message: a sentence.
        param: the field of the body that is wrong.
        code: a word that programs compare.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _sendable(message), code
        self.param = None if param is None else _sendable(param)

    def response(self) -> JSONResponse:
        """The answer."""
        headers = RETRIED_AFTER if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)

    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        error = {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}
        return {"error": error}


def _sendable(text: str) -> str:
    """As UTF-8 can have it: JSON may name half of a surrogate pair, which a client has sent."""
    return text.encode(errors="backslashreplace").decode()


def refused(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Status 400: what cannot be served."""
    return APIError(400, message, param, code)


def failed() -> APIError:
    """Status 500: a bug, whose traceback stands in the server's log."""
    return APIError(500, "the engine has failed; the server's log has the reason.", code="engine_failed")


def add_handlers(app: FastAPI) -> None:
    """Answer in this form wherever the app, FastAPI or Starlette refuses something."""
    app.add_exception_handler(APIError, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(Exception, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return as_api_error(request, error).response()


def as_api_error(request: Request, error: Exception) -> APIError:
    """The answer to what was raised while a request was served."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_a_body(error)
    if isinstance(error, HTTPException):
        return APIError(error.status_code, _of_http(request, error))
    return failed()


def _of_a_body(error: RequestValidationError) -> APIError:
    """The first field that is wrong."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return refused(f"the body is no JSON ({first['ctx']['error']} at letter {first['loc'][1] + 1}); correct it.")
    param = ".".join(str(part) for part in first["loc"][1:])
    if not param:
        return refused("the body is no JSON object; send one, with Content-Type: application/json.")
    if first["type"] == "extra_forbidden":
        return refused(f"'{param}' is not served here; leave it out.", param, "unknown_parameter")
    return refused(f"{param}: {first['msg'].removeprefix('Value error, ')}", param)


def _of_http(request: Request, error: HTTPException) -> str:
    what = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return f"there is no {what}; the paths stand at /openapi.json."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return f"{what} is not served; this path has {error.headers['Allow'] if error.headers else 'another method'}."
    if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return too_long()
    return str(error.detail)


def too_long() -> str:
    """What is said of a body above the limit."""
    return f"the body has more than {LONGEST_BODY} bytes; send less."


LONGEST_BODY = 8 * 2**20
"""Bytes of a request: a million token ids, and no more."""


def _kind(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
