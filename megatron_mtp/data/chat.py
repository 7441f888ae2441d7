"""A chat, from one line of a file.

{"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}, or ShareGPT's {"conversations": [{"from":
"human", "value": ...}, ...]}. Lines of SPEED-Bench (arXiv:2604.09557) have only the user's turns, {"turns": ["...",
...]}.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from megatron_mtp.data.corpus import Document
from megatron_mtp.data.messages import CHATS, normal_line, normal_messages, normal_tools
from megatron_mtp.data.named_sources import named_source


@dataclass(frozen=True)
class Chat:
    """One chat. Creation normalizes the messages as in `data/messages.py`, or rejects them.

    Attributes:
        messages: each has a role and a text; other fields are for the template.
        tools: tools that the template describes; None if there are none.
        variables: other template variables, from "chat_template_kwargs" of the line.
        source: source named in the line, if any.
        trained: indices of the assistant's messages that no flag excludes.

    Raises:
        ValueError: a message, tool or flag cannot be normalized.
        TypeError: the messages have the wrong type.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    trained: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        messages, trained = normal_messages(self.messages)
        for name, value in (("messages", messages), ("trained", trained), ("tools", normal_tools(self.tools))):
            object.__setattr__(self, name, value)


def read_chat(line: Document) -> Chat:
    """Read the chat of a line. Raise ValueError if it is not a chat, or is rejected."""
    with open(line.path, "rb") as file:
        file.seek(line.start)
        raw = file.read(line.size)
    try:
        fields = json.loads(raw)
        tools = fields.get("tools") or fields.get("functions")
        variables = fields.get("chat_template_kwargs") or {}
        return Chat(normal_line(fields), tools or None, variables, named_source(fields))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError, IndexError):
        raise ValueError(
            f"--chat: {place_of(line)} is not a chat; give lines such as "
            '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.'
        ) from None
    except ValueError as error:
        raise ValueError(f"--chat: {place_of(line)}: {error}.") from error


def is_chat(line: dict[str, Any]) -> bool:
    """Return whether a line of a file is a chat rather than text."""
    return any(key in line for key in CHATS)


def place_of(line: Document) -> str:
    """Format file and line for a message."""
    return f"'{line.path}', line {line.line}"
