"""The wheel carries the compiled `helpers_cpp`, but not the Makefile that Megatron's `compile_helpers` runs.

Without the Makefile the call would end the process. A checkout of Megatron-LM has the Makefile, and compiles as ever.
"""

from collections.abc import Callable
from typing import Any


def already_compiled(_: Any) -> Callable[[], None]:
    """In the place of `compile_helpers`."""
    return _import


def _import() -> None:
    from megatron.core.datasets import helpers_cpp  # noqa: F401  (an ImportError here names what is missing)
