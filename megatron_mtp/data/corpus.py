"""Documents to Megatron's indexed dataset: tokenized in parallel, written beside and renamed.

Out: PREFIX.bin  the tokens of all documents, one after the other, each document ended by the EOD id
     PREFIX.idx  Megatron's index: one sequence per document
     PREFIX.json the sidecar: counts, highest token id, tokenizer and the settings that made them
     PREFIX.answers.npy  of texts that continue prompts: where each answer begins and ends, two int32 a document
PREFIX.idx appears last: if it exists, all files are whole.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_mtp.data.checks import vocabulary_digest
from megatron_mtp.data.documents import Document, parts, read_document
from megatron_mtp.data.tokenizer import Encode, Encoder
from megatron_mtp.files import written_beside

# Size of one task: large enough to be worth sending, small enough to balance the workers and their memory.
CHUNK_BYTES = 1 << 20

Work = Callable[[list[Document]], list[Any]]
"""What a worker makes of a chunk: one result for each of its documents, or parts of documents."""


def write_corpus(
    documents: Sequence[Document], encoder: Encoder, prefix: str, json_key: str, workers: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Tokenize documents in their order into PREFIX.bin, PREFIX.idx and PREFIX.json; returns what the last one holds.

    A failed or killed run leaves no PREFIX.idx. More than one worker means spawned processes: a script that calls this
    needs a `__main__` guard.

    Args:
        json_key: key of the text in the lines of .jsonl files.
        workers: number of processes, which does not change the files.
        settings: flags to store in the sidecar.

    Raises:
        ValueError: a document cannot be read (`read_document`), there is no text at all, or a worker process died.
    """
    eod, tokens = np.array([encoder.eod_id], dtype=np.int32), list[np.ndarray]()
    every = [part for document in documents for part in parts(document)]
    start = functools.partial(_text_work, encoder, json_key)
    with worked(start, every, workers) as encoded, dataset_writer(prefix, encoder) as writer:
        for part, part_tokens in encoded:
            tokens.append(part_tokens)
            if part.ends and any(ids.size for ids in tokens):
                writer.add(np.concatenate([*tokens, eod]))
            if part.ends:
                tokens.clear()
        if not writer.record["tokens"]:
            raise ValueError("--input: the files hold no text, only blanks; give files with text.")
        return writer.finish(settings, text_bytes=sum(document.size for document in documents))


def write_sequences(
    sequences: Iterable[Sequence[int]],
    answers: Sequence[tuple[int, int]],
    encoder: Encoder,
    prefix: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Write documents that are token ids already, each without its EOD, and which of their tokens are answers.

    Args:
        answers: the first token of every document's answer, and the one behind its last, which may be the EOD.
        encoder: the tokenizer that the ids are of.
        prefix, settings: as in `write_corpus`, whose result this has.
    """
    with dataset_writer(prefix, encoder, "answers.npy") as writer:
        for ids in sequences:
            writer.add(np.array([*ids, encoder.eod_id], dtype=np.int32))
        with open(writer.paths["answers.npy"], "wb") as file:
            np.save(file, np.array(answers, dtype=np.int32))
        return writer.finish(settings)


@contextmanager
def dataset_writer(prefix: str, encoder: Encoder, *more: str, has_modes: bool = False) -> Iterator["DatasetWriter"]:
    """Write a dataset's files beside the old ones, which they replace when the block ends well.

    Args:
        more: endings of further files.
        has_modes: sequences have modes.
    """
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    with ExitStack() as renamed:
        # Without its index a dataset is unreadable: the old index goes first, the new one, entered first, comes last.
        targets = {kind: Path(f"{prefix}.{kind}") for kind in ("idx", "json", "bin", *more)}
        paths = {kind: str(renamed.enter_context(written_beside(target))) for kind, target in targets.items()}
        yield DatasetWriter(paths, encoder, has_modes)
        targets["idx"].unlink(missing_ok=True)


class DatasetWriter:
    """Megatron's builder, with the smallest type that holds the ids, and what the sidecar says of the documents.

    Attributes:
        paths: where the files are written, by their ending.
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

    def add(self, ids: np.ndarray, sizes: Sequence[int] | None = None, modes: Sequence[int] | None = None) -> None:
        """Add a document, of one sequence or of sequences of these sizes and modes."""
        self._builder.add_document(ids, [len(ids)] if sizes is None else sizes, modes)
        self.record["documents"] += 1
        self.record["tokens"] += len(ids)
        self.record["max_token_id"] = max(self.record["max_token_id"], int(ids.max()))

    def finish(self, settings: dict[str, Any], **counts: int) -> dict[str, Any]:
        """Write index and sidecar, with these counts and settings in it; returns the sidecar."""
        self._builder.finalize(self.paths["idx"])
        encoder = self._encoder
        made = {
            **self.record,
            **counts,
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


# --- workers ---------------------------------------------------------------------------------------------------------


@contextmanager
def worked(
    start: Callable[[], Work], documents: Sequence[Document], workers: int
) -> Iterator[Iterator[tuple[Document, Any]]]:
    """Yield the documents, in order, each with what the workers make of it, under a progress bar.

    Several workers start at once; a single worker is this process and works on demand.

    Args:
        start: makes the work in a worker; it is pickled.
        documents: documents, or parts of documents.
        workers: the most processes.

    Raises:
        ValueError: a worker process died.
    """
    chunks = list(_chunks(documents))
    workers, size = min(workers, len(chunks)), sum(document.size for document in documents)
    pause = 0.2 if sys.stderr.isatty() else 10.0  # a terminal shows a moving bar, a log file gets a line now and then
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
        bar = tqdm(total=size, unit="B", unit_scale=True, desc="tokenizing", mininterval=pause, smoothing=0)
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


def _encode_chunk(encode: Encode, chunk: list[Document], json_key: str) -> list[np.ndarray]:
    texts = [read_document(document, json_key) for document in chunk]
    # A blank document has no tokens, but a blank part of a long file keeps them.
    texts = [text if text.strip() or not document.ends else "" for document, text in zip(chunk, texts, strict=True)]
    return [np.array(ids, dtype=np.int32) for ids in encode(texts)]


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
