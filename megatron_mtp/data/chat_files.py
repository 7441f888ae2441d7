"""Convert files of chats to an indexed dataset, and report what is not trained on.

In:  JSON lines, each a chat (`data/chat.py`).
Out: PREFIX.bin and PREFIX.idx, a Megatron indexed dataset with modes: a document is a chat up to its last token that
     counts; its sequences are spans that count (mode 1) and spans that do not (mode 0).
"""

import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_mtp.data.chat import read_chat
from megatron_mtp.data.chat_counts import lines_of
from megatron_mtp.data.corpus import Document, Work, dataset_writer, find_files, worked
from megatron_mtp.data.counted_tokens import ChatEncoder
from megatron_mtp.data.named_sources import sources_of_files
from megatron_mtp.data.tokenizer import Encoder, read_tokenizer

SHOWN_LINES = 5
"""Maximum number of bad lines that are shown; all are counted."""


def write_chats(
    lines: Sequence[Document],
    encoder: Encoder,
    prefix: str,
    counts_empty_thinking: bool,
    workers: int,
    settings: dict[str, Any],
    masks_history: bool = False,
    skips_bad_lines: bool = False,
) -> dict[str, Any]:
    """Write the chats of .jsonl files in order; other arguments as in `write_corpus`.

    Args:
        encoder: names the tokenizer.
        counts_empty_thinking, masks_history: as in `ChatEncoder`.
        skips_bad_lines: whether to skip lines that cannot be trained on; the result counts them by reason.

    Raises:
        ValueError: lines are not chats or are rejected, or no token counts in any.
    """
    counted, without, left_out, bad = 0, 0, Counter[str](), list[str]()
    source_of = sources_of_files({line.path for line in lines})
    start = functools.partial(
        _chat_work, encoder.folder, encoder.trust_remote_code, counts_empty_thinking, masks_history
    )
    with worked(start, lines, workers) as encoded, dataset_writer(prefix, encoder, has_modes=True) as writer:
        for line, (of_chat, of_reasons, source, refusal) in encoded:
            without += not of_chat
            left_out += of_reasons
            if refusal is not None:
                left_out["bad_lines"] += 1
                bad += [refusal.removeprefix("--chat: ").rstrip(".")] if len(bad) < SHOWN_LINES else []
            for ids, spans in of_chat:
                sizes = np.diff([0, *(edge for span in spans for edge in span)]).tolist()
                parts = [(size, place % 2) for place, size in enumerate(sizes) if size]
                writer.add(ids, source or source_of[line.path], *zip(*parts, strict=True))
                counted += sum(sizes[1::2])
        if bad and not skips_bad_lines:
            raise ValueError(_refusal(bad, left_out["bad_lines"], len(lines)))
        if not counted:
            said = "; ".join(lines_of(left_out, len(lines), bad))
            raise ValueError(
                f"--chat: there are no tokens to train on, since no chat has an assistant message that counts: {said}."
            )
        return writer.finish(
            settings,
            chats=len(lines),
            counted_tokens=counted,
            chats_without_counted_tokens=without,
            left_out=dict(left_out),
            bad_lines=bad,
        )


def _refusal(bad: list[str], count: int, lines: int) -> str:
    shown = "".join(f"\n  {reason}" for reason in bad)
    more = f"\n  and {count - len(bad):,} more" if count > len(bad) else ""
    return (
        f"--chat: {count:,} of {lines:,} lines cannot be trained on:{shown}{more}\n"
        "Correct or remove them, or skip them with --chat-skip-bad-lines."
    )


def prefix_in_cache(files: Sequence[str], tokenizer: str, cache: str | None, settings: dict[str, Any]) -> str:
    """Return the prefix of `train --chat`'s dataset, which depends only on the files, the tokenizer and the settings.

    Args:
        files: as users name them.
        tokenizer: its folder.
        cache: folder; None for `cache` next to the first file, like Megatron's indices.
        settings: what else the dataset depends on.

    Raises:
        ValueError: there is no such file.
    """
    found = find_files(files, ["*.jsonl"], "--chat")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in found:
        about = file.stat()
        digest.update(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}\n".encode())
    for name in sorted(os.listdir(tokenizer)):
        if name.endswith((".json", ".jinja", ".model")):
            digest.update(Path(tokenizer, name).read_bytes())
    return str((found[0].parent / "cache" if cache is None else Path(cache)) / f"chat-{digest.hexdigest()[:16]}")


class EncodedLine(NamedTuple):
    """A worker's result for a line.

    Attributes:
        documents: tokens, and the spans of them that count.
        left_out: counts of what is not trained on, by the names in `LEFT_OUT`.
        source: source named in the line, if any.
        refusal: why the line is rejected; None if it is not.
    """

    documents: list[tuple[np.ndarray, list[tuple[int, int]]]]
    left_out: Counter[str]
    source: str | None = None
    refusal: str | None = None


def _chat_work(folder: str, trust_remote_code: bool, counts_empty_thinking: bool, masks_history: bool) -> Work:
    encoder = ChatEncoder(read_tokenizer(Path(folder), trust_remote_code), counts_empty_thinking, masks_history)

    def encode(line: Document) -> EncodedLine:
        left_out = Counter[str]()
        try:
            chat = read_chat(line)
            documents = encoder.documents(line, chat, left_out)
        except ValueError as error:
            return EncodedLine([], Counter(), refusal=str(error))
        return EncodedLine([(np.array(ids, dtype=np.int32), spans) for ids, spans in documents], left_out, chat.source)

    return lambda chunk: [encode(line) for line in chunk]
