r"""Which tokens of a chat are trained on: those that the model generates.

If the template has {% generation %}, its spans count. With any other template, every assistant turn is rendered twice:

    prompt   the messages before it, with the generation prompt     <user>Hi<end><assistant>
    turn     the messages up to it                                  <user>Hi<end><assistant>Hello<end>\n
    counts                                                                               Hello<end>

The turn must begin with the tokens of the prompt. A span ends at the first end token, because the model generates
nothing after it. Some templates render a turn differently once others follow it (they drop its reasoning). The turn
then becomes a separate document, so each turn counts once, after the tokens that the model saw when it generated it.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_mtp.data.chat import Chat, place_of
from megatron_mtp.data.chat_template import GENERATION, ChatForm, ChatPrompt, ChatTemplate, common_start
from megatron_mtp.data.corpus import Document
from megatron_mtp.data.messages import ROLES, Texts, TurnError, holds_reasoning, reasoning_of
from megatron_mtp.data.tokenizer import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENED = re.compile(r"[<\[][^<>\[\]/]*(think|thought|reason)[^<>\[\]/]*[>\]]\s*$", re.IGNORECASE)
"""The start of a thought, at the end of some generation prompts."""

OPEN, CLOSE = "⟦", "⟧"


class Counted(NamedTuple):
    """A document.

    Attributes:
        ids: its tokens.
        spans: first token and end (exclusive) of every part that counts; in order, none empty.
    """

    ids: list[int]
    spans: list[tuple[int, int]]


class ChatEncoder:
    """Converts chats to documents.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        counts_empty_thinking: whether an empty thinking block counts even if a generation prompt can supply it.
        masks_history: whether only the last assistant turn counts.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", counts_empty_thinking: bool = False, masks_history: bool = False
    ) -> None:
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self._counts_empty_thinking, self._masks_history = counts_empty_thinking, masks_history
        self._ends, self._added = end_tokens(tokenizer), self._template.added

    def documents(self, line: Document, chat: Chat, left_out: Counter[str] | None = None) -> list[Counted]:
        """Return the documents of the chat in a line; empty if nothing counts. Raise ValueError if it is rejected."""
        try:
            return self.encode(chat, left_out)
        except TurnError as error:
            raise ValueError(f"--chat: {place_of(line)}: {error}.") from error
        except Exception as error:  # chat templates reject roles and their order with various Jinja exceptions
            raise ValueError(
                f"--chat: the chat template of '{self._tokenizer.name_or_path}' refuses {place_of(line)} "
                f"({str(error).rstrip('.')}); correct or remove the line, or give a template with {{% generation %}}."
            ) from error

    def encode(self, chat: Chat, left_out: Counter[str] | None = None) -> list[Counted]:
        """Return the documents of a chat.

        Args:
            left_out: counts what is not trained on, under the names of `LEFT_OUT`.

        Raises:
            TurnError: the tokens of a turn that count do not contain what the assistant wrote.
            ValueError: a turn does not begin with the tokens of its generation prompt.
            Exception: an error of the template.
        """
        template = self._template.source(chat.tools)
        is_tagged, counter = GENERATION.search(template) is not None, Counter[str]()
        _check_roles(chat, template)
        turns = self._turns(chat, is_tagged, counter)
        form = ChatForm(chat.messages, chat.tools, chat.variables)
        made = (self._tagged if is_tagged else self._plain)(form, turns, counter)
        if left_out is not None:
            left_out.update(+counter)
        return made

    def _turns(self, chat: Chat, is_tagged: bool, left_out: Counter[str]) -> list[int]:
        """Return indices of the turns to train on; count the others."""
        answers = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
        turns = list(chat.trained)
        left_out["masked_turns"] += len(answers) - len(turns)
        if self._masks_history:
            turns = [place for place in turns if place == answers[-1]]
            left_out["history_turns"] += len(chat.trained) - len(turns)
        if not is_tagged and turns[:1] == [0]:  # no generation prompt precedes it
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
        """Return the documents of a template without tags; count turns that lost their reasoning."""
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
        """Return tokens of the messages up to a turn, how many precede the turn, and the counted span."""
        text = self._template.render(form, place + 1)
        ids, (history, openings, texts) = self._template.tokenize(text), self._template.prompt(form, place)
        found = [len(history) + len(opening) for opening in openings if _starts(ids, history + opening)]
        if not found and (whole := self._cut(text, texts) or self._unopened(text, ids, texts)) is not None:
            left_out["unopened_turns"] += not any(map(text.startswith, texts))
            ids, start = whole
            found = [start]
        if not found:
            prompt = history + openings[0]
            same = common_start(prompt, ids)
            raise ValueError(
                f"message {place + 1} is rendered as {self._shown(ids[same:])}, where the generation prompt has "
                f"{self._shown(prompt[same:])}"
            )
        start = found[0] if self._counts_empty_thinking else max(found)
        return ids, len(history), start, self._end(ids, start, len(ids))

    def _cut(self, text: str, prompts: list[str]) -> tuple[list[int], int] | None:
        r"""Return tokens of a text whose prompt ends within a token, and how many are the prompt's.

        None without a prompt.

        The model sees "assistant\n" and writes "\nyes", while "\n\n" is one token of the text.
        """
        fitting = [prompt for prompt in prompts if text.startswith(prompt)]
        if not fitting:
            return None
        prompt = fitting[0] if self._counts_empty_thinking else max(fitting, key=len)
        begun, written = self._template.tokenize(prompt), self._template.tokens(text[len(prompt) :]).input_ids
        return (begun + written, len(begun)) if self._tokenizer.decode(written) == text[len(prompt) :] else None

    def _unopened(self, text: str, ids: list[int], prompts: list[str]) -> tuple[list[int], int] | None:
        r"""Like `_cut`, for prompts that open a thought that the text does not have: cut after their common prefix.

        Distilled R1's prompt ends with "<Assistant><think>\n", and an answer is rendered as "<Assistant>yes".
        """
        heads = [OPENED.sub("", prompt) for prompt in prompts if OPENED.search(prompt)]
        shared = [one for head in heads for one in (head, head.rstrip()) if text.startswith(one)]
        for head in shared[:1]:
            begun = self._template.tokenize(head)
            return (ids, len(begun)) if _starts(ids, begun) else self._cut(text, [head])
        return None

    def _tagged(self, form: ChatForm, turns: list[int], left_out: Counter[str]) -> list[Counted]:
        """Like `_plain`, for a template with {% generation %}: one document, without tokens of generation prompts."""
        text, blocks = self._template.blocks(form, len(form.messages))
        answers = [place for place, message in enumerate(form.messages) if message["role"] == "assistant"]
        blocks_of, prompts = dict[int, list[tuple[int, int]]](), dict[int, ChatPrompt]()
        ids, places = self._template.whole(text)
        for place in reversed(turns):  # longest prompt first; later ones are its prefixes
            if len(blocks) == len(answers):
                own = [blocks[answers.index(place)]]
            else:
                before = len(self._template.blocks(form, place)[1]) if place else 0
                own = blocks[before : len(self._template.blocks(form, place + 1)[1])]
            blocks_of[place] = _joined(own)
            prompts[place] = self._template.prompt(form, place) if place else ChatPrompt([], [], [])
        ends = {len(prompt) for of_turn in prompts.values() for prompt in of_turn.texts if text.startswith(prompt)}
        if cuts := sorted(ends & {own[0][0] for own in blocks_of.values() if own} - {start for start, _ in places}):
            ids, places = self._template.in_pieces(text, cuts)
        spans = list[tuple[int, int]]()
        for place in turns:
            counted, supplied = list[tuple[int, int]](), list[int]()
            for start, stop in (_tokens_of(places, *block) for block in blocks_of[place]):
                first = start if counted else self._unsupplied(prompts[place].openings, ids, start, stop)
                counted.append((first, self._end(ids, first, stop)))
                supplied += ids[start:first]
            written = [one for start, end in counted for one in ids[start:end]]
            left_out["unthought_turns"] += self._loses_reasoning(form, place, supplied, written)
            spans += [span for span in counted if span[0] < span[1]]
        if not spans:
            return []
        return [self._closed(Counted(ids[: spans[-1][1]], spans), form.messages[turns[-1]])]

    def _unsupplied(self, openings: list[list[int]], ids: list[int], start: int, stop: int) -> int:
        """Return the first token of a block that no generation prompt supplies; prompts may begin before the block."""
        ends = [
            start - back + len(opening)
            for opening in (openings[:1] if self._counts_empty_thinking else openings)
            for back in range(len(opening))
            if start >= back and _starts(ids[start - back :], opening)
        ]
        return max([start, *(end for end in ends if end <= stop)])

    def _loses_reasoning(self, form: ChatForm, place: int, before: list[int], written: list[int]) -> bool:
        """Return whether counted tokens hold a turn without its reasoning. Raise TurnError if they lack more."""
        texts = Texts(self._tokenizer.decode(before), self._tokenizer.decode(written), self._respelled)
        return not holds_reasoning(form.messages[place], f"message {place + 1} ('assistant')", texts)

    def _respelled(self, text: str) -> str:
        """Return a text as its tokens decode it."""
        return self._tokenizer.decode(self._template.tokens(text).input_ids)

    def _end(self, ids: list[int], start: int, stop: int) -> int:
        """Return a span's end: after its first token that ends a text, or after a following one.

        Without trailing blanks.
        """
        for place in range(start, min(stop + 1, len(ids))):
            if ids[place] in self._ends:
                return place + 1
        kept = stop
        while kept > start and ids[kept - 1] not in self._added and not self._tokenizer.decode(ids[kept - 1]).strip():
            kept -= 1
        return kept if kept > start and ids[kept - 1] in self._added else stop

    def _closed(self, document: Counted, last: dict[str, Any]) -> Counted:
        """Return a document whose last turn ends with a token that ends a text.

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
        """Return the token that ends a text and also opens a user message; None without one."""
        ids = self._template.tokenize(self._template.render(ChatForm([{"role": "user", "content": ""}], None, {}), 1))
        return next((one for one in ids if one in self._ends), None)

    def _shown(self, ids: list[int]) -> str:
        return repr(self._tokenizer.decode(ids[:8])) if ids else "nothing more"


def _check_roles(chat: Chat, template: str) -> None:
    """Raise TurnError for a role that is not a usual one and that the template does not name."""
    for number, message in enumerate(chat.messages, start=1):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            usual = ", ".join(role for role in ROLES if role != "call")
            raise TurnError(
                f"message {number} has the role '{role}', which the chat template does not name; give one of {usual}"
            )


def _tokens_of(places: list[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
    """Return the tokens of these characters, by the characters of every token."""
    first = bisect_right(places, start, key=lambda place: place[1])
    return first, max(first, bisect_left(places, stop, key=lambda place: place[0]))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort spans, and join adjacent ones."""
    made = list[tuple[int, int]]()
    for start, stop in spans:
        if made and start <= made[-1][1]:
            start = made.pop()[0]
        made.append((start, stop))
    return made


def _starts(ids: list[int], with_ids: list[int]) -> bool:
    return ids[: len(with_ids)] == with_ids


def spans_of(counts: np.ndarray) -> list[tuple[int, int]]:
    """Return first position and end (exclusive) of every run of positions that count."""
    edges = np.flatnonzero(np.diff(counts, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def marked(tokenizer: "PreTrainedTokenizerBase", document: Counted) -> str:
    """Return the text of a document with the parts that count in white brackets: ⟦ ⟧."""
    edges = [0, *(edge for span in document.spans for edge in span), len(document.ids)]
    texts = [tokenizer.decode(document.ids[start:end]) for start, end in pairwise(edges)]
    return "".join(f"{OPEN}{text}{CLOSE}" if place % 2 else text for place, text in enumerate(texts))
