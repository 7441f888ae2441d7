"""Request fields that were once silently ignored, and fields that are accepted without effect."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from documents import ROOT
from parrot import Parrot, Running, running, words

from megatron_mtp.server import request_defaults
from megatron_mtp.server.protocol import ChatBody, CompletionBody, Unused

TOOL_NAMES = run_path(str(ROOT / "tools/server/request_defaults.py"))
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(Parrot(), words(tmp_path_factory.mktemp("tokenizer"))) as served:
        yield served


def bodies(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a valid request body with these fields."""
    return {"max_tokens": 2, **({"prompt": "ab"} if path == COMPLETIONS else {"messages": [USER]}), **fields}


def call(function: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": function, **more}]}]}


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "option": (
        COMPLETIONS, {"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge",
        "'stream_options.include_usge' is not served here; leave it out.",
    ),
    "option of a chat": (
        CHATS, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "is not served here",
    ),
    "type of an option": (
        CHATS, {"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage",
        "stream_options.include_usage: Input should be a valid boolean",
    ),
    "options": (CHATS, {"stream": True, "stream_options": True}, "stream_options", "stream_options: give an object"),
    "random characters": (
        CHATS, {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation", "is not served here with another value than false; leave it out.",
    ),
    "options without a stream": (
        COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options",
        "stream_options is given without stream; add 'stream': true.",
    ),
    "top without logprobs": (
        CHATS, {"top_logprobs": 3}, "top_logprobs", "top_logprobs is given without logprobs; add 'logprobs': true.",
    ),
    "top of no logprobs": (CHATS, {"top_logprobs": 3, "logprobs": False}, "top_logprobs", "without logprobs"),
    "top of completions": (
        COMPLETIONS, {"top_logprobs": 3}, "top_logprobs", "is a field of chats; send the number as 'logprobs'.",
    ),
    "logprobs as in a chat": (COMPLETIONS, {"logprobs": True}, "logprobs", "logprobs: Input should be a valid integer"),
    "logprobs as in completions": (CHATS, {"logprobs": 3}, "logprobs", "logprobs: Input should be a valid boolean"),
    "two limits": (
        CHATS, {"max_completion_tokens": 3}, "max_tokens",
        "max_tokens is 2, and max_completion_tokens is 3; send one of them.",
    ),
    "limit of chats": (
        COMPLETIONS, {"max_completion_tokens": 3}, "max_completion_tokens",
        "'max_completion_tokens' is a field of chats; send 'max_tokens'.",
    ),
    "messages": (COMPLETIONS, {"messages": [USER]}, "messages", "send them to /v1/chat/completions"),
    "prompt": (CHATS, {"prompt": "a"}, "prompt", "send it to /v1/completions"),
    "text and more": (
        CHATS, {"response_format": {"type": "text", "schema": {}}}, "response_format",
        """with another value than {"type": "text"}; leave it out.""",
    ),
    "true is not 1": (COMPLETIONS, {"length_penalty": True}, "length_penalty", "with another value than 1.0"),
    "0 is not false": (COMPLETIONS, {"use_beam_search": 0}, "use_beam_search", "with another value than false"),
    "no tool": (CHATS, {"tools": [{"type": "function", "functon": FUNCTION}]}, "tools.0.function", "Field required"),
    "tool without a name": (
        CHATS, {"tools": [{"function": {"nmae": "f"}}]}, "tools.0.function.name", "name: Field required",
    ),
    "field of a tool": (
        CHATS, {"tools": [{"function": {**FUNCTION, "paramters": {}}}]}, "tools.0.function.paramters",
        "'tools.0.function.paramters' is not served here; leave it out.",
    ),
    "type of a tool": (
        CHATS, {"tools": [{"type": "web_search", "function": FUNCTION}]}, "tools.0.type",
        "'tools.0.type' is not served here with another value than 'function'; leave it out.",
    ),
    "strict tool": (
        CHATS, {"tools": [{"function": {**FUNCTION, "strict": True}}]}, "tools.0.function.strict",
        "'tools.0.function.strict' is not served here with another value than false; leave it out.",
    ),
    "field of a call": (CHATS, call({"name": "f"}, argumnts="{}"), "messages.0.tool_calls.0.argumnts", "is not served"),
    "call without a name": (CHATS, call({"arguments": "{}"}), "messages.0.tool_calls.0.function.name", "required"),
    "misspelt content": (
        CHATS, {"messages": [{"role": "user", "contnet": "a"}]}, "messages.0.contnet",
        "the model's chat template does not read 'contnet'; leave it out.",
    ),
    "no content": (
        CHATS, {"messages": [{"role": "user"}]}, "messages.0", "a message of the role 'user' has no content; send its",
    ),
    "variable": (
        CHATS, {"chat_template_kwargs": {"enable_thinkng": False}}, "chat_template_kwargs.enable_thinkng",
        "the model's chat template does not read 'enable_thinkng'; leave it out.",
    ),
    "documents": (CHATS, {"documents": [{"text": "a"}]}, "documents", "does not read 'documents'; leave it out."),
    "stop token": (COMPLETIONS, {"stop_token_ids": [258]}, "stop_token_ids", "stop_token_ids has 258; give 0 to 257."),
    "salt": (COMPLETIONS, {"cache_salt": "x"}, "cache_salt", "all clients share the prefix cache"),
    "user": (COMPLETIONS, {"user": 5}, "user", "user: Input should be a valid string"),
    "grammar": (CHATS, {"regex": "a+"}, "regex", "'regex' is not served here; leave it out."),
    "special tokens": (CHATS, {"add_special_tokens": True}, "add_special_tokens", "with another value than false"),
    "bias": (COMPLETIONS, {"logit_bias": {"5": True}}, "logit_bias.5", "logit_bias.5: Input should be a valid number"),
    "stop": (COMPLETIONS, {"stop": ["a", 5]}, "stop.1", "stop.1: Input should be a valid string"),
    "best": (CHATS, {"best_of": 2}, "best_of", "best_of is 2, and n is 1; give n alone"),
    "seed": (COMPLETIONS, {"seed": True}, "seed", "seed: Input should be a valid integer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_request_fields_are_rejected(name: str, server: Running) -> None:
    path, fields, param, said = REFUSED[name]
    done = server.post(path, bodies(path, fields))
    assert done.status_code == 400, done.text
    error = done.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert said in error["message"]


SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "option": (CHATS, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
    "option of nothing": (CHATS, {"stream": True, "stream_options": {"include_usage": None}}),
    "no options": (COMPLETIONS, {"stream_options": {}}),
    "no top": (CHATS, {"top_logprobs": 0}),
    "top": (CHATS, {"top_logprobs": 1, "logprobs": True}),
    "the same limit twice": (CHATS, {"max_completion_tokens": 2}),
    "tool": (CHATS, {"tools": [{"type": "function", "function": {**FUNCTION, "return": {"type": "string"}}}]}),
    "tool that is not strict": (CHATS, {"tools": [{"function": {**FUNCTION, "strict": False, "description": None}}]}),
    "echoed answer": (
        CHATS, {"messages": [{"role": "assistant", "content": "a", "refusal": None, "audio": None, "annotations": []}]},
    ),
    "thinking": (CHATS, {"separate_reasoning": False, "stream_reasoning": False, "thinking_token_budget": -1}),
    "text": (COMPLETIONS, {"response_format": {"type": "text"}}),
    "stops": (COMPLETIONS, {"stop": [f"stop {number}" for number in range(64)]}),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_neutral_fields_are_accepted(name: str, server: Running) -> None:
    path, fields = SERVED[name]
    done = server.post(path, bodies(path, fields))
    assert done.status_code == 200, done.text


DEFAULTS = {COMPLETIONS: request_defaults.COMPLETIONS, CHATS: request_defaults.CHAT}


@pytest.mark.parametrize("path", DEFAULTS)
def test_a_request_with_the_defaults_of_other_engines_is_served(path: str, server: Running) -> None:
    """All at once, with the last value where engines differ; and each first value."""
    for place in (0, -1):
        done = server.post(path, bodies(path, {name: values[place] for name, values in DEFAULTS[path].items()}))
        assert done.status_code == 200, done.text


def test_every_default_is_a_field_or_neutral() -> None:
    for body, rows in ((CompletionBody, request_defaults.COMPLETIONS), (ChatBody, request_defaults.CHAT)):
        assert all(name in body.model_fields or set(map(str, values)) <= set(map(str, body.neutral[name]))
                   for name, values in rows.items())  # fmt: skip
    assert not Unused.model_fields.keys() & request_defaults.COMPLETIONS.keys()


def test_the_page_lists_what_is_accepted_and_ignored() -> None:
    page = (ROOT / "docs/reference/http_api.md").read_text()
    updated = run_path(str(ROOT / "tools/docs/neutral_fields.py"))["updated"]
    assert updated(page) == page, "run python tools/docs/neutral_fields.py"
    assert all(f"`{name}`" in page for name in Unused.model_fields)


def test_a_low_temperature_is_greedy(server: Running) -> None:
    """A sampled output of the stand-in starts as many tokens later as its seed."""
    for temperature, text in ((1e-8, "abc"), (9.9e-6, "abc"), (1e-5, "bca")):
        body = {"prompt": "abc", "max_tokens": 3, "seed": 1, "temperature": temperature}
        assert server.post(COMPLETIONS, body).json()["choices"][0]["text"] == text


@pytest.mark.parametrize("arguments", [{"arguments": None}, {}])
def test_a_tool_call_without_arguments_gets_an_empty_object(
    arguments: dict[str, Any], server: Running, tmp_path: Path
) -> None:
    """Even with a template that joins arguments as text."""
    body = call({"name": "f", **arguments})
    done = server.post(CHATS, bodies(CHATS, {**body, "return_token_ids": True})).json()["choices"][0]
    assert words(tmp_path).decode(done["prompt_token_ids"]) == "assistant:  call {}\nassistant: "
    joined = words(tmp_path / "joined", "{{ 'f ' + messages[0].tool_calls[0].function.arguments }}")
    (message,) = ChatBody.model_validate(body).messages
    assert joined.decode(joined.chat([message.plain()], {}, {}, 512)) == "f {}"


ROLES = "{% for m in messages if m.role in ('user', 'system') %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"


def test_no_message_is_left_out_of_a_chat(tmp_path: Path) -> None:
    with running(Parrot(), words(tmp_path, ROLES)) as server:
        messages = [{"role": "developer", "content": " be kind "}, USER]
        body = bodies(CHATS, {"messages": messages, "return_token_ids": True})
        ids = server.post(CHATS, body).json()["choices"][0]["prompt_token_ids"]
        assert words(tmp_path).decode(ids) == "system: be kind\nuser: a\n"
        error = server.post(CHATS, bodies(CHATS, {"messages": [USER, {"role": "usre", "content": "b!"}]})).json()[
            "error"
        ]
        assert error["param"] == "messages.1.role"
        assert "leaves out a message of the role 'usre'; send another role" in error["message"]


MODELS = """
class Routing(BaseModel):
    rank: Optional[int] = None
    skip: int = 0

class CompletionRequest(Routing):
    model: str
    flag: bool | None = None
    hidden: Union[bool, Literal["last"]] = False
    words: list[str] = Field(default_factory=list)
    number: str = Field(default_factory=random)
    kind: Literal["a", "b"] = Field(default="a", description="which")
    first: int = Field(3, ge=0)
    named: int = CONSTANT
    _private: int = 1
"""


def test_defaults_are_read_from_a_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "engine-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("engine/entrypoints/openai/protocol.py", MODELS)
    sources, found = TOOL_NAMES["merged"]([tmp_path / "engine-1.2-py3-none-any.whl"])
    assert sources == ["engine 1.2"]
    assert found["completions"] == {
        "skip": [0], "flag": [False], "hidden": [False], "words": [[]], "kind": ["a"], "first": [3],
    }  # fmt: skip
    written = TOOL_NAMES["written"](sources, found)
    assert written.startswith('"""Defaults of the fields')
    assert '    "kind": ("a",),\n' in written
