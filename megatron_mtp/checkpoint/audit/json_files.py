"""The JSON files of a Hugging Face folder: each can be read, and says what loaders take where they look for it.

In:  a folder.
Out: findings. The numbers of a config that its family reads are checked by the family (folder.py), its index with the
     files (folder.py as well).
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.audit.finding import WARNING, Finding, listed
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json, wrong_kinds
from megatron_mtp.checkpoint.hf.folder import INDEX

OBJECTS = ("generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
"""Files that hold an object; others may hold a list."""
CORRECT = "correct the file, or copy that of the model that this was made from"


def json_findings(folder: Path) -> Iterator[Finding]:
    """What is wrong with the JSON files of a folder; whether config and index can be read is found elsewhere."""
    for file in sorted(folder.glob("*.json")):
        try:
            found = read_json(file)
        except ValueError as error:
            if file.exists() and file.name not in (CONFIG, INDEX):
                yield Finding("damaged file", str(error), CORRECT, names=(file.name,))
            continue
        yield from _of_file(file, found)


def _of_file(file: Path, found: Any) -> Iterator[Finding]:
    if file.name in OBJECTS and not isinstance(found, dict):
        says = f"'{file.name}' holds {found!r:.40}; it must be an object."
        yield Finding("damaged file", says, CORRECT, names=(file.name,))
    elif isinstance(found, dict) and file.name in (CONFIG, "generation_config.json"):
        for name, says in wrong_kinds(found):
            yield Finding("damaged config", f"{file.name}: {says}.", CORRECT, names=(name,))
    twice = repeated_names(file)
    if twice:
        says = f"'{file.name}' has {listed(twice)} more than once: which one is read depends on the reader."
        yield Finding("damaged config", says, "remove the wrong ones", WARNING, tuple(twice))


def repeated_names(file: Path) -> list[str]:
    """Names that an object of a JSON file has more than once."""
    found: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        found.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)

    json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=note)
    return found
