"""Conversions that fail halfway, and the files that they leave behind."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def failing(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Return the function wrapped to fail with a full disk after this many calls."""
    left = iter(range(calls))

    def called(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device", "disk")
        return function(*arguments)

    return called
