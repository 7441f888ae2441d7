"""Compiling Triton's kernels for a GPU, which needs none; the interpreter takes much that the compiler refuses."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = 232_448
"""Bytes of shared memory that a program can have."""


def assert_compiles(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> None:
    """To a binary for sm_90; arguments without a type are constants."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert ".target sm_90" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED
