"""Chats to tokens by the tokenizer's own chat template, and which of them count: those that the model writes.

In:  JSON lines, each a chat: {"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}, or as ShareGPT
     writes it, {"conversations": [{"from": "human", "value": ...}, ...]}.
Out: PREFIX.bin and PREFIX.idx, an indexed dataset of Megatron with modes: a document is a chat up to its last token
     that counts, and its sequences are the spans of it that count (mode 1) and that do not (mode 0).

Where the template has {% generation %}, its spans count. Any other template renders every turn of the assistant twice:

    prompt   the messages before it, with the generation prompt     <user>Hi<end><assistant>
    turn     the messages up to it                                  <user>Hi<end><assistant>Hello<end>\\n
    counts                                                                               Hello<end>

The tokens of the prompt have to be the first ones of the turn. A span ends with the first token that ends a text, since
the model writes nothing behind it. Some templates render a turn otherwise when others follow it (they drop its
reasoning): what the model wrote is then a document of its own, and each turn counts once, behind the tokens that the
model saw when it wrote it.
"""

import functools
import hashlib
import json
import os
import re
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_mtp.data.corpus import Document, Work, dataset_writer, find_files, worked
from megatron_mtp.data.tokenizer import Encoder, apply_template, end_tokens, read_tokenizer

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
"""Names of ShareGPT, and the roles that templates know; other names stay."""

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag around what the assistant writes, where a template has it."""

MODES: tuple[dict[str, Any], ...] = ({}, *({"enable_thinking": on, "thinking": on} for on in (False, True)))
"""Variables by which generation prompts differ: with nothing, an empty thinking block, or the beginning of one."""

COUNTS = 1
"""Mode of a sequence whose tokens count."""

OPEN, CLOSE = "⟦", "⟧"


# --- a chat ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """A line of a file.

    Attributes:
        messages: each has a role; what else it has is for the template.
        tools: that the template describes; None for none.
        variables: others that the template reads, from "chat_template_kwargs" of the line.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def read_chat(line: Document) -> Chat:
    """Read the chat of a line. Raises ValueError where it is none."""
    with open(line.path, "rb") as file:
        file.seek(line.start)
        raw = file.read(line.size)
    try:
        fields = json.loads(raw)
        messages = [_message(given) for given in fields.get("messages") or fields["conversations"]]
        if fields.get("system") and messages[0]["role"] != "system":  # ShareGPT's, beside the turns
            messages.insert(0, {"role": "system", "content": fields["system"]})
        tools = fields.get("tools") or None
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return Chat(messages, tools or None, fields.get("chat_template_kwargs") or {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, IndexError):
        raise ValueError(
            f"--chat: {place_of(line)} is no chat; give lines such as "
            '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.'
        ) from None


def _message(given: dict[str, Any]) -> dict[str, Any]:
    if "role" not in given:
        role, others = given["from"], {name: given[name] for name in given if name not in ("from", "value")}
        given = {"role": ROLES.get(role, role), "content": given["value"], **others}
    if not isinstance(given["role"], str):
        raise TypeError
    return given


def is_chat(line: dict[str, Any]) -> bool:
    """Return whether a line of a file is a chat and no text."""
    return "messages" in line or "conversations" in line


def place_of(line: Document) -> str:
    """The file and the line, for a message."""
    return f"'{line.path}', line {line.line}"


def check_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises ValueError where the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"--chat was given, but the tokenizer in '{tokenizer.name_or_path}' has no chat template; give text with "
            "--data-path, or the tokenizer of a chat model."
        )


# --- tokens that count -----------------------------------------------------------------------------------------------


class Counted(NamedTuple):
    """A document.

    Attributes:
        ids: its tokens.
        spans: first token, and the one behind the last, of every part that counts; in order, none empty.
    """

    ids: list[int]
    spans: list[tuple[int, int]]


class Tokenized(NamedTuple):
    """The tokens of a text, and of its added tokens their places among them and where they start in the text."""

    text: str
    ids: list[int]
    places: list[int]
    starts: list[int]

    def shared(self, text: str) -> tuple[int, int]:
        """Characters and tokens that another text begins with too, up to an added token, at which all words end."""
        count = bisect_left(self.starts, True, key=lambda start: not text.startswith(self.text[:start]))
        return (self.starts[count - 1], self.places[count - 1]) if count else (0, 0)


class ChatEncoder:
    """Turns chats into documents.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        counts_empty_thinking: whether an empty thinking block counts that a generation prompt can supply.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", counts_empty_thinking: bool = False) -> None:
        check_template(tokenizer)
        self._tokenizer, self._counts_empty_thinking = tokenizer, counts_empty_thinking
        self._ends = end_tokens(tokenizer)
        self._added = tokenizer.added_tokens_decoder.keys()
        self._known = deque[Tokenized](maxlen=len(MODES))

    def documents(self, line: Document) -> list[Counted]:
        """The documents of the chat in a line; none where nothing counts. Raises ValueError where it is refused."""
        chat = read_chat(line)
        try:
            return self.encode(chat)
        except Exception as error:  # templates refuse roles and orders by exceptions of Jinja
            raise ValueError(
                f"--chat: the chat template of '{self._tokenizer.name_or_path}' refuses {place_of(line)} "
                f"({str(error).rstrip('.')}); correct or remove the line, or give a template with {{% generation %}}."
            ) from error

    def encode(self, chat: Chat) -> list[Counted]:
        """The documents of a chat.

        Raises:
            ValueError: the tokens of a generation prompt are not the first ones of the turn behind it.
            Exception: the template's own.
        """
        turns = [place for place, message in enumerate(chat.messages) if place and message["role"] == "assistant"]
        if GENERATION.search(self._tokenizer.get_chat_template(tools=chat.tools)):
            return self._tagged(chat, turns)
        made: list[Counted] = []
        for place in reversed(turns):
            ids, start, end = self._turn(chat, place)
            if made and made[0].ids[:end] == ids[:end]:
                made[0].spans.insert(0, (start, self._end(made[0].ids, start, end)))
            elif start < end:
                made.insert(0, self._closed(Counted(ids[:end], [(start, end)]), chat.messages[place]))
        return made

    def _turn(self, chat: Chat, place: int) -> tuple[list[int], int, int]:
        """Tokens of the messages up to a turn of the assistant, and the span of them that counts."""
        ids = self._tokenize(self._render(chat, place + 1))
        history, openings = self._prompt(chat, place)
        found = [len(history) + len(opening) for opening in openings if _starts(ids, history + opening)]
        if not found:
            prompt = history + openings[0]
            same = _common(prompt, ids)
            raise ValueError(
                f"message {place + 1} is rendered as {self._shown(ids[same:])}, where the generation prompt has "
                f"{self._shown(prompt[same:])}"
            )
        start = found[0] if self._counts_empty_thinking else max(found)
        return ids, start, self._end(ids, start, len(ids))

    def _tagged(self, chat: Chat, turns: list[int]) -> list[Counted]:
        """The document of a template with {% generation %}, without what generation prompts supply."""
        out = apply_template(
            self._tokenizer,
            chat.messages,
            tokenize=True,
            tools=chat.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **chat.variables,
        )
        ids: list[int] = out["input_ids"]
        supplied = []
        for history, openings in (self._prompt(chat, place) for place in reversed(turns)):
            known = openings[:1] if self._counts_empty_thinking else openings
            supplied += [len(history) + len(opening) for opening in known if _starts(ids, history + opening)]
        spans = []
        for start, stop in spans_of(np.array(out["assistant_masks"]) > 0):
            start = max([start, *(end for end in supplied if start < end <= stop)])
            if start < (end := self._end(ids, start, stop)):
                spans.append((start, end))
        if not spans:
            return []
        last = [message for message in chat.messages if message["role"] == "assistant"][-1]
        return [self._closed(Counted(ids[: spans[-1][1]], spans), last)]

    def _end(self, ids: list[int], start: int, stop: int) -> int:
        """The end of a span: behind its first token that ends a text, or that follows it; without blanks behind it."""
        for place in range(start, min(stop + 1, len(ids))):
            if ids[place] in self._ends:
                return place + 1
        kept = stop
        while kept > start and ids[kept - 1] not in self._added and not self._tokenizer.decode(ids[kept - 1]).strip():
            kept -= 1
        return kept if kept > start and ids[kept - 1] in self._added else stop

    def _closed(self, document: Counted, last: dict[str, Any]) -> Counted:
        """A document whose last turn ends with a token that ends a text.

        GLM-4.5 renders none: a turn ends where the user's begins, and <|user|> ends texts. It is added and counts.
        """
        ids, spans = document
        is_open = ids[-1] not in self._ends and ids[-1] not in self._added
        if not is_open or last.get("tool_calls") or self._opening is None:
            return document
        start, end = spans[-1]
        return Counted([*ids, self._opening], [*spans[:-1], (start, end + 1)])

    @cached_property
    def _opening(self) -> int | None:
        """The token that ends a text and is in a message of the user; None where there is none."""
        ids = self._tokenize(self._render(Chat([{"role": "user", "content": ""}]), 1))
        return next((one for one in ids if one in self._ends), None)

    def _prompt(self, chat: Chat, place: int) -> tuple[list[int], list[list[int]]]:
        """Tokens of the messages before a turn, and those that generation prompts put behind, the plain one first."""
        history, seen = list[int](), dict[str, list[int]]()
        for mode in MODES:
            text = self._render(chat, place, add_generation_prompt=True, **mode)
            if text not in seen:
                prompt, messages = self._tokenize(text), self._tokenize(self._render(chat, place, **mode))
                same = _common(prompt, messages)
                history = history if seen else prompt[:same]
                seen[text] = prompt[same:]
        return history, list(seen.values())

    def _render(self, chat: Chat, messages: int, **variables: Any) -> str:
        arguments = {**chat.variables, **variables}
        return str(apply_template(self._tokenizer, chat.messages[:messages], tools=chat.tools, **arguments))

    def _tokenize(self, text: str) -> list[int]:
        """Tokens of a text; what it shares with an earlier one is not tokenized again."""
        for known in self._known:
            start, place = known.shared(text)
            if 2 * start > len(text):
                return known.ids[:place] + self._tokens(text[start:]).input_ids
        made = self._tokens(text, return_offsets_mapping=True)
        ids: list[int] = made.input_ids
        places = [place for place, token in enumerate(ids) if token in self._added]
        starts = [made.offset_mapping[place][0] for place in places]
        self._known.appendleft(Tokenized(text, ids, places, starts))
        return ids

    def _tokens(self, text: str, **more: bool) -> "BatchEncoding":
        return self._tokenizer(text, add_special_tokens=False, verbose=False, **more)

    def _shown(self, ids: list[int]) -> str:
        return repr(self._tokenizer.decode(ids[:8])) if ids else "nothing more"


def _common(one: list[int], other: list[int]) -> int:
    """The number of first tokens that both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def _starts(ids: list[int], with_ids: list[int]) -> bool:
    return ids[: len(with_ids)] == with_ids


def spans_of(counts: np.ndarray) -> list[tuple[int, int]]:
    """First position, and the one behind the last, of every run of positions that count."""
    edges = np.flatnonzero(np.diff(counts, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def marked(tokenizer: "PreTrainedTokenizerBase", document: Counted) -> str:
    """The text of a document, with what counts in white brackets: ⟦ ⟧."""
    edges = [0, *(edge for span in document.spans for edge in span), len(document.ids)]
    texts = [tokenizer.decode(document.ids[start:end]) for start, end in pairwise(edges)]
    return "".join(f"{OPEN}{text}{CLOSE}" if place % 2 else text for place, text in enumerate(texts))


# --- files -----------------------------------------------------------------------------------------------------------


def write_chats(
    lines: Sequence[Document],
    encoder: Encoder,
    prefix: str,
    counts_empty_thinking: bool,
    workers: int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Write the chats in lines of .jsonl files, in their order; the rest as in `write_corpus`.

    Args:
        encoder: names the tokenizer.
        counts_empty_thinking: as in `ChatEncoder`.

    Raises:
        ValueError: a line is no chat or the template refuses it, or nothing counts in any.
    """
    counted, left_out = 0, 0
    start = functools.partial(_chat_work, encoder.folder, encoder.trust_remote_code, counts_empty_thinking)
    with worked(start, lines, workers) as encoded, dataset_writer(prefix, encoder, has_modes=True) as writer:
        for _, of_chat in encoded:
            left_out += not of_chat
            for ids, spans in of_chat:
                sizes = np.diff([0, *(edge for span in spans for edge in span)]).tolist()
                parts = [(size, place % 2) for place, size in enumerate(sizes) if size]
                writer.add(ids, *zip(*parts, strict=True))
                counted += sum(sizes[1::2])
        if not counted:
            raise ValueError("--chat: no token counts, since no chat has an answer of the assistant; give other chats.")
        return writer.finish(settings, chats=len(lines), counted_tokens=counted, chats_without_counted_tokens=left_out)


def prefix_in_cache(files: Sequence[str], tokenizer: str, cache: str | None, settings: dict[str, Any]) -> str:
    """The prefix of the dataset that `train --chat` makes: the same for the same files, tokenizer and settings.

    Args:
        files: as users name them.
        tokenizer: its folder.
        cache: folder; None for `cache` beside the first file, as Megatron's indices.
        settings: what else the dataset depends on.

    Raises:
        ValueError: there is no such file.
    """
    found = find_files(files, ["*.jsonl"], "--chat")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in found:
        about = file.stat()
        digest.update(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}\n".encode())
    for name in sorted(os.listdir(tokenizer)):
        if name.endswith((".json", ".jinja", ".model")):
            digest.update(Path(tokenizer, name).read_bytes())
    return str((found[0].parent / "cache" if cache is None else Path(cache)) / f"chat-{digest.hexdigest()[:16]}")


def _chat_work(folder: str, trust_remote_code: bool, counts_empty_thinking: bool) -> Work:
    encoder = ChatEncoder(read_tokenizer(Path(folder), trust_remote_code), counts_empty_thinking)

    def encode(chunk: list[Document]) -> list[list[tuple[np.ndarray, list[tuple[int, int]]]]]:
        return [[(np.array(ids, dtype=np.int32), spans) for ids, spans in encoder.documents(line)] for line in chunk]

    return encode


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack documents into rows, the longest first, each into the row that it leaves the least room in.

    Best-fit decreasing, as in arXiv:2404.10830. Documents of 5, 3, 3 and 2 positions in rows of 8: [5, 3] and [3, 2].

    Args:
        lengths: positions of each document, at most `capacity`.
        capacity: positions of a row.

    Returns:
        The numbers of the documents of every row.
    """
    rows: list[list[int]] = []
    sizes: list[int] = []  # of the room that rows have left, sorted
    with_room = defaultdict[int, list[int]](list)
    for document in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(sizes, lengths[document])
        if place == len(sizes):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = sizes[place], with_room[sizes[place]].pop()
            if not with_room[left]:
                sizes.pop(place)
        rows[row].append(document)
        if left := left - int(lengths[document]):
            if not with_room[left]:
                insort(sizes, left)
            with_room[left].append(row)
    return rows
