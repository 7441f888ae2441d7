"""Packages that a test installs. Registries look up installed packages only once."""

from typing import Any

from megatron_mtp.spec import registry
from megatron_mtp.spec.registry import Registry


def ask_again(table: Registry[Any]) -> None:
    """Make a registry look up installed packages again at its next use."""
    registry._points_on.cache_clear()
    table.__dict__.pop("_registered", None)
