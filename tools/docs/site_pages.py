"""Hooks of mkdocs.yml: pages from outside docs/, a page for every module, and links between all of them."""

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "CONTRIBUTING.md": "develop/contributing.md",
    "CHANGELOG.md": "develop/changelog.md",
    "studies/results.md": "explanation/studies.md",
    "integrations/README.md": "guides/integrations.md",
}
"""Pages of the repository, and their place on the site."""

WHENCE = {place: page for page, place in OUTSIDE.items()}
MODULES = "reference/api"
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside docs/, and module pages with their index."""
    made = {place: (ROOT / page).read_text(encoding="utf-8") for page, place in OUTSIDE.items()}
    modules = {name: first_line(path) for path in (ROOT / "megatron_mtp").rglob("*.py") if (name := public_name(path))}
    made |= {f"{MODULES}/{name}.md": f"# `{name}`\n\n::: {name}\n" for name in modules}
    rows = [f"| [`{name}`]({name}.md) | {line} |" for name, line in sorted(modules.items())]
    made[f"{MODULES}/index.md"] = "\n".join(["# Modules", "", "| module | |", "|---|---|", *rows, ""])
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links of the site; links to files outside of it become text."""
    place = page.file.src_uri
    return markdown if place.startswith(MODULES) else LINK.sub(lambda link: linked(link, place), markdown)


def linked(link: re.Match[str], place: str) -> str:
    """Return a link of the page at this place of the site."""
    words, target, anchor = link[1], link[2], link[3] or ""
    if "://" in target or not target:
        return link[0]
    file = os.path.normpath(os.path.join(os.path.dirname(WHENCE.get(place, f"docs/{place}")), target))
    goal = OUTSIDE.get(file, file.removeprefix("docs/") if file.startswith("docs/") else "")
    if not goal:
        return words
    return f"[{words}]({os.path.relpath(goal, os.path.dirname(place))}{anchor})"


def public_name(path: Path) -> str:
    """Return a module's name; "" if it starts with an underscore."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return "" if "._" in name else name


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, for a table cell."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].replace("|", "\\|")
