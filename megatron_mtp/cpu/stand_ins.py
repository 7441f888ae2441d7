"""Stand-ins of CUDA on a CPU: streams, events, memory, random state, device strings, type names."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")
_ORIGINAL_TO = torch.Tensor.to
_ORIGINAL_TYPE = torch.Tensor.type


class CpuStream:
    """A stream that is always finished: CPU kernels return when they are done."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: "CpuEvent | None" = None) -> "CpuEvent":
        event = event or CpuEvent()
        event.record()
        return event

    def __enter__(self) -> "CpuStream":
        return self

    def __exit__(self, *_: object) -> None: ...


class CpuEvent:
    """An event that notes the time at which it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: object = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds, as `torch.cuda.Event` returns them."""
        return (end.seconds - self.seconds) * 1e3


@contextmanager
def on_stream(stream: object = None) -> Iterator[None]:
    yield


def yes(*_: Any) -> bool:
    return True


def no(*_: Any) -> bool:
    return False


def local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cpu_device() -> torch.device:
    return CPU


def cpu_name(device: object = None) -> str:
    return "CPU"


def cpu_capability(device: object = None) -> tuple[int, int]:
    return (0, 0)


def nothing(*_: Any, **__: Any) -> None: ...


def zero(*_: Any, **__: Any) -> int:
    return 0


def memory_stats(*_: Any, **__: Any) -> dict[str, int]:
    """The CUDA allocator's report, with 0 for every entry that Megatron reads."""
    return _ZeroStats()


class _ZeroStats(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


def without_cuda_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; a CUDA device among its arguments means the CPU, and memory is not pinned."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return on_cpu


def with_own_generator(init: Callable[..., None]) -> Callable[..., None]:
    """`DataLoader.__init__`; without a `generator`, the loader gets one of its own."""

    @functools.wraps(init)
    def own(loader: Any, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> None:
        init(loader, *args, generator=torch.Generator() if generator is None else generator, **kwargs)

    return own


def with_numbers_for_splits(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """The same collective; split sizes may be tensors."""

    @functools.wraps(all_to_all_single)
    def exchange(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def numbers(value: Any) -> Any:
            return value.tolist() if isinstance(value, torch.Tensor) else value

        return all_to_all_single(
            output, input, *map(numbers, args), **{name: numbers(value) for name, value in kwargs.items()}
        )

    return exchange


def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`; a CUDA device, by position or by name, means the CPU."""
    if args and _names_cuda(args[0]):
        args = (CPU, *args[1:])
    if "device" in kwargs and _names_cuda(kwargs["device"]):
        kwargs["device"] = CPU
    return _ORIGINAL_TO(tensor, *args, **kwargs)


def _names_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def type_name(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    """`Tensor.type`; without an argument, the name of the CUDA tensor of the same kind."""
    if dtype is None:
        return _ORIGINAL_TYPE(tensor).replace("torch.", "torch.cuda.", 1)
    return _ORIGINAL_TYPE(tensor, dtype, **kwargs)


def itself(value: Any, *_: Any, **__: Any) -> Any:
    return value


def not_compiled(model: Any = None, **_: Any) -> Any:
    """`torch.compile` as a function and as a decorator with arguments."""
    return itself if model is None else model


def cpu_properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(name="CPU", major=0, minor=0, multi_processor_count=os.cpu_count() or 1, total_memory=0)
