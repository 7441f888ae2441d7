"""Chats to tokens by the tokenizer's own chat template, and which of them count: those that the model writes.

In:  JSON lines, each a chat: {"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}, or as ShareGPT
     writes it, {"conversations": [{"from": "human", "value": ...}, ...]}. Lines of SPEED-Bench (arXiv:2604.09557)
     have the turns of the user alone, {"turns": ["...", ...]}.
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
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_mtp.data.corpus import Document, Work, dataset_writer, find_files, worked
from megatron_mtp.data.messages import (
    CHATS,
    ROLES,
    Texts,
    TurnError,
    holds_reasoning,
    normal_line,
    normal_messages,
    normal_tools,
    reasoning_of,
)
from megatron_mtp.data.sources import named_source, sources_of_files
from megatron_mtp.data.tokenizer import Encoder, apply_template, end_tokens, generated_spans, read_tokenizer

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag around what the assistant writes, where a template has it."""

OPENED = re.compile(r"[<\[][^<>\[\]/]*(think|thought|reason)[^<>\[\]/]*[>\]]\s*$", re.IGNORECASE)
"""The beginning of a thought, with which some generation prompts end."""

MODES: tuple[dict[str, Any], ...] = ({}, *({"enable_thinking": on, "thinking": on} for on in (False, True)))
"""Variables by which generation prompts differ: with nothing, an empty thinking block, or the beginning of one."""

LEFT_OUT = {
    "bad_lines": "{} of {chats} lines are left out, since they cannot be trained on (--chat-skip-bad-lines)",
    "chats_without_answer": "{} of {chats} chats are left out, since they hold no answer of the assistant",
    "chats_without_trained_answer": "{} of {chats} chats are left out, since none of their answers shall count",
    "masked_turns": "{} turns of the assistant do not count, as their fields request (weight, loss, train or the like)",
    "history_turns": "{} turns of the assistant do not count, since others follow (--chat-mask-history)",
    "opening_turns": "{} turns of the assistant do not count, since they begin a chat",
    "unthought_turns": "{} turns of the assistant count without their reasoning, which the chat template leaves out",
    "unopened_turns": "{} turns of the assistant count without the thought that the generation prompt begins, as the "
    "chat template renders them; give data with reasoning, or a template with {{% generation %}}, to train on thoughts",
    "empty_turns": "{} turns of the assistant are empty, and teach to answer nothing",
}
"""What is not trained on, or not as it was written, and the line that says so."""

SHOWN_LINES = 5
"""Bad lines that are shown, of all that are counted."""

COUNTS = 1
"""Mode of a sequence whose tokens count."""

OPEN, CLOSE = "⟦", "⟧"


# --- a chat ----------------------------------------------------------------------------------------------------------


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
            f"--chat: {place_of(line)} is no chat; give lines such as "
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


class ChatForm(NamedTuple):
    """A chat as the template gets it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


class ChatPrompt(NamedTuple):
    """What stands before a turn.

    Attributes:
        history: tokens of the messages before it.
        openings: tokens that generation prompts put behind them, those of the plain one first.
        texts: messages and each opening as text.
    """

    history: list[int]
    openings: list[list[int]]
    texts: list[str]


class ChatEncoder:
    """Turns chats into documents.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        counts_empty_thinking: whether an empty thinking block counts that a generation prompt can supply.
        masks_history: whether the last turn of the assistant alone counts.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", counts_empty_thinking: bool = False, masks_history: bool = False
    ) -> None:
        check_template(tokenizer)
        self._tokenizer = tokenizer
        self._counts_empty_thinking, self._masks_history = counts_empty_thinking, masks_history
        self._ends = end_tokens(tokenizer)
        self._added = tokenizer.added_tokens_decoder.keys()
        self._known = deque[Tokenized](maxlen=len(MODES))

    def documents(self, line: Document, chat: Chat, left_out: Counter[str] | None = None) -> list[Counted]:
        """The documents of the chat in a line; none where nothing counts. Raises ValueError where it is refused."""
        try:
            return self.encode(chat, left_out)
        except TurnError as error:
            raise ValueError(f"--chat: {place_of(line)}: {error}.") from error
        except Exception as error:  # templates refuse roles and orders by exceptions of Jinja
            raise ValueError(
                f"--chat: the chat template of '{self._tokenizer.name_or_path}' refuses {place_of(line)} "
                f"({str(error).rstrip('.')}); correct or remove the line, or give a template with {{% generation %}}."
            ) from error

    def encode(self, chat: Chat, left_out: Counter[str] | None = None) -> list[Counted]:
        """The documents of a chat.

        Args:
            left_out: counts what is not trained on, under the names of `LEFT_OUT`.

        Raises:
            TurnError: the tokens that count of a turn do not hold what the assistant wrote.
            ValueError: the tokens of a generation prompt are not the first ones of the turn behind it.
            Exception: the template's own.
        """
        template = self._tokenizer.get_chat_template(tools=chat.tools)
        is_tagged, counter = GENERATION.search(template) is not None, Counter[str]()
        _check_roles(chat, template)
        turns = self._turns(chat, is_tagged, counter)
        form = ChatForm(chat.messages, chat.tools, chat.variables)
        made = (self._tagged if is_tagged else self._plain)(form, turns, counter)
        if left_out is not None:
            left_out.update(+counter)
        return made

    def _turns(self, chat: Chat, is_tagged: bool, left_out: Counter[str]) -> list[int]:
        """Places of the turns that shall be trained on; counts the others."""
        answers = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
        turns = list(chat.trained)
        left_out["masked_turns"] += len(answers) - len(turns)
        if self._masks_history:
            turns = [place for place in turns if place == answers[-1]]
            left_out["history_turns"] += len(chat.trained) - len(turns)
        if not is_tagged and turns[:1] == [0]:  # no generation prompt stands before it
            left_out["opening_turns"] += 1
            turns = turns[1:]
        if not turns:
            left_out["chats_without_trained_answer" if answers else "chats_without_answer"] += 1
        written = [(chat.messages[place], reasoning_of(chat.messages[place])) for place in turns]
        left_out["empty_turns"] += sum(
            not (m["content"].strip() or m.get("tool_calls") or thought) for m, thought in written
        )
        return turns

    def _plain(self, form: ChatForm, turns: list[int], left_out: Counter[str]) -> list[Counted]:
        """The documents of a template without tags; counts the turns that have lost their reasoning."""
        made: list[Counted] = []
        for place in reversed(turns):
            ids, history, start, end = self._turn(form, place, left_out)
            left_out["unthought_turns"] += self._loses_reasoning(form, place, ids[history:start], ids[start:end])
            if made and made[0].ids[:end] == ids[:end]:
                made[0].spans.insert(0, (start, self._end(made[0].ids, start, end)))
            elif start < end:
                made.insert(0, self._closed(Counted(ids[:end], [(start, end)]), form.messages[place]))
        return made

    def _turn(self, form: ChatForm, place: int, left_out: Counter[str]) -> tuple[list[int], int, int, int]:
        """Tokens of the messages up to a turn, how many are of those before it, and the span of them that counts."""
        text = self._render(form, place + 1)
        ids, (history, openings, texts) = self._tokenize(text), self._prompt(form, place)
        found = [len(history) + len(opening) for opening in openings if _starts(ids, history + opening)]
        if not found and (whole := self._cut(text, texts) or self._unopened(text, ids, texts)) is not None:
            left_out["unopened_turns"] += not any(map(text.startswith, texts))
            ids, start = whole
            found = [start]
        if not found:
            prompt = history + openings[0]
            same = _common(prompt, ids)
            raise ValueError(
                f"message {place + 1} is rendered as {self._shown(ids[same:])}, where the generation prompt has "
                f"{self._shown(prompt[same:])}"
            )
        start = found[0] if self._counts_empty_thinking else max(found)
        return ids, len(history), start, self._end(ids, start, len(ids))

    def _cut(self, text: str, prompts: list[str]) -> tuple[list[int], int] | None:
        r"""Tokens of a text whose prompt ends within a token, and how many are the prompt's; None where it has none.

        The model sees "assistant\n" and writes "\nyes", while "\n\n" is one token of the text.
        """
        fitting = [prompt for prompt in prompts if text.startswith(prompt)]
        if not fitting:
            return None
        prompt = fitting[0] if self._counts_empty_thinking else max(fitting, key=len)
        begun, written = self._tokenize(prompt), self._tokens(text[len(prompt) :]).input_ids
        return (begun + written, len(begun)) if self._tokenizer.decode(written) == text[len(prompt) :] else None

    def _unopened(self, text: str, ids: list[int], prompts: list[str]) -> tuple[list[int], int] | None:
        r"""As `_cut`, where the prompts open a thought that the text has not: behind what both share.

        Distilled R1 is asked with "<Assistant><think>\n", and an answer is rendered as "<Assistant>yes".
        """
        heads = [OPENED.sub("", prompt) for prompt in prompts if OPENED.search(prompt)]
        shared = [one for head in heads for one in (head, head.rstrip()) if text.startswith(one)]
        for head in shared[:1]:
            begun = self._tokenize(head)
            return (ids, len(begun)) if _starts(ids, begun) else self._cut(text, [head])
        return None

    def _tagged(self, form: ChatForm, turns: list[int], left_out: Counter[str]) -> list[Counted]:
        """As `_plain`, of a template with {% generation %}: one document, without what generation prompts supply."""
        text, blocks = self._blocks(form, len(form.messages))
        answers = [place for place, message in enumerate(form.messages) if message["role"] == "assistant"]
        blocks_of, prompts = dict[int, list[tuple[int, int]]](), dict[int, ChatPrompt]()
        ids, places = self._whole(text)
        for place in reversed(turns):  # the longest text first, with which later ones begin
            if len(blocks) == len(answers):
                own = [blocks[answers.index(place)]]
            else:
                own = blocks[len(self._blocks(form, place)[1]) if place else 0 : len(self._blocks(form, place + 1)[1])]
            blocks_of[place] = _joined(own)
            prompts[place] = self._prompt(form, place) if place else ChatPrompt([], [], [])
        ends = {len(prompt) for of_turn in prompts.values() for prompt in of_turn.texts if text.startswith(prompt)}
        if cuts := sorted(ends & {own[0][0] for own in blocks_of.values() if own} - {start for start, _ in places}):
            ids, places = self._in_pieces(text, cuts)
        spans = list[tuple[int, int]]()
        for place in turns:
            counted, before = list[tuple[int, int]](), list[int]()
            for start, stop in (_tokens_of(places, *block) for block in blocks_of[place]):
                first = start if counted else self._unsupplied(prompts[place].openings, ids, start, stop)
                counted.append((first, self._end(ids, first, stop)))
                before += ids[start:first]
            written = [one for start, end in counted for one in ids[start:end]]
            left_out["unthought_turns"] += self._loses_reasoning(form, place, before, written)
            spans += [span for span in counted if span[0] < span[1]]
        if not spans:
            return []
        return [self._closed(Counted(ids[: spans[-1][1]], spans), form.messages[turns[-1]])]

    def _in_pieces(self, text: str, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens and their characters of a text; none goes beyond a cut, where a prompt ends."""
        ids, places = list[int](), list[tuple[int, int]]()
        for start, stop in pairwise([0, *cuts, len(text)]):
            made = self._tokens(text[start:stop], return_offsets_mapping=True)
            ids += made.input_ids
            places += [(start + first, start + end) for first, end in made.offset_mapping]
        return ids, places

    def _blocks(self, form: ChatForm, messages: int) -> tuple[str, list[tuple[int, int]]]:
        """Text of the first messages, and the characters of its {% generation %} blocks."""
        return generated_spans(self._tokenizer, form.messages[:messages], tools=form.tools, **form.variables)

    def _unsupplied(self, openings: list[list[int]], ids: list[int], start: int, stop: int) -> int:
        """The first token of a block that no generation prompt supplies; prompts may begin before the block."""
        ends = [
            start - back + len(opening)
            for opening in (openings[:1] if self._counts_empty_thinking else openings)
            for back in range(len(opening))
            if start >= back and _starts(ids[start - back :], opening)
        ]
        return max([start, *(end for end in ends if end <= stop)])

    def _loses_reasoning(self, form: ChatForm, place: int, before: list[int], written: list[int]) -> bool:
        """Whether tokens that count hold a turn without its reasoning. Raises TurnError where they lack more."""
        texts = Texts(self._tokenizer.decode(before), self._tokenizer.decode(written), self._respelled)
        return not holds_reasoning(form.messages[place], f"message {place + 1} ('assistant')", texts)

    def _respelled(self, text: str) -> str:
        """A text as tokens spell it."""
        return self._tokenizer.decode(self._tokens(text).input_ids)

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
        ids = self._tokenize(self._render(ChatForm([{"role": "user", "content": ""}], None, {}), 1))
        return next((one for one in ids if one in self._ends), None)

    def _prompt(self, form: ChatForm, place: int) -> ChatPrompt:
        """What stands before a turn, in every mode in which that differs."""
        history, seen = list[int](), dict[str, list[int]]()
        for mode in MODES:
            text = self._render(form, place, add_generation_prompt=True, **mode)
            if text not in seen:
                prompt, messages = self._tokenize(text), self._tokenize(self._render(form, place, **mode))
                same = _common(prompt, messages)
                history = history if seen else prompt[:same]
                seen[text] = prompt[same:]
        return ChatPrompt(history, list(seen.values()), list(seen))

    def _render(self, form: ChatForm, messages: int, **variables: Any) -> str:
        arguments = {**form.variables, **variables}
        return apply_template(self._tokenizer, form.messages[:messages], tools=form.tools, **arguments)

    def _tokenize(self, text: str) -> list[int]:
        """Tokens of a text; what it shares with an earlier one is not tokenized again."""
        for known in self._known:
            start, place = known.shared(text)
            if 2 * start > len(text):
                return known.ids[:place] + self._tokens(text[start:]).input_ids
        return self._whole(text)[0]

    def _whole(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a text, remembered for texts that begin as it does, and the characters of each."""
        made = self._tokens(text, return_offsets_mapping=True)
        ids, characters = list[int](made.input_ids), list[tuple[int, int]](made.offset_mapping)
        places = [place for place, token in enumerate(ids) if token in self._added]
        self._known.appendleft(Tokenized(text, ids, places, [characters[place][0] for place in places]))
        return ids, characters

    def _tokens(self, text: str, **more: bool) -> "BatchEncoding":
        return self._tokenizer(text, add_special_tokens=False, verbose=False, **more)

    def _shown(self, ids: list[int]) -> str:
        return repr(self._tokenizer.decode(ids[:8])) if ids else "nothing more"


def _check_roles(chat: Chat, template: str) -> None:
    """Raises TurnError for a role that is none of the usual ones, and none that the template names."""
    for number, message in enumerate(chat.messages, start=1):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            usual = ", ".join(role for role in ROLES if role != "call")
            raise TurnError(
                f"message {number} has the role '{role}', which the chat template does not name; give one of {usual}"
            )


def _tokens_of(places: list[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
    """The tokens of characters, by the characters of every token."""
    first = bisect_right(places, start, key=lambda place: place[1])
    return first, max(first, bisect_left(places, stop, key=lambda place: place[0]))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that touch as one."""
    made = list[tuple[int, int]]()
    for start, stop in spans:
        if made and start <= made[-1][1]:
            start = made.pop()[0]
        made.append((start, stop))
    return made


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
    masks_history: bool = False,
    skips_bad_lines: bool = False,
) -> dict[str, Any]:
    """Write the chats in lines of .jsonl files, in their order; the rest as in `write_corpus`.

    Args:
        encoder: names the tokenizer.
        counts_empty_thinking, masks_history: as in `ChatEncoder`.
        skips_bad_lines: whether to leave out lines that cannot be trained on; the result says how many, and why.

    Raises:
        ValueError: lines are no chats or are refused, or nothing counts in any.
    """
    counted, without, left_out, bad = 0, 0, Counter[str](), list[str]()
    source_of = sources_of_files({line.path for line in lines})
    start = functools.partial(
        _chat_work, encoder.folder, encoder.trust_remote_code, counts_empty_thinking, masks_history
    )
    with worked(start, lines, workers) as encoded, dataset_writer(prefix, encoder, has_modes=True) as writer:
        for line, (of_chat, of_reasons, source, refusal) in encoded:
            without += not of_chat
            left_out += of_reasons
            if refusal is not None:
                left_out["bad_lines"] += 1
                bad += [refusal.removeprefix("--chat: ").rstrip(".")] if len(bad) < SHOWN_LINES else []
            for ids, spans in of_chat:
                sizes = np.diff([0, *(edge for span in spans for edge in span)]).tolist()
                parts = [(size, place % 2) for place, size in enumerate(sizes) if size]
                writer.add(ids, source or source_of[line.path], *zip(*parts, strict=True))
                counted += sum(sizes[1::2])
        if bad and not skips_bad_lines:
            raise ValueError(_refusal(bad, left_out["bad_lines"], len(lines)))
        if not counted:
            said = "; ".join(lines_of(left_out, len(lines), bad))
            raise ValueError(
                f"--chat: no token counts, since no chat has an answer of the assistant to train on: {said}."
            )
        return writer.finish(
            settings,
            chats=len(lines),
            counted_tokens=counted,
            chats_without_counted_tokens=without,
            left_out=dict(left_out),
            bad_lines=bad,
        )


def _refusal(bad: list[str], count: int, lines: int) -> str:
    shown = "".join(f"\n  {reason}" for reason in bad)
    more = f"\n  and {count - len(bad):,} more" if count > len(bad) else ""
    return (
        f"--chat: {count:,} of {lines:,} lines cannot be trained on:{shown}{more}\n"
        "Correct or remove them, or leave them out with --chat-skip-bad-lines."
    )


def lines_of(left_out: dict[str, int], chats: int, bad: Sequence[str]) -> list[str]:
    """Lines that say what is not trained on.

    Args:
        left_out: counts, by the names in `LEFT_OUT`.
        chats: lines of all files.
        bad: the first bad lines, with place and reason.
    """
    said = [
        text.format(f"{left_out[name]:,}", chats=f"{chats:,}") for name, text in LEFT_OUT.items() if left_out.get(name)
    ]
    return [*said, *(f"left out: {reason}" for reason in bad)]


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


class EncodedLine(NamedTuple):
    """What a worker makes of a line.

    Attributes:
        documents: tokens, and the spans of them that count.
        left_out: counts of what does not count, by the names in `LEFT_OUT`.
        source: that the line names, if it does.
        refusal: why the line is refused; None where it is not.
    """

    documents: list[tuple[np.ndarray, list[tuple[int, int]]]]
    left_out: Counter[str]
    source: str | None = None
    refusal: str | None = None


def _chat_work(folder: str, trust_remote_code: bool, counts_empty_thinking: bool, masks_history: bool) -> Work:
    encoder = ChatEncoder(read_tokenizer(Path(folder), trust_remote_code), counts_empty_thinking, masks_history)

    def encode(line: Document) -> EncodedLine:
        left_out = Counter[str]()
        try:
            chat = read_chat(line)
            documents = encoder.documents(line, chat, left_out)
        except ValueError as error:
            return EncodedLine([], Counter(), refusal=str(error))
        return EncodedLine([(np.array(ids, dtype=np.int32), spans) for ids, spans in documents], left_out, chat.source)

    return lambda chunk: [encode(line) for line in chunk]


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
