"""Finished texts, a line each, in a file that a killed process leaves whole but for its last line.

    {"settings": {"load": 3735928559, "seed": 1234, "temperature": 0.7, ...}}
    {"number": 4, "prompt": [5, 12], "tokens": [7, 9, 0], "finish": "stop"}

The first line has everything that the texts depend on. A line that was cut short is removed, and its text made again.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_mtp.files import synced, written_beside


@dataclass(frozen=True)
class Written:
    """A finished text.

    Attributes:
        number: its place among all texts.
        prompt: token ids that it began with.
        tokens: token ids that the model added.
        finish: why it ended, as `requests.Finish`.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    finish: str


class Journal:
    """The finished texts of a file.

    Args:
        file: the file, which may not be there yet.
        settings: what the texts depend on, by the name of the flag.

    Attributes:
        texts: those that are finished, by number.

    Raises:
        ValueError: its texts were made with other settings, or a line is damaged.
    """

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self._settings = file, settings
        self.texts: dict[int, Written] = {}
        self._whole = 0
        if file.exists():
            self._read(file.read_bytes())

    def _read(self, data: bytes) -> None:
        self._whole = data.rfind(b"\n") + 1
        first, *lines = data[: self._whole].splitlines() or [b""]
        kept = _object(first).get("settings")
        if not isinstance(kept, dict):
            raise self._damaged(1)
        if not lines:  # nothing is lost with other settings
            self._whole = 0
            return
        if others := sorted(name for name in {*kept, *self._settings} if kept.get(name) != self._settings.get(name)):
            raise ValueError(
                f"{self.file} holds texts made with another {', '.join(f'--{name}' for name in others)}; add "
                "--overwrite to make them anew, or name another --output-prefix."
            )
        for number, line in enumerate(lines, start=2):
            try:
                text = Written(**_object(line))
            except TypeError:
                raise self._damaged(number) from None
            self.texts[text.number] = text

    def _damaged(self, line: int) -> ValueError:
        return ValueError(f"{self.file} is damaged in line {line}; remove the line, or make it anew with --overwrite.")

    @contextmanager
    def keeping(self) -> Iterator[Callable[[Written], None]]:
        """A function that keeps a finished text: when it returns, the text is on the disk."""
        if not self._whole:
            first = _line({"settings": self._settings})
            with written_beside(self.file) as beside:
                beside.write_bytes(first)
            self._whole = len(first)
        with open(self.file, "r+b") as stream:
            stream.truncate(self._whole)
            stream.seek(self._whole)

            def keep(text: Written) -> None:
                stream.write(_line(asdict(text)))
                synced(stream)
                self.texts[text.number] = text

            yield keep


def _object(line: bytes) -> dict[str, Any]:
    """The object of a line; empty if it holds none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
