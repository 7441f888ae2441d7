r"""Render and tokenize chats with the tokenizer's own chat template, and find what it adds before a generated turn.

    prompt   the messages before it, with the generation prompt     <user>Hi<end><assistant>
    turn     the messages up to it                                  <user>Hi<end><assistant>Hello<end>\n

Generation prompts differ by mode: with nothing, an empty thinking block, or the start of a thought. A chat is
rendered and tokenized once per turn and mode; parts that a text shares with an earlier one are not tokenized again.
"""

import re
from bisect import bisect_left
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_mtp.data.tokenizer import apply_template, generated_spans

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag around what the assistant writes, if a template has it."""

MODES: tuple[dict[str, Any], ...] = ({}, *({"enable_thinking": on, "thinking": on} for on in (False, True)))
"""Variables by which generation prompts differ: nothing, an empty thinking block, or the start of one."""


class Tokenized(NamedTuple):
    """Tokens of a text, with the index and the start in the text of each added token."""

    text: str
    ids: list[int]
    places: list[int]
    starts: list[int]

    def shared(self, text: str) -> tuple[int, int]:
        """Return how many characters and tokens another text shares at its start, up to an added token."""
        count = bisect_left(self.starts, True, key=lambda start: not text.startswith(self.text[:start]))
        return (self.starts[count - 1], self.places[count - 1]) if count else (0, 0)


class ChatForm(NamedTuple):
    """A chat in the form that the template gets."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


class ChatPrompt(NamedTuple):
    """What comes before a turn.

    Attributes:
        history: tokens of the messages before it.
        openings: tokens that generation prompts add after them, those of the plain one first.
        texts: messages and each opening as text.
    """

    history: list[int]
    openings: list[list[int]]
    texts: list[str]


class ChatTemplate:
    """A tokenizer's chat template: renders messages and tokenizes them.

    Args:
        tokenizer: a fast tokenizer.

    Attributes:
        added: its added tokens, which end all words.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        check_template(tokenizer)
        self.added = tokenizer.added_tokens_decoder.keys()
        self._tokenizer = tokenizer
        self._known = deque[Tokenized](maxlen=len(MODES))

    def source(self, tools: list[dict[str, Any]] | None) -> str:
        """Return the template itself, which may differ for chats with tools."""
        return self._tokenizer.get_chat_template(tools=tools)

    def prompt(self, form: ChatForm, place: int) -> ChatPrompt:
        """Return what comes before a turn, in every mode with a different prompt."""
        history, seen = list[int](), dict[str, list[int]]()
        for mode in MODES:
            text = self.render(form, place, add_generation_prompt=True, **mode)
            if text not in seen:
                prompt, messages = self.tokenize(text), self.tokenize(self.render(form, place, **mode))
                same = common_start(prompt, messages)
                history = history if seen else prompt[:same]
                seen[text] = prompt[same:]
        return ChatPrompt(history, list(seen.values()), list(seen))

    def render(self, form: ChatForm, messages: int, **variables: Any) -> str:
        """Render the first messages."""
        arguments = {**form.variables, **variables}
        return apply_template(self._tokenizer, form.messages[:messages], tools=form.tools, **arguments)

    def blocks(self, form: ChatForm, messages: int) -> tuple[str, list[tuple[int, int]]]:
        """Render the first messages, and return the characters of the {% generation %} blocks."""
        return generated_spans(self._tokenizer, form.messages[:messages], tools=form.tools, **form.variables)

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text; the part that it shares with an earlier one is not tokenized again."""
        for known in self._known:
            start, place = known.shared(text)
            if 2 * start > len(text):
                return known.ids[:place] + self.tokens(text[start:]).input_ids
        return self.whole(text)[0]

    def whole(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text and the characters of each, cached for texts with the same prefix."""
        made = self.tokens(text, return_offsets_mapping=True)
        ids, characters = list[int](made.input_ids), list[tuple[int, int]](made.offset_mapping)
        places = [place for place, token in enumerate(ids) if token in self.added]
        self._known.appendleft(Tokenized(text, ids, places, [characters[place][0] for place in places]))
        return ids, characters

    def in_pieces(self, text: str, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return tokens and their characters; no token crosses a cut, where a prompt ends."""
        ids, places = list[int](), list[tuple[int, int]]()
        for start, stop in pairwise([0, *cuts, len(text)]):
            made = self.tokens(text[start:stop], return_offsets_mapping=True)
            ids += made.input_ids
            places += [(start + first, start + end) for first, end in made.offset_mapping]
        return ids, places

    def tokens(self, text: str, **more: bool) -> "BatchEncoding":
        """Tokenize a text on its own."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False, **more)


def check_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"--chat was given, but the tokenizer in '{tokenizer.name_or_path}' has no chat template; give text with "
            "--data-path, or the tokenizer of a chat model."
        )


def common_start(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))
