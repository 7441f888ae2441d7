"""A chat: a line of a file, in one form.

{"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}, or as ShareGPT writes it, {"conversations":
[{"from": "human", "value": ...}, ...]}. Lines of SPEED-Bench (arXiv:2604.09557) have the turns of the user alone,
{"turns": ["...", ...]}.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from megatron_mtp.data.corpus import Document
from megatron_mtp.data.messages import CHATS, normal_line, normal_messages, normal_tools
from megatron_mtp.data.sources import named_source


@dataclass(frozen=True)
class Chat:
    """A line of a file. Whatever makes one brings it into the form of `data/messages.py`, or refuses it.

    Attributes:
        messages: each has a role and a text; what else it has is for the template.
        tools: that the template describes; None for none.
        variables: others that the template reads, from "chat_template_kwargs" of the line.
        source: that the line names, if it does.
        trained: places of the assistant's messages that no flag of theirs leaves out.

    Raises:
        ValueError: a message, a tool or a flag has no place in the form.
        TypeError: the messages are none.
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
    """Read the chat of a line. Raises ValueError where it is none, or is refused."""
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
    """Return whether a line of a file is a chat and no text."""
    return any(key in line for key in CHATS)


def place_of(line: Document) -> str:
    """The file and the line, for a message."""
    return f"'{line.path}', line {line.line}"
