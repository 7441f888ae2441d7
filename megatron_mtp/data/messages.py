"""Normalize the messages of a chat. Fields that cannot be normalized are rejected by name.

In:  messages as in published data sets: OpenAI's (content parts, tool_calls, function_call), ShareGPT's (from, value,
     function_call turns), and flags of single messages (weight, loss, train, ...).
Out: messages with role and content (text); calls are {"type": "function", "function": {"name", "arguments"}}, whose
     arguments are JSON text. Flags are removed.

`holds_reasoning` checks a rendered message, because templates drop and change contents. Blanks are ignored, because
templates trim. Reasoning may be missing, because templates strip it; callers count such turns. A call counts as present
if the function, its argument names and their values are, in any order or spelling.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ROLES = {
    "assistant": "assistant gpt chatgpt model bot chatbot ai",
    "user": "user human prompter",
    "system": "system",
    "developer": "developer",
    "tool": "tool observation function function_response tool_response tool_result ipython",
    "call": "function_call tool_call",
}
"""Roles, and their names in published data, in any case; a call belongs to the assistant."""

CHATS = ("messages", "conversations", "turns")
"""Keys of a line that contain its chat."""

NAMES = {name: role for role, names in ROLES.items() for name in names.split()}
TEXT_PARTS = ("text", "input_text", "output_text")

COUNTS_IF_TRUE = (
    "weight loss loss_weight loss_mask loss_scale step_loss_mask train training trainable train_on_turn".split()
)
COUNTS_IF_FALSE = ["mask", "masked"]
LEFT_OUT_IF_TRUE = ["ignore", "ignored", "skip", "exclude"]
FLAGS = (*COUNTS_IF_TRUE, *COUNTS_IF_FALSE, *LEFT_OUT_IF_TRUE)
FLAG_LIKE = re.compile(r"(?<![a-z])(loss|train\w*|weights?|mask\w*|ignor\w*|skip\w*|exclud\w*)(?![a-z])")
"""Fields that set whether a turn is trained on (the last ones set nothing if false), and similar ones."""

VALUES = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


class Messages(NamedTuple):
    """Normalized messages.

    Attributes:
        messages: with role, content and calls; other fields are for the template.
        trained: indices of the assistant's messages that no flag excludes.
    """

    messages: list[dict[str, Any]]
    trained: tuple[int, ...]


def normal_messages(given: list[dict[str, Any]]) -> Messages:
    """Normalize messages.

    A call in a separate message is merged into the assistant's message right before it, because both are one turn.

    Raises:
        ValueError: a part, call, content or flag cannot be normalized; names message and field.
        TypeError: these are not messages.
    """
    made, trained = list[dict[str, Any]](), list[bool]()
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict) or not isinstance(role := message.get("role", message.get("from")), str):
            raise TypeError
        where = f"message {number} ('{role}')"
        fields = {name: value for name, value in message.items() if value is not None and name not in _OF_MESSAGES}
        content = message.get("content", message.get("value"))
        role = NAMES.get(role.strip().lower(), role)
        counts = _is_trained(fields, role in ("assistant", "call"), where)
        calls = _calls(fields, where)
        if role == "call":
            content, of_role = _called(content, where)
            calls += of_role
        if calls and role not in ("assistant", "call"):
            raise ValueError(f"{where} has calls, which the assistant alone makes; correct the role")
        text = _text(content, where)
        if content is None and not calls and (counts or role != "assistant"):
            raise ValueError(f"{where} has no content; give a text")
        if role == "call" and made and made[-1]["role"] == "assistant" and trained[-1] == counts and not text:
            made[-1]["tool_calls"] = [*made[-1].get("tool_calls", ()), *calls]
            continue
        role = "assistant" if role == "call" else role
        made.append({"role": role, "content": text, **fields} | ({"tool_calls": calls} if calls else {}))
        trained.append(counts)
    return Messages(made, tuple(place for place, counts in enumerate(trained) if counts))


def normal_line(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a line, including a separate system message as in ShareGPT.

    Raises:
        ValueError: the line has two system messages, or requests an unusual weight or mask.
    """
    *others, last = CHATS
    messages = next((fields[key] for key in others if fields.get(key)), None) or _asked(fields[last])
    weight, mask, system = fields.get("weight"), fields.get("mask"), fields.get("system")
    if weight is not None and weight != 1:
        raise ValueError(
            f"the line has 'weight': {weight!r:.20}, but all chats have equal weight; remove the field or the line"
        )
    if mask is not None and NAMES.get(str(mask).lower()) != "user":  # NeMo: the role that is not trained on
        raise ValueError(f"the line has 'mask': {mask!r:.20}, and all but the assistant is masked; remove the field")
    for name, value in fields.items():
        is_list = isinstance(value, list) and all(str(one).lower() in VALUES for one in value)
        if is_list and FLAG_LIKE.search(name.lower()):  # NeMo-RL's message_loss_mask
            raise ValueError(f"the line has '{name}' of all messages; give each message a 'loss_mask' of its own")
        if name in LEFT_OUT_IF_TRUE and VALUES.get(str(value).lower()):
            raise ValueError(f"the line has '{name}': {value!r:.20}; remove the line")
    first = messages[0]
    if not system:
        return list(messages)
    if NAMES.get(str(first.get("role", first.get("from"))).lower()) != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content", first.get("value")) != system:
        raise ValueError("the line has 'system', and its first message is another one of the system; remove one")
    return list(messages)


def _asked(turns: list[str]) -> list[dict[str, Any]]:
    """Return the turns as messages of the user. Raise TypeError for turns that are not strings."""
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise TypeError
    return [{"role": "user", "content": turn} for turn in turns]


def normal_tools(given: Any) -> list[dict[str, Any]] | None:
    """Return tools in the form of OpenAI's `tools`, from that form, from plain functions, or from JSON text of either.

    Raises:
        ValueError: they are not a list of objects.
    """
    tools = [_from_json(tool, "a tool") for tool in _from_json(given, "'tools'") or ()]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("'tools' is not a list of objects; give OpenAI's form")
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in tools
    ] or None


def _text(content: Any, where: str) -> str:
    """Return a message's content as text; parts are joined by line breaks, as the server joins them."""
    if isinstance(content, list):
        return "\n".join(_part(part, where) for part in content)
    if content is None or isinstance(content, str):
        return content or ""
    raise ValueError(f"{where} has a content that is neither text nor parts but {_kind(content)}; give text")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind not in TEXT_PARTS:
        raise ValueError(f"{where} has a part of the type {kind!r}; only parts of text are read, so leave it out")
    if not isinstance(text, str):
        raise ValueError(f"{where} has a part of the type {kind!r} without text; give its 'text'")
    if flag := next(filter(FLAG_LIKE.search, part), None):
        raise ValueError(f"{where} has a part with '{flag}', and a message counts as a whole or not; remove the field")
    return text


def _is_trained(fields: dict[str, Any], is_assistant: bool, where: str) -> bool:
    """Return the values of a message's flags, and remove them from its fields."""
    said = dict[str, bool]()
    for name in [name for name in fields if FLAG_LIKE.search(name.lower())]:
        value = fields.pop(name)
        if name not in FLAGS:
            raise ValueError(
                f"{where} has a field '{name}', which is not read; give one of {', '.join(FLAGS)}, or remove it"
            )
        if (flag := VALUES.get(str(value).lower())) is None:
            shown = json.dumps(value, ensure_ascii=False)
            raise ValueError(f"{where} has '{name}': {shown:.80}; a message counts as a whole or not, so give 1 or 0")
        if flag or name not in LEFT_OUT_IF_TRUE:
            said[name] = flag == (name in COUNTS_IF_TRUE)
    if len(set(said.values())) > 1:
        raise ValueError(f"{where} has {' and '.join(map(repr, said))}, which contradict each other; keep one")
    counts = all(said.values())
    if said and counts and not is_assistant:
        names = " and ".join(map(repr, said))
        raise ValueError(f"{where} has {names}, but only assistant messages are trained on; remove the field")
    return counts and is_assistant


def _calls(fields: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the calls of a message, and remove them from its fields."""
    calls = _from_json(fields.pop("tool_calls", None), f"{where}: 'tool_calls'") or []
    old = _from_json(fields.pop("function_call", None), f"{where}: 'function_call'")
    if not isinstance(calls, list):
        raise ValueError(f"{where}: 'tool_calls' is {_kind(calls)}; give a list of calls")
    return [_call(call, where) for call in [*calls, *([old] if old else [])]]


def _called(value: Any, where: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the reasoning and the calls of a turn whose content is a call, or a list of calls, as JSON."""
    thought, tag, body = value.rpartition("</think>") if isinstance(value, str) else ("", "", value)
    calls = _from_json(body, f"{where}: the call")
    return thought + tag, [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: Any, where: str) -> dict[str, Any]:
    call = _from_json(call, f"{where}: a call")
    if not isinstance(call, dict):
        raise ValueError(f"{where} has a call that is {_kind(call)}; give an object with name and arguments")
    if (kind := call.get("type") or "function") != "function":
        raise ValueError(f"{where} has a call of the type {kind!r}; only calls of functions are read, so leave it out")
    function = call.get("function")
    function = function if isinstance(function, dict) else {name: call.get(name) for name in _BARE if name in call}
    name, given = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} has a call without a name; give the function's")
    arguments = _from_json("{}" if given in (None, "") else given, f"{where}: 'arguments' of the call of '{name}'")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: 'arguments' of the call of '{name}' are {_kind(arguments)}; give an object")
    text = given if isinstance(given, str) and given else json.dumps(arguments, ensure_ascii=False)
    others = {key: value for key, value in call.items() if key not in (*_BARE, "type", "function")}
    return {"type": "function", "function": {"name": name, "arguments": text}, **others}


_BARE = ("name", "arguments", "parameters")
_OF_MESSAGES = ("role", "from", "content", "value")


def _from_json(given: Any, what: str) -> Any:
    """Parse a JSON text; return other text unchanged, and None for a blank text."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given) if given.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({error}); correct it") from error


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", str: "a text"}
    return kinds.get(type(value), "a number")


# --- how a template renders a message ---------------------------------------------------------------------------------

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that contain its reasoning."""

END_OF_REASONING = "</think>"


class TurnError(ValueError):
    """A turn cannot be trained on as the template renders it."""


class Texts(NamedTuple):
    """The rendered parts of a turn.

    Attributes:
        supplied: the part in the generation prompt, such as the start of a thinking block.
        written: the part that counts.
        respelled: function that converts a text to the tokens' spelling, because some tokenizers normalize.
    """

    supplied: str
    written: str
    respelled: Callable[[str], str]

    def hold(self, text: str, times: int = 1) -> bool:
        """Return whether a text occurs this many times; it has to end in the part that counts."""
        supplied, written = _squeezed(self.supplied), _squeezed(self.written)

        def count(spelled: str) -> int:
            return (supplied + written).count(spelled, max(0, len(supplied) - len(spelled) + 1))

        return count(_squeezed(text)) >= times or count(_squeezed(self.respelled(text))) >= times


def holds_reasoning(message: dict[str, Any], where: str, texts: Texts) -> bool:
    """Return whether the rendered parts contain the reasoning of a message.

    Args:
        where: names the message.

    Raises:
        TurnError: they lack its content or a call.
    """
    content, thoughts = message["content"], [reasoning_of(message)]
    made = f"{where}: the chat template makes {texts.written!r:.80} of it, which does not hold"
    if not texts.hold(content):
        thought, tag, answer = content.rpartition(END_OF_REASONING)
        if not tag or not answer.strip() or not texts.hold(answer):
            raise TurnError(
                f"{made} its content {content!r:.60}; correct it, give another template, or 'weight': 0 to skip it"
            )
        thoughts.append(thought)
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    times = Counter(function["name"] for function in functions)
    for function in functions:
        named = all(any(map(texts.hold, spellings)) for spellings in _spellings(function))
        if not named or not texts.hold(function["name"], times[function["name"]]):
            raise TurnError(
                f"{made} its call of '{function['name']}'; give a template that renders such calls, or 'weight': 0 to "
                "skip it"
            )
    return all(map(texts.hold, thoughts))


def reasoning_of(message: dict[str, Any]) -> str:
    """Return the reasoning of a message; empty if there is none."""
    return next((text for name in REASONING if isinstance(text := message.get(name), str) and text.strip()), "")


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _spellings(function: dict[str, Any]) -> Iterator[set[str]]:
    """Return spellings of everything that a call's arguments name: their names, and string values."""
    for name in _names(json.loads(function["arguments"])):
        yield {name, json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1], repr(name)[1:-1]}


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from (key, *_names(inner))
    for inner in value if isinstance(value, list) else ():
        yield from _names(inner)
