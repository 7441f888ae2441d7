"""Errors that end a command: one sentence on stderr and an exit status. Bugs keep their traceback.

    user error, full disk, out of memory               PROGRAM: error: SENTENCE    status 2
    Ctrl-C                                             PROGRAM: interrupted        status 130
    closed output pipe (`| head`)                      nothing                     status 141

This module imports only the standard library, so Ctrl-C during the import of torch is reported the same way.
"""

import errno
import os
import re
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter, _SubParsersAction
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn, override

REFUSED, INTERRUPTED, UNREAD = 2, 130, 141

SPOKEN_AFTER = 20.0
"""Seconds that other ranks wait before they print, so that the first rank can; torchrun ends all ranks with the first.
"""

LONGEST = 600
"""Maximum number of characters shown of a library's message."""

LIKENESS = 0.65
"""Minimum similarity by `difflib` of a name that is suggested for an unknown word."""

FOREIGN = "foreign flags"
"""Name of the registry in which a parser keeps replacements for flags of other programs."""

MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "Cannot allocate memory")
"""torch's messages when memory is exhausted."""

Mistakes = type[Exception] | tuple[type[Exception], ...]


class InputError(ValueError):
    """A user error, raised where a plain ValueError could be a bug, such as inside Megatron's training loop."""


class Parser(ArgumentParser):
    """Argument parser that reports errors in one sentence, without the usage text. Examples keep their line breaks.

    Flags may be written with underscores instead of hyphens.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": RawDescriptionHelpFormatter, **settings})

    @override
    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(None if args is None else [*args], namespace)
        if unknown:
            parsers: list[ArgumentParser] = [self]
            for action in self._actions:
                if isinstance(action, _SubParsersAction):
                    parsers += filter(None, [action.choices.get(getattr(found, action.dest))])
            wrong = [word.split("=")[0] for word in unknown if word.startswith("--")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{flags_meant(wrong, *parsers)}")
        return found

    def parse_with_line(self, arguments: list[str]) -> Any:
        """Parse like `parse_args`, but append everything after `--` unchanged to the positional argument `line`."""
        split = arguments.index("--") if "--" in arguments else len(arguments)
        found = self.parse_args(arguments[:split])
        found.line = [*found.line, *arguments[split + 1 :]]
        return found

    @override
    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = [self._hyphenated(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(words, namespace)

    def _hyphenated(self, word: str) -> str:
        """Return the parser's spelling of a flag; return any other word unchanged."""
        flag, equals, value = word.partition("=")
        hyphenated = flag.replace("_", "-")
        is_own = flag.startswith("--") and hyphenated in self._option_string_actions
        return hyphenated + equals + value if is_own else word

    @override
    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            message += did_you_mean([choice[1]], re.findall(r"[^', ]+", choice[2]))
        fail(self.prog, f"{message} (--help lists the flags)")


def add_foreign_flags(parser: ArgumentParser, here: Mapping[str, str]) -> None:
    """Make a parser answer flags of other programs with the flag to use here."""
    for flag, remedy in here.items():
        parser.register(FOREIGN, flag, remedy)


def flags_meant(words: Sequence[str], *parsers: ArgumentParser) -> str:
    """Suggest replacements for unknown flags, to end an error message: known equivalents or the closest names."""
    foreign = {flag: remedy for parser in parsers for flag, remedy in parser._registries.get(FOREIGN, {}).items()}
    known = {word: here for word in words if (here := foreign.get(word.replace("_", "-")))}
    said = "".join(f"; in the place of {word} give {here}" for word, here in known.items())
    names = [flag for parser in parsers for flag in parser._option_string_actions]
    return said + did_you_mean([word for word in words if word not in known], names)


def did_you_mean(words: Sequence[str], names: Iterable[str]) -> str:
    """Suggest the closest names for unknown words, as a question that ends an error message; empty if none is close.

    Hyphens and underscores are equivalent, and case is ignored.
    """
    plain = {name.replace("_", "-").lower(): name for name in names}
    close = [get_close_matches(word.replace("_", "-").lower(), plain, cutoff=LIKENESS) for word in words]
    best = dict.fromkeys(plain[found[0]] for found in close if found)
    return f"; did you mean {' and '.join(best)}?" if best else ""


@contextmanager
def sentences(program: str, mistakes: Mistakes = ValueError, advice: str = "") -> Iterator[None]:
    """Turn exceptions of the enclosed code into the exit statuses listed at the top of this module.

    Args:
        program: name of the command, for the message.
        mistakes: exceptions whose message is meant for the user.
        advice: text to append to the message for Ctrl-C.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _say(program, f"interrupted{advice and f'; {advice}'}")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout again at exit
        sys.exit(UNREAD)
    except Exception as error:
        said = _of_the_output(error) or (
            _one_line(error) if isinstance(error, mistakes) else sentence_of_the_machine(error)
        )
        if said is None:
            raise
        fail(program, said)


def fail(program: str, error: ValueError | str) -> NoReturn:
    """Print a sentence and exit with status 2. Ranks other than 0 wait before they print."""
    if _rank() != "0":
        time.sleep(SPOKEN_AFTER)
        program = f"{program}: rank {_rank()}"
    print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    sys.exit(REFUSED)


def _say(program: str, message: str) -> None:
    if _rank() == "0":
        print(f"{program}: {message}", file=sys.stderr, flush=True)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _of_the_output(error: Exception) -> str | None:
    """Return a sentence if the output's encoding lacks a character; UTF-8 has all of them."""
    if not isinstance(error, UnicodeEncodeError) or error.encoding.lower().replace("-", "") == "utf8":
        return None
    letter = ascii(error.object[error.start])
    return f"the output is in {error.encoding}, which has no {letter}; set PYTHONIOENCODING=utf-8, or unset it."


def sentence_of_the_machine(error: BaseException) -> str | None:
    """Describe a failure of disk, files or memory in one sentence; None for other exceptions, which are bugs."""
    message = _one_line(error)
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in message for words in MEMORY)
    ):
        return f"this machine has not enough memory ({message or 'no size is known'}); give smaller sizes."
    if not isinstance(error, OSError) or error.errno is None:
        return None
    what = "a file" if error.filename is None else f"'{error.filename}'"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left on the disk for {what}; free some, and run the command again."
    return f"{what} cannot be used ({error.strerror}); correct the path, or the rights on it."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:LONGEST]
