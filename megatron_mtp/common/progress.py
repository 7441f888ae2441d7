"""Progress of long work: a progress bar in a terminal, an occasional line in a log file."""

import sys
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 10.0
"""Seconds between two lines of a log file, and before the first one."""


def progress_bar(**settings: Any) -> "tqdm[Any]":
    """Create a tqdm bar on standard error. Work of a few seconds leaves no line in a log file."""
    if not sys.stderr.isatty():
        settings = {"mininterval": LOG_SECONDS, "delay": LOG_SECONDS, **settings}
    return tqdm(**settings)
