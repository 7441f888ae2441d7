"""What torch and Megatron raise for a checkpoint that cannot be read, in one sentence."""

import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_mtp.megatron.checkpoint.catalogue import DamagedError, foreign

READ_ERRORS = (
    ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError, OSError, RuntimeError, EOFError,
    MemoryError, pickle.UnpicklingError, struct.error, CheckpointingException, CheckpointException,
)  # fmt: skip
"""Exceptions that torch and Megatron raise for files that are damaged, missing or from another model."""


@contextmanager
def read_errors(where: str) -> Iterator[None]:
    """Turn errors of torch and Megatron while reading a checkpoint into one sentence that begins with `where`."""
    try:
        yield
    except DamagedError:
        raise
    except READ_ERRORS as error:
        raise DamagedError(f"{where}: {reason(error)}.") from None


def reason(error: BaseException) -> str:
    """Return the first line of the original error, without the final period."""
    error = root_of(error)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, pickle.UnpicklingError) and "weights" in text.lower():
        return f"it holds {foreign(error)}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0].removesuffix(".") if lines else ""
    return first[:400] if " " in first else f"{type(error).__name__} {first}".strip()


def root_of(error: BaseException) -> BaseException:
    """Return the first rank's error if torch has collected errors of all ranks, otherwise the error itself."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((of_rank for of_rank, _ in failures), error)
