"""Text to Megatron's indexed dataset: find files, list and choose documents, tokenise in parallel, write.

In:  files, folders, globs; a `.jsonl` file holds one document per line, any other file is one document.
Out: PREFIX.bin  the tokens of all documents, one after the other, each document ended by the EOD id
     PREFIX.idx  Megatron's index: one sequence per document
     PREFIX.json the sidecar: counts, highest token id, tokenizer and the settings that made them
PREFIX.idx appears last: where it stands, all three are whole.
"""

import fnmatch
import glob
import json
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from megatron_mtp.data.tokenizer import Encode, Encoder

# The work of one task: enough to pay for handing it over, little enough to balance the workers and their memory.
CHUNK_BYTES = 1 << 20
# A longer file is encoded in parts.
PART_BYTES = 4 << 20


class Document(NamedTuple):
    """Where one document's text lies: `size` bytes from `start`.

    `line` counts from 1 in JSONL and is 0 elsewhere. `ends` is False for a part of a long file, except its last.
    """

    path: str
    start: int
    size: int
    line: int = 0
    ends: bool = True


EncodeChunks = Callable[[list[list[Document]]], Iterator[list[np.ndarray]]]


def find_files(inputs: Sequence[str], include: Sequence[str]) -> list[Path]:
    """Return every file that `inputs` name, each once, in an order that depends on the names alone.

    Folders are searched recursively for names matching a pattern of `include`; links are followed, once. A file that
    is named itself, or by a glob, is taken whatever its name.

    Raises:
        ValueError: an input matches nothing, or no file is found at all.
    """
    found: dict[str, Path] = {}
    seen_folders: set[str] = set()
    for value in inputs:
        for path in _expand(value):
            for file in _walk(path, include, seen_folders) if os.path.isdir(path) else [path]:
                found.setdefault(os.path.realpath(file), Path(file))
    if not found:
        raise ValueError(
            f"--input: no file in {', '.join(map(repr, inputs))} matches --include {' '.join(include)}; "
            "give a folder with such files, or another --include."
        )
    return sorted(found.values(), key=str)


def list_documents(files: Iterable[Path]) -> list[Document]:
    """List the documents of the files in order; empty files and blank JSONL lines are left out."""
    documents: list[Document] = []
    for path in files:
        if path.suffix == ".jsonl":
            documents.extend(_json_lines(str(path)))
        else:
            documents.append(Document(str(path), 0, os.path.getsize(path)))
    return [document for document in documents if document.size]


def choose_documents(documents: Sequence[Document], max_bytes: int | None, seed: int, shuffle: bool) -> list[Document]:
    """Shuffle by `seed`, stop once `max_bytes` are reached (None: never), and restore the order unless `shuffle`.

    The sample is thus spread over the whole corpus either way, and at most one document larger than `max_bytes`.
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
    """Read a document's text as UTF-8, invalid bytes replaced.

    Raises:
        ValueError: the file cannot be read; a JSONL line is not an object with a string under `json_key`.
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


def write_corpus(
    documents: Sequence[Document], encoder: Encoder, prefix: str, json_key: str, workers: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Tokenise `documents` in their order into PREFIX.bin, PREFIX.idx and PREFIX.json; return the sidecar's contents.

    The files do not depend on `workers`. More than one worker means spawned processes, so that a script calling this
    needs a `__main__` guard. A failed or killed run leaves no PREFIX.idx.

    Raises:
        ValueError: a document cannot be read (`read_document`), or there is no text at all.
        RuntimeError: a worker process died.
    """
    started = time.monotonic()
    partial = {kind: f"{prefix}.{kind}.partial" for kind in ("bin", "idx", "json")}
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    try:
        record = _write_tokens(documents, encoder, partial, json_key, workers)
        if not record["tokens"]:
            raise ValueError("--input: the files hold no text, only blanks; give files with text.")
        record |= {"vocab_size": encoder.vocab_size, "eod_token": encoder.eod_token, "eod_id": encoder.eod_id}
        record |= {"tokenizer": encoder.folder, "seconds": round(time.monotonic() - started, 1), "settings": settings}
        Path(partial["json"]).write_text(json.dumps(record, indent=2) + "\n")
        # Without its index a dataset is unreadable: the old index goes first, the new one comes last.
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        for kind in ("bin", "json", "idx"):
            os.replace(partial[kind], f"{prefix}.{kind}")
    finally:
        for path in partial.values():
            Path(path).unlink(missing_ok=True)
    return record


def _write_tokens(
    documents: Sequence[Document], encoder: Encoder, partial: dict[str, str], json_key: str, workers: int
) -> dict[str, Any]:
    chunks = list(_chunks(part for document in documents for part in _parts(document)))
    size = sum(document.size for document in documents)
    # A log file gets a line now and then, a terminal a moving bar.
    pause = 0.2 if sys.stderr.isatty() else 10.0
    eod = np.array([encoder.eod_id], dtype=np.int32)
    lengths: list[int] = []
    highest = 0
    with (
        _chunk_encoder(encoder, json_key, min(workers, len(chunks))) as encode_chunks,
        tqdm(total=size, unit="B", unit_scale=True, desc="importing Megatron", mininterval=pause, smoothing=0) as bar,
    ):
        encoded = encode_chunks(chunks)
        builder = _dataset_builder(partial["bin"], encoder.vocab_size)  # the workers start while this imports Megatron
        bar.set_description("tokenising")
        tokens: list[np.ndarray] = []
        for part, part_tokens in _pairs(chunks, encoded):
            tokens.append(part_tokens)
            if part.ends and any(ids.size for ids in tokens):
                sequence = np.concatenate([*tokens, eod])
                builder.add_document(sequence, [len(sequence)])
                lengths.append(len(sequence))
                highest = max(highest, int(sequence.max()))
            if part.ends:
                tokens = []
            bar.update(part.size)
    builder.finalize(partial["idx"])
    return {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "max_token_id": highest,
        "text_bytes": size,
        "bin_bytes": os.path.getsize(partial["bin"]),
    }


def _pairs(chunks: list[list[Document]], encoded: Iterator[list[np.ndarray]]) -> Iterator[tuple[Document, np.ndarray]]:
    for chunk, chunk_tokens in zip(chunks, encoded, strict=True):
        yield from zip(chunk, chunk_tokens, strict=True)


def _dataset_builder(bin_path: str, vocab_size: int) -> Any:
    with warnings.catch_warnings():
        # Importing megatron.core on a machine without Transformer Engine warns half a dozen times about optimizers.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return IndexedDatasetBuilder(bin_path, dtype=DType.optimal_dtype(vocab_size))


@contextmanager
def _chunk_encoder(encoder: Encoder, json_key: str, workers: int) -> Iterator[EncodeChunks]:
    """Open the function that maps chunks, in order, to the token ids of each of their documents or parts.

    Several workers begin as soon as it is called; one worker means this process, a chunk whenever one is asked for.
    """
    if workers <= 1:
        encode = encoder.start()
        yield lambda chunks: (_encode_chunk(encode, chunk, json_key) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(encoder, json_key))
    try:
        yield lambda chunks: pool.map(_work, chunks)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"--workers: one of {workers} worker processes died, most likely for lack of memory; give fewer."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_chunk(encode: Encode, chunk: list[Document], json_key: str) -> list[np.ndarray]:
    texts = [read_document(document, json_key) for document in chunk]
    # Blank documents have no tokens; a blank part of a long file keeps its own.
    texts = [text if text.strip() or not document.ends else "" for document, text in zip(chunk, texts, strict=True)]
    return [np.array(ids, dtype=np.int32) for ids in encode(texts)]


# What a worker process was started with. An executor's initializer has no other way to hand it to the tasks.
_worker: dict[str, Any] = {}


def _start_worker(encoder: Encoder, json_key: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker.update(encode=encoder.start(), json_key=json_key)


def _exit_with_parent() -> None:
    """After a `kill -9` of the parent, its workers would wait for tasks for ever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work(chunk: list[Document]) -> list[np.ndarray]:
    return _encode_chunk(_worker["encode"], chunk, _worker["json_key"])


def _parts(document: Document) -> Iterator[Document]:
    """Cut a long file after newlines, or between characters where there is none near."""
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


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.size
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _expand(value: str) -> list[str]:
    path = os.path.expanduser(value)
    matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    if not matches:
        raise ValueError(f"--input: '{value}' matches no file or folder; give a path or a quoted glob that exists.")
    return matches


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


def _json_lines(path: str) -> Iterator[Document]:
    start = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Document(path, start, len(line), number)
            start += len(line)


def _json_text(document: Document, line: str, json_key: str) -> str:
    place = f"'{document.path}', line {document.line}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"--input: {place} is not JSON ({error}); give one JSON object per line.") from error
    text = fields.get(json_key) if isinstance(fields, dict) else None
    if isinstance(text, str):
        # JSON can spell half a surrogate pair, which no tokenizer can encode.
        return text.encode("utf-8", errors="replace").decode("utf-8")
    keys = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
    raise ValueError(f"--json-key: {place} has no text under '{json_key}' (it has: {keys}); name the key of the text.")
