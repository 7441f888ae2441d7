"""Write the tables of methods and verifiers in docs/drafting.md from what each of them states in its own file.

python tools/docs/method_tables.py
"""

from pathlib import Path

from megatron_mtp.drafting.listing import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs/drafting.md"
BEGIN, END = "<!-- written by tools/docs/method_tables.py -->\n", "\n<!-- end -->"


def updated(page: str) -> str:
    """The page with new tables between the two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + markdown() + END + after


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
