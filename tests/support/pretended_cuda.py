"""CPU tensors that report the device `cuda`: mixing devices fails as on a GPU, and synchronizations are counted.

    with pretended_cuda() as waits:
        loss(on_cuda(states)).backward()
    assert not waits

A wait is where the host would block until the GPU has computed a value: reads of values, results whose size depends on
values, and copies from host memory that is not pinned. Numbers, shapes and backward passes are real; there are no
streams and kernels.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from megatron_mtp.losses import linear_cross_entropy
from megatron_mtp.megatron import cpu

CUDA = torch.device("cuda", 0)
READS = ("_local_scalar_dense", "nonzero", "_unique", "unique_", "masked_select", "is_nonzero", "equal")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")

waits: Counter[str] = Counter()


class OnCuda(Tensor):
    """A tensor on the pretended device."""

    held: Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnCuda":
        made: OnCuda = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), dtype=held.dtype, requires_grad=held.requires_grad
        )
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = function._schema.name.removeprefix("aten::"), tree_flatten((args, kwargs))[0]
        tensors = [one for one in given if isinstance(one, Tensor)]
        of_host = [one for one in tensors if not isinstance(one, OnCuda) and one.dim()]
        if name.startswith(READS) or (name in INDEXING and any(one.dtype == torch.bool for one in tensors[1:])):
            waits[name] += 1
        elif of_host and name in INDEXING:
            waits["index of the host"] += 1
        elif of_host:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got cuda:0 and cpu")
        there = {**(kwargs or {}), **({"device": torch.device("cpu")} if (kwargs or {}).get("device") else {})}
        held = {id(one.held): one for one in tensors if isinstance(one, OnCuda)}
        found = function(*tree_map(_held, args), **tree_map(_held, there))
        wrapped = tree_map(lambda one: held.get(id(one), _there(one)), found)
        return return_and_correct_aliasing(function, args, there, wrapped)

    def tolist(self) -> Any:
        waits["tolist"] += 1
        return self.held.tolist()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        waits["cpu"] += 1
        return _ToHost.apply(self)  # type: ignore[no-any-return]

    def new_tensor(self, data: Any, **named: Any) -> Tensor:
        waits["new_tensor"] += 1
        return OnCuda(self.held.new_tensor(data, **named))


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnCuda) else value


def _there(value: Any) -> Any:
    return OnCuda(value) if isinstance(value, Tensor) else value


class _ToCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        return OnCuda(value.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _held(gradient)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: OnCuda) -> Tensor:  # type: ignore[override]
        return value.held.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return OnCuda(gradient)


def on_cuda(value: Tensor) -> Tensor:
    """Return the tensor on the pretended device."""
    return value if isinstance(value, OnCuda) else _ToCuda.apply(value)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _made_there(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(factory)
    def make(*given: Any, device: Any = None, **named: Any) -> Tensor:
        if isinstance(device, torch.device | str | int) and _is_cuda(device):
            return on_cuda(factory(*given, **named))
        return factory(*given, **named)

    return make


def _moved(own: Callable[..., Tensor], value: Tensor, *given: Any, non_blocking: bool = False, **named: Any) -> Tensor:
    device = named.pop("device", None)
    if given and isinstance(given[0], torch.device | str):
        device, *given = given  # type: ignore[assignment]
    elif given and isinstance(given[0], Tensor):
        device, given = given[0].device, (given[0].dtype, *given[1:])
    made = own(value, *given, **named) if given or named else value
    if _is_cuda(device) and not isinstance(made, OnCuda):
        if not non_blocking:
            waits["copy from the host"] += 1
        return on_cuda(made)
    return made.cpu() if device is not None and not _is_cuda(device) and isinstance(made, OnCuda) else made


@contextmanager
def pretended_cuda() -> Iterator[Counter[str]]:
    """Provide a device `cuda:0` within the context; yield the number of waits by operation."""
    waits.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name in cpu._FACTORIES:
            patch.setattr(torch, name, _made_there(getattr(torch, name)))
        own = Tensor.to
        patch.setattr(Tensor, "to", lambda value, *given, **named: _moved(own, value, *given, **named))
        patch.setattr(Tensor, "cuda", lambda value, *_, **named: _moved(own, value, CUDA, **named))
        patch.setattr(Tensor, "pin_memory", lambda value, *_: value)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(linear_cross_entropy, "kernels_of", lambda *_: None)
        yield waits
