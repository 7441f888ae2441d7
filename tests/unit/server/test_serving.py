"""The HTTP server with the official client and plain HTTP, in front of an engine that repeats its prompt."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parrot import NAME, POSITIONS, Parrot, Running, running, words
from tokenizers import AddedToken

from megatron_mtp.decoding.sampling import Penalties
from megatron_mtp.server.codec import Codec
from megatron_mtp.server.protocol import MAX_BODY_BYTES


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return words(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(codec: Codec) -> Iterator[Running]:
    with running(Parrot(), codec) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "€"}]}]


def completion(server: Running, **fields: Any) -> dict[str, Any]:
    """Return the response to a greedy request with fields that the client does not know."""
    done = server.post("/v1/completions", {"prompt": "ab€", "temperature": 0, **fields})
    assert done.status_code == 200, done.text
    return done.json()  # type: ignore[no-any-return]


def events(server: Running, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return a stream's events, which must end with [DONE]."""
    with httpx2.stream("POST", server.url + path, json={"stream": True, "temperature": 0, **fields}) as done:
        assert done.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in done.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_completion_is_what_the_engine_emits(client: openai.OpenAI) -> None:
    done = client.completions.create(model=NAME, prompt="ab€", max_tokens=7, temperature=0)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("ab€ab", "length", 0, None)
    assert (done.object, done.model) == ("text_completion", NAME)
    usage = done.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 7, 12)


COUNTED = st.lists(st.lists(st.integers(40, 42), min_size=1, max_size=6), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(prompts=COUNTED, n=st.integers(1, 4), limit=st.integers(0, 5), stream=st.booleans())
@example(prompts=[[40] * 5], n=3, limit=2, stream=False)
@example(prompts=[[40] * 5, [41] * 5], n=2, limit=2, stream=True)
@example(prompts=[[42] * 5, [42] * 5], n=1, limit=0, stream=False)
def test_usage_counts_prompts_once_and_tokens_as_they_come(
    server: Running, prompts: list[list[int]], n: int, limit: int, stream: bool
) -> None:
    """Cached tokens are part of the prompts, even if some choices find what another has run."""
    body = {"prompt": prompts, "n": n, "max_tokens": limit, "echo": not limit, "return_token_ids": True}
    if stream:
        *parts, last = events(server, "/v1/completions", **body, stream_options={"include_usage": True})
        choices, usage = [choice for part in parts for choice in part["choices"]], last["usage"]
    else:
        done = completion(server, **body)
        choices, usage = done["choices"], done["usage"]
    made = sum(len(choice["token_ids"]) for choice in choices)
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == made == limit * n * len(prompts)
    assert usage["total_tokens"] == usage["prompt_tokens"] + made
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"] - len(prompts)


def test_a_prompt_is_cached_after_an_earlier_request_with_it(server: Running) -> None:
    """Not if one of its own choices did."""
    cached = [
        completion(server, prompt=[50, 51, 52, 53], n=3)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 3]


def test_without_a_limit_a_completion_has_16_tokens_and_a_chat_all_positions(client: openai.OpenAI) -> None:
    done = client.completions.create(model=NAME, prompt="ab", temperature=0)
    assert done.choices[0].text == "ab" * 8
    said = client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0)
    assert said.usage is not None
    assert said.usage.total_tokens == POSITIONS


def test_an_answer_may_fill_all_positions(server: Running) -> None:
    """One more token is rejected; see BAD."""
    done = completion(server, max_tokens=POSITIONS - 5)
    assert done["usage"]["total_tokens"] == POSITIONS
    assert completion(server, prompt="a" * (POSITIONS - 1), max_tokens=1)["usage"]["total_tokens"] == POSITIONS


def test_prompts_are_texts_or_ids_or_lists_of_them(client: openai.OpenAI, server: Running) -> None:
    ids = completion(server, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert len(ids) == 5
    for prompt, texts in (("ab€", 1), (ids, 1), (["ab€", "ab€"], 2), ([ids, ids], 2), (["ab€", ids], 2)):
        found = client.completions.create(model=NAME, prompt=prompt, max_tokens=5, temperature=0).choices
        assert [choice.text for choice in found] == ["ab€"] * texts
        assert [choice.index for choice in found] == list(range(texts))


def test_a_stream_has_whole_characters_and_ends_with_usage_if_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=NAME, prompt="ab€", max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    *texts, last = chunks
    pieces = [chunk.choices[0].text for chunk in texts]
    assert "".join(pieces) == "ab€ab�"
    assert "�" not in "".join(pieces[:-1])
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * (len(texts) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in texts)
    assert len({chunk.id for chunk in chunks}) == 1


def test_every_event_has_the_usage_so_far_if_requested(server: Running) -> None:
    """Load testers request this, since events hold several tokens."""
    options, ids = {"include_usage": True, "continuous_usage_stats": True}, {"return_token_ids": True}
    *found, last = events(server, "/v1/completions", prompt=["ab", "xyz"], max_tokens=5, stream_options=options, **ids)
    grown = [0, 0]
    for event in found:
        (choice,) = event["choices"]
        grown[choice["index"]] += len(choice["token_ids"])
        prompt, completion = (2, 3)[choice["index"]], grown[choice["index"]]
        sums = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        assert event["usage"] == sums
    assert grown == [5, 5]
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 15)


def test_a_chat_follows_the_template(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 8}
    said = client.chat.completions.create(**asked)
    assert said.object == "chat.completion"
    message = said.choices[0].message
    assert (message.role, message.content) == ("assistant", "user: a\n"), "parts are lines, as vLLM joins them"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_n_texts_have_their_own_seeds(client: openai.OpenAI, server: Running) -> None:
    """A sampled output of the stand-in starts as many tokens later as its seed."""
    done = client.completions.create(model=NAME, prompt=["abc", "xyz"], n=2, seed=1, max_tokens=3)
    assert [choice.text for choice in done.choices] == ["bca", "cab", "xyz", "yzx"]
    said = client.chat.completions.create(model=NAME, messages=MESSAGES, n=2, seed=0, max_tokens=3)
    assert [choice.message.content for choice in said.choices] == ["use", "ser"]
    streamed = events(server, "/v1/completions", prompt="abc", n=2, seed=4, temperature=1, max_tokens=3)
    texts = ["", ""]
    for event in streamed:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["bca", "cab"]
    found = {client.completions.create(model=NAME, prompt="abcdefghijkl", max_tokens=5).choices[0].text
             for _ in range(20)}  # fmt: skip
    assert len(found) > 1


def test_log_probabilities_of_completions_and_of_the_prompt(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": "a€", "max_tokens": 5, "temperature": 0, "logprobs": 3}
    (choice,) = client.completions.create(**asked).choices
    listed = choice.logprobs
    assert listed is not None
    assert listed.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "a"]
    assert listed.token_logprobs == [-0.5] * 5
    assert listed.text_offset == [0, 1, 1, 1, 2]
    assert listed.top_logprobs is not None
    assert listed.top_logprobs[0] == {"a": -0.5, "!": -1.5, '"': -9999.0}
    (echoed,) = client.completions.create(**asked, echo=True).choices
    assert echoed.text == "a€a€a"
    assert echoed.logprobs is not None
    assert echoed.logprobs.tokens == [*listed.tokens[:4], *listed.tokens]
    assert echoed.logprobs.token_logprobs == [None, *[-0.5] * 8]
    assert echoed.logprobs.text_offset == [0, 1, 1, 1, 2, 3, 3, 3, 4]
    (scored,) = client.completions.create(**{**asked, "max_tokens": 0}, echo=True).choices
    assert scored.text == "a€"
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    pieces = list(client.completions.create(**asked, echo=True, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == echoed.text
    assert [token for piece in pieces if (found := piece.choices[0].logprobs) for token in found.tokens or []] == (
        echoed.logprobs.tokens
    )


def test_log_probabilities_of_chats(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 9}
    (choice,) = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == [*"user: a\n", "bytes:\\xe2"]
    assert content[-1].bytes == [0xE2]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("u", -0.5), ("!", -1.5), ('"', -9999.0)]
    (plain,) = client.chat.completions.create(**asked, logprobs=True).choices
    assert plain.logprobs is not None
    assert plain.logprobs.content is not None
    assert plain.logprobs.content[0].top_logprobs == []
    streamed = list(client.chat.completions.create(**asked, logprobs=True, stream=True))
    found = [entry.token for chunk in streamed if (one := chunk.choices[0].logprobs) for entry in one.content or []]
    assert found == [entry.token for entry in content]


def test_stop_strings_end_a_text_and_are_not_in_it(client: openai.OpenAI, server: Running) -> None:
    (choice,) = client.completions.create(model=NAME, prompt="ab€xy", stop=["€x", "zz"], temperature=0).choices
    assert (choice.text, choice.finish_reason) == ("ab", "stop")
    streamed = events(server, "/v1/completions", prompt="ab€xy", stop="y", max_tokens=50)
    assert "".join(event["choices"][0]["text"] for event in streamed) == "ab€x"
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
    (choice,) = client.completions.create(model=NAME, prompt="ab", stop="ac", max_tokens=3, temperature=0).choices
    assert choice.text == "aba", "what was held back for a stop string goes out at the end"


def test_stop_tokens_and_the_end_of_text(server: Running) -> None:
    ended = completion(server, prompt=[40, 41, 0, 42], max_tokens=8, return_token_ids=True)["choices"][0]
    assert (ended["token_ids"], ended["finish_reason"]) == ([40, 41, 0], "stop")
    assert "endoftext" not in ended["text"]
    on = completion(server, prompt=[40, 41, 0, 42], max_tokens=8, return_token_ids=True, ignore_eos=True)["choices"][0]
    assert on["token_ids"] == [40, 41, 0, 42] * 2
    stopped = completion(server, prompt=[40, 41, 42], stop_token_ids=[41], return_token_ids=True)["choices"][0]
    assert (stopped["token_ids"], stopped["finish_reason"]) == ([40, 41], "stop")


def test_every_setting_reaches_the_engine(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    add = server.engine.add
    monkeypatch.setattr(server.engine, "add", lambda request: (seen.append(request), add(request))[1])
    completion(
        server, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, logit_bias={"7": -3, "5": 1.5}, min_tokens=2, seed=9, max_tokens=3, user="me",
        best_of=1, suffix=None,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )  # fmt: skip
    (request,) = seen
    sampling, penalties = request.sampling, request.penalties
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert penalties == Penalties(1, -1, 1.5, ((5, 1.5), (7, -3.0)), 2, frozenset([0]))
    assert (request.seed, request.max_new_tokens, request.stop_ids) == (9, 3, frozenset([0]))
    assert request.speculative.num_speculative_tokens == 1
    assert (request.logprobs, request.prompt_logprobs, request.cut) == (None, None, None)


def test_return_drafts_adds_the_drafts_of_each_step(server: Running) -> None:
    streamed = events(server, "/v1/completions", prompt="ab€", max_tokens=8, return_drafts=True, return_token_ids=True)
    found = [draft for event in streamed for draft in event["choices"][0]["drafts"]]
    assert "".join(piece for draft in found for piece in draft["pieces"]) == "ab€ab"
    assert [(draft["offered"], draft["accepted"]) for draft in found][:3] == [(0, 0), (2, 1), (2, 0)]
    assert streamed[0]["choices"][0]["prompt_token_ids"] is not None
    assert streamed[1]["choices"][0]["prompt_token_ids"] is None


def test_an_answer_has_the_version_of_the_weights_that_made_it(codec: Codec) -> None:
    parrot = Parrot()
    with running(parrot, codec) as served:
        first = completion(served, max_tokens=3)["choices"][0]
        parrot.policy_version = 4
        later = completion(served, max_tokens=3, n=2)["choices"]
        said = events(served, "/v1/chat/completions", messages=MESSAGES, max_tokens=8)
    assert first["policy_version"] == 0
    assert [choice["policy_version"] for choice in later] == [4, 4]
    assert {event["choices"][0].get("policy_version") for event in said[1:]} == {4}


def test_the_openapi_schema_lists_the_field_types(server: Running) -> None:
    schemas = httpx2.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    forms = {name: schemas["CompletionBody"]["properties"][name]["anyOf"] for name in ("prompt", "stop")}
    assert [[form["type"] for form in given] for given in forms.values()] == [["string", "array"]] * 2


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (NAME, "megatron-mtp")
    assert client.models.retrieve(NAME).model_dump()["max_model_len"] == POSITIONS
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not served; 'parrot' is"):
        client.models.retrieve("gpt")


BAD: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "nothing": ({"prompt": None}, "prompt: Field required", "prompt"),
    "empty": ({"prompt": ""}, "a prompt is empty", "prompt"),
    "no prompts": ({"prompt": []}, "give a text, a list of token ids", "prompt"),
    "booleans": ({"prompt": [True]}, "neither a text nor a list of token ids", "prompt"),
    "mixed": ({"prompt": [1, "a"]}, "neither a text nor a list of token ids", "prompt"),
    "vocabulary": ({"prompt": [1, 258]}, "ids outside of the model's vocabulary; give 0 to 257", "prompt"),
    "negative": ({"prompt": [-1]}, "ids outside of the model's vocabulary", "prompt"),
    "long": ({"prompt": [1] * 10**6}, "has 1000000 tokens, and there is room for 512 with", "prompt"),
    "long text": ({"prompt": "a" * 10**6}, "has at least 76924 tokens, and there is room for 512 with", "prompt"),
    "text": ({"prompt": "a" * 1000}, "has 1000 tokens, and there is room for 512 with", "prompt"),
    "too many new": ({"max_tokens": 508}, "has 5 tokens, and there is room for 512 with", "prompt"),
    "none new": ({"max_tokens": 0}, "max_tokens is 0; give 1 or more", "max_tokens"),
    "surrogate": ({"prompt": "a\ud800"}, r"the text holds '\ud800' at character 2", None),
    "temperature": ({"temperature": 2.5}, "temperature: Input should be less than or equal to 2", "temperature"),
    "temperature as text": ({"temperature": "1"}, "temperature: Input should be a valid number", "temperature"),
    "top_p": ({"top_p": 0}, "top_p: Input should be greater than 0", "top_p"),
    "seed": ({"seed": 2**63 - 1, "n": 2}, "seed + n exceeds a signed 64-bit integer (seed=", "seed"),
    "huge seed": ({"seed": 10**30}, "seed: Input should be less than", "seed"),
    "n": ({"n": 0}, "n: Input should be greater than or equal to 1", "n"),
    "many": ({"prompt": ["a"] * 129}, "the request has 129 outputs; this server allows 128 at once", None),
    "a million": ({"prompt": ["a"] * 10**6}, "the request has 1000000 outputs", None),
    "stop": ({"stop": ""}, "stop: give at most 64 strings of 1 to 256 characters", "stop"),
    "stops": ({"stop": ["a"] * 65}, "stop: give at most 64 strings", "stop"),
    "logprobs": ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20", "logprobs"),
    "misspelt": ({"temprature": 1}, "'temprature' is not served here; leave it out.", "temprature"),
    "suffix": ({"suffix": "end"}, "'suffix' is not served here", "suffix"),
    "best_of": ({"best_of": 3}, "best_of is 3, and n is 1; give n alone", "best_of"),
    "special": ({"skip_special_tokens": False}, "not served here with another value than true", "skip_special_tokens"),
    "least": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, and max_tokens is 8; give fewer", "min_tokens"),
    "bias": ({"logit_bias": {"5": 101}}, "logit_bias.5: Input should be less than or equal to 100", "logit_bias.5"),
    "method": ({"speculative_config": {"method": "medusa"}}, "choose one of mtp", "speculative_config"),
    "folder": ({"speculative_config": {"method": "draft_model", "model": "x"}}, "no draft model", "speculative_config"),
    "engine": ({"prompt": [7]}, "no prompt begins with token 7.", None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_requests_that_cannot_be_served_are_rejected(name: str, server: Running) -> None:
    fields, said, param = BAD[name]
    body = {"prompt": "ab€", **fields}
    done = server.post("/v1/completions", json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    error = done.json()["error"]
    assert done.status_code == 400
    assert said in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert completion(server, max_tokens=5)["choices"][0]["text"] == "ab€", "and the server goes on"


def called(arguments: Any) -> dict[str, Any]:
    """Return a turn that calls a function."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages: List should have at least 1 item"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the type 'image_url'; leave it"),
    "part": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]}]}, "txt"),
    "template": ({"messages": [{"role": "rude", "content": "x"}]}, "template refuses these messages: no manners"),
    "tool choice": ({"messages": MESSAGES, "tool_choice": "required"}, 'another value than "none" or "auto"; leave it'),
    "arguments": ({"messages": [called("{")]}, "arguments of a call in messages.0 are not JSON"),
    "both": (
        {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message and add_generation_prompt exclude each other; send one of them.",
    ),
    "form": ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "'response_format' is not served"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_chats_that_cannot_be_served(name: str, server: Running) -> None:
    fields, said = CHATS[name]
    done = server.post("/v1/chat/completions", fields)
    assert done.status_code == 400
    assert said in done.json()["error"]["message"]


UNKNOWN = {
    "temprature": 0, "Temperature": 0, "do_sample": False, "enable_thinking": False, "skip_special_tokens": False,
    "add_generation_prompt": False, "prompt_logprobs": 0, "guided_json": {}, "tool": "", "stops": [],
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_field_is_refused_whatever_its_value(name: str, server: Running) -> None:
    done = server.post("/v1/completions", {"prompt": "ab€", name: UNKNOWN[name]})
    assert (done.status_code, done.json()["error"]["param"]) == (400, name)
    assert completion(server, max_tokens=5, **{name: None})["choices"][0]["text"] == "ab€", "null asks for nothing"


NEUTRAL = {
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "length_penalty": 1.0, "detokenize": True,
    "typical_p": 1.0, "request_id": "r1", "cache_prompt": True, "function_call": "none", "best_of": 2, "suffix": "",
    "use_beam_search": False, "include_stop_str_in_output": False, "priority": 0, "max_tokens": 5.0, "top_k": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_unsupported_fields_may_have_their_neutral_value(name: str, server: Running) -> None:
    done = completion(server, **{"max_tokens": 5, "n": 2, name: NEUTRAL[name]})
    assert [choice["text"] for choice in done["choices"]] == ["ab€"] * 2


@pytest.mark.parametrize(
    "name", ["messages", "tokenizer", "self", "conversation", "tools", "chat_template", "tokenize"]
)
def test_template_variables_cannot_override_function_arguments(name: str, server: Running) -> None:
    done = server.post("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {name: "y"}})
    error = done.json()["error"]
    assert (done.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert f"'{name}' is not a variable of a template" in error["message"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "a"}
PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "cache_control": (
        {"messages": [{**USER, "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]},
        "user: a\nassistant: ",
    ),
    "tools": ({"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}, "tool f\nuser: a\nassistant: "),
    "no tools": ({"messages": [USER], "tools": []}, "user: a\nassistant: "),
    "kwargs": (
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}, "/no_think\nuser: a\nassistant: "
    ),
    "effort": ({"messages": [USER], "reasoning_effort": "low"}, "effort low\nuser: a\nassistant: "),
    "no beginning": ({"messages": [USER], "add_generation_prompt": False}, "user: a\n"),
    "continued": (
        {"messages": [USER, {"role": "assistant", "content": "So"}], "continue_final_message": True},
        "user: a\nassistant: So",
    ),
    "call": ({"messages": [called('{"b":1}')]}, 'assistant:  call {"b": 1}\nassistant: '),
    "decoded call": ({"messages": [called({"b": 1})]}, 'assistant:  call {"b": 1}\nassistant: '),
    "no arguments": ({"messages": [called("")]}, "assistant:  call {}\nassistant: "),
    "no calls": ({"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]}, "assistant: x\nassistant: "),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_every_part_of_a_chat_reaches_the_template(name: str, server: Running, codec: Codec) -> None:
    fields, text = PROMPTS[name]
    done = server.post("/v1/chat/completions", {"max_tokens": 1, "return_token_ids": True, **fields})
    assert done.status_code == 200, done.text
    assert codec.decode(done.json()["choices"][0]["prompt_token_ids"]) == text


def test_a_template_that_joins_arguments_gets_the_sent_string(tmp_path: Path) -> None:
    found = words(tmp_path, "{{ 'f ' + messages[0].tool_calls[0].function.arguments }}")
    assert found.decode(found.chat([called('{"b":1}')], {}, {}, POSITIONS)) == 'f {"b":1}'


def test_a_stop_string_that_is_a_special_token(client: openai.OpenAI, server: Running) -> None:
    for stop in ("<|padding|>", ["zz", "<|padding|>"]):
        said = completion(server, prompt=[40, 41, 1, 42], stop=stop, max_tokens=8, return_token_ids=True)["choices"][0]
        assert (said["token_ids"], said["finish_reason"]) == ([40, 41, 1], "stop")
        assert "padding" not in said["text"]
    done = server.post("/v1/completions", {"prompt": "a", "stop": "<|padding|>b"})
    assert "'<|padding|>' is a special token, which has no text; send it as a stop" in done.json()["error"]["message"]


def test_a_stop_string_that_is_an_end_token_is_left_out(
    codec: Codec, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the end token of some tokenizers, which is not a special token; it is still left out of the text."""
    end = codec._added[0]
    assert end.special
    monkeypatch.setitem(codec._added, 0, AddedToken(end.content, special=False))
    done = completion(server, prompt=[40, 41, 0, 42], stop=end.content, ignore_eos=True, return_token_ids=True)
    assert (done["choices"][0]["token_ids"], done["choices"][0]["finish_reason"]) == ([40, 41, 0], "stop")


def test_stop_strings_are_ignored_before_min_tokens(server: Running) -> None:
    for least, text in ((0, "ab"), (3, "abcab"), (6, "abcabcab")):
        streamed = events(server, "/v1/completions", prompt="abc", stop="c", max_tokens=20, min_tokens=least)
        assert "".join(event["choices"][0]["text"] for event in streamed) == text
        assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


def test_long_values_are_not_echoed(server: Running) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "a", "model": "b" * 10**6}),
        ("/v1/completions", {"prompt": "a", "b" * 10**6: 1}),
        ("/v1/chat/completions", {"messages": [USER], "speculative_config": {"method": "b" * 10**6}}),
    ):
        done = server.post(path, fields)
        assert done.status_code in {400, 404}
        assert len(done.content) < 2000
        assert "bbb ... " in done.json()["error"]["message"]


def test_a_compressed_body_is_named(server: Running) -> None:
    done = server.post("/v1/completions", gzip.compress(b"{}"), headers={**JSON, "Content-Encoding": "gzip"})
    assert (done.status_code, "Content-Encoding gzip, which is not served" in done.text) == (415, True)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
def test_head_is_get_without_a_body(path: str, server: Running) -> None:
    done = httpx2.head(server.url + path)
    assert (done.status_code, done.content) == (200, b"")


def test_scripts_of_allowed_origins_may_call_it(tmp_path: Path) -> None:
    page, asks = "http://localhost:3000", {"Access-Control-Request-Method": "POST"}
    with running(Parrot(), words(tmp_path), "secret", (page,)) as server:
        for origin, status, allowed in ((page, 200, page), ("http://else", 400, None)):
            done = httpx2.options(f"{server.url}/v1/completions", headers={"Origin": origin, **asks})
            assert (done.status_code, done.headers.get("access-control-allow-origin")) == (status, allowed)
        refused = server.post("/v1/completions", {"prompt": "a"}, headers={"Origin": page})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)


JSON = {"Content-Type": "application/json"}
BODIES: dict[str, tuple[bytes, int, str]] = {
    "cut off": (b'{"prompt": "ab', 400, "the body is not JSON (Unterminated string"),
    "nothing": (b"", 400, "the body is not a JSON object; send one"),
    "list": (b"[1]", 400, "the body is not a JSON object"),
    "nan": (b'{"prompt": "ab", "temperature": NaN}', 400, "temperature: Input should be a finite number"),
    "infinity": (b'{"prompt": "ab", "temperature": 1e999}', 400, "temperature: Input should be a finite number"),
    "digits": (b'{"prompt": "ab", "seed": ' + b"1" * 5000 + b"}", 400, "the body cannot be read; send JSON in UTF-8"),
    "nested": (b"[" * 100_000, 400, "the body cannot be read; send JSON in UTF-8"),
    "no such letter": (b'{"prompt": "ab", "model": "\\ud800"}', 404, r"the model '\ud800' is not served"),
    "no such key": (b'{"prompt": "a", "speculative_config": {"method": "mtp", "\\udfff": 1}}', 400, r"no key '\udfff'"),
    "not unicode": (b'{"prompt": "\xff"}', 400, "the body cannot be read; send JSON in UTF-8"),
    "ten megabytes": (b'{"prompt": "' + b"a" * 10**7 + b'"}', 413, f"the body has more than {MAX_BODY_BYTES} bytes"),
}


@pytest.mark.parametrize("name", BODIES)
def test_malformed_bodies_are_rejected(name: str, server: Running) -> None:
    content, status, said = BODIES[name]
    done = server.post("/v1/completions", content, headers=JSON)
    assert done.status_code == status
    assert said in done.json()["error"]["message"]
    assert completion(server, max_tokens=5)["choices"][0]["text"] == "ab€"


def test_a_long_body_without_content_length_is_rejected(server: Running) -> None:
    parts = (b"a" * 2**20 for _ in range(10))
    done = httpx2.post(f"{server.url}/v1/completions", content=parts, headers=JSON)
    assert done.status_code == 413
    assert "the body has more than" in done.json()["error"]["message"]


def test_unknown_paths_methods_and_models_are_rejected(server: Running, client: openai.OpenAI) -> None:
    for answer, status, said in (
        (httpx2.get(f"{server.url}/v1/nothing"), 404, "there is no GET /v1/nothing"),
        (httpx2.get(server.url), 404, "there is no GET /"),
        (httpx2.get(f"{server.url}/v1/completions"), 405, "GET /v1/completions is not served; this path has POST."),
        (server.post("/v1/completions", {"prompt": "a", "model": "gpt"}), 404, "the model 'gpt' is not served"),
    ):
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="a")


def test_a_missing_json_content_type_is_named(server: Running) -> None:
    """Without Content-Type: application/json, as with `curl -d`, one sentence names what is missing."""
    done = httpx2.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}')
    assert done.status_code == 400
    assert "with Content-Type: application/json" in done.json()["error"]["message"]


def test_an_api_key(tmp_path: Path) -> None:
    with running(Parrot(), words(tmp_path), key="sésame") as server:
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} sésame".encode()}
            assert server.post("/v1/completions", {"prompt": "a"}, headers=headers).status_code == 200
        assert (
            server.post("/v1/completions", {"prompt": "a"}, headers={"Authorization": "sésame".encode()}).status_code
            == 401
        )
        for key in ("", "wrong"):
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                server.client(api_key=key or "none").models.list()
        assert server.post("/v1/completions", b"[" * 10**7).status_code == 401, "before the body is read"
        for path in ("/health", "/metrics", "/openapi.json"):
            assert httpx2.get(server.url + path).status_code == 200


def test_without_a_tokenizer_token_ids_are_served() -> None:
    with running(Parrot(), Codec(None)) as server:
        done = completion(server, prompt=[5, 6], max_tokens=3, return_token_ids=True, logprobs=1)["choices"][0]
        assert (done["text"], done["token_ids"]) == ("", [5, 6, 5])
        assert done["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:5"]
        for path, body, said in (
            ("/v1/completions", {"prompt": "a"}, "names no tokenizer; send token ids"),
            ("/v1/completions", {"prompt": [5], "stop": "a"}, "no tokenizer to look for stop strings with"),
            ("/v1/chat/completions", {"messages": MESSAGES}, "so it has no chat template"),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]


def test_a_chat_without_a_chat_template_is_rejected(tmp_path: Path) -> None:
    with running(Parrot(), words(tmp_path, template=None)) as server:
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES})
        assert answer.status_code == 400
        assert "has no chat template; use /v1/completions" in answer.json()["error"]["message"]
