"""Help texts, messages and pages use the words of the field: `BETTER` has the private ones, with what to write instead.

Help texts and README have none of them. Other files have as many as `LEFT` allows, numbers that may only shrink: lower
them with the file.
"""

import re
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator

import pytest
from documents import DOCUMENTS, ROOT, _subparsers, strings

from megatron_mtp.cli.verbs import VERBS, module_of

BETTER = {
    r"beside": "alongside, next to, in addition to",
    r"(?<!--)depths(?! [1d] )": "MTP layers, or: depth d",
    r"(?:is|are) none(?! of)|none for none": "has no ..., is not a ...",
    r"letter": "character",
    r"own texts": "self-generated data",
    r"(?<!own )(?<!--)(?<!\.)texts": "outputs, generations, requests, documents",
    r"(?<!config )says?|said": "prints, reports, specifies, sets",
    r"witness(?:es)?": "reference, prompt sample",
    r"nobody": "not tested, not run",
    r"(?<!there )(?:is|are) no (?!longer|other|more|earlier|older|newer)": "is not a ..., has no ...",
    r"for want of": "missing",
    r"which head|draft heads?": "drafter",
}
"""Pattern of a private word to what is better."""

MOST_WORDS = 25
"""Of the help of a flag."""

LEFT = {"megatron_mtp/model/stock.py": 4}
"""File to the number of private words that it still has: names of arguments, which its messages tell."""


def found_in(text: str) -> Iterator[str]:
    """What is to be written in the place of every private word; code in the text is skipped."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    for pattern, better in BETTER.items():
        for word in re.findall(rf"\b(?:{pattern})\b", prose, flags=re.IGNORECASE):
            yield f"'{word}': write {better}"


def found_in_page(page: str) -> list[str]:
    """Place and advice for every private word of a page outside of its blocks."""
    text = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    return [f"line {number}: {one}" for number, line in enumerate(text.splitlines(), 1) for one in found_in(line)]


def help_texts() -> Iterator[tuple[str, str, bool]]:
    """Place and text of everything that `--help` of every verb shows, and whether it is the help of a flag."""
    for verb, row in VERBS.items():
        yield verb, row.line, True
        yield from _texts_of(module_of(verb).parser(f"megatron-mtp {verb}"))


def _texts_of(parser: ArgumentParser) -> Iterator[tuple[str, str, bool]]:
    yield parser.prog, f"{parser.description}", False
    yield parser.prog, f"{parser.epilog}", False
    for action in parser._actions:
        if action.help and action.help != SUPPRESS:
            yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", action.help, True
    for children in _subparsers(parser):
        for child in children.values():
            yield from _texts_of(child)


def test_help_texts_use_the_words_of_the_field() -> None:
    assert [f"{place}: {one}" for place, text, _ in help_texts() for one in found_in(text)] == []


def test_the_help_of_a_flag_is_short() -> None:
    lengths = {place: len(text.split()) for place, text, is_flag in help_texts() if is_flag}
    assert {place: words for place, words in lengths.items() if words > MOST_WORDS} == {}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pages_use_the_words_of_the_field(name: str) -> None:
    assert too_many(name, found_in_page(DOCUMENTS[name].read_text(encoding="utf-8"))) == []


def test_messages_use_the_words_of_the_field() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "megatron_mtp").rglob("*.py")}
    assert [one for name, source in files.items() for one in too_many(name, found_in_messages(source))] == []


def found_in_messages(source: str) -> list[str]:
    """Place and advice for every private word of a file's strings of several words, docstrings excepted."""
    messages = [(line, text) for line, text in strings(source) if " " in text.strip()]
    return [f"line {line}: {one}" for line, text in messages for one in found_in(text)]


def too_many(name: str, found: list[str]) -> list[str]:
    """What was found, with the name of the file, where it is more than the file may have."""
    return [f"{name}, {one}" for one in found] if len(found) > LEFT.get(name, 0) else []


def test_private_words_are_seen() -> None:
    page = "# Texts\n`beside` it\n```\nsaid\n```\nA letter [of](beside.md) --texts, which is none.\n"
    assert found_in_page(page) == [
        "line 1: 'Texts': write outputs, generations, requests, documents",
        "line 6: 'is none': write has no ..., is not a ...",
        "line 6: 'letter': write character",
    ]
