"""Packages that a test installs; tables ask for what is installed once."""

from typing import Any

from megatron_mtp.spec import registry
from megatron_mtp.spec.registry import Registry


def ask_again(table: Registry[Any]) -> None:
    """Let a table ask at its next use."""
    registry._points_on.cache_clear()
    table.__dict__.pop("_registered", None)
