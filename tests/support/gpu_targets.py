"""Compile Triton kernels for GPUs, without one. The interpreter accepts much that the compiler rejects."""

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {80: 166_912, 89: 101_376, 90: 232_448}
"""Shared memory of a thread block in bytes, by compute capability: A100, L40, H100."""
DIVISIBLE = [["tt.divisibility", 16]]
"""Divisibility by 16, as a launch declares it for torch pointers and divisible integers; it allows wider loads."""


def assert_compiles(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, target: int, folder: Path
) -> None:
    """Check that a kernel compiles to a binary that fits the target without spilling registers.

    Arguments without a type are constants. Pointers and strides are divisible by 16, as for a contiguous matrix. The
    binary is written to `folder`.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    divisible = [name.endswith("stride") or types.get(name, "").startswith("*") for name in kernel.arg_names]
    attributes = {(place,): DIVISIBLE for place, is_divisible in enumerate(divisible) if is_divisible}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps})
    assert f".target sm_{target}" in compiled.asm["ptx"]
    assert re.search(r"\.v4\.b32|\.v2\.b64", compiled.asm["ptx"])  # 16-byte loads
    assert compiled.metadata.shared <= SHARED[target]
    assert stack_bytes(compiled.asm["cubin"], folder) == 0


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return a thread's stack bytes, which hold spilled registers."""
    (folder / "cubin").write_bytes(cubin)
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    dump = subprocess.run(
        [tool, "--dump-resource-usage", folder / "cubin"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"STACK:(\d+)", dump)
    assert found is not None, dump
    return int(found.group(1))
