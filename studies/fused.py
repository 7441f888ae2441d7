"""Kernels of torch.compile between the products of a decoding layer on CUDA, generated and compiled without a GPU.

    python studies/fused.py                          prints a row a kernel: registers, spills, shared memory
    python studies/fused.py --seconds 3 --threads 1  on this CPU: the same pieces by inductor's C++ and one by one

Inductor asks torch for the GPU's properties, which are an H100's here, and is stopped once it has written its code.
Each kernel is then compiled by Triton for sm_80, sm_89 and sm_90. Nothing is run on a GPU.

Run at 0f338fc.
"""

import argparse
import importlib.util
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read as torch is imported

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

HIDDEN, WIDTH, GROUPS, HEADS, CHANNELS = 4096, 14336, 8, 4, 128
"""A layer of Llama 3 8B: queries of each of its groups of keys."""
TARGETS = (80, 89, 90)


class Written(Exception):  # noqa: N818 - no error: stops inductor before it loads what it has written
    """Inductor has written its code."""


def add_and_norm(hidden: Tensor, part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual sum and the norm after it."""
    hidden = hidden + part
    return hidden, rms_norm(hidden, (hidden.size(-1),), weight, 1e-5)


def gate(wide: Tensor) -> tuple[Tensor]:
    """A gated SiLU."""
    one, other = wide.chunk(2, -1)
    return (silu(one) * other,)


def turn(mixed: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned and moved to their heads, values moved."""
    rows, batch, _ = mixed.shape
    mixed = mixed.view(rows, batch, GROUPS, HEADS + 2, CHANNELS)
    both, value = mixed.narrow(3, 0, HEADS + 1), mixed.select(3, HEADS + 1)  # a fake tensor on CUDA takes no slices
    both = torch.addcmul(both * cosine, torch.cat(both.chunk(2, -1)[::-1], -1), sine)
    query = both.narrow(3, 0, HEADS).permute(1, 2, 3, 0, 4).reshape(batch, GROUPS * HEADS, rows, CHANNELS)
    return query, both.select(3, HEADS).permute(1, 2, 0, 3).clone(), value.permute(1, 2, 0, 3).clone()


def inputs(rows: int, batch: int, device: str, dtype: torch.dtype) -> dict[Callable[..., Any], list[Tensor]]:
    """Numbers for each piece."""
    make = lambda *shape: torch.ones(*shape, device=device, dtype=dtype)  # noqa: E731
    return {
        add_and_norm: [make(rows, batch, HIDDEN), make(rows, batch, HIDDEN), make(HIDDEN)],
        gate: [make(rows, batch, 2 * WIDTH)],
        turn: [make(rows, batch, GROUPS * (HEADS + 2) * CHANNELS), *(make(rows, batch, 1, 1, CHANNELS) for _ in "cs")],
    }


def main() -> None:
    """Print the table that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, help="time the pieces on this CPU instead, each for so long")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.seconds:
        time_on_cpu(args.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, source in written().items():
            for number, (kernel, body) in enumerate(kernels(source)):
                print(name, kernel, *compiled(body, kernel, Path(folder) / f"{name}_{number}.py"), sep=" | ")


def written() -> dict[str, str]:
    """Inductor's code of each piece, for any number of rows and batch."""
    from torch._dynamo import device_interface
    from torch._inductor import compile_fx, graph
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode, fake_tensor
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    h100 = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, gcnArchName="", L2_cache_size=50 << 20,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    )  # fmt: skip
    answers = {
        "is_available": True, "current_device": 0, "device_count": 1, "get_device_properties": h100, "_lazy_init": None,
        "get_device_capability": (9, 0), "set_device": None, "synchronize": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "get_rng_state": torch.empty(0), "set_rng_state": None,
    }  # fmt: skip
    codes: dict[str, str] = {}
    own = graph.GraphLowering.codegen

    def stop(self: Any) -> Any:
        code = own(self)[0]
        codes[piece.__name__] = getattr(code, "value", code)
        raise Written

    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        interface = device_interface.CudaInterface
        for owner in (interface, interface.Worker):
            stack.enter_context(mock.patch.object(owner, "get_device_properties", staticmethod(lambda _=None: h100)))
        stack.enter_context(mock.patch.object(interface, "get_compute_capability", staticmethod(lambda _=None: 90)))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda _: None))
        stack.enter_context(mock.patch.object(graph.GraphLowering, "codegen", stop))
        utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132})
        target = GPUTarget("cuda", 90, 32)
        driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, utils=utils))
        mode = FakeTensorMode(shape_env=ShapeEnv())
        for piece, real in inputs(4, 2, "cpu", torch.bfloat16).items():
            given = []
            for one in real:
                free = [DimDynamic.DYNAMIC if size in (4, 2) else DimDynamic.STATIC for size in one.shape]
                fake = mode.from_tensor(one, symbolic_context=StatelessSymbolicContext(dynamic_sizes=free))
                with mode:
                    given.append(torch.empty(*fake.shape, dtype=one.dtype, device="cuda:0"))
            traced = make_fx(piece, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(*given)
            try:
                with mode:
                    compile_fx.compile_fx_inner(traced, given)
            except Exception as error:
                if piece.__name__ not in codes:
                    raise error
    return codes


def kernels(source: str) -> list[tuple[str, str]]:
    """Triton's kernels in the code, each a name and a module."""
    return re.findall(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''',", source, re.DOTALL)


def compiled(body: str, name: str, file: Path) -> list[str]:
    """Registers, spilled bytes and shared memory of a kernel for each target."""
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    said: dict[str, Any] = {}

    def kept(**facts: Any) -> Callable[[Any], Any]:
        said.update(facts)
        return lambda kernel: kernel

    file.write_text(body)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    kinds = ("pointwise", "reduction", "persistent_reduction")
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(triton_heuristics, kind, kept))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        spec.loader.exec_module(module)
    meta = said["triton_meta"]
    reduces = "R0_BLOCK" in meta["signature"]
    sizes = {"XBLOCK": 1 if reduces else 256, "R0_BLOCK": 2048, "YBLOCK": 32}
    if "YBLOCK" in meta["signature"]:
        sizes["XBLOCK"] = 32
    blocks = {arg: sizes[arg] for arg, kind in meta["signature"].items() if kind == "constexpr"}
    source = ASTSource(getattr(module, name), meta["signature"], {**meta["constants"], **blocks}, meta["configs"][0])
    rows = []
    for target in TARGETS:
        made = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": 4})
        file.with_suffix(".cubin").write_bytes(made.asm["cubin"])
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        command = [tool, "--dump-resource-usage", file.with_suffix(".cubin")]
        usage = re.search(r"REG:(\d+) STACK:(\d+)", subprocess.run(command, capture_output=True, text=True).stdout)
        assert usage is not None
        rows.append(f"sm_{target}: {usage[1]} registers, {usage[2]} spilled, {made.metadata.shared} shared")
    return rows


def time_on_cpu(seconds: float) -> None:
    """Microseconds of each piece, one operation after the other and by inductor, in turns; the largest difference."""
    for rows, batch in ((1, 1), (3, 1), (3, 8)):
        for piece, given in inputs(rows, batch, "cpu", torch.float32).items():
            given = [torch.randn_like(one) for one in given]
            fused = torch.compile(piece, dynamic=True)
            one, other = piece(*given), fused(*given)
            apart = max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
            spent: dict[str, list[float]] = {"one by one": [], "fused": []}
            until = time.process_time() + seconds
            while time.process_time() < until:
                for name, way in (("one by one", piece), ("fused", fused)):
                    began = time.process_time()
                    for _ in range(50):
                        way(*given)
                    spent[name].append((time.process_time() - began) / 50 * 1e6)
            medians = (f"{name} {statistics.median(values):.0f} us" for name, values in spent.items())
            print(f"{rows} x {batch}", piece.__name__, *medians, f"{apart:.1e} apart", sep=" | ")


if __name__ == "__main__":
    with torch.no_grad():
        main()
