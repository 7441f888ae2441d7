"""Substitutes that let Megatron run without CUDA, over gloo: a list, each with its reason.

Megatron assumes a CUDA device in its device strings, streams and events, random number state and tensor type names.
`install()` substitutes the CPU for each of these, only in this process; with a CUDA device, nothing is substituted. The
rows below are all substitutions; their implementations follow.

If Megatron was imported before, its modules have copies of some of the functions: under other names (`jit_fuser` is
`torch.compile`), as default arguments and in tuples. These copies are replaced too.
"""

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isfunction
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Substitution:
    """An attribute that is replaced, and the reason."""

    owner: Any
    name: str
    replacement: Any
    reason: str


SUBSTITUTIONS: list[Substitution] = []
"""Substitutions made in this process; empty until `install()`."""

ONEDNN_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "1"}
"""Environment variables that size oneDNN's and torch's caches of compiled products; both read them at their first
product. In bfloat16 there is an entry for each shape, half a megabyte in both, and 1,024 fit by default: prompts of all
lengths filled a gigabyte. The second cache only repeats the first.
"""

_FACTORIES = (
    "tensor as_tensor empty zeros ones full arange linspace rand randn randint randperm eye triu_indices "
    "empty_like zeros_like ones_like full_like rand_like randn_like empty_strided"
).split()


def installed() -> bool:
    """Return whether the substitutions are active in this process."""
    return bool(SUBSTITUTIONS)


def install() -> None:
    """Apply every substitution once. The environment may differ at every call, as in a fork."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asserts this for TP and CP
    for name, value in ONEDNN_CACHES.items():
        os.environ.setdefault(name, value)
    if installed():
        return
    import torch._dynamo  # its import records torch's functions, so it must come before they are replaced
    from torch.utils._device import _device_constructors

    _device_constructors()  # fill its cache, which `with torch.device("meta")` reads, before they are replaced
    torch_rows = [*_cuda_rows(), *_tensor_rows()]
    _replace_copies(torch_rows)
    _substitute(torch_rows)
    _substitute(_megatron_rows())  # imports Megatron if it is not imported yet
    torch.compiler.set_stance("force_eager")  # for functions that torch.compile has already wrapped
    # On a CPU there is no separate generator for dropout; Megatron would warn at every use.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _substitute(rows: Sequence[Substitution]) -> None:
    for row in rows:
        setattr(row.owner, row.name, row.replacement)
        SUBSTITUTIONS.append(row)


def _replace_copies(rows: Sequence[Substitution]) -> None:
    """Replace copies of the rows' functions in modules of Megatron that are loaded already."""
    by_id = {id(getattr(row.owner, row.name)): row.replacement for row in rows if hasattr(row.owner, row.name)}

    def replaced(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(by_id.get(id(value), value) for value in values)

    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"]:
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
            elif type(value) is tuple and any(id(one) in by_id for one in value):
                setattr(module, name, replaced(value))
        for function in _functions(module):
            if any(id(value) in by_id for value in function.__defaults__ or ()):
                function.__defaults__ = replaced(function.__defaults__ or ())


def _functions(module: Any) -> Iterator[FunctionType]:
    """Return the functions of a module and of its classes."""
    for value in list(vars(module).values()):
        if isfunction(value):
            yield value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            yield from filter(isfunction, list(vars(value).values()))


def _cuda_rows() -> list[Substitution]:
    return [
        *_rows(
            torch.cuda,
            "Megatron asserts that there is a CUDA device, asks how many there are, and picks one by its rank",
            is_available=yes,
            device_count=local_ranks,
            current_device=cpu_device,
            set_device=nothing,
            get_device_name=cpu_name,
            get_device_properties=cpu_properties,
            get_device_capability=cpu_capability,
        ),
        *_rows(
            torch.accelerator,
            "the RNG tracker asks for the index of its device, and torch 2.15's optimizers whether its stream captures",
            current_device_index=zero,
            current_stream=CpuStream,
        ),
        *_rows(
            torch.cuda,
            "overlap of copies and communication is written with streams and events, which a CPU does not have",
            Stream=CpuStream,
            Event=CpuEvent,
            stream=on_stream,
            set_stream=nothing,
            current_stream=CpuStream,
            default_stream=CpuStream,
            synchronize=nothing,
            is_current_stream_capturing=no,
        ),
        *_rows(
            torch.cuda,
            "the allocator's figures are logged and its cache is emptied between steps; the CPU has neither",
            empty_cache=nothing,
            memory_stats=memory_stats,
            memory_allocated=zero,
            max_memory_allocated=zero,
            memory_reserved=zero,
            max_memory_reserved=zero,
            device_memory_used=zero,
            reset_peak_memory_stats=nothing,
        ),
        *_rows(
            torch.cuda,
            "dropout and initialization draw from the CUDA generator, whose state is saved with every checkpoint",
            get_rng_state=get_rng_state,
            set_rng_state=set_rng_state,
            manual_seed=torch.manual_seed,
        ),
        *_rows(torch.cuda, "gradient norms are made with the tensor type's constructor", FloatTensor=torch.FloatTensor),
    ]


def _tensor_rows() -> list[Substitution]:
    on_cpu = {name: without_cuda_device(getattr(torch, name)) for name in _FACTORIES}
    moved = "batches, gradients and the model are moved to the device"
    return [
        *_rows(torch, "tensors are made with device='cuda' or in pinned memory", **on_cpu),
        *_rows(torch.Tensor, moved, to=to, cuda=itself, record_stream=nothing),
        *_rows(torch.nn.Module, moved, cuda=itself),
        *_rows(torch.Tensor, "pinned memory is a CUDA allocation", pin_memory=itself),
        *_rows(
            torch.Tensor,
            "the optimizers sort parameters by names such as torch.cuda.FloatTensor",
            type=type_name,
        ),
        *_rows(
            torch.utils.data.DataLoader,
            "it draws a seed from the CPU's generator, which is dropout's generator here: a resumed run would differ",
            __init__=with_own_generator(torch.utils.data.DataLoader.__init__),
        ),
        *_rows(
            torch.distributed,
            "the MoE dispatcher turns its split sizes from tensors into numbers as it fetches them from a GPU",
            all_to_all_single=with_numbers_for_splits(torch.distributed.all_to_all_single),
        ),
        *_rows(torch, "compiling small fusions takes longer than a short run", compile=not_compiled),
    ]


def _megatron_rows() -> list[Substitution]:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_token_prediction
    from megatron.training import training

    return [
        *_rows(
            multi_token_prediction,
            "Megatron 0.20 compares its projection with classes of Transformer Engine, which are missing without it",
            is_inference_column_parallel_linear=no,
        ),
        *_rows(
            random,
            "it reaches past torch.cuda's functions into the CUDA generators themselves",
            _get_cuda_rng_state=get_rng_state,
            _set_cuda_rng_state=set_rng_state,
        ),
        *_rows(
            random,
            "recomputed activations are shared by an extension in C++, which Megatron compiles at its first use",
            _get_share_storage=lambda: copy_storage,
        ),
        *_rows(
            training,
            "it sums up packed lengths on the device 'cuda:' + the current device, and 'cuda:cpu' does not exist",
            _seqlen_stats_in_iteration=torch.zeros(2, dtype=torch.float64),
        ),
    ]


def _rows(owner: Any, reason: str, **replacements: Any) -> list[Substitution]:
    return [Substitution(owner, name, replacement, reason) for name, replacement in replacements.items()]


# --- stand-ins: streams, events, memory, random state, device strings, type names -------------------------------------

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
    """An event that stores the time at which it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: object = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Return milliseconds, as `torch.cuda.Event` does."""
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
    """Return the CUDA allocator's report, with 0 for every entry that Megatron reads."""
    return _ZeroStats()


class _ZeroStats(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


def without_cuda_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that a CUDA device among its arguments means the CPU, and memory is not pinned."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return on_cpu


def with_own_generator(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DataLoader.__init__`; without a `generator`, the loader gets its own."""

    @functools.wraps(init)
    def own(loader: Any, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> None:
        init(loader, *args, generator=torch.Generator() if generator is None else generator, **kwargs)

    return own


def with_numbers_for_splits(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that split sizes may be tensors."""

    @functools.wraps(all_to_all_single)
    def exchange(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def numbers(value: Any) -> Any:
            return value.tolist() if isinstance(value, torch.Tensor) else value

        return all_to_all_single(
            output, input, *map(numbers, args), **{name: numbers(value) for name, value in kwargs.items()}
        )

    return exchange


def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replacement of `Tensor.to`: a CUDA device, by position or by name, means the CPU."""
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
    """Replacement of `Tensor.type`: without an argument, return the name of the CUDA tensor of the same kind."""
    if dtype is None:
        return _ORIGINAL_TYPE(tensor).replace("torch.", "torch.cuda.", 1)
    return _ORIGINAL_TYPE(tensor, dtype, **kwargs)


def copy_storage(emptied: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into the storage of a tensor, and of its views, without a new version for autograd."""
    storage, filled = emptied.untyped_storage(), source.untyped_storage()
    storage.resize_(filled.nbytes())
    storage.copy_(filled)


def itself(value: Any, *_: Any, **__: Any) -> Any:
    return value


def not_compiled(model: Any = None, **_: Any) -> Any:
    """Replacement of `torch.compile`, as a function and as a decorator with arguments."""
    return itself if model is None else model


def cpu_properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(name="CPU", major=0, minor=0, multi_processor_count=os.cpu_count() or 1, total_memory=0)
