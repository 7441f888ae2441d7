"""Rows of the table: each is known by what it depends on, and kept in a file of its own.

A row that is there is not made again. Another number of drafts, another text or a checkpoint that has changed is
another row beside it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_mtp.checkpoint.hf.hub import local_folder
from megatron_mtp.checkpoint.mcore.iterations import is_checkpoint
from megatron_mtp.checkpoint.mcore.tensors import DistReader
from megatron_mtp.data.documents import TEXT_FILES, find_files, list_documents, read_document
from megatron_mtp.files import written_beside

Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a row depends on beside the checkpoint's own files.

    Attributes:
        checkpoint: a Megatron checkpoint, a Hugging Face folder or a name on the Hub, as it was given.
        drafts: K, drafts a round; None for as many as the checkpoint has depths.
        engines: whose acceptance is foretold.
        text: files and folders with the prompts.
        digest: of what these hold.
        prompts, prompt_tokens, new_tokens: how many prompts of which length, and how far each is continued.
        tokenizer: folder of the tokenizer; None for the checkpoint's own.
        trust_remote_code: whether to run the tokenizer folder's Python code.
    """

    checkpoint: str
    drafts: int | None
    engines: tuple[str, ...]
    text: tuple[str, ...]
    digest: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    tokenizer: str | None = None
    trust_remote_code: bool = False

    def settings(self) -> dict[str, Any]:
        """All that the row depends on; ValueError for a checkpoint that cannot be read."""
        own = {name: value for name, value in asdict(self).items() if name not in ("text", "trust_remote_code")}
        return {**own, "engines": list(self.engines), "state": state_of(local_folder(Path(self.checkpoint)))}


def digest_of(text: list[str]) -> str:
    """A digest of all text; ValueError where there is none."""
    found = hashlib.sha256()
    for document in list_documents(find_files(text, TEXT_FILES)):
        found.update(read_document(document, "text").encode())
    return found.hexdigest()[:16]


def state_of(folder: Path) -> str:
    """A digest that differs when the checkpoint differs: names, sizes and times of its files.

    Raises:
        ValueError: it is no folder, or no checkpoint that can be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; give a Megatron checkpoint or a Hugging Face folder.")
    if is_checkpoint(folder):
        found: Any = DistReader(folder).fingerprint()
    else:
        stats = ((file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file())
        found = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def file_of(folder: Path, settings: dict[str, Any]) -> Path:
    """Where the row of these settings is kept."""
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{name}.json"


def kept(file: Path) -> Row | None:
    """A finished row; None if there is none, or it is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "acceptance" in found else None


def keep(file: Path, row: Row) -> None:
    """Write a finished row whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(file, shared=True) as beside:
        beside.write_text(json.dumps(row, indent=1), encoding="utf-8")


def all_rows(folder: Path) -> list[Row]:
    """Every finished row of a folder, by checkpoint and number of drafts."""
    found = (kept(file) for file in sorted(folder.glob("*.json")))
    rows = [row for row in found if row is not None]
    return sorted(rows, key=lambda row: (row["checkpoint"], row["drafts"]))
