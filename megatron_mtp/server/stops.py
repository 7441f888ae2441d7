"""Stop strings: a text ends before the first of them, and no letter goes out that may belong to one.

stops "\\n\\n"      arrives   "a\\n"   "b\\n"    "\\nc"
                    goes out  "a"     "\\nb"    ""       and the text has ended
"""

from dataclasses import dataclass

from megatron_mtp.server.tokens import Reader


@dataclass(frozen=True)
class Released:
    """What may go out.

    Attributes:
        text: new letters.
        stop: the stop string that has ended the text.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """The letters of one text in, those that may go out; cutting them into other pieces changes nothing."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held = stops, ""

    def add(self, piece: str) -> Released:
        """More letters."""
        text = self._held + piece
        found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, stop = min(found)  # the one that is whole first
            self._held = ""
            return Released(text[:start], stop)
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return Released(text[: len(text) - kept])

    def rest(self) -> str:
        """What was held back, of a text that has ended otherwise."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Letters at the text's end that begin the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


@dataclass(frozen=True)
class Letters:
    """What a token adds to a text.

    Attributes:
        piece: the letters that it completes.
        text: what may go out with it.
    """

    piece: str
    text: str


class Reading:
    """The tokens of one text, each read once, by whoever comes first: the engine where there are stop strings, to end
    the text, and else the answer.

    As `Request.cut` it says how many tokens to keep, up to the one that completes a stop string; None before. Lists
    must grow from call to call.

    Attributes:
        stops: the stop strings.
    """

    def __init__(self, reader: Reader, stops: tuple[str, ...]) -> None:
        self.stops, self._reader, self._strings = stops, reader, StopStrings(stops)
        self._read = list[Letters]()
        self._end: int | None = None

    def __call__(self, ids: list[int]) -> int | None:
        """Read the tokens that were emitted so far."""
        for place in range(len(self._read), len(ids)):
            self.letters(place, ids[place])
        return self._end

    def letters(self, place: int, token: int) -> Letters:
        """Of the token at a place of the text; places are read in their order."""
        if place == len(self._read):
            piece = self._reader.add(token)
            self._read.append(Letters(piece, self._released(piece)))
        return self._read[place]

    def rest(self) -> str:
        """What goes out at the text's end, after all tokens: letters whose bytes were not all there, and held ones."""
        return self._released(self._reader.rest()) + ("" if self._end is not None else self._strings.rest())

    def _released(self, piece: str) -> str:
        """Nothing goes out behind a stop string."""
        if self._end is not None:
            return ""
        released = self._strings.add(piece)
        if released.stop is not None:
            self._end = len(self._read) + 1
        return released.text
