"""Protocol of the HTTP API: validates request bodies and formats errors, compatible with OpenAI's API.

Fields are OpenAI's, plus vLLM's extensions under vLLM's names. Any other field is rejected, at the top level and in
nested objects, so that a misspelled field never silently changes a completion. Fields of other engines that are not
supported are accepted with their default values (`request_defaults.py`).

Errors are {"error": {"message", "type", "param", "code"}} with an HTTP status:

400  invalid or unsupported request, or not JSON          413  request body too large
401  wrong API key                                     415  compressed request body
404  unknown path or model                             429  the queue is full
405  method not allowed on this path                   500  the engine has failed
                                                       503  the server is shutting down
"""

import json
import secrets
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, Self, override

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from megatron_mtp.decoding.config import SpeculativeConfig
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.sampling import Penalties
from megatron_mtp.server import request_defaults

MAX_BODY_BYTES = 8 * 2**20
"""Maximum bytes of a request, about a million token ids."""

TOO_LONG = f"the body has more than {MAX_BODY_BYTES} bytes; send less."

UNREADABLE = "the body cannot be read; send JSON in UTF-8, without deep nesting or numbers of thousands of digits."

NEUTRAL: dict[str, tuple[Any, ...]] = {
    name: values
    for names, values in (
        ("tool_choice function_call", ("none", "auto")),
        ("detokenize", (True,)),
        ("early_stopping separate_reasoning stream_reasoning", (False,)),  # the last two control how thinking is parsed
        ("num_beams typical_p tfs tfs_z repeat_penalty", (1,)),
        ("top_a mirostat", (0,)),
        ("thinking_token_budget", (-1,)),
        ("functions tools logits_processors documents stop_regex", ([],)),
        ("response_format", ({"type": "text"},)),
        ("modalities", (["text"],)),
        ("suffix", ("",)),
        ("verbosity", ("medium",)),
    )
    for name in names.split()
}
"""Unsupported fields of OpenAI, vLLM, SGLang and llama.cpp, with the values at which they have no effect, in addition
to those of `request_defaults`."""

INSTEAD = {
    "max_completion_tokens": "is a field of chats; send 'max_tokens'",
    "top_logprobs": "is a field of chats; send the number as 'logprobs'",
    "messages": "is a field of chats; send them to /v1/chat/completions",
    "prompt": "is not a field of chats; send it to /v1/completions, or 'messages'",
    "cache_salt": "is not supported, since all clients share the prefix cache; leave it out",
}
"""Advice for unsupported fields, if leaving the field out is not what the client wants."""

MAX_MESSAGE_CHARS, MESSAGE_END_CHARS = 600, 200
"""Maximum characters of an error message, and how many of them to take from its end, which holds the advice."""

MAX_CHOICES, MAX_STOPS, MAX_STOP_CHARS, MAX_LOGPROBS = 128, 64, 256, 20
SEEDS = 2**63
DEFAULT_MAX_TOKENS = 16
"""Default of max_tokens for completions."""

Integer = Annotated[
    int, BeforeValidator(lambda given: int(given) if type(given) is float and given % 1 == 0 else given)
]
"""An integer; also accepts whole floats such as 16.0 from clients that have no integers."""


class APIError(Exception):
    """An error response.

    Attributes:
        message: a sentence for people.
        param: the invalid field of the body.
        code: a word for programs.
        status: HTTP status; 400 for requests that are not supported.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.code, self.status = _sendable(message), code, status
        self.param = None if param is None else _sendable(param)

    def response(self) -> JSONResponse:
        """Build the response; it asks clients to retry after a second where that may help."""
        return JSONResponse(self.body(), self.status, {"Retry-After": "1"} if self.status in (429, 503) else None)

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the error."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = "rate_limit_error" if self.status == HTTPStatus.TOO_MANY_REQUESTS else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _sendable(text: str) -> str:
    """Replace lone surrogates, which JSON allows but UTF-8 cannot encode, and cut out the middle of a long value."""
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[: MAX_MESSAGE_CHARS - MESSAGE_END_CHARS]} ... {text[-MESSAGE_END_CHARS:]}"
    return text.encode(errors="backslashreplace").decode()


def failed() -> APIError:
    """Return an error with status 500, for a bug whose traceback is in the server's log."""
    return APIError("the engine has failed; the server's log has the reason.", code="engine_failed", status=500)


def shutting_down() -> APIError:
    """Return an error with status 503: the server is draining, or its shutdown timeout is over."""
    return APIError("the server is shutting down; retry on another replica.", code="draining", status=503)


def add_error_handlers(app: FastAPI) -> None:
    """Format all errors of the app, FastAPI and Starlette in this way."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return _as_api_error(request, error).response()

    for kind in (APIError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _as_api_error(request: Request, error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        bodies: dict[str, type[Body]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
        return _of_a_body(error, bodies[request.url.path].neutral)
    if not isinstance(error, HTTPException):
        return failed()
    what, message = f"{request.method} {request.url.path}", str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no {what}; see /openapi.json for the paths."
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = error.headers["Allow"] if error.headers else "another method"
        message = f"{what} is not served; this path has {allowed}."
    elif error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        message = TOO_LONG
    elif error.status_code == HTTPStatus.BAD_REQUEST:
        message = UNREADABLE
    return APIError(message, status=error.status_code)


def _of_a_body(error: RequestValidationError, neutral: dict[str, tuple[Any, ...]]) -> APIError:
    """Return the error for the first invalid field; for a field with several forms, for the closest form."""
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        place = first["loc"][1] + 1
        return APIError(f"the body is not JSON ({first['ctx']['error']} at character {place}); correct it.")
    param = ".".join(part for part in map(str, first["loc"][1:]) if not part.startswith("list["))
    said = "give an object" if first["type"].startswith("model_") else first["msg"].removeprefix("Value error, ")
    if not param:
        return APIError("the body is not a JSON object; send one, with Content-Type: application/json.")
    if first["type"] == "extra_forbidden" and param in INSTEAD:
        return APIError(f"'{param}' {INSTEAD[param]}.", param, "unknown_parameter")
    if first["type"] in ("extra_forbidden", "literal_error"):
        known = neutral.get(param, ()) if first["type"] == "extra_forbidden" else ()
        values = " or ".join(dict.fromkeys(map(json.dumps, known))) or first.get("ctx", {}).get("expected", "")
        but = f" with another value than {values.replace('False', 'false')}" if values else ""
        return APIError(f"'{param}' is not served here{but}; leave it out.", param, "unknown_parameter")
    return APIError(f"{param}: {said}", param)


class BodyPart(BaseModel):
    """Base of objects in a body. Fields must be known and of the right type; null means that a field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {key: one for key, one in given.items() if one is not None} if isinstance(given, dict) else given


class StreamOptions(BodyPart):
    """Token counts in a stream: in a final event, or in every event for its choice so far, as in vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Unused(BaseModel):
    """Fields that are accepted and have no effect on completions."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    request_id: str | None = None
    rid: str | list[str] | None = None
    session_id: str | None = None
    cache_prompt: bool | None = None


class Body(Unused):
    """Fields of both endpoints, and their conversion for the engine.

    Attributes:
        neutral: unsupported fields, with the values at which they are accepted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

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
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
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
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False

    @property
    def top(self) -> int | None:
        """Number of most probable tokens listed with each token; None for no log-probabilities."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens; None for as many as the model's positions allow."""
        return self.max_tokens

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, given: Any) -> Any:
        """Drop fields without effect: clients send unused fields as null, or with an engine's default."""
        if not isinstance(given, dict):
            return given
        own = cls.model_fields
        return {
            name: value
            for name, value in given.items()
            if not (value is None or (name not in own and _is_one_of(value, cls.neutral.get(name, ()))))
        }

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.best_of not in (None, self.n):
            why = f"best_of is {self.best_of}, and n is {self.n}; give n alone, since all are returned."
            raise APIError(why, "best_of")
        if self.limit is not None and self.min_tokens > self.limit:
            why = f"min_tokens is {self.min_tokens}, and max_tokens is {self.limit}; give fewer."
            raise APIError(why, "min_tokens")
        if self.stream_options.model_fields_set and not self.stream:
            raise APIError("stream_options is given without stream; add 'stream': true.", "stream_options")
        return self

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _can_be_looked_for(cls, given: Any) -> Any:
        """Accept a single string without a list."""
        stops = [given] if isinstance(given, str) else given
        lengths = [len(stop) for stop in stops if isinstance(stop, str)] if isinstance(stops, list) else []
        if len(lengths) > MAX_STOPS or not all(0 < length <= MAX_STOP_CHARS for length in lengths):
            raise ValueError(f"give at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
        return stops

    def penalties(self, ends: frozenset[int]) -> Penalties:
        """Return the changes to logits, for an output that may end with these tokens."""
        own, bias = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty), self.logit_bias.items()
        return Penalties(*own, tuple(sorted(bias)), self.min_tokens, ends if self.min_tokens else frozenset())

    def seeds(self, count: int) -> list[int]:
        """Return the given seed and the numbers after it, or random seeds. Raises APIError."""
        if self.seed is None:
            return [secrets.randbelow(SEEDS) for _ in range(count)]
        if self.seed + count > SEEDS:
            raise APIError(f"seed + n exceeds a signed 64-bit integer (seed={self.seed}, n={count}).", "seed")
        return list(range(self.seed, self.seed + count))

    def speculative(self) -> SpeculativeConfig | None:
        """Return the drafting method if the request chooses one. Raises APIError."""
        if self.speculative_config is None:
            return None
        try:
            config = config_from(self.speculative_config)
        except (ValueError, TypeError) as error:
            raise APIError(str(error), "speculative_config") from error
        if "model" in config.flat():
            raise APIError("a request names no draft model; the server is started with one.", "speculative_config")
        return config


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Compare as in JSON, where true does not equal 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known)


def _with(defaults: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    return {name: NEUTRAL.get(name, ()) + defaults.get(name, ()) for name in NEUTRAL | defaults}


class CompletionBody(Body):
    """Body of /v1/completions. A prompt is a string, a list of token ids, or a list of these."""

    neutral = _with(request_defaults.COMPLETIONS)
    prompt: list[Any]
    max_tokens: Annotated[Integer, Field(ge=0)] | None = DEFAULT_MAX_TOKENS
    add_special_tokens: bool = False

    @field_validator("prompt", mode="before", json_schema_input_type=str | list[str | int | list[int]])
    @classmethod
    def _are_prompts(cls, given: Any) -> Any:
        """Validate prompts: strings or lists of token ids; a single one needs no list."""
        listed = [given] if isinstance(given, str) or _are_ids(given) else given
        if not isinstance(listed, list) or not listed:
            raise ValueError("give a text, a list of token ids, or a list of these")
        if not all(one and (isinstance(one, str) or _are_ids(one)) for one in listed):
            raise ValueError("a prompt is empty, or neither a text nor a list of token ids; correct it")
        return listed


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is int for one in given)


class MessagePart(BodyPart):
    """A part of a message. `cache_control` has no effect, since all prompts are cached."""

    type: Literal["text"]
    text: str
    cache_control: Any = None


class CalledFunction(BodyPart):
    """Function and arguments of a call in an earlier turn; arguments are an object, as JSON text or not, or null."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BodyPart):
    """A tool call in an earlier turn."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(BodyPart):
    """A function that the model may call. `strict` is not enforced: arguments are not constrained to the schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returned: Any = Field(None, alias="return")  # as in transformers' function schemas
    strict: Literal[False] = False
    defer_loading: Literal[False] = False


class Tool(BodyPart):
    """A tool, which the chat template describes to the model."""

    type: Literal["function"] = "function"
    function: ToolFunction
    defer_loading: Literal[False] = False


AsSent = WrapValidator(lambda given, check: (check(given), given)[1])
"""Validates a value but keeps it as sent, since templates print the keys of objects in order."""


class Message(BaseModel):
    """A chat message. Further fields are passed to the chat template, which must read them."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    tool_calls: Annotated[list[ToolCall] | None, AsSent] = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        for part in given if isinstance(given, list) else []:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"the model reads text alone, and a part is of the type '{kind}'; leave it out")
        return given

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.plain().keys() - {"role", "content", "name", "tool_call_id"}):
            raise ValueError(f"a message of the role '{self.role}' has no content; send its text")
        return self

    @property
    def others(self) -> list[str]:
        """Fields that only the chat template knows."""
        return [name for name, value in (self.model_extra or {}).items() if value is not None]

    def plain(self) -> dict[str, Any]:
        """Convert the message for templates: content is one string, with parts on separate lines; no empty calls."""
        text = "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        sent = self.model_dump(exclude={"role", "content", "tool_calls"}, exclude_none=True)
        calls: Any = self.tool_calls
        return {**sent, "role": self.role, "content": text} | ({"tool_calls": [*map(_whole, calls)]} if calls else {})


def _whole(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier turn with its arguments, {} if it has none."""
    function = call["function"]
    return call | {"function": function | ({"arguments": "{}"} if function.get("arguments") is None else {})}


class ChatBody(Body):
    """Body of /v1/chat/completions."""

    neutral = _with(request_defaults.CHAT)
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] = False
    tools: Annotated[list[Tool] | None, AsSent] = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _fields_of_chats_go_together(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            why = "continue_final_message and add_generation_prompt exclude each other; send one of them."
            raise APIError(why, "continue_final_message")
        if self.top_logprobs and not self.logprobs:
            raise APIError("top_logprobs is given without logprobs; add 'logprobs': true.", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            both = f"max_tokens is {self.max_tokens}, and max_completion_tokens is {self.max_completion_tokens}"
            raise APIError(f"{both}; send one of them.", "max_tokens")
        return self

    def for_template(self) -> dict[str, str]:
        """Names that the template must read so that nothing is lost, by field of the body."""
        variables = {name: name for name in ("tools", "documents", "reasoning_effort") if getattr(self, name)}
        own = {f"chat_template_kwargs.{name}": name for name in self.chat_template_kwargs}
        messages = enumerate(self.messages)
        return variables | own | {f"messages.{place}.{name}": name for place, one in messages for name in one.others}

    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
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
