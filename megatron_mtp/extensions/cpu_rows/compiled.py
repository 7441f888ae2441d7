"""Compile this extension's code with the machine's C++ compiler when a runner first needs it, and cache it.

`library` builds native/few_rows.cpp for this CPU and weight dtype, and keeps it in the user's cache:
`$TORCH_EXTENSIONS_DIR`, else `$XDG_CACHE_HOME`, else `~/.cache`. The file name has a hash of everything that it depends
on, so a new source, compiler or CPU gets a new file. The source does not include torch's headers, which would take
longer to compile than the code. If it cannot be built, drafting runs without it, and a warning gives the reason.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

from megatron_mtp.common.files import written_beside

SWITCH = "MEGATRON_MTP_COMPILED"
"""Environment variable: 0 turns compiled kernels off; nothing is built."""

SOURCE = Path(__file__).parent / "native" / "few_rows.cpp"
FLAGS = "-O3 -march=native -std=c++17 -fno-math-errno -ffp-contract=off -fopenmp -shared -fPIC".split()
NUMBERS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
"""Weight types that can be compiled, and their names in the source."""
LONGEST_BUILD = 120
"""Timeout of a build in seconds; a build takes about seven."""

_logger = logging.getLogger(__name__)


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled code for weights of this dtype; None if it is turned off or cannot be built."""
    return None if os.environ.get(SWITCH) == "0" else _loaded(dtype)


@cache
def _loaded(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Load the library once in a process; a failure is not retried."""
    try:
        return ctypes.CDLL(str(built(folder(), dtype)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _logger.warning("drafting runs without compiled code, which is slower: %s", _reason(error))
        return None


def folder() -> Path:
    """Return the folder of compiled code."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    cached = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(extensions or cached) / "megatron_mtp"


def built(where: Path, dtype: torch.dtype) -> Path:
    """Return the library's file in a folder, and build it if it does not exist.

    Two processes may do so at the same time.

    Raises:
        RuntimeError: there is no compiler.
        subprocess.SubprocessError: the compiler fails.
        OSError: the folder cannot be written.
    """
    target = where / f"few_rows-{NUMBERS[dtype]}-{_key()}.so"
    if target.is_file():
        return target
    compiler = _compiler()
    where.mkdir(parents=True, exist_ok=True)
    _logger.warning("compiling %s for this CPU, once; it takes some seconds", SOURCE.name)
    with written_beside(target, shared=True) as beside:
        command = [compiler, *FLAGS, f"-DNUMBER={NUMBERS[dtype]}", "-o", str(beside), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST_BUILD)
    return target


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, [wanted] if wanted else ["c++", "g++", "clang++"])), None)
    if found is None:
        raise RuntimeError(f"there is no C++ compiler ({wanted or 'c++, g++ or clang++'}); install g++")
    return found


def _key() -> str:
    """Return a hash of what a build depends on.

    Asking the compiler itself would take longer than the rest of a start.
    """
    facts = (SOURCE.read_text(), *FLAGS, os.environ.get("CXX", ""), torch.__version__, _cpu())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Return the CPU's features, as the Linux kernel names them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join([platform.system(), platform.machine(), *sorted(named)])


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"status {error.returncode}"]
        return f"the compiler fails: {lines[0].strip()}"
    return str(error)
