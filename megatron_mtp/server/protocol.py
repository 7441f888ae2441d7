"""The HTTP API's protocol: bodies of requests, checked, and errors, in OpenAI's form.

Fields are OpenAI's, and those that vLLM adds under vLLM's names. Any other field is refused, so that a misspelt one
does not change a completion in silence.

Errors are {"error": {"message", "type", "param", "code"}} with an HTTP status:

400  what cannot be served, and what is no JSON        413  a body that is too long
401  a wrong key                                       415  a body that is compressed
404  a path or a model that is not here                429  the queue is full
405  another method than the path has                  500  the engine has failed
                                                       503  the server is ending
"""

import json
import secrets
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self, override

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.sampling import LEAST_TEMPERATURE, Penalties

LONGEST_BODY = 8 * 2**20
"""Bytes of a request: a million token ids, and no more."""

TOO_LONG = f"the body has more than {LONGEST_BODY} bytes; send less."

IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls "
    "request_id rid cache_prompt cache_salt"
    .split()
)  # fmt: skip
"""Fields that change no completion, and may be sent."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    name: values
    for names, values in (
        ("tool_choice function_call", ("none", "auto")),
        ("skip_special_tokens spaces_between_special_tokens detokenize", (True,)),
        ("include_stop_str_in_output return_tokens_as_token_ids use_beam_search early_stopping no_stop_trim", (False,)),
        ("num_beams length_penalty typical_p tfs tfs_z repeat_penalty", (1,)),
        ("priority top_a mirostat", (0,)),
        ("functions tools bad_words logits_processors documents stop_regex", ([],)),
        ("response_format", ({"type": "text"},)),
        ("modalities", (["text"],)),
        ("suffix", ("",)),
        ("verbosity", ("medium",)),
    )
    for name in names.split()
}
"""Fields of OpenAI, vLLM, SGLang and llama.cpp that are not served, with the values that change no completion."""

LONGEST_MESSAGE, MESSAGE_END = 600, 200
"""Characters of an error; of a longer one, as many of its end stay, which says what to do."""

MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_LOGPROBS = 128, 16, 256, 20
SEEDS = 2**63
USUAL_LIMIT = 16
"""New tokens of a completion, where a body does not say."""

Integer = Annotated[
    int, BeforeValidator(lambda given: int(given) if type(given) is float and given % 1 == 0 else given)
]
"""An integer, also as clients write it that know floats alone: 16.0."""


class APIError(Exception):
    """An answer that is an error.

    Attributes:
        message: a sentence.
        param: the field of the body that is wrong.
        code: a word that programs compare.
        status: of HTTP; 400 for what cannot be served.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.code, self.status = _sendable(message), code, status
        self.param = None if param is None else _sendable(param)

    def response(self) -> JSONResponse:
        """The answer; clients ask again after a second where that may help."""
        return JSONResponse(self.body(), self.status, {"Retry-After": "1"} if self.status in (429, 503) else None)

    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = "rate_limit_error" if self.status == HTTPStatus.TOO_MANY_REQUESTS else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _sendable(text: str) -> str:
    """Text that UTF-8 can hold, since JSON may name half of a surrogate pair; without the middle of a long value."""
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[: LONGEST_MESSAGE - MESSAGE_END]} ... {text[-MESSAGE_END:]}"
    return text.encode(errors="backslashreplace").decode()


def failed() -> APIError:
    """Status 500: a bug, whose traceback stands in the server's log."""
    return APIError("the engine has failed; the server's log has the reason.", code="engine_failed", status=500)


def add_error_handlers(app: FastAPI) -> None:
    """Answer in this form wherever the app, FastAPI or Starlette refuses something."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return _as_api_error(request, error).response()

    for kind in (APIError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _as_api_error(request: Request, error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_a_body(error)
    if not isinstance(error, HTTPException):
        return failed()
    what, message = f"{request.method} {request.url.path}", str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no {what}; the paths stand at /openapi.json."
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = error.headers["Allow"] if error.headers else "another method"
        message = f"{what} is not served; this path has {allowed}."
    elif error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        message = TOO_LONG
    return APIError(message, status=error.status_code)


def _of_a_body(error: RequestValidationError) -> APIError:
    """The first field that is wrong; of a field with several forms, in the form that comes nearest."""
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        place = first["loc"][1] + 1
        return APIError(f"the body is no JSON ({first['ctx']['error']} at character {place}); correct it.")
    param = ".".join(part for part in map(str, first["loc"][1:]) if not part.startswith("list["))
    said = first["msg"].removeprefix("Value error, ")
    if not param and first["type"] == "value_error":  # of several fields
        return APIError(f"{said}.")
    if not param:
        return APIError("the body is no JSON object; send one, with Content-Type: application/json.")
    if first["type"] == "extra_forbidden":
        known = " or ".join(json.dumps(value) for value in NEUTRAL.get(param, ()))
        but = f" with another value than {known}" if known else ""
        return APIError(f"'{param}' is not served here{but}; leave it out.", param, "unknown_parameter")
    return APIError(f"{param}: {said}", param)


class StreamOptions(BaseModel):
    """`include_usage`: the last event has the sums of tokens."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Body(BaseModel):
    """Fields of both endpoints, and what the engine understands of them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1), AfterValidator(lambda given: max(given, 0))] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    seed: Annotated[Integer, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    n: Annotated[Integer, Field(ge=1, le=MOST_CHOICES)] = 1
    best_of: Integer | None = None
    stop: list[str] = []
    logit_bias: dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] = {}
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    stop_token_ids: list[Integer] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_drafts: bool = False
    speculative_config: dict[str, Any] | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False

    @property
    def top(self) -> int | None:
        """The number of most probable tokens listed with each token; None for no log-probabilities."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """New tokens, at most; None for as many as there are positions."""
        return self.max_tokens

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, given: Any) -> Any:
        """Clients send fields that they do not use as null, or with the value that an engine has without them."""
        if not isinstance(given, dict):
            return given
        own = cls.model_fields
        return {
            name: value
            for name, value in given.items()
            if not (value is None or name in IGNORED or (name not in own and value in NEUTRAL.get(name, ())))
        }

    @field_validator("temperature")
    @classmethod
    def _can_be_divided_by(cls, given: float) -> float:
        if 0 < given < LEAST_TEMPERATURE:
            raise ValueError(f"give 0 (greedy) or at least {LEAST_TEMPERATURE}")
        return given

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is {self.best_of}, and n is {self.n}; give n alone, since all are returned")
        if self.limit is not None and self.min_tokens > self.limit:
            raise ValueError(f"min_tokens is {self.min_tokens}, and max_tokens is {self.limit}; give fewer")
        return self

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _can_be_looked_for(cls, given: Any) -> Any:
        """One string may be sent without a list."""
        stops = [given] if isinstance(given, str) else given
        lengths = [len(stop) for stop in stops if isinstance(stop, str)] if isinstance(stops, list) else []
        if len(lengths) > MOST_STOPS or not all(0 < length <= LONGEST_STOP for length in lengths):
            raise ValueError(f"give at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
        return stops

    def penalties(self, ends: frozenset[int]) -> Penalties:
        """Changes of the logits, of an output that may end with these tokens."""
        own, bias = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty), self.logit_bias.items()
        return Penalties(*own, tuple(sorted(bias)), self.min_tokens, ends if self.min_tokens else frozenset())

    def seeds(self, count: int) -> list[int]:
        """The given seed and the numbers after it, or random ones. Raises APIError."""
        if self.seed is None:
            return [secrets.randbelow(SEEDS) for _ in range(count)]
        if self.seed + count > SEEDS:
            raise APIError(f"seed + n exceeds a signed 64-bit integer (seed={self.seed}, n={count}).", "seed")
        return list(range(self.seed, self.seed + count))

    def speculative(self) -> SpeculativeConfig | None:
        """The drafting method of a request that names one. Raises APIError."""
        if self.speculative_config is None:
            return None
        try:
            config = config_from(self.speculative_config)
        except (ValueError, TypeError) as error:
            raise APIError(str(error), "speculative_config") from error
        if config.method == "draft_model":
            raise APIError("a request names no draft model; the server is started with one.", "speculative_config")
        return config


class CompletionBody(Body):
    """/v1/completions; a prompt is a string or token ids, or a list of these."""

    prompt: list[Any]
    max_tokens: Annotated[Integer, Field(ge=0)] | None = USUAL_LIMIT
    add_special_tokens: bool = False

    @field_validator("prompt", mode="before", json_schema_input_type=str | list[str | int | list[int]])
    @classmethod
    def _are_prompts(cls, given: Any) -> Any:
        """Texts and lists of token ids; one may be sent without a list."""
        listed = [given] if isinstance(given, str) or _are_ids(given) else given
        if not isinstance(listed, list) or not listed:
            raise ValueError("give a text, a list of token ids, or a list of these")
        if not all(one and (isinstance(one, str) or _are_ids(one)) for one in listed):
            raise ValueError("a prompt is empty, or neither a text nor a list of token ids; correct it")
        return listed


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is int for one in given)


class MessagePart(BaseModel):
    """A piece of a message; `cache_control` changes nothing, since all prompts are cached."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str
    cache_control: Any = None


class Message(BaseModel):
    """One turn of a chat; what else it has is for the template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[MessagePart] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        for part in given if isinstance(given, list) else []:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"the model reads text alone, and a part is of the type '{kind}'; leave it out")
        return given

    def plain(self) -> dict[str, Any]:
        """The message as templates read it: the content is one string, of several parts by lines; no calls are none."""
        text = "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {**(self.model_extra or {}), "role": self.role, "content": text, **calls}


class ChatBody(Body):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: Literal[False] = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _begins_or_goes_on(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; send one of them")
        return self

    def template_variables(self) -> dict[str, Any]:
        """Variables that a template may read; a template without them ignores them."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    def template_arguments(self) -> dict[str, Any]:
        """Arguments of transformers' `apply_chat_template`."""
        begins = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "tools": self.tools or None,
            "documents": self.documents or None,
            "add_generation_prompt": begins,
            "continue_final_message": self.continue_final_message,
        }

    @property
    @override
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    @override
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
