"""Chats with templates in the shapes of twelve families: which tokens count, by hand; files, rows, MTP targets."""

import dataclasses
import itertools
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_cases import CALL, CASES, ONE, SHAPES, SYSTEM, THOUGHT, TOOLS, TWO, Shape, said, user
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from packed_runs import set_packed_run
from tiers import tiered
from transformers import PreTrainedTokenizerBase

from megatron_mtp.cli.preprocess import main as preprocess
from megatron_mtp.data import corpus
from megatron_mtp.data.best_fit import best_fit, order_of_rows
from megatron_mtp.data.chat import Chat, read_chat
from megatron_mtp.data.chat_files import prefix_in_cache, write_chats
from megatron_mtp.data.checks import check_data_prefixes, check_split, read_index
from megatron_mtp.data.corpus import list_documents
from megatron_mtp.data.counted_tokens import ChatEncoder, marked
from megatron_mtp.data.messages import TurnError
from megatron_mtp.data.prompts import UserTurns
from megatron_mtp.data.tokenizer import Encoder, read_tokenizer
from megatron_mtp.training import forward_step, given_chats
from megatron_mtp.training.chats import PackedChats, counted_part
from megatron_mtp.training.datasets import reads_chats
from megatron_mtp.training.given_chats import example, make_chats

pytestmark = pytest.mark.usefixtures("megatron")


# --- tokens that count -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
@pytest.mark.parametrize(
    ("shape", "chat", "plain", "of_tags"), CASES, ids=[f"{case[0]}-{place}" for place, case in enumerate(CASES)]
)
def test_counted_tokens_match_the_ones_marked_by_hand(
    shape: str, chat: Chat, plain: list[str], of_tags: list[str] | None, tagged: bool, tmp_path: Path
) -> None:
    tokenizer = SHAPES[shape].tokenizer(tmp_path, tagged)
    expected = of_tags if tagged and of_tags else plain
    assert [marked(tokenizer, document) for document in ChatEncoder(tokenizer).encode(chat)] == expected


@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("Qwen3", "<|im_start|>assistant\n⟦<think>\n\n</think>\n\na<|im_end|>⟧"),
        ("GLM-4.5", "<|assistant|>⟦\n<think></think>\na<|user|>⟧"),
    ],
)
def test_an_empty_thinking_block_counts_if_requested(shape: str, expected: str, tagged: bool, tmp_path: Path) -> None:
    tokenizer = SHAPES[shape].tokenizer(tmp_path, tagged)
    (document,) = ChatEncoder(tokenizer, counts_empty_thinking=True).encode(ONE)
    assert marked(tokenizer, document).endswith(expected)


@pytest.mark.parametrize("shape", tiered(SHAPES, [*SHAPES][:3]))
@pytest.mark.parametrize("tagged", [False, True])
def test_a_long_chat_is_tokenized_little_more_than_once_and_as_a_whole(
    shape: str, tagged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SHAPES[shape].tokenizer(tmp_path, tagged)
    encoder, read = ChatEncoder(tokenizer), 0
    template = encoder._template
    tokenize, tokens = template.tokenize, template.tokens

    def counted(text: str, **more: bool) -> Any:
        nonlocal read
        read += len(text)
        return tokens(text, **more)

    def compared(text: str) -> list[int]:
        ids = tokenize(text)
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
        return ids

    monkeypatch.setattr(template, "tokens", counted)
    monkeypatch.setattr(template, "tokenize", compared)
    turns = [(user(f"question {turn} " * 9), said(f"answer {turn} " * 9, f"thought {turn}")) for turn in range(30)]
    made = encoder.encode(Chat([message for pair in turns for message in pair]))
    assert read < 3 * max(len(document.ids) for document in made)


def lines_of(file: Path, *rows: dict[str, Any]) -> list[Any]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list_documents([file])


@pytest.mark.parametrize(
    ("shape", "messages", "because"),
    [
        (
            "MiniMax",
            [user("q"), said("a")],
            "message 2 is rendered as 'a[e~[\\n', where the generation prompt has 'Draft",
        ),
        ("Gemma", [user("q"), user("q"), said("a")], "turns must alternate"),
    ],
)
def test_a_template_whose_prompt_does_not_begin_the_turn_is_refused(
    shape: str, messages: list[dict[str, Any]], because: str, tmp_path: Path
) -> None:
    tokenizer = SHAPES[shape].tokenizer(tmp_path, tagged=False)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "]~b]ai{{ '\\n' }}<think>", "]~b]ai{{ '\\n' }}Draft: <think>"
    )
    encoder = ChatEncoder(tokenizer)
    _, line = lines_of(tmp_path / "chats.jsonl", {"messages": ONE.messages}, {"messages": messages})
    with pytest.raises(ValueError, match="refuses") as raised:
        encoder.documents(line, read_chat(line))
    assert f"the chat template of '{tmp_path}' refuses '{tmp_path}/chats.jsonl', line 2 (" in str(raised.value)
    assert because in str(raised.value)


def test_an_answer_may_begin_with_the_token_that_ends_the_prompt(tmp_path: Path) -> None:
    """Two line breaks are one token, but a model's prompt ends with one of them and it writes the other."""
    tokenizer = SHAPES["Qwen2.5"].tokenizer(tmp_path, tagged=False)
    (document,) = ChatEncoder(tokenizer).encode(Chat([SYSTEM, user("q"), said("\nanswer")]))
    assert marked(tokenizer, document).endswith("<|im_start|>assistant\n⟦\nanswer<|im_end|>⟧")
    ((start, _),) = document.spans
    assert tokenizer.convert_ids_to_tokens(document.ids[start - 1 : start + 1]) == ["Ċ", "Ċ"]


def test_an_end_token_counts_even_if_it_is_the_pad_token(tmp_path: Path) -> None:
    tokenizer = SHAPES["Qwen2.5"].tokenizer(tmp_path, tagged=False)
    tokenizer.pad_token = tokenizer.eos_token
    (document,) = ChatEncoder(tokenizer).encode(TWO)
    assert marked(tokenizer, document).count("<|im_end|>⟧") == 2


def test_an_opening_assistant_turn_does_not_count(tmp_path: Path) -> None:
    tokenizer = SHAPES["Qwen2.5"].tokenizer(tmp_path, tagged=False)
    (document,) = ChatEncoder(tokenizer).encode(Chat([said("hello"), *ONE.messages]))
    assert marked(tokenizer, document).endswith(
        "hello<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧"
    )
    assert ChatEncoder(tokenizer).encode(Chat([said("hello"), user("q")])) == []
    tagged = ChatEncoder(SHAPES["Qwen2.5"].tokenizer(tmp_path, tagged=True))
    assert [len(document.spans) for document in tagged.encode(Chat([said("hello"), user("q")]))] == [1]


# --- how templates change a turn --------------------------------------------------------------------------------------

HEAD, TAIL = (
    "{% for m in messages %}<B>{{ m.role }}¶",
    "<E>{% endfor %}{% if add_generation_prompt %}<B>assistant¶{% endif %}",
)
QUESTION = "<B>user\nq<E><B>assistant\n"
MADE = Shape("<B> <E>", "<E>", HEAD + "{{ m.content }}" + TAIL)


def of_template(template: str, folder: Path, tagged: bool = False) -> PreTrainedTokenizerBase:
    return dataclasses.replace(MADE, template=template).tokenizer(folder, tagged)


def test_a_call_that_a_template_drops_is_refused(tmp_path: Path) -> None:
    encoder = ChatEncoder(of_template(HEAD + "{{ m.content }}" + TAIL, tmp_path))
    with pytest.raises(TurnError, match=r"'<E>' .* does not hold its call of 'add'; give a template"):
        encoder.encode(CALL)


@pytest.mark.parametrize(
    "body",
    [
        "{{ c.function.name + ' ' + c.function.arguments }}",
        "{{ c.function.name }} {{ c.function.arguments }}",
        "{{ c.function.name }} {{ c.function.arguments | tojson }}",
    ],
    ids=["joins text", "prints", "tojson"],
)
@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
@pytest.mark.parametrize("given", [{"a": 2}, '{"a": 2}'], ids=["object", "text"])
def test_arguments_are_json_however_a_template_takes_them(body: str, tagged: bool, given: Any, tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}" + body + "{% endfor %}"
    body = "{{ m.content }}{% if m.role == 'assistant' %}«" + calls + "<E>»{% else %}<E>{% endif %}"
    tokenizer = of_template(HEAD + body + TAIL.removeprefix("<E>"), tmp_path, tagged)
    function = {"name": "add", "arguments": given}
    chat = Chat([user("q"), {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}])
    (document,) = ChatEncoder(tokenizer).encode(chat)
    assert marked(tokenizer, document) == QUESTION + '⟦add {"a": 2}<E>⟧'


HEADS_TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<B>assistant¶{{ m.content }}<E>"
    "{% endgeneration %}{% else %}<B>{{ m.role }}¶{{ m.content }}<E>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<B>assistant¶{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([said("a"), said("b")], QUESTION + "⟦a<E>⟧<B>assistant\n⟦b<E>⟧"),
        ([said("a") | {"weight": 0}, said("b")], QUESTION + "a<E><B>assistant\n⟦b<E>⟧"),
        ([said("a"), said("b") | {"weight": 0}], QUESTION + "⟦a<E>⟧"),
    ],
)
def test_answers_in_a_row_count_each(messages: list[dict[str, Any]], expected: str, tmp_path: Path) -> None:
    """The tags also enclose the headers, so the blocks of the two answers touch."""
    tokenizer = of_template(HEADS_TAGGED, tmp_path)
    (document,) = ChatEncoder(tokenizer).encode(Chat([user("q"), *messages]))
    assert marked(tokenizer, document) == expected


def test_a_turn_may_have_several_tagged_blocks(tmp_path: Path) -> None:
    """As in a template that tags reasoning and answer separately."""
    body = (
        "{% if m.role == 'assistant' %}{% if m.thinking %}«{{ m.thinking }}»|{% endif %}«{{ m.content }}<E>»{% else %}"
    )
    tokenizer = of_template(HEAD + body + "{{ m.content }}{% endif %}" + TAIL, tmp_path, tagged=True)
    chat = Chat([user("q"), said("a", "t"), user("q"), said("b", "u") | {"loss": False}, user("q"), said("c")])
    (document,) = ChatEncoder(tokenizer).encode(chat)
    assert marked(tokenizer, document) == (QUESTION + "⟦t⟧|⟦a<E>⟧<E>" + QUESTION + "u|b<E><E>" + QUESTION + "⟦c<E>⟧")


def test_a_tagged_answer_may_begin_with_the_token_that_ends_the_prompt(tmp_path: Path) -> None:
    tokenizer = SHAPES["Qwen2.5"].tokenizer(tmp_path, tagged=True)
    (document,) = ChatEncoder(tokenizer).encode(Chat([SYSTEM, user("q"), said("\nanswer")]))
    assert marked(tokenizer, document).endswith("<|im_start|>assistant\n⟦\nanswer<|im_end|>⟧")


def test_content_that_ends_a_text_is_refused(tmp_path: Path) -> None:
    encoder = ChatEncoder(of_template(MADE.template, tmp_path))
    with pytest.raises(TurnError, match="makes 'a<E>' of it, which does not hold its content 'a<E>b'"):
        encoder.encode(Chat([user("q"), said("a<E>b")]))


def test_a_role_that_the_template_does_not_name_is_refused(tmp_path: Path) -> None:
    chat = Chat([{"role": "critic", "content": "c"}, user("q"), said("a")])
    with pytest.raises(TurnError, match=r"message 1 has the role 'critic', .*; give"):
        ChatEncoder(of_template(MADE.template, tmp_path)).encode(chat)
    named = ChatEncoder(of_template("{% set known = 'critic' %}" + MADE.template, tmp_path))
    assert len(named.encode(chat)) == 1


@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
def test_messages_that_are_not_trained_on_are_counted(tagged: bool, tmp_path: Path) -> None:
    tokenizer = SHAPES["Qwen2.5"].tokenizer(tmp_path, tagged)
    left_out = Counter[str]()
    turns = [user("q"), said("a", "t"), user("r"), said("b") | {"loss": 0}, user("s"), said("c")]
    ChatEncoder(tokenizer).encode(Chat(turns), left_out)
    assert left_out == {"masked_turns": 1, "unthought_turns": 1}
    ChatEncoder(tokenizer, masks_history=True).encode(Chat(turns), left_out)
    assert left_out == {"masked_turns": 2, "unthought_turns": 1, "history_turns": 1}
    ChatEncoder(SHAPES["R1-Distill"].tokenizer(tmp_path / "r1", tagged)).encode(TWO, opened := Counter[str]())
    assert opened == ({} if tagged else {"unopened_turns": 2})
    last_is_masked = Chat([user("q"), said("a"), user("r"), said("b") | {"weight": 0}])
    assert ChatEncoder(tokenizer, masks_history=True).encode(last_is_masked) == []  # nor an earlier answer instead
    ChatEncoder(tokenizer).encode(Chat([user("q")]), left_out)
    ChatEncoder(tokenizer).encode(Chat([user("q"), said("a") | {"train": False}]), left_out)
    assert (left_out["chats_without_answer"], left_out["chats_without_trained_answer"]) == (1, 1)
    ChatEncoder(tokenizer).encode(Chat([said("hello"), user("q"), said("")]), left_out)
    assert (left_out["opening_turns"], left_out["empty_turns"]) == (0 if tagged else 1, 1)


# --- files -----------------------------------------------------------------------------------------------------------

SHAREGPT = {
    "system": "S",
    "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
    "tools": json.dumps(TOOLS),
}


def test_lines_of_either_form_are_chats(tmp_path: Path) -> None:
    given = {"messages": CALL.messages, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    ours, theirs = (read_chat(line) for line in lines_of(tmp_path / "chats.jsonl", given, SHAREGPT))
    assert ours == Chat(CALL.messages, TOOLS, {"enable_thinking": False})
    assert theirs == Chat([SYSTEM, *ONE.messages], TOOLS)


@pytest.mark.parametrize(
    "row", [{"text": "a"}, {"messages": []}, {"messages": ["a"]}, {"messages": [{"content": "a"}]}]
)
def test_a_line_that_is_not_a_chat_is_named(row: dict[str, Any], tmp_path: Path) -> None:
    _, line = lines_of(tmp_path / "chats.jsonl", SHAREGPT, row)
    with pytest.raises(ValueError, match=r"chats\.jsonl', line 2 is not a chat; give lines such as"):
        read_chat(line)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., str]:
    """Return a chat dataset with Qwen3's template."""
    SHAPES["Qwen3"].tokenizer(tmp_path / "tokenizer", tagged=False)

    def make(*rows: dict[str, Any], workers: int = 1, name: str = "made", **how: bool) -> str:
        lines = lines_of(tmp_path / "chats.jsonl", *rows)
        write_chats(lines, Encoder.from_folder(tmp_path / "tokenizer"), str(tmp_path / name), False, workers, {}, **how)
        return str(tmp_path / name)

    return make


def test_a_dataset_stores_which_tokens_count(made: Callable[..., str], tmp_path: Path) -> None:
    prefix = made({"messages": THOUGHT.messages}, {"messages": [user("q")]}, SHAREGPT)
    tokenizer = read_tokenizer(tmp_path / "tokenizer")
    expected = [*ChatEncoder(tokenizer).encode(THOUGHT), *ChatEncoder(tokenizer).encode(Chat([SYSTEM, *ONE.messages]))]
    data = IndexedDataset(prefix, multimodal=True)
    for number, document in enumerate(expected):
        first, end = data.document_indices[number : number + 2]
        sequences, modes = data[first:end]
        assert np.concatenate(sequences).tolist() == document.ids
        assert [mode for mode, part in zip(modes, sequences, strict=True) for _ in part] == [
            any(start <= place < stop for start, stop in document.spans) for place in range(len(document.ids))
        ]
    assert read_index(prefix).has_modes
    assert example(prefix, str(tmp_path / "tokenizer")) == marked(tokenizer, expected[0])
    lines = counted_part(prefix, 200)
    counts = sum(stop - start for document in expected for start, stop in document.spans)
    assert f"{counts} of {sum(len(document.ids) for document in expected)} tokens count, in 3 documents" in lines[0]
    assert lines[1:] == [
        "1 of 3 chats are skipped because they have no assistant message",
        "1 documents are earlier turns, which the chat template renders differently once others follow",
    ]


@pytest.mark.matrix
def test_any_number_of_workers_makes_the_same_dataset(
    made: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 200)
    rows = [{"messages": [user(f"{number}"), said("a" * number)]} for number in range(9)]
    one, two = (made(*rows, workers=workers, name=f"by{workers}") for workers in (1, 2))
    for ending in ("bin", "idx"):
        assert Path(f"{one}.{ending}").read_bytes() == Path(f"{two}.{ending}").read_bytes()


BAD = [
    {"messages": [user("q") | {"content": [{"type": "image_url"}]}, said("a")]},
    {"messages": [user("q"), said("a") | {"weight": 0.5}]},
    {"text": "a"},
]


def test_all_bad_lines_are_refused_at_once(made: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--chat: 9 of 10 lines cannot be trained on:") as raised:
        made({"messages": ONE.messages}, *BAD * 3)
    _, *shown, more, advice = str(raised.value).splitlines()
    assert [line.split("chats.jsonl', ")[1][:30] for line in shown] == [
        "line 2: message 1 ('user') has",
        "line 3: message 2 ('assistant'",
        "line 4 is not a chat; give lin",
        "line 5: message 1 ('user') has",
        "line 6: message 2 ('assistant'",
    ]
    assert (more, advice) == (
        "  and 4 more",
        "Correct or remove them, or skip them with --chat-skip-bad-lines.",
    )
    assert not list(tmp_path.glob("made.*"))


def test_bad_lines_are_skipped_if_requested(made: Callable[..., str]) -> None:
    good = {"messages": [user("q"), said("a") | {"weight": 0}, user("r"), said("b")]}
    prefix = made(good, *BAD * 2, skips_bad_lines=True)
    first, *lines = counted_part(prefix, 200)
    assert "in 1 documents" in first
    assert lines[:2] == [
        "6 of 7 lines are skipped because they cannot be trained on (--chat-skip-bad-lines)",
        "1 assistant messages are masked by their own fields (weight, loss, train or the like)",
    ]
    assert [line.split("chats.jsonl', ")[1][:6] for line in lines[2:]] == [f"line {place}" for place in range(2, 7)]


def test_preprocess_says_what_it_leaves_out(
    made: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made({"messages": TWO.messages}, {"messages": [user("q")]})
    paths = ["--chat", str(tmp_path / "chats.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"), "--workers", "1"]
    assert preprocess([*paths, "--output-prefix", str(tmp_path / "last"), "--chat-mask-history"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "1 of 2 chats are skipped because they have no assistant message",
        "1 assistant messages are masked because others follow (--chat-mask-history)",
    ]
    assert "⟦a" not in example(str(tmp_path / "last"), str(tmp_path / "tokenizer"))
    assert preprocess([*paths, "--output-prefix", str(tmp_path / "last")]) == 2
    assert "made with another --chat-mask-history" in capsys.readouterr().err
    text = ["--input", str(tmp_path / "chats.jsonl"), "--output-prefix", str(tmp_path / "text")]
    assert preprocess([*text, "--chat-skip-bad-lines"]) == 2
    assert "--chat-skip-bad-lines was given without --chat" in capsys.readouterr().err


def test_chats_of_a_larger_vocabulary_are_refused(made: Callable[..., str]) -> None:
    """Vocabulary padding is not tokens, neither in a corpus of chats nor in one of texts."""
    prefix = made({"messages": ONE.messages})
    highest = int(np.fromfile(f"{prefix}.bin", read_index(prefix).dtype).max())
    check_data_prefixes([prefix], highest + 1)
    with pytest.raises(
        ValueError, match=f"holds the token id {highest}, but the tokenizer has ids up to {highest - 1}"
    ):
        check_data_prefixes([prefix], highest)


def test_chats_without_an_assistant_message_are_rejected(made: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat has an assistant message"):
        made({"messages": [user("q")]})
    assert not (tmp_path / "made.idx").exists()


def test_chats_of_either_form_are_prompts_of_sample(tmp_path: Path) -> None:
    tokenizer = SHAPES["Qwen2.5"].tokenizer(tmp_path / "tokenizer", tagged=False)
    lines_of(tmp_path / "chats.jsonl", {**SHAREGPT, "system": None})
    prompts = UserTurns([str(tmp_path / "chats.jsonl")], tokenizer, 1, "1", "training")
    expected = "<|im_start|>system\nH\nadd<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompts.prompt(0)) == expected


# --- rows ------------------------------------------------------------------------------------------------------------


def naive_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the space left in every row, by checking all rows for every document."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, left in enumerate(room) if left >= length]
        if not fitting:
            room.append(capacity)
            fitting = [len(room) - 1]
        room[min(fitting, key=lambda place: room[place])] -= length
    return sorted(room)


def test_documents_are_packed_by_best_fit() -> None:
    assert best_fit([5, 3, 3, 2], 8) == [[0, 1], [2, 3]]
    draw = np.random.default_rng(5)
    for capacity in (8, 50, 200):
        lengths = draw.integers(1, capacity + 1, 300).tolist()
        rows = best_fit(lengths, capacity)
        assert sorted(document for row in rows for document in row) == list(range(300))
        assert sorted(capacity - sum(lengths[one] for one in row) for row in rows) == naive_best_fit(lengths, capacity)


Document = list[int]


def packed(prefix: Path, documents: list[Document], length: int, ranks: int = 1) -> PackedChats:
    """Return rows of documents in which tokens from 50 on count."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", multimodal=True)
    for ids in documents:
        counts = [int(one >= 50) for one in ids]
        edges = [0, *(place for place in range(1, len(ids)) if counts[place] != counts[place - 1]), len(ids)]
        builder.add_document(np.array(ids), np.diff(edges).tolist(), [counts[edge] for edge in edges[:-1]])
    builder.finalize(f"{prefix}.idx")
    config: Any = Namespace(
        tokenizer=Namespace(unique_identifiers={}, eod=61, eos=61, pad=61),
        sequence_length=length,
        context_parallel_size=ranks,
        random_seed=1234,
        split="1",
        split_matrix=None,
        mmap_bin_files=True,
        allow_ambiguous_pad_tokens=False,
    )
    data = PackedChats.build_low_level_dataset(str(prefix), config)
    every = np.arange(PackedChats.numel_low_level_dataset(data), dtype=np.int32)  # Megatron's split
    return PackedChats(data, str(prefix), every, None, Split.train, config)


PAIR = [[1, 2, 50, 51, 52], [3, 4, 60, 61]]


def test_two_chats_without_system_messages_are_two_documents(tmp_path: Path) -> None:
    """The example of `PackedChats`; 61 is EOS and the tokenizer's padding token, and still counts."""
    rows = packed(tmp_path / "pair", PAIR, 8)
    assert len(rows) == 1
    row = {name: values.tolist() for name, values in rows[0].items()}
    assert row["tokens"] == [1, 2, 50, 51, 3, 4, 60, 0]
    assert row["labels"] == [2, 50, 51, 52, 4, 60, 61, 0]
    assert row["loss_mask"] == [0, 1, 1, 1, 0, 1, 1, 0]
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 0]
    assert row["cu_seqlens"] == [0, 4, 7, 8, 8, 8, 8, 8, 8]
    assert row["max_seqlen"] == 4


def test_context_parallelism_pads_each_chat_to_equal_chunks(tmp_path: Path) -> None:
    row = {name: values.tolist() for name, values in packed(tmp_path / "pair", PAIR, 16, ranks=2)[0].items()}
    assert row["cu_seqlens"][:4] == [0, 4, 8, 16]
    assert row["labels"][:8] == [2, 50, 51, 52, 4, 60, 61, 0]
    assert row["loss_mask"][:8] == [0, 1, 1, 1, 0, 1, 1, 0]


def drawn_documents(count: int, longest: int) -> list[Document]:
    draw = np.random.default_rng(3)
    return [draw.integers(1, 99, draw.integers(2, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("length", [40, 12])
def test_a_depth_counts_where_its_target_counts(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of an epoch for every depth, counted by a plain loop over the chats; 12 positions truncate some."""
    documents, depths = drawn_documents(30, 40), 3
    expected = [0] * (depths + 1)
    for ids in documents:
        if not any(one >= 50 for one in ids[1 : length + 1]):
            continue
        for depth in range(depths + 1):
            for position in range(min(len(ids) - 1, length)):
                target = position + depth + 1
                if target < len(ids) and target <= length:
                    expected[depth] += ids[target] >= 50
    set_packed_run(monkeypatch, 2, length, depths)
    rows = packed(tmp_path / "drawn", documents, length)
    found = torch.zeros(depths + 1)
    for place in range(len(rows)):
        batch = torch.utils.data.default_collate([rows[place]] * 2)
        _, made = forward_step.get_batch(iter([batch]), None, depths)
        assert made is not None
        assert ((made.labels_DBS >= 50) | (made.loss_mask_DBS == 0)).all()
        found += made.whole_tokens / 2
    assert found.tolist() == expected


def test_an_epoch_has_every_chat_once_and_resumes_in_its_order(tmp_path: Path) -> None:
    documents = drawn_documents(40, 30)
    first, again = (packed(tmp_path / "drawn", documents, 32) for _ in range(2))
    texts = sorted(tuple(ids[1:]) for ids in documents if any(one >= 50 for one in ids[1:]))

    def labels(rows: PackedChats, place: int) -> list[tuple[int, ...]]:
        row = rows[place]
        ends = [0, *(end for end in row["cu_seqlens"].unique().tolist() if end)]
        parts = [row["labels"][start:end].tolist() for start, end in pairwise(ends)]
        return [tuple(part) for part in parts if any(part)]

    epochs = [[labels(first, epoch * len(first) + place) for place in range(len(first))] for epoch in range(3)]
    assert all(sorted(text for row in epoch for text in row) == texts for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    order_of_rows.cache_clear()
    assert [labels(again, len(first) + place) for place in range(len(first))] == epochs[1]


def test_truncated_tokens_are_counted(made: Callable[..., str]) -> None:
    short, long = {"messages": ONE.messages}, {"messages": [user("q"), said("a" * 50)]}
    late = {"messages": [user("q" * 90), said("a")]}
    lines = counted_part(made(short, long, late), 60)
    (first, *_), cut = lines, lines[-1]
    assert "2 documents are truncated to --seq-length 60: " in cut
    assert cut.endswith("1 documents are skipped because no such token remains")
    whole, kept = (int(found) for found in (2 + 51 + 2, first.split(": ")[1].split(" of")[0]))
    assert f"{whole - kept} tokens that count are lost" in cut
    with pytest.raises(ValueError, match=r"and no chat in .* has a token that counts within it"):
        counted_part(made(late), 60)


def test_a_split_needs_chats_in_every_part(made: Callable[..., str]) -> None:
    prefix = made(*[{"messages": ONE.messages}] * 2)
    check_split([prefix], "50,50,0")
    with pytest.raises(ValueError, match=r"of the 2 documents .* leaves none for validation"):
        check_split([prefix], "90,10,0")


# --- flags -----------------------------------------------------------------------------------------------------------


def flags(tmp_path: Path, **given: Any) -> Namespace:
    of_data = dict.fromkeys(
        "data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path".split()
    )
    return Namespace(
        **{
            "chat": [str(tmp_path / "chats.jsonl")],
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(tmp_path / "tokenizer"),
            "data_cache_path": None,
            "trust_remote_code": False,
            "chat_count_empty_thinking": None,
            "chat_mask_history": None,
            "chat_skip_bad_lines": None,
            "seed": 1,
            "rank": 0,
            "distributed_timeout_minutes": 10,
            **of_data,
            **given,
        }
    )


def test_chats_are_made_into_a_dataset_once(made: Callable[..., str], tmp_path: Path) -> None:
    made(SHAREGPT)
    first = flags(tmp_path)
    make_chats(first)
    (prefix,) = first.data_path
    assert Path(prefix).parent == tmp_path / "cache"
    written = Path(f"{prefix}.idx").stat().st_mtime_ns
    for rank in (0, 1):  # rank 1 finds it there and does not wait
        again = flags(tmp_path, rank=rank)
        make_chats(again)
        assert again.data_path == [prefix]
    assert Path(f"{prefix}.idx").stat().st_mtime_ns == written
    others = (
        *({"seed": 2}, {"data_cache_path": str(tmp_path / "other")}),
        *({name: True} for name in ("chat_count_empty_thinking", "chat_mask_history", "chat_skip_bad_lines")),
    )
    for other in others:
        changed = flags(tmp_path, **other)
        make_chats(changed)
        assert changed.data_path != [prefix]
    lines_of(tmp_path / "chats.jsonl", SHAREGPT, SHAREGPT)
    assert prefix_in_cache(first.chat, first.tokenizer_model, None, {}) != prefix


def test_a_rank_waits_for_the_dataset_only_as_long_as_it_grows(
    made: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(SHAREGPT)
    waiting, minutes = flags(tmp_path, rank=1), itertools.count()
    monkeypatch.setattr(given_chats, "monotonic", lambda: 60.0 * next(minutes))

    def sleep(seconds: float) -> None:
        if (pause := next(pauses)) < 30:
            Path(f"{waiting.data_path[0]}.bin.partial").write_bytes(bytes(pause))

    pauses = itertools.count()
    monkeypatch.setattr(given_chats, "sleep", sleep)
    (tmp_path / "cache").mkdir()
    with pytest.raises(ValueError, match=r"rank 0 .* nothing at .* for 10 minutes .* all nodes share"):
        make_chats(waiting)
    assert next(pauses) == 30 + 10


def test_a_tokenizer_that_has_no_template_is_refused(made: Callable[..., str], tmp_path: Path) -> None:
    made(SHAREGPT)
    with pytest.raises(ValueError, match="--chat was given with --tokenizer-type NullTokenizer"):
        make_chats(flags(tmp_path, tokenizer_type="NullTokenizer", tokenizer_model=None))
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        make_chats(flags(tmp_path))


def test_datasets_of_chats_and_of_text_do_not_mix(made: Callable[..., str], tmp_path: Path) -> None:
    talk, text = made(SHAREGPT), str(tmp_path / "text")
    builder = IndexedDatasetBuilder(f"{text}.bin")
    builder.add_document(np.arange(3), [3])
    builder.finalize(f"{text}.idx")
    assert reads_chats(flags(tmp_path, chat=None, data_path=[talk]))
    assert not reads_chats(flags(tmp_path, chat=None, data_path=[text]))
    with pytest.raises(ValueError, match="of chats and of text"):
        reads_chats(flags(tmp_path, chat=None, data_path=["1", talk, "1", text]))
