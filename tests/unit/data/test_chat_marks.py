"""Chats of twenty shapes with the templates of eleven families: every token that counts, as marked in chat_marks.txt.

In that file ¶ is a line break, ⟦ ⟧ enclose what counts, and a line is a document. After REFUSED comes a part of the
error. The first tier has one shape per family, each a different one.
"""

import json
import re
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from chat_cases import SHAPES, SYSTEM, TOOLS, said, user
from transformers import PreTrainedTokenizerBase

from megatron_mtp.data.chat import read_chat
from megatron_mtp.data.corpus import list_documents
from megatron_mtp.data.counted_tokens import ChatEncoder, Counted

pytestmark = pytest.mark.usefixtures("megatron")

MARKS = Path(__file__).parents[2] / "support" / "chat_marks.txt"


def part(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def calling(*values: Any, content: str | None = "") -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "add", "arguments": value}} for value in values]
    return {"role": "assistant", "content": content, "tool_calls": calls}


ANSWERED = {"role": "tool", "content": "4"}
FUNCTION = TOOLS[0]["function"]
CALL = {"name": "add", "arguments": '{"a": 2}'}

CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [user("q"), said("a")]},
    "two": {"messages": [user("q"), said("a"), user("r"), said("b")]},
    "system": {"messages": [SYSTEM, user("q"), said("a")]},
    "parts": {"messages": [user("q") | {"content": part("q")}, said("a") | {"content": part("a")}]},
    "two_parts": {"messages": [user("q") | {"content": part("q", "p")}, said("a") | {"content": part("a", "m")}]},
    "call": {"messages": [user("q"), calling('{"a": 2}'), ANSWERED, said("b")], "tools": TOOLS},
    "call_object": {"messages": [user("q"), calling({"a": 2}), ANSWERED, said("b")], "tools": TOOLS},
    "call_null": {"messages": [user("q"), calling({"a": 2}, content=None), ANSWERED, said("b")], "tools": TOOLS},
    "function_call_field": {
        "messages": [
            user("q"),
            {"role": "assistant", "content": None, "function_call": CALL},
            {"role": "function", "name": "add", "content": "4"},
            said("b"),
        ],
        "functions": [FUNCTION],
    },
    "sharegpt_call": {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "b"},
        ],
        "tools": json.dumps([FUNCTION]),
    },
    "two_calls": {"messages": [user("q"), calling({"a": 2}, {"a": 3}), ANSWERED, ANSWERED, said("b")], "tools": TOOLS},
    "text_and_call": {"messages": [user("q"), calling({"a": 2}, content="wait"), ANSWERED, said("b")], "tools": TOOLS},
    "weight": {"messages": [user("q"), said("a") | {"weight": 0}, user("r"), said("b") | {"weight": 1}]},
    "loss": {
        "messages": [
            user("q"),
            said("a"),
            user("r"),
            said("b") | {"loss": False},
            user("s"),
            said("c") | {"train": True},
        ]
    },
    "roles": {
        "messages": [
            {"role": role, "content": text}
            for role, text in (("Human", "q"), ("model", "a"), ("USER", "r"), ("Assistant", "b"))
        ]
    },
    "mask_history": {"messages": [user("q"), said("a"), user("r"), said("b")]},
    "two_answers": {"messages": [user("q"), said("a"), said("b")]},
    "reasoning": {"messages": [user("q"), said("a", "t"), user("r"), said("b", "u")]},
    "blanks": {"messages": [user("q"), said("\n a \n")]},
    "inline_thinking": {"messages": [user("q"), said("<think>\nt\n</think>\n\na")]},
}


def read_marks() -> dict[str, dict[str, list[str]]]:
    """Return the documents of every family and shape."""
    marks: dict[str, dict[str, list[str]]] = {}
    for section in MARKS.read_text(encoding="utf-8").split("== ")[1:]:
        family, *shapes = re.split(r"\n(?! |$)", section)
        for shape, *documents in (lines.splitlines() for lines in shapes):
            texts = [line.removeprefix("    ").replace("¶", "\n") for line in documents]
            marks.setdefault(family, {})[shape] = texts
    return marks


EXPECTED = read_marks()
IN_FIRST_TIER = set(zip(EXPECTED, cycle(list(CHATS)[3:]), strict=False))


def tokens(tokenizer: PreTrainedTokenizerBase, marked: str) -> list[tuple[str, bool]]:
    """Return the tokens of a marked text, and whether each counts; no token crosses a mark."""
    pieces = marked.replace("⟧", "⟦").split("⟦")
    return [
        (token, number % 2 == 1)
        for number, piece in enumerate(pieces)
        for token in tokenizer.convert_ids_to_tokens(tokenizer(piece, add_special_tokens=False).input_ids)
    ]


def counted(tokenizer: PreTrainedTokenizerBase, document: Counted) -> list[tuple[str, bool]]:
    places = {place for start, stop in document.spans for place in range(start, stop)}
    return [(token, place in places) for place, token in enumerate(tokenizer.convert_ids_to_tokens(document.ids))]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    return {shape: SHAPES[shape].tokenizer(tmp_path_factory.mktemp(shape), tagged=False) for shape in EXPECTED}


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(family, shape, marks=() if (family, shape) in IN_FIRST_TIER else pytest.mark.matrix)
        for family in EXPECTED
        for shape in CHATS
    ],
)
def test_every_token_that_counts_is_marked(
    family: str, shape: str, tokenizers: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    tokenizer, (first, *_) = tokenizers[family], EXPECTED[family][shape]
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHATS[shape]) + "\n")
    (line,) = list_documents([tmp_path / "chats.jsonl"])
    encoder = ChatEncoder(tokenizer, masks_history=shape == "mask_history")
    if first.startswith("REFUSED "):
        with pytest.raises(ValueError, match=first.removeprefix("REFUSED ")):
            encoder.documents(line, read_chat(line))
        return
    expected = [tokens(tokenizer, marked) for marked in EXPECTED[family][shape]]
    assert [counted(tokenizer, document) for document in encoder.documents(line, read_chat(line))] == expected


def test_every_family_has_every_shape() -> None:
    assert [list(of_family) for of_family in EXPECTED.values()] == [list(CHATS)] * 11
