"""Progress of work that takes minutes: a moving bar in a terminal, in a log file a line now and then."""

import sys
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 10.0
"""Seconds between two lines of a log file, and before the first one."""


def progress_bar(**settings: Any) -> "tqdm[Any]":
    """A bar of tqdm's on standard error, with its settings; work of a few seconds leaves no line in a log file."""
    if not sys.stderr.isatty():
        settings = {"mininterval": LOG_SECONDS, "delay": LOG_SECONDS, **settings}
    return tqdm(**settings)
