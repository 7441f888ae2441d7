"""Chats by templates in the shapes of twelve families: which tokens count, by hand; rows of them; resumed and cut."""

from pathlib import Path

import pytest
from chat_cases import CASES, SHAPES

from megatron_mtp.data.chat import Chat, ChatEncoder, marked


@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
@pytest.mark.parametrize(
    ("shape", "chat", "plain", "of_tags"), CASES, ids=[f"{case[0]}-{place}" for place, case in enumerate(CASES)]
)
def test_what_counts_is_what_a_person_marks(
    shape: str, chat: Chat, plain: list[str], of_tags: list[str] | None, tagged: bool, tmp_path: Path
) -> None:
    tokenizer = SHAPES[shape].tokenizer(tmp_path, tagged)
    expected = of_tags if tagged and of_tags else plain
    assert [marked(tokenizer, document) for document in ChatEncoder(tokenizer).encode(chat)] == expected
