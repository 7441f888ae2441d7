"""Sources of documents, before they are a corpus (sources.py).

A JSON line names its own source: `category`, as in SPEED-Bench, or else `source`. The source of any other document is
the folder, or the .jsonl file, directly below the folder that contains all files:

    texts/code/a/one.py     code
    texts/prose/two.txt     prose
    texts/chats.jsonl       chats
    texts/three.txt         texts
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KEYS = ("category", "source")
"""Keys of a line that name its source; the first existing one counts."""


def named_source(fields: Any) -> str | None:
    """Return the source that a line names; None if it names none."""
    found = (fields.get(key) for key in KEYS) if isinstance(fields, dict) else ()
    return next((name for name in found if isinstance(name, str) and name), None)


def sources_of_files(paths: Iterable[str]) -> dict[str, str]:
    """Return the sources of documents that name none, by the path of their file."""
    files = {path: Path(os.path.abspath(path)) for path in paths}
    if not files:
        return {}
    common = Path(os.path.commonpath([file.parent for file in files.values()]))

    def source(file: Path) -> str:
        folders = file.relative_to(common).parts[:-1]
        if folders:
            return folders[0]
        return file.stem if file.suffix == ".jsonl" else common.name or str(common)

    return {path: source(file) for path, file in files.items()}
