"""How files are written."""

import os
from typing import IO, Any


def synced(stream: IO[Any]) -> None:
    """Return when what was written is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def default_workers() -> int:
    """One a core, but few: the disk is the limit."""
    return min(os.cpu_count() or 1, 4)
