"""Substitutions by which Megatron runs without CUDA, over gloo: a named list, each with its reason.

Megatron assumes a CUDA device in its device strings, its streams and events, its random number state and the names of
tensor types. `install()` substitutes the CPU for each of these, in this process alone; nothing is substituted when a
CUDA device is present. The rows below are all substitutions.

Megatron may have been imported before. Its modules then have copies of some of the functions: under names of their own
(`jit_fuser` is `torch.compile`), as default arguments and in tuples. The copies are replaced as well.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import isfunction
from types import FunctionType
from typing import Any

import torch

from megatron_mtp.cpu import stand_ins


@dataclass(frozen=True)
class Substitution:
    """One attribute that is replaced, and why."""

    owner: Any
    name: str
    replacement: Any
    reason: str


SUBSTITUTIONS: list[Substitution] = []
"""What is substituted in this process; empty until `install()`."""

_FACTORIES = (
    "tensor as_tensor empty zeros ones full arange linspace rand randn randint randperm eye triu_indices "
    "empty_like zeros_like ones_like full_like rand_like randn_like empty_strided"
).split()


def installed() -> bool:
    """True if the substitutions are in place in this process."""
    return bool(SUBSTITUTIONS)


def install() -> None:
    """Substitute every row, once; the environment may be another one at every call, as in a fork."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asserts it for TP and CP
    if installed():
        return
    import torch._dynamo  # it catalogues torch's functions when imported, and must find the original ones
    from torch.utils._device import _device_constructors

    _device_constructors()  # a catalogue as well, of what `with torch.device("meta")` applies to
    torch_rows = [*_cuda_rows(), *_tensor_rows()]
    _replace_copies(torch_rows)
    _substitute(torch_rows)
    _substitute(_megatron_rows())  # this imports Megatron, unless it was imported before
    torch.compiler.set_stance("force_eager")  # for functions that torch.compile was called on before
    # A GPU has a generator of its own for dropout, and a CPU does not; Megatron would warn of that at every use.
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
    """The functions of a module and of its classes."""
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
            is_available=stand_ins.yes,
            device_count=stand_ins.local_ranks,
            current_device=stand_ins.cpu_device,
            set_device=stand_ins.nothing,
            get_device_name=stand_ins.cpu_name,
            get_device_properties=stand_ins.cpu_properties,
            get_device_capability=stand_ins.cpu_capability,
        ),
        *_rows(
            torch.accelerator,
            "the RNG tracker asks for the index of its device, and torch 2.15's optimizers whether its stream captures",
            current_device_index=stand_ins.zero,
            current_stream=stand_ins.CpuStream,
        ),
        *_rows(
            torch.cuda,
            "overlap of copies and communication is written with streams and events, which a CPU does not have",
            Stream=stand_ins.CpuStream,
            Event=stand_ins.CpuEvent,
            stream=stand_ins.on_stream,
            set_stream=stand_ins.nothing,
            current_stream=stand_ins.CpuStream,
            default_stream=stand_ins.CpuStream,
            synchronize=stand_ins.nothing,
            is_current_stream_capturing=stand_ins.no,
        ),
        *_rows(
            torch.cuda,
            "the allocator's figures are logged and its cache is emptied between steps; the CPU has neither",
            empty_cache=stand_ins.nothing,
            memory_stats=stand_ins.memory_stats,
            memory_allocated=stand_ins.zero,
            max_memory_allocated=stand_ins.zero,
            memory_reserved=stand_ins.zero,
            max_memory_reserved=stand_ins.zero,
            device_memory_used=stand_ins.zero,
            reset_peak_memory_stats=stand_ins.nothing,
        ),
        *_rows(
            torch.cuda,
            "dropout and initialization draw from the CUDA generator, whose state is saved with every checkpoint",
            get_rng_state=stand_ins.get_rng_state,
            set_rng_state=stand_ins.set_rng_state,
            manual_seed=torch.manual_seed,
        ),
        *_rows(torch.cuda, "gradient norms are made with the tensor type's constructor", FloatTensor=torch.FloatTensor),
    ]


def _tensor_rows() -> list[Substitution]:
    on_cpu = {name: stand_ins.without_cuda_device(getattr(torch, name)) for name in _FACTORIES}
    moved = "batches, gradients and the model are moved to the device"
    return [
        *_rows(torch, "tensors are made with device='cuda' or in pinned memory", **on_cpu),
        *_rows(torch.Tensor, moved, to=stand_ins.to, cuda=stand_ins.itself, record_stream=stand_ins.nothing),
        *_rows(torch.nn.Module, moved, cuda=stand_ins.itself),
        *_rows(torch.Tensor, "pinned memory is a CUDA allocation", pin_memory=stand_ins.itself),
        *_rows(
            torch.Tensor,
            "the optimizers sort parameters by names such as torch.cuda.FloatTensor",
            type=stand_ins.type_name,
        ),
        *_rows(
            torch.utils.data.DataLoader,
            "it draws a seed from the CPU's generator, which is dropout's generator here: a resumed run would differ",
            __init__=stand_ins.with_own_generator(torch.utils.data.DataLoader.__init__),
        ),
        *_rows(
            torch.distributed,
            "the MoE dispatcher turns its split sizes from tensors into numbers as it fetches them from a GPU",
            all_to_all_single=stand_ins.with_numbers_for_splits(torch.distributed.all_to_all_single),
        ),
        *_rows(torch, "compiling small fusions takes longer than a short run", compile=stand_ins.not_compiled),
    ]


def _megatron_rows() -> list[Substitution]:
    from megatron.core.tensor_parallel import random
    from megatron.training import training

    return [
        *_rows(
            random,
            "it reaches past torch.cuda's functions into the CUDA generators themselves",
            _get_cuda_rng_state=stand_ins.get_rng_state,
            _set_cuda_rng_state=stand_ins.set_rng_state,
        ),
        *_rows(
            training,
            "it sums up packed lengths on the device 'cuda:' + the current device, and 'cuda:cpu' does not exist",
            _seqlen_stats_in_iteration=torch.zeros(2, dtype=torch.float64),
        ),
    ]


def _rows(owner: Any, reason: str, **replacements: Any) -> list[Substitution]:
    return [Substitution(owner, name, replacement, reason) for name, replacement in replacements.items()]
