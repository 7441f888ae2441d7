"""Run cases in Triton's interpreter, in a separate process, and plant faults in kernels.

The process is needed because Triton reads TRITON_INTERPRET when it is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


def found_by(cases: str, *parts: str) -> dict[str, Any]:
    """Run parts of a file in this folder and return its results: on the CPU, with torch operations as the reference."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).parent / cases), *parts]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@contextmanager
def planted(kernels: ModuleType, old: str, new: str) -> Iterator[None]:
    """Replace `old` with `new` in a module of kernels, for code that imports it within the context."""
    source = Path(str(kernels.__file__)).read_text()
    assert old in source, old
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "planted.py"
        file.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("planted", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        room, _, name = kernels.__name__.rpartition(".")
        with mock.patch.object(sys.modules[room], name, module):
            yield
