"""Write Megatron's indexed dataset: find, sample, read and tokenize documents in parallel; output is atomic.

In:  files, folders and globs. A `.jsonl` file has one document per line; any other file is one document. Long ones are
     cut into parts.

Out: PREFIX.bin  the tokens of all documents, one after the other, each document ended by the EOD id
     PREFIX.idx  Megatron's index: one sequence per document
     PREFIX.json the sidecar: counts, highest token id, tokenizer, sources and settings
     PREFIX.sources.npy  the source of each document (data/sources.py)
     PREFIX.answers.npy  for documents that continue prompts: start and end of each response, two int32 per document
PREFIX.idx appears last: if it exists, all files are complete.
"""

import fnmatch
import functools
import glob
import json
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from megatron_mtp.common.files import written_beside
from megatron_mtp.common.progress import progress_bar
from megatron_mtp.data.checks import vocabulary_digest
from megatron_mtp.data.named_sources import named_source, sources_of_files
from megatron_mtp.data.sources import SOURCES
from megatron_mtp.data.tokenizer import Encode, Encoder

# Longer files are encoded in parts of this size.
PART_BYTES = 4 << 20

TEXT_FILES = ["*.txt", "*.md", "*.py", "*.jsonl"]
"""Default patterns of file names to read in folders."""

# Size of one task: large enough to be worth sending, small enough to balance the workers and their memory.
CHUNK_BYTES = 1 << 20


NO_TEXT = {
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\0": "compressed by xz",
    b"BZh91AY&SY": "compressed by bzip2",
    b"PK\x03\x04": "a zip file",
    b"PAR1\x15": "a Parquet file",
    b"\xff\xfe": "in UTF-16",
    b"\xfe\xff": "in UTF-16",
}
"""First bytes of binary files, and the kind of file."""


class Document(NamedTuple):
    """Location of a document's text.

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


Work = Callable[[list[Document]], list[Any]]
"""A worker's result for a chunk: one for each of its documents, or parts of documents."""


def write_corpus(
    documents: Sequence[Document], encoder: Encoder, prefix: str, json_key: str, workers: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Tokenize documents in order to PREFIX.bin, PREFIX.idx and PREFIX.json. Return the contents of the last one.

    A failed or killed run leaves no PREFIX.idx. With more than one worker, processes are spawned: a script that calls
    this needs a `__main__` guard.

    Args:
        json_key: key of the text in the lines of .jsonl files.
        workers: number of processes, which does not change the files.
        settings: flags to store in the sidecar.

    Raises:
        ValueError: a document cannot be read (`read_document`), there is no text at all, or a worker process died.
    """
    eod, tokens = np.array([encoder.eod_id], dtype=np.int32), list[np.ndarray]()
    every = [part for document in documents for part in parts(document)]
    source_of = sources_of_files({document.path for document in documents})
    start = functools.partial(_text_work, encoder, json_key)
    with worked(start, every, workers) as encoded, dataset_writer(prefix, encoder) as writer:
        for part, (part_tokens, source) in encoded:
            tokens.append(part_tokens)
            if part.ends and any(ids.size for ids in tokens):
                writer.add(np.concatenate([*tokens, eod]), source or source_of[part.path])
            if part.ends:
                tokens.clear()
        if not writer.record["tokens"]:
            raise ValueError("--input: the files hold no text, only blanks; give files with text.")
        return writer.finish(settings, text_bytes=sum(document.size for document in documents))


def write_sequences(
    sequences: Iterable[Sequence[int]],
    answers: Sequence[tuple[int, int]],
    sources: Sequence[str],
    encoder: Encoder,
    prefix: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Write documents of token ids, each without its EOD, and which of their tokens are responses.

    Args:
        answers: index of the first token of every response, and of the token after its end, which may be the EOD.
        sources: source of every document.
        encoder: tokenizer of the ids.
        prefix, settings: as in `write_corpus`, which has the same return value.
    """
    with dataset_writer(prefix, encoder, "answers.npy") as writer:
        for ids, source in zip(sequences, sources, strict=True):
            writer.add(np.array([*ids, encoder.eod_id], dtype=np.int32), source)
        with open(writer.paths["answers.npy"], "wb") as file:
            np.save(file, np.array(answers, dtype=np.int32))
        return writer.finish(settings)


@contextmanager
def dataset_writer(prefix: str, encoder: Encoder, *more: str, has_modes: bool = False) -> Iterator["DatasetWriter"]:
    """Write a dataset's files to temporary paths that replace the old files when the block succeeds.

    Args:
        more: suffixes of additional files.
        has_modes: whether sequences have modes.
    """
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    with ExitStack() as renamed:
        # Without its index a dataset is unreadable, so the old index is removed first, and the new one, entered first,
        # is renamed last.
        targets = {kind: Path(f"{prefix}.{kind}") for kind in ("idx", "json", "bin", SOURCES, *more)}
        paths = {kind: str(renamed.enter_context(written_beside(target))) for kind, target in targets.items()}
        yield DatasetWriter(paths, encoder, has_modes)
        targets["idx"].unlink(missing_ok=True)


class DatasetWriter:
    """Megatron's builder with the smallest integer type that holds the ids, and the sidecar's counts.

    Attributes:
        paths: temporary paths of the files, by suffix.
        record: counts of the documents so far.
    """

    def __init__(self, paths: dict[str, str], encoder: Encoder, has_modes: bool) -> None:
        with warnings.catch_warnings():
            # Importing megatron.core on a machine without Transformer Engine warns half a dozen times about optimizers.
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
        dtype = DType.optimal_dtype(encoder.vocab_size)
        self._builder = IndexedDatasetBuilder(paths["bin"], dtype=dtype, multimodal=has_modes)
        self.paths, self._encoder, self._started = paths, encoder, time.monotonic()
        self.record = {"documents": 0, "tokens": 0, "max_token_id": 0}
        self._places, self._sources = dict[str, int](), list[int]()

    def add(
        self, ids: np.ndarray, source: str, sizes: Sequence[int] | None = None, modes: Sequence[int] | None = None
    ) -> None:
        """Add a document of a source, with one sequence or with sequences of these sizes and modes."""
        self._sources.append(self._places.setdefault(source, len(self._places)))
        self._builder.add_document(ids, [len(ids)] if sizes is None else sizes, modes)
        self.record["documents"] += 1
        self.record["tokens"] += len(ids)
        self.record["max_token_id"] = max(self.record["max_token_id"], int(ids.max()))

    def finish(self, settings: dict[str, Any], **counts: Any) -> dict[str, Any]:
        """Write index and sidecar, with these counts and settings. Return the sidecar."""
        self._builder.finalize(self.paths["idx"])
        with open(self.paths[SOURCES], "wb") as file:
            np.save(file, np.array(self._sources, dtype=np.int32))
        encoder = self._encoder
        made = {
            **self.record,
            **counts,
            "sources": list(self._places),
            "bin_bytes": os.path.getsize(self.paths["bin"]),
            "vocab_size": encoder.vocab_size,
            "eod_token": encoder.eod_token,
            "eod_id": encoder.eod_id,
            "tokenizer": encoder.folder,
            "vocabulary_sha256": vocabulary_digest(encoder.folder),
            "seconds": round(time.monotonic() - self._started, 1),
            "settings": settings,
        }
        Path(self.paths["json"]).write_text(json.dumps(made, indent=2) + "\n")
        return made


# --- documents -------------------------------------------------------------------------------------------------------


def find_files(inputs: Sequence[str], include: Sequence[str], flag: str = "--input") -> list[Path]:
    """Find all files of the inputs, each once, sorted by name.

    Args:
        inputs: files, folders and globs. Folders are searched recursively, following each link once.
        include: patterns for file names inside folders; files given directly may have any name.
        flag: flag that named the inputs, for messages.

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
            f"{flag}: no file in {', '.join(map(repr, inputs))} matches --include {' '.join(include)}; "
            "give a folder with such files, or another --include."
        )
    return sorted(found.values(), key=str)


def list_documents(files: Iterable[Path]) -> list[Document]:
    """List the documents of the files in order, without empty files and blank lines of .jsonl files."""
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
    """Draw a random sample of the documents, of `max_bytes` plus at most one document.

    Args:
        documents: all documents.
        max_bytes: size of the sample; None for all documents.
        seed: seed of the sample and of the order.
        shuffle: whether to return a random order instead of the original one.
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
        ValueError: as in `read_with_source`.
    """
    return read_with_source(document, json_key)[0]


def read_with_source(document: Document, json_key: str) -> tuple[str, str | None]:
    """Read the text of a document, and the source that its line names, if any.

    Raises:
        ValueError: the file cannot be read or has no text, or a line of a .jsonl file is not an object with a string
            under `json_key`.
    """
    try:
        with open(document.path, "rb") as file:
            file.seek(document.start)
            raw = file.read(document.size)
    except OSError as error:
        raise ValueError(
            f"--input: cannot read '{document.path}' ({error.strerror}); remove it or allow reading it."
        ) from error
    if kind := next((kind for first, kind in NO_TEXT.items() if document.start == 0 and raw.startswith(first)), None):
        raise ValueError(f"--input: '{document.path}' is {kind}; give it as plain UTF-8 text.")
    text = raw.decode("utf-8", errors="replace")
    return _json_text(document, text, json_key) if document.line else (text, None)


def parts(document: Document) -> Iterator[Document]:
    """Split a document into parts: a long file is cut after newlines, or between characters if none is near."""
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


def _json_text(document: Document, line: str, json_key: str) -> tuple[str, str | None]:
    place = f"'{document.path}', line {document.line}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"--input: {place} is not JSON ({error}); give one JSON object per line.") from error
    text = fields.get(json_key) if isinstance(fields, dict) else None
    if isinstance(text, str):
        # JSON can contain half of a surrogate pair, which no tokenizer can encode.
        return text.encode("utf-8", errors="replace").decode("utf-8"), named_source(fields)
    keys = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
    raise ValueError(f"--json-key: {place} has no text under '{json_key}' (it has: {keys}); name the key of the text.")


# --- workers ---------------------------------------------------------------------------------------------------------


@contextmanager
def worked(
    start: Callable[[], Work], documents: Sequence[Document], workers: int
) -> Iterator[Iterator[tuple[Document, Any]]]:
    """Yield each document, in order, with the workers' result, and show a progress bar.

    Several workers start at once; a single worker is this process and works on demand.

    Args:
        start: creates the worker's function; it is pickled.
        documents: documents, or parts of documents.
        workers: maximum number of processes.

    Raises:
        ValueError: a worker process died.
    """
    chunks = list(_chunks(documents))
    workers, size = min(workers, len(chunks)), sum(document.size for document in documents)
    with ExitStack() as ending:
        if workers <= 1:
            results: Iterator[list[Any]] = map(start(), chunks)
        else:
            pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(start,))
            ending.callback(pool.shutdown, cancel_futures=True)
            # Workers start with SIGINT blocked: on Ctrl-C only the parent prints a message.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            ending.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            results = pool.map(_work, chunks)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        bar = progress_bar(total=size, unit="B", unit_scale=True, desc="tokenizing", smoothing=0)
        try:
            yield _counted(chunks, results, ending.enter_context(bar))
        except BrokenProcessPool as error:
            raise ValueError(
                f"--workers: one of {workers} worker processes died, most likely for lack of memory; give fewer."
            ) from error


def _counted(
    chunks: list[list[Document]], results: Iterator[list[Any]], bar: "tqdm[Any]"
) -> Iterator[tuple[Document, Any]]:
    for chunk, made in zip(chunks, results, strict=True):
        for document, result in zip(chunk, made, strict=True):
            yield document, result
            bar.update(document.size)


def _text_work(encoder: Encoder, json_key: str) -> Work:
    encode = encoder.start()
    return lambda chunk: _encode_chunk(encode, chunk, json_key)


def _encode_chunk(encode: Encode, chunk: list[Document], json_key: str) -> list[tuple[np.ndarray, str | None]]:
    read = [read_with_source(document, json_key) for document in chunk]
    # A blank document has no tokens, but a blank part of a long file keeps them.
    texts = [text if text.strip() or not document.ends else "" for document, (text, _) in zip(chunk, read, strict=True)]
    return [(np.array(ids, dtype=np.int32), source) for ids, (_, source) in zip(encode(texts), read, strict=True)]


# Set by the executor's initializer, which has no other way to pass objects to the tasks.
_worker: dict[str, Work] = {}


def _start_worker(start: Callable[[], Work]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker["work"] = start()


def _exit_with_parent() -> None:
    """Exit when the parent dies: after `kill -9` its workers would wait for tasks forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work(chunk: list[Document]) -> list[Any]:
    return _worker["work"](chunk)


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
