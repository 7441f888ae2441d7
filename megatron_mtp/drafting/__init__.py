"""Drafting: several tokens per forward of the trunk, with the modules as trained.

The Python API is `load_runner` and `generate`, which are looked up when asked for: they need Megatron on a prepared
platform, and the rules in this room (types, sampling, verifiers) do not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mtp.drafting.api import Generated, generate
    from megatron_mtp.drafting.load import load_runner

__all__ = ["Generated", "generate", "load_runner"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_mtp.drafting import api, load

    return getattr(load if name == "load_runner" else api, name)
