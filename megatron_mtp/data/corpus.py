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
    """Tokenize documents in their order into PREFIX.bin, PREFIX.idx and PREFIX.json.

    A failed or killed run leaves no PREFIX.idx. More than one worker means spawned processes: a script that calls this
    needs a `__main__` guard.

    Args:
        documents: the documents.
        encoder: the tokenizer.
        prefix: path of the files, without their endings.
        json_key: key of the text in the lines of .jsonl files.
        workers: number of processes, which does not change the files.
        settings: flags to store in the sidecar.

    Returns:
        The contents of PREFIX.json.

    Raises:
        ValueError: a document cannot be read (`read_document`), there is no text at all, or a worker process died.
    """
    started = time.monotonic()
    with published(prefix) as partial:
        record = _write_tokens(documents, encoder, partial, json_key, workers)
        if not record["tokens"]:
            raise ValueError("--input: the files hold no text, only blanks; give files with text.")
        return with_sidecar(record, encoder, partial, settings, started)


def write_sequences(
    sequences: Iterable[Sequence[int]],
    answers: Sequence[tuple[int, int]],
    encoder: Encoder,
    prefix: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Write documents that are token ids already, each without its EOD, and which of their tokens are answers.

    Args:
        sequences: the documents.
        answers: the first token of every document's answer, and the one behind its last, which may be the EOD.
        encoder: the tokenizer that the ids are of.
        prefix, settings: as in `write_corpus`.

    Returns:
        The contents of PREFIX.json.
    """
    started, lengths, highest = time.monotonic(), list[int](), 0
    with published(prefix, "answers.npy") as partial:
        builder = dataset_builder(partial["bin"], encoder.vocab_size)
        for ids in sequences:
            sequence = np.array([*ids, encoder.eod_id], dtype=np.int32)
            builder.add_document(sequence, [len(sequence)])
            lengths.append(len(sequence))
            highest = max(highest, int(sequence.max()))
        builder.finalize(partial["idx"])
        with open(partial["answers.npy"], "wb") as file:
            np.save(file, np.array(answers, dtype=np.int32))
        record = {"documents": len(lengths), "tokens": sum(lengths), "max_token_id": highest}
        record["bin_bytes"] = os.path.getsize(partial["bin"])
        return with_sidecar(record, encoder, partial, settings, started)


@contextmanager
def published(prefix: str, *more: str) -> Iterator[dict[str, str]]:
    """Paths to write the files at, by their ending; they replace the old ones when the block ends well."""
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    with ExitStack() as renamed:
        # Without its index a dataset is unreadable: the old index goes first, the new one, entered first, comes last.
        targets = {kind: Path(f"{prefix}.{kind}") for kind in ("idx", "json", "bin", *more)}
        yield {kind: str(renamed.enter_context(written_beside(target))) for kind, target in targets.items()}
        targets["idx"].unlink(missing_ok=True)


def with_sidecar(
    record: dict[str, Any], encoder: Encoder, partial: dict[str, str], settings: dict[str, Any], started: float
) -> dict[str, Any]:
    """Write the sidecar, and return it: the counts, the tokenizer and the settings."""
    record |= {"vocab_size": encoder.vocab_size, "eod_token": encoder.eod_token, "eod_id": encoder.eod_id}
    record |= {"tokenizer": encoder.folder, "vocabulary_sha256": vocabulary_digest(encoder.folder)}
    record |= {"seconds": round(time.monotonic() - started, 1), "settings": settings}
    Path(partial["json"]).write_text(json.dumps(record, indent=2) + "\n")
    return record


def _write_tokens(
    documents: Sequence[Document], encoder: Encoder, partial: dict[str, str], json_key: str, workers: int
) -> dict[str, Any]:
    eod = np.array([encoder.eod_id], dtype=np.int32)
    lengths: list[int] = []
    highest = 0
    every = [part for document in documents for part in parts(document)]
    with worked(functools.partial(_text_work, encoder, json_key), every, workers) as encoded:
        builder = dataset_builder(partial["bin"], encoder.vocab_size)  # imports Megatron while the workers start
        tokens: list[np.ndarray] = []
        for part, part_tokens in encoded:
            tokens.append(part_tokens)
            if part.ends and any(ids.size for ids in tokens):
                sequence = np.concatenate([*tokens, eod])
                builder.add_document(sequence, [len(sequence)])
                lengths.append(len(sequence))
                highest = max(highest, int(sequence.max()))
            if part.ends:
                tokens = []
    builder.finalize(partial["idx"])
    return {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "max_token_id": highest,
        "text_bytes": sum(document.size for document in documents),
        "bin_bytes": os.path.getsize(partial["bin"]),
    }


def dataset_builder(bin_path: str, vocab_size: int, multimodal: bool = False) -> Any:
    """Megatron's builder, with the smallest type that holds the ids; with `multimodal`, sequences have modes."""
    with warnings.catch_warnings():
        # Importing megatron.core on a machine without Transformer Engine warns half a dozen times about optimizers.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return IndexedDatasetBuilder(bin_path, dtype=DType.optimal_dtype(vocab_size), multimodal=multimodal)


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
    size = sum(document.size for document in documents)
    # A terminal shows a moving bar, a log file gets a line now and then.
    pause = 0.2 if sys.stderr.isatty() else 10.0
    with (
        _chunk_results(start, chunks, min(workers, len(chunks))) as results,
        tqdm(total=size, unit="B", unit_scale=True, desc="tokenizing", mininterval=pause, smoothing=0) as bar,
    ):
        yield _counted(chunks, results, bar)


def _counted(
    chunks: list[list[Document]], results: Iterator[list[Any]], bar: "tqdm[Any]"
) -> Iterator[tuple[Document, Any]]:
    for chunk, made in zip(chunks, results, strict=True):
        for document, result in zip(chunk, made, strict=True):
            yield document, result
            bar.update(document.size)


@contextmanager
def _chunk_results(
    start: Callable[[], Work], chunks: list[list[Document]], workers: int
) -> Iterator[Iterator[list[Any]]]:
    if workers <= 1:
        yield map(start(), chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(start,))
    try:
        yield _start_work(pool, chunks)
    except BrokenProcessPool as error:
        raise ValueError(
            f"--workers: one of {workers} worker processes died, most likely for lack of memory; give fewer."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_work(pool: ProcessPoolExecutor, chunks: list[list[Document]]) -> Iterator[list[Any]]:
    """Start the workers with SIGINT blocked: on Ctrl-C only the parent prints a message."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.map(_work, chunks)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
