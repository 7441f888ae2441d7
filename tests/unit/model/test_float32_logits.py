"""Comparisons of logits multiply in float32, whether or not TF32 was allowed before. The settings need no GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from inspect import getsource
from pathlib import Path

import pytest
import torch

from megatron_mtp.checkpoint.verify import prompt, reference, verify

ALLOWED, EXACT = ("high", True, True), ("highest", False, False)


def settings() -> tuple[str, bool, bool]:
    backends = torch.backends
    return torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32


@pytest.mark.parametrize(("compare", "folders"), [(verify.verify, 2), (reference.main, 3)])
def test_tf32_is_off_inside_and_back_on_afterwards(
    compare: Callable[..., object], folders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def look(_: Path) -> None:
        seen.append(settings())
        raise ValueError("seen")

    monkeypatch.setattr(verify, "DistReader", look)
    monkeypatch.setattr(reference, "load_file", look)
    before = settings()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")
    try:
        allowed = settings()
        with pytest.raises(ValueError, match="seen"):
            compare(*[Path("nowhere")] * folders)
        assert (allowed, seen, settings()) == (ALLOWED, [EXACT], ALLOWED)
    finally:
        torch.set_float32_matmul_precision(before[0])


HEAD = "from collections.abc import Iterator\nfrom contextlib import contextmanager\n"


def test_the_tf32_variable_of_nvidias_images_has_no_effect_inside() -> None:
    code = f"import torch\n{getsource(settings)}\n{HEAD}{getsource(prompt.exact_float32)}\nprint(settings())\n"
    code += "with exact_float32():\n    print(settings())\nprint(settings())"
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(ALLOWED), str(EXACT), str(ALLOWED)], done.stderr
