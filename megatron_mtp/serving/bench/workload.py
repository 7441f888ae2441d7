"""What is asked: the bodies of requests, from a file or made of random words, the same ones for the same seed."""

import json
import random
from argparse import Namespace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

Body = dict[str, Any]

SYLLABLES = "ba de fi go hu ka le mi no pu ra se ti vo zu".split()


def bodies(args: Namespace, model: str) -> list[Body]:
    """As many as are asked for, each streaming.

    Raises:
        ValueError: flags or a file that cannot be used.
    """
    extra = _extra(args.extra_body)
    found = _synthetic(args) if args.input is None else _of_a_file(args.input)
    common = {"model": model, "max_tokens": args.max_tokens, "temperature": args.temperature}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return [{**common, **one, **extra, **stream} for one in islice(cycle(found), args.requests)]


def _extra(text: str) -> Body:
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--extra-body is not JSON ({error}); give for example '{{\"top_k\": 20}}'.") from error
    if not isinstance(extra, dict):
        raise ValueError(f"--extra-body is {text}, not a JSON object; give for example '{{\"top_k\": 20}}'.")
    return extra


def _synthetic(args: Namespace) -> list[Body]:
    """Random words, so that no two prompts begin alike."""
    first, _, last = args.words.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ValueError(f"--words is {args.words}; give the least and the most words of a prompt, like 20:120.")
    chosen = random.Random(args.seed)
    lengths = [chosen.randint(int(first), int(last)) for _ in range(args.requests)]
    return [{"prompt": " ".join(_word(chosen) for _ in range(length))} for length in lengths]


def _word(chosen: random.Random) -> str:
    return "".join(chosen.choices(SYLLABLES, k=chosen.randint(1, 3)))


def _of_a_file(file: Path) -> list[Body]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--input: '{file}' cannot be read ({error}); give a UTF-8 text file.") from error
    if file.suffix == ".jsonl":
        found = [_of_a_line(file, line) for line in text.splitlines() if line.strip()]
    else:
        found = [{"prompt": part.strip()} for part in text.split("\n\n") if part.strip()]
    if not found:
        raise ValueError(f"--input: '{file}' holds no prompt; give a file that does.")
    return found


def _of_a_line(file: Path, line: str) -> Body:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
        raise ValueError(
            f"--input: '{file}' has the line {line[:80]!r}, which is no JSON object with a 'prompt' or 'messages'; "
            "correct it."
        )
    return body
