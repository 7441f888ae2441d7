"""Published chat formats are normalized or rejected by name, and so is a rendered turn that lacks the original text."""

import json
from typing import Any

import pytest
from chat_cases import TOOLS, said, user

from megatron_mtp.data.chat import Chat
from megatron_mtp.data.messages import Texts, TurnError, holds_reasoning, normal_line, normal_messages, normal_tools

ANSWER = {"role": "assistant", "content": "a"}
ADD = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def called(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return normal_messages([user("q"), *messages]).messages[1:]


@pytest.mark.parametrize(
    ("names", "role"),
    [
        ("assistant Assistant gpt GPT model bot chatbot", "assistant"),
        ("user Human human prompter", "user"),
        ("tool observation function function_response tool_response ipython", "tool"),
        ("system System", "system"),
        ("developer", "developer"),
        ("document", "document"),
    ],
)
def test_roles_have_one_name(names: str, role: str) -> None:
    given = [{"role": name, "content": "a"} for name in names.split()]
    assert [message["role"] for message in normal_messages(given).messages] == [role] * len(given)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}, "c"], "a\nb\nc"),
        ([], ""),
    ],
)
def test_parts_of_text_are_one_text(content: Any, text: str) -> None:
    assert normal_messages([{"role": "user", "content": content}]).messages == [user(text)]
    assert normal_messages([{"from": "human", "value": content}]).messages == [user(text)]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": [ADD]},
        {"role": "assistant", "content": None, "tool_calls": [ADD], "function_call": None},
        {"role": "assistant", "tool_calls": json.dumps([ADD])},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "function_call", "value": {"name": "add", "parameters": {"a": 2}}},
        {"role": "tool_call", "content": '[{"name": "add", "arguments": "{\\"a\\": 2}"}]'},
    ],
)
def test_calls_have_one_form(message: dict[str, Any]) -> None:
    assert called(message) == [{"role": "assistant", "content": "", "tool_calls": [ADD]}]


def test_separate_tool_calls_are_merged_into_the_preceding_turn() -> None:
    turn = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    assert called(said("wait"), turn, turn) == [said("wait") | {"tool_calls": [ADD, ADD]}]
    thought = {"from": "function_call", "value": "<think>t</think>" + turn["value"]}
    assert called(thought) == [said("<think>t</think>") | {"tool_calls": [ADD]}]
    apart = normal_messages([user("q"), said("wait") | {"loss": False}, turn])
    assert [message["content"] for message in apart.messages] == ["q", "wait", ""]
    assert apart.trained == (2,)


def test_missing_tool_call_arguments_become_an_empty_object() -> None:
    for none in (None, "", {}, "{}"):
        (message,) = called({"role": "assistant", "tool_calls": [{"name": "add", "arguments": none}]})
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


def test_normalizing_a_chat_twice_changes_nothing() -> None:
    once = Chat([user("q"), {"role": "model", "tool_calls": [ADD["function"] | {"id": "i"}]}], json.dumps(TOOLS))  # type: ignore[arg-type]
    assert Chat(once.messages, once.tools) == once


@pytest.mark.parametrize(
    "tools",
    [TOOLS, json.dumps(TOOLS), [TOOLS[0]["function"]], json.dumps([TOOLS[0]["function"]]), [json.dumps(TOOLS[0])]],
)
def test_tools_have_one_form(tools: Any) -> None:
    assert normal_tools(tools) == TOOLS


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_no_tools_are_none(tools: Any) -> None:
    assert normal_tools(tools) is None


def test_the_system_prompt_becomes_one_message() -> None:
    system = {"role": "System", "content": "S"}
    of_line = {"messages": [user("q")], "system": "S", "weight": 1, "mask": "User", "train_tags": ["a"]}
    assert normal_line(of_line) == [{"role": "system", "content": "S"}, user("q")]
    assert normal_line({"messages": [system, user("q")], "system": "S"}) == [system, user("q")]


@pytest.mark.parametrize(
    ("field", "because"),
    [
        ({"system": "T"}, "its first message is another one of the system"),
        ({"weight": 0.5}, "'weight': 0.5, but all chats have equal weight"),
        ({"mask": "Assistant"}, "'mask': 'Assistant', and all but the assistant is masked"),
        ({"message_loss_mask": [0, 1]}, "'message_loss_mask' of all messages; give each message"),
        ({"ignore": True}, "'ignore': True; remove the line"),
    ],
)
def test_a_line_that_asks_for_something_else_is_refused(field: dict[str, Any], because: str) -> None:
    with pytest.raises(ValueError, match=because):
        normal_line({"messages": [{"role": "system", "content": "S"}, user("q")], **field})


@pytest.mark.parametrize("name", ["source", "glossary", "id", "entrainment"])
def test_other_fields_are_for_the_template(name: str) -> None:
    assert normal_messages([user("q") | {name: 0}]).messages == [user("q") | {name: 0}]


FLAGS = "weight loss loss_weight loss_mask loss_scale step_loss_mask train training trainable train_on_turn".split()


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    ("value", "counts"), [(0, False), (False, False), (0.0, False), ("0", False), (1, True), (True, True), (None, True)]
)
def test_a_flag_says_whether_a_turn_is_trained_on(name: str, value: Any, counts: bool) -> None:
    messages, trained = normal_messages([user("q"), ANSWER | {name: value}, user("r"), ANSWER])
    assert trained == ((1, 3) if counts else (3,))
    assert messages[1] == ANSWER


@pytest.mark.parametrize("name", ["mask", "masked"])
def test_a_mask_field_means_the_opposite(name: str) -> None:
    given = [user("q") | {name: True}, ANSWER | {name: True}, user("r") | {name: True}, ANSWER | {name: False}]
    assert normal_messages(given).trained == (3,)


@pytest.mark.parametrize("name", ["ignore", "ignored", "skip", "exclude"])
def test_a_field_may_leave_a_turn_out_and_asks_for_nothing_if_false(name: str) -> None:
    given = [user("q") | {name: True}, ANSWER | {name: True}, user("r") | {name: False}, ANSWER | {name: False}]
    assert normal_messages(given) == ([user("q"), ANSWER, user("r"), ANSWER], (3,))


@pytest.mark.parametrize(
    ("message", "because"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "a part of the type 'image_url'; only"),
        ({"role": "user", "content": [{"text": "a"}]}, "a part of the type None"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of the type 'text' without text"),
        ({"role": "user", "content": 4}, "has a content that is neither text nor parts but a number"),
        ({"role": "user", "content": {"text": "a"}}, "neither text nor parts but an object"),
        ({"role": "user", "content": None}, "has no content"),
        ({"role": "user"}, "has no content"),
        ({"role": "assistant", "content": None}, "has no content"),
        ({"role": "user", "content": "a", "tool_calls": [ADD]}, "has calls, which the assistant alone makes"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}, "a call of the type 'custom'"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "a call without a name"),
        ({"role": "assistant", "tool_calls": {"name": "add"}}, "'tool_calls' is an object; give a list"),
        ({"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{a"}]}, "of the call of 'add' is not JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "add", "arguments": [2]}]}, "'add' are a list; give an object"),
        ({"from": "function_call", "value": "add 2"}, "the call is not JSON"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, "'weight': 0.5; a message counts as a whole or not"),
        ({"role": "assistant", "content": "a", "weight": 0, "train": True}, "'weight' and 'train', which contradict"),
        ({"role": "assistant", "content": [{"type": "text", "text": "a", "train": False}]}, "a part with 'train', and"),
        ({"role": "assistant", "content": "a", "ignore": True, "train": 1}, "'ignore' and 'train', which contradict"),
        ({"role": "assistant", "content": "a", "ignore_loss": 1}, "a field 'ignore_loss', which is not read"),
        ({"role": "assistant", "content": "a", "training_detail": []}, "a field 'training_detail', which is not read"),
        ({"role": "user", "content": "a", "train": True}, "has 'train', but only assistant messages are trained on"),
    ],
)
def test_unsupported_message_parts_are_rejected_by_name(message: dict[str, Any], because: str) -> None:
    role = message.get("role", message.get("from"))
    with pytest.raises(ValueError, match="message 2") as raised:
        normal_messages([user("q"), message])
    assert str(raised.value).startswith(f"message 2 ('{role}')")
    assert because in str(raised.value)


# --- how a template renders a message ---------------------------------------------------------------------------------


def shown(written: str, supplied: str = "") -> Texts:
    return Texts(supplied, written, str)


@pytest.mark.parametrize(
    ("message", "texts", "has_reasoning"),
    [
        (said("yes"), shown("yes<E>"), True),
        (said(" y es\n"), shown("y es<E>"), True),
        (said("yes", "why"), shown("<think>why</think>yes<E>"), True),
        (said("yes", "why"), shown("yes<E>"), False),
        (said("<think>\nwhy\n</think>\n\nyes"), shown("why</think>yes<E>", "<think>\n"), True),
        (said("<think>\nwhy\n</think>\n\nyes"), shown("yes<E>"), False),
        (said("why</think>yes"), shown("yes<E>"), False),
    ],
)
def test_reasoning_may_be_missing(message: dict[str, Any], texts: Texts, has_reasoning: bool) -> None:
    assert holds_reasoning(message, "message 2", texts) == has_reasoning


def test_content_may_appear_as_the_tokenizer_spells_it() -> None:
    assert holds_reasoning(said("Yes"), "message 2", Texts("", "yes<E>", str.lower))


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [ADD | {"function": {"name": "add", "arguments": '{"of": "x \\"y"}'}}],
}


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "add", "arguments": {"of": "x \\"y"}}',
        '<function=add><parameter=of>x "y</parameter>',
        "[add(of='x \"y')]",
    ],
)
def test_a_call_may_be_there_in_any_spelling(written: str) -> None:
    assert holds_reasoning(CALL, "message 2", shown(written))


@pytest.mark.parametrize(
    ("message", "texts", "because"),
    [
        (said("yes"), shown("<E>"), "makes '<E>' of it, which does not hold its content 'yes'"),
        (said("assistant"), shown("<E>", "assistant"), "its content 'assistant'"),
        (said("<think>why</think>"), shown("<E>"), "its content"),
        (CALL, shown("<E>"), "its call of 'add'"),
        (CALL, shown('add {"of": 2}'), "its call of 'add'"),
        (CALL | {"tool_calls": CALL["tool_calls"] * 2}, shown("add(of='x \"y')"), "its call of 'add'"),
    ],
)
def test_a_rendered_turn_without_its_content_is_rejected(message: dict[str, Any], texts: Texts, because: str) -> None:
    with pytest.raises(TurnError, match="message 2: the chat template") as raised:
        holds_reasoning(message, "message 2", texts)
    assert because in str(raised.value)
