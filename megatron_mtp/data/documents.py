"""Documents of a corpus: found in files, folders and globs, listed, chosen, and read; long ones are cut into parts.

A `.jsonl` file has one document per line; any other file is one document.
"""

import fnmatch
import glob
import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Longer files are encoded in parts of this size.
PART_BYTES = 4 << 20

TEXT_FILES = ["*.txt", "*.md", "*.py", "*.jsonl"]
"""Names of the files that are read inside folders, unless others are given."""


class Document(NamedTuple):
    """Place of a document's text.

    Attributes:
        path: its file.
        start, size: first byte, and number of bytes.
        line: line of a .jsonl file, from 1; 0 in other files.
        ends: whether the document ends here; False for all parts of a long file except the last.
    """

    path: str
    start: int
    size: int
    line: int = 0
    ends: bool = True


def find_files(inputs: Sequence[str], include: Sequence[str], flag: str = "--input") -> list[Path]:
    """Find all files of the inputs, each once, sorted by name.

    Args:
        inputs: files, folders and globs. Folders are searched recursively, and links are followed once.
        include: patterns for names of files inside folders; other inputs are taken with any name.
        flag: that named the inputs, for messages.

    Raises:
        ValueError: an input matches nothing, or no file is found at all.
    """
    found: dict[str, Path] = {}
    seen_folders: set[str] = set()
    for value in inputs:
        path = os.path.expanduser(value)
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        if not matches:
            raise ValueError(f"{flag}: '{value}' matches no file or folder; give a path or a quoted glob that exists.")
        for path in matches:
            for file in _walk(path, include, seen_folders) if os.path.isdir(path) else [path]:
                found.setdefault(os.path.realpath(file), Path(file))
    if not found:
        raise ValueError(
            f"--input: no file in {', '.join(map(repr, inputs))} matches --include {' '.join(include)}; "
            "give a folder with such files, or another --include."
        )
    return sorted(found.values(), key=str)


def list_documents(files: Iterable[Path]) -> list[Document]:
    """The documents of the files in order, without empty files and blank lines of .jsonl files."""
    documents: list[Document] = []
    for path in files:
        if path.suffix != ".jsonl":
            documents.append(Document(str(path), 0, os.path.getsize(path)))
            continue
        start = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                documents += [Document(str(path), start, len(line), number)] if line.strip() else []
                start += len(line)
    return [document for document in documents if document.size]


def choose_documents(documents: Sequence[Document], max_bytes: int | None, seed: int, shuffle: bool) -> list[Document]:
    """A random sample of the documents, at most one document larger than `max_bytes`.

    Args:
        documents: all documents.
        max_bytes: size of the sample; None for all documents.
        seed: seed of the sample and of the order.
        shuffle: whether to return a random order, not the original one.
    """
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    chosen, total = [], 0
    for index in order:
        if max_bytes is not None and total >= max_bytes:
            break
        chosen.append(index)
        total += documents[index].size
    return [documents[index] for index in (chosen if shuffle else sorted(chosen))]


def read_document(document: Document, json_key: str) -> str:
    """Read the text of a document as UTF-8, with invalid bytes replaced.

    Raises:
        ValueError: the file cannot be read, or a line of a .jsonl file is no object with a string under `json_key`.
    """
    try:
        with open(document.path, "rb") as file:
            file.seek(document.start)
            raw = file.read(document.size)
    except OSError as error:
        raise ValueError(
            f"--input: cannot read '{document.path}' ({error.strerror}); remove it or allow reading it."
        ) from error
    text = raw.decode("utf-8", errors="replace")
    return _json_text(document, text, json_key) if document.line else text


def parts(document: Document) -> Iterator[Document]:
    """The parts of a document: a long file is cut after newlines, or between characters if none is near."""
    start, stop = document.start, document.start + document.size
    if document.line or document.size <= PART_BYTES:
        yield document
        return
    with open(document.path, "rb") as file:
        while stop - start > PART_BYTES:
            file.seek(start + PART_BYTES)
            near = file.read(1 << 16)
            inside = len(near) - len(near.lstrip(bytes(range(0x80, 0xC0))))  # bytes that continue a UTF-8 character
            end = min(start + PART_BYTES + (near.find(b"\n") + 1 or inside), stop)
            yield Document(document.path, start, end - start, ends=end == stop)
            start = end
    if start < stop:
        yield Document(document.path, start, stop - start)


def _walk(folder: str, include: Sequence[str], seen_folders: set[str]) -> Iterator[str]:
    for root, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(root) in seen_folders:
            folders.clear()
            continue
        seen_folders.add(os.path.realpath(root))
        folders.sort()
        for name in sorted(names):
            path = os.path.join(root, name)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in include) and os.path.isfile(path):
                yield path


def _json_text(document: Document, line: str, json_key: str) -> str:
    place = f"'{document.path}', line {document.line}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"--input: {place} is not JSON ({error}); give one JSON object per line.") from error
    text = fields.get(json_key) if isinstance(fields, dict) else None
    if isinstance(text, str):
        # JSON can contain half of a surrogate pair, which no tokenizer can encode.
        return text.encode("utf-8", errors="replace").decode("utf-8")
    keys = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
    raise ValueError(f"--json-key: {place} has no text under '{json_key}' (it has: {keys}); name the key of the text.")
