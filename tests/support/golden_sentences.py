"""Everything that users read, sentence by sentence: `golden/sentences.txt`, which `test_golden.py` compares.

    python tests/support/golden_sentences.py     # rewrite the file after changing a sentence

Messages, help texts and logs of the package are listed by file; values inside an f-string become `{}`. Other tests
check the facts of a message: the flag, the value, the remedy.
"""

from collections.abc import Iterator
from pathlib import Path

from documents import ROOT, strings

FILE = Path(__file__).parent / "golden" / "sentences.txt"
FEWEST_WORDS = 5
"""Shorter strings are names or parts of lines."""


def record() -> str:
    """Return the file's text."""
    package = ROOT / "megatron_mtp"
    parts = ["\n".join([str(path.relative_to(package)), *_sentences(path)]) for path in sorted(package.rglob("*.py"))]
    return "\n\n".join(part for part in parts if "\n" in part) + "\n"


def _sentences(path: Path) -> Iterator[str]:
    """Yield one indented line per sentence, in the order of the source."""
    found = sorted(strings(path.read_text("utf-8"), filled="{}"), key=lambda one: one[0])
    for _, text in found:
        words = text.split()
        if len(words) >= FEWEST_WORDS:
            yield "    " + " ".join(words)


if __name__ == "__main__":
    FILE.write_text(record(), encoding="utf-8")
