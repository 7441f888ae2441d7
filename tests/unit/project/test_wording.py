"""Help, messages, pages, comments and docstrings use the field's terms: `BETTER` has private words and replacements.

Help and README have none of them. Other files have at most as many as `LEFT` allows; lower the number with the file.
"""

import ast
import io
import re
import tokenize
import tomllib
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
"""Patterns of private words, and what to write instead."""

ORDINARY_IN_SOURCES = ("depths", "none", "letter", "texts", "draft heads?")
"""Parts of the patterns that do not apply to comments and docstrings.

There they are ordinary words: depths 1 .. D of a formula, the value None, letters that name axes, strings, and the
protocol `DraftHead`.
"""

IN_SOURCES = {
    pattern: better for pattern, better in BETTER.items() if not any(word in pattern for word in ORDINARY_IN_SOURCES)
} | {
    r"anew": "again, from scratch",
    r"beginnings?": "start, prefix",
    r"but for": "except",
    r"goes? on|going on|gone on|went on": "continues, resumes",
    r"li(?:e|es) in": "is in",
    r"mend(?:s|ed)?": "fix",
    r"spoilt": "damaged",
    r"stood|whereof|thereof|wherein": "was, of which",
}
"""Patterns of private words in comments and docstrings, and what to write instead."""

FOLDERS = "megatron_mtp tests benchmarks examples integrations scripts tools upstream .ci".split()
"""Folders with sources."""

MOST_WORDS = 25
"""Longest help of a flag."""

LEFT = {"megatron_mtp/model/stock.py": 4}
"""Private words that each file still has: names of arguments in its messages."""


def found_in(text: str, private: dict[str, str] = BETTER) -> Iterator[str]:
    """Yield what to write instead of every private word; code in the text is skipped."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    for pattern, better in private.items():
        for word in re.findall(rf"\b(?:{pattern})\b", prose, flags=re.IGNORECASE):
            yield f"'{word}': write {better}"


def found_in_page(page: str) -> list[str]:
    """Return place and advice for every private word of a page outside of its blocks."""
    text = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    return [f"line {number}: {one}" for number, line in enumerate(text.splitlines(), 1) for one in found_in(line)]


def help_texts() -> Iterator[tuple[str, str, bool]]:
    """Yield place and text of all that `--help` of every verb shows, and whether it is the help of a flag."""
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


@pytest.mark.parametrize("name", [*DOCUMENTS, "studies/results.md"])
def test_pages_use_the_words_of_the_field(name: str) -> None:
    assert too_many(name, found_in_page((ROOT / name).read_text(encoding="utf-8"))) == []


def test_messages_use_the_words_of_the_field() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "megatron_mtp").rglob("*.py")}
    assert [one for name, source in files.items() for one in too_many(name, found_in_messages(source))] == []


def found_in_messages(source: str) -> list[str]:
    """Return place and advice for every private word in strings of several words, except docstrings."""
    messages = [(line, text) for line, text in strings(source) if " " in text.strip()]
    return [f"line {line}: {one}" for line, text in messages for one in found_in(text)]


def too_many(name: str, found: list[str]) -> list[str]:
    """Return what was found, with the name of the file, if it is more than the file may have."""
    return [f"{name}, {one}" for one in found] if len(found) > LEFT.get(name, 0) else []


def comments_and_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment and of every line of a docstring, without code and names of arguments."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number, line in enumerate(node.value.value.splitlines(), node.lineno):
                if not re.match(r"\s*(?:with |[\w.]+\()", line):
                    yield number, re.sub(r"^\s*\w+(?:, \w+)*:", "", line)


def files_of(*patterns: str) -> dict[str, str]:
    """Return names and contents of the repository's source files whose names match a pattern."""
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    found = sorted(path for path in paths if any(path.match(pattern) for pattern in patterns))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in found}


def test_comments_and_docstrings_use_the_words_of_the_field() -> None:
    lines = [
        (f"{name}:{number}", text)
        for name, source in files_of("*.py").items()
        for number, text in comments_and_docstrings(source)
    ]
    assert [f"{place} {one}" for place, text in lines for one in found_in(text, IN_SOURCES)] == []


def test_scripts_and_planted_faults_use_the_words_of_the_field() -> None:
    lines = [
        (f"{name}:{number}", comment[1])
        for name, source in files_of("*.sh", "*.sbatch", ".ci/run", "pyproject.toml", "Dockerfile").items()
        for number, line in enumerate(source.splitlines(), 1)
        if (comment := re.search(r"(?:^|\s)#(.*)", line))
    ]
    faults = tomllib.loads((ROOT / "tests/planted_faults.toml").read_text("utf-8"))
    lines += [(name, fault["breaks"]) for name, fault in faults.items()]
    assert [f"{place} {one}" for place, text in lines for one in found_in(text, IN_SOURCES)] == []


def test_private_words_in_sources_are_seen() -> None:
    source = 'def f():\n    """It says so.\n\n    says: fine.\n    """\n    return 1  # made anew, of `beside`\n'
    found = [(number, one) for number, text in comments_and_docstrings(source) for one in found_in(text, IN_SOURCES)]
    assert found == [(6, "'anew': write again, from scratch"), (2, "'says': write prints, reports, specifies, sets")]


def test_private_words_are_seen() -> None:
    page = "# Texts\n`beside` it\n```\nsaid\n```\nA letter [of](beside.md) --texts, which is none.\n"
    assert found_in_page(page) == [
        "line 1: 'Texts': write outputs, generations, requests, documents",
        "line 6: 'is none': write has no ..., is not a ...",
        "line 6: 'letter': write character",
    ]
