r"""Incremental detokenization: text of an output character by character, up to a stop string.

tokens    "a"  E2 82  AC    "\n"   "\n"
text      "a"         "€"                   a character is sent when all its bytes have arrived and it cannot be part
                                            of a stop string, here "\n\n", which has ended the output
"""

from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CONTEXT = 8
"""Number of the prompt's last tokens that are decoded with the first new one, which may need a leading space or
complete a character.
"""

UNFINISHED = "\ufffd"


class Detokenizer:
    """Incremental detokenizer that holds back incomplete UTF-8."""

    def __init__(self, backend: Tokenizer | None, context: list[int], hidden: frozenset[int] = frozenset()) -> None:
        self._backend, self._hidden = backend, hidden
        self._stream, self._pending = DecodeStream(skip_special_tokens=True), list[int]()
        if backend is None:
            return
        context = context[-CONTEXT:]
        whole = len(context)
        while whole and backend.decode(context[:whole]).endswith(UNFINISHED):
            whole -= 1  # the context ends inside a character
        self._stream = DecodeStream(context[:whole], skip_special_tokens=True)
        for token in context[whole:]:
            self.add(token)

    def add(self, token: int) -> str:
        """Return the characters that this token completes."""
        if self._backend is None or token in self._hidden:
            return ""
        self._pending.append(token)
        try:
            piece = self._stream.step(self._backend, token)
        except Exception:  # raised by the library if a decoder changes text that it has already returned
            self._stream, piece = DecodeStream(skip_special_tokens=True), self.rest()
        if piece:
            self._pending.clear()
        return piece or ""

    def rest(self) -> str:
        """Return the text of incomplete bytes at the end of the output."""
        pending, self._pending = self._pending, []
        return "" if self._backend is None else self._backend.decode(pending, skip_special_tokens=True)


class StopStrings:
    """Holds back text that may become a stop string. The result does not depend on how the text is split."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held = stops, ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Return the new characters that may be sent, and the stop string that has ended the text."""
        text, self._held = self._held + piece, ""
        found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, stop = min(found)  # the stop string that is complete first
            return text[:start], stop
        begun = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        end = len(text) - max(begun, default=0)
        self._held = text[end:]
        return text[:end], None

    def rest(self) -> str:
        """Return the characters that were held back, for a text that ended without a stop string."""
        held, self._held = self._held, ""
        return held


class TokenText(NamedTuple):
    """A token's part of an output: the characters that it completes, and those that can be sent with it."""

    whole: str
    released: str


class OutputText:
    """Text of one output. Each token is read once: by the engine if there are stop strings, otherwise by the response.

    As `Request.cut`, it returns the number of tokens to keep, up to the one that completes a stop string; None before
    that. Lists must grow from call to call.

    Attributes:
        stops: the stop strings.
        least: stop strings are ignored in this many first tokens.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], least: int = 0) -> None:
        self.stops, self.least, self._detokenizer, self._strings = stops, least, detokenizer, StopStrings(stops)
        self._pieces = list[TokenText]()
        self._end: int | None = None

    def __call__(self, ids: list[int]) -> int | None:
        """Read the tokens that were emitted so far."""
        for place in range(len(self._pieces), len(ids)):
            self.piece(place, ids[place])
        return self._end

    def piece(self, place: int, token: int) -> TokenText:
        """Return the part of the token at an index; indices must be read in order."""
        if place == len(self._pieces):
            whole = self._detokenizer.add(token)
            self._pieces.append(TokenText(whole, self._released(whole)))
        return self._pieces[place]

    def rest(self) -> str:
        """Return the end of the text after all tokens: incomplete characters, and what was held back."""
        return self._released(self._detokenizer.rest()) + ("" if self._end is not None else self._strings.rest())

    def _released(self, piece: str) -> str:
        """Return text that may be sent: nothing after a stop string."""
        if self._end is not None:
            return ""
        if len(self._pieces) < self.least:
            return piece
        released, stop = self._strings.add(piece)
        if stop is not None:
            self._end = len(self._pieces) + 1
        return released
