"""Patches of saving and loading checkpoints: what a kill leaves behind, and the optimizer state.

Every rank starts a helper process at its first save, to hold a queue. Megatron's helper survives when its rank is
killed, with half a gigabyte of memory. Here it ends with its rank. A process that has not used CUDA forks it, because
spawning imports everything again, which takes longer than the save.

A run that was killed between its save and the tracker's update restarts and saves that iteration over itself.
`metadata.json`, which marks an iteration as complete, is removed first; Megatron leaves it in place.

The optimizer bugs concern slices after padding, torch's Adam, SGD, stages without trained parameters, and new
parameters.
"""

import ctypes
import functools
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature, unwrap
from itertools import accumulate
from multiprocessing.managers import SyncManager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_mtp.megatron.checkpoint import ABSENT
from megatron_mtp.megatron.checkpoint.catalogue import CHECKSUMS, FORMAT
from megatron_mtp.megatron.checkpoint.sealing import seal
from megatron_mtp.megatron.patches.code import names_in, with_globals
from megatron_mtp.megatron.patches.patch import Function

PR_SET_PDEATHSIG = 1
"""Linux option for the signal that a process gets when its parent has ended (prctl(2))."""

Save = Callable[..., Any]
"""Signature of `dist_checkpointing.save`: state, folder of the iteration, and settings; returns an AsyncRequest or
None.
"""


def unmarked_meanwhile(save: Save) -> Save:
    """Wrap a save so that the folder looks complete only when it is."""

    @functools.wraps(save)
    def saved(state: Any, checkpoint_dir: str, *rest: Any, **settings: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            (Path(checkpoint_dir) / FORMAT).unlink(missing_ok=True)
        torch.distributed.barrier()
        return save(state, checkpoint_dir, *rest, **settings)

    return saved


def sealed(save: Save) -> Save:
    """Wrap a save so that a checksum of the metadata is written."""

    @functools.wraps(save)
    def saved(state: Any, checkpoint_dir: str, *rest: Any, **settings: Any) -> Any:
        folder, is_first = Path(checkpoint_dir), torch.distributed.get_rank() == 0
        if is_first:
            (folder / CHECKSUMS).unlink(missing_ok=True)
        request = save(state, checkpoint_dir, *rest, **settings)
        if is_first and request is None:
            seal(folder)
        elif is_first:
            request.finalize_fns.append(partial(seal, folder))
        return request

    return saved


def queue_that_ends(get_queue: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `get_write_results_queue`: one queue per process, stored where Megatron stores it."""
    owner: Any = sys.modules[get_queue.__module__]

    def get(mp_mode: str = "spawn") -> Any:
        if owner._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode if torch.cuda.is_initialized() else "fork"))
            manager.start(initializer=end_with_parent, initargs=(os.getpid(),))
            owner._results_queue = manager.Queue()
        return owner._results_queue

    return get


def end_with_parent(parent: int) -> None:
    """End the calling process with its parent. Works only on Linux; does nothing on other systems."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


# --- the optimizer's state -------------------------------------------------------------------------------------------


def without_gaps(state_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DistributedOptimizer.sharded_param_state_fully_reshardable` to compute offsets without padding.

    The gathered tensors have no padding, but the parameters' offsets count it. A bucket is padded before others if the
    embedding's copy on a later pipeline stage has its own bucket:

        bucket 0: a a a . .    bucket 1: b b      gathered: a a a b b      place of b: 5 to 7; should be 3 to 5
    """

    @functools.wraps(state_of)
    def state(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        maps = [buffer.param_index_map for buffer in optimizer.buffers]
        for buffer in optimizer.buffers:
            padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            gaps = list(accumulate(padding, initial=0))
            buffer.param_index_map = {
                parameter: (start - gaps[bucket], end - gaps[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }
        try:
            return state_of(optimizer, *args, **kwargs)
        finally:
            for buffer, index_map in zip(optimizer.buffers, maps, strict=True):
                buffer.param_index_map = index_map

    return state


# --- resuming --------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
else:
    DistributedOptimizer = object  # keeps the table of patches importable without Megatron


class _Resumable(DistributedOptimizer):
    """Mixin before Megatron's optimizer class that resumes torch's Adam, which Megatron shards but cannot resume.

    torch's Adam keeps `step` as a tensor for every parameter, and its first step makes these tensors; Apex and TE keep
    a number for every group. Each method is Megatron's, corrected where it assumes a number.
    """

    def state_dict(self) -> Any:
        """Return the state, with entries of a first step: a load needs them before that step."""
        if not self.optimizer.state and self.init_state_fn is not None:
            self.init_state_fn(self.optimizer)
            self._own_steps(torch.tensor(0.0))
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state with its own `step` for every parameter: each parameter would increment a shared one."""
        super().load_state_dict(state_dict)
        self._own_steps()

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Any]) -> None:
        """Set the tensors, but keep `step`, which is loaded before them.

        The loaded tensors have no `step`, or that of a first step. Float32 tensors go into the parameters themselves.
        """
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": None})

    def _own_steps(self, step: torch.Tensor | None = None) -> None:
        for state in self.optimizer.state.values():
            if step is not None or "step" in state:
                state["step"] = (state["step"] if step is None else step).clone()


def resumable(distributed_optimizer: type) -> type:
    """Replacement of the class in `megatron.core.optimizer` that creates the optimizers."""
    return type("ResumableDistributedOptimizer", (_Resumable, distributed_optimizer), {})


# --- SGD -------------------------------------------------------------------------------------------------------------


def with_momentum(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `MegatronOptimizer.__init__` to give SGD the function that creates its state before a checkpoint is read.

    Momenta of zero are those of an optimizer before its first step.
    """

    @functools.wraps(init)
    def made(self: Any, optimizer: Any, config: Any, init_state_fn: Any = lambda _: None) -> None:
        has_momentum = init_state_fn is None and "momentum" in getattr(optimizer, "defaults", ())
        init(self, optimizer, config, _zero_momentum if has_momentum else init_state_fn)

    return made


def _zero_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    for group in optimizer.param_groups if optimizer.defaults["momentum"] else ():
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


# --- stages without trainable parameters -----------------------------------------------------------------------------


def with_stubs(get_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_megatron_optimizer` to create a stub if no parameter is trained, as under `--mtp-train-only`.

    Megatron gives such a stage an optimizer with empty groups, on which torch's Adam cannot step, and which no other
    stage can read. Stubs are Megatron's optimizers that are left out of checkpoints.
    """

    @functools.wraps(get_optimizer)
    def get(config: Any, model_chunks: list[torch.nn.Module], *rest: Any, **settings: Any) -> Any:
        optimizer = get_optimizer(config, model_chunks, *rest, **settings)
        if not any(parameter.requires_grad for chunk in model_chunks for parameter in chunk.parameters()):
            optimizer.is_stub_optimizer = True
        return optimizer

    return get


def with_lent_optimizer(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `dist_checkpointing.save`: if rank 0 has no `optimizer`, it saves another rank's, without sharded parts."""

    @functools.wraps(save)
    def saved(state: dict[str, Any], *rest: Any, **settings: Any) -> Any:
        return save(_with_optimizer(state), *rest, **settings)

    return saved


def _with_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    has_one = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(has_one, "optimizer" in state)
    if has_one[0] or not any(has_one):
        return state
    lender, rank = has_one.index(True), torch.distributed.get_rank()
    lent = [_not_sharded(state["optimizer"]) if rank == lender else None]
    torch.distributed.broadcast_object_list(lent, src=lender)
    return {**state, "optimizer": lent[0]} if rank == 0 else state


def _not_sharded(optimizer: dict[str, Any]) -> Any:
    from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base

    _, stored = extract_nonpersistent(optimizer)
    return extract_sharded_base(stored)[1]


# --- parameters that the checkpoint lacks ----------------------------------------------------------------------------

OWN_COPY, LISTS = ("param", "fp32_param"), "fp32_from_fp16_params"
"""Optimizer states that are a copy of the parameter, and the key under which one optimizer keeps them."""


def without_absent(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `dist_checkpointing.load` to skip entries with an `ABSENT` key.

    The model creates such entries itself, so they are left out. The optimizer's entries become those of a new
    parameter: moments of zero and, as its copy, the model's parameter, which Megatron loads before the optimizer.
    """

    @functools.wraps(load)
    def loaded(state: dict[str, Any], *rest: Any, **settings: Any) -> Any:
        parameters = _absent_parameters(state)
        if not parameters:
            return load(state, *rest, **settings)
        found = load(_with_new(state, parameters), *rest, **settings)
        common = found[0] if isinstance(found, tuple) else found
        for asked, got in zip(_with_lists(state), _with_lists(common), strict=True):
            got[LISTS] = [[got[LISTS][i][j] for j in range(len(group))] for i, group in enumerate(asked[LISTS])]
        return found

    return loaded


def _absent_parameters(state: dict[str, Any]) -> dict[str, Any]:
    """Return the model's entries under `ABSENT` keys: parameters, and None for a kernel state."""
    models = [part for name, part in state.items() if name.startswith("model") and isinstance(part, dict)]
    return {entry.key: entry.data for part in models for entry in part.values() if _is_absent(entry)}


def _with_new(state: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the state to load without the model's absent entries, and with optimizer states as for new parameters.

    Megatron takes lists apart and loses places where some of the items are not read: they become dicts by index.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace

    found: dict[str, Any] = {
        name: {key: entry for key, entry in part.items() if not _is_absent(entry)} if name.startswith("model") else part
        for name, part in state.items()
    }
    found = dict_list_map_outplace(functools.partial(_new_state, parameters), found)
    for part in _with_lists(found):
        part[LISTS] = {index: dict(enumerate(group)) for index, group in enumerate(part[LISTS])}
    return found


def _with_lists(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return states of optimizers that list their copies of the parameters by group."""
    optimizer = state.get("optimizer") or {}
    return [part for part in (optimizer, *optimizer.values()) if isinstance(part, dict) and LISTS in part]


def _is_absent(entry: Any) -> bool:
    return ABSENT in getattr(entry, "key", "")


def _new_state(parameters: dict[str, torch.Tensor], entry: Any) -> Any:
    """Return zeros in the parameter's shape for `optimizer.state.exp_avg.absent: mtp.layers.1.eh_proj.weight`."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if not _is_absent(entry):
        return entry
    state, _, key = entry.key.partition(ABSENT)
    parameter = parameters[ABSENT + key].detach()
    if state.split(".")[-2] in OWN_COPY:
        return LocalNonpersistentObject(parameter)
    return LocalNonpersistentObject(torch.zeros_like(parameter, dtype=entry.data.dtype))


# --- probes: is the bug present? -------------------------------------------------------------------------------------


def keeps_mark(save: Function) -> bool | None:
    """Return whether a folder that is overwritten is still marked as complete when the save begins."""
    reached: list[bool] = []

    def begin(*_: Any) -> None:
        reached.append(True)
        raise InterruptedError

    alone = SimpleNamespace(get_rank=lambda: 0, barrier=lambda *_: None, is_initialized=lambda: False)
    begun = with_globals(
        save, save_preprocess=begin, torch=SimpleNamespace(distributed=alone), logger=logging.Logger("probe", 100)
    )
    with TemporaryDirectory(prefix="megatron-mtp-") as folder:
        mark = Path(folder) / FORMAT
        mark.touch()
        with suppress(InterruptedError):
            begun({}, folder)
        return mark.exists() if reached else None


def seals_nothing(save: Function) -> bool:
    """Return whether a save writes no checksum of the metadata by default."""
    settings = signature(save).parameters
    return "verify_integrity" not in settings or settings["verify_integrity"].default is False


def leaves_helper(get_queue: Function) -> bool:
    """Return whether the queue's process is a plain Manager, which does not end with its parent."""
    return "Manager" in names_in(get_queue)


def counts_padding(state_of: Function) -> bool | None:
    """Probe: bucket 0 has one number and one of padding; bucket 1 has three, and the parameter is the first two.

    Gathered: [0, 1, 2, 3]; the parameter is [1, 2], or [2, 3] with the bug.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    parameter = torch.zeros(2)
    buckets = [
        SimpleNamespace(grad_data=torch.zeros(2), numel_unpadded=1),
        SimpleNamespace(grad_data=torch.zeros(3), numel_unpadded=3),
    ]
    buffer = SimpleNamespace(buckets=buckets, param_index_map={parameter: (2, 4, 1)}, numel_unpadded=4)
    gathered = {0: {"dtype": {"param": torch.arange(4.0)}}}
    optimizer = SimpleNamespace(
        get_parameter_state_dp_zero=lambda **_: gathered, gbuf_ranges=[{"dtype": None}], buffers=[buffer]
    )
    model = {"weight": ShardedTensor.from_rank_offsets("weight", parameter)}
    state = state_of(optimizer, model, metadata={})
    return {(1.0, 2.0): False, (2.0, 3.0): True}.get(tuple(state[0]["param"].data.tolist()))


def needs_first_step(optimizer_class: Any) -> bool | None:
    """Return whether torch's Adam has no state before its first step; False with Apex or Transformer Engine."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return False
    before_a_step = SimpleNamespace(state={}, state_dict=lambda: {"state": {}, "param_groups": []})
    try:
        optimizer_class.state_dict(SimpleNamespace(optimizer=before_a_step, init_state_fn=None, grad_scaler=None))
    except AssertionError:
        return True
    return False


def leaves_sgd_stateless(init: Function) -> bool:
    """Return whether an SGD optimizer has no function that creates its state."""
    made = SimpleNamespace()
    init(made, torch.optim.SGD([torch.zeros(1)]), None, None)
    return made.init_state_fn is None


def makes_no_stubs(get_optimizer: Function) -> bool:
    """Return whether stages without trained parameters get no stub: no function that creates optimizers mentions it."""
    scope = unwrap(get_optimizer).__globals__
    parts = ("_get_megatron_optimizer_based_on_param_groups", "_get_param_groups_and_buffers", "_get_param_groups")
    functions = [get_optimizer, *(scope[part] for part in parts if part in scope)]
    return not any("is_stub_optimizer" in names_in(function) for function in functions)


def lends_nothing(save: Function) -> bool:
    """Return whether rank 0 writes only its own optimizer: no object is exchanged before the save."""
    return not {"broadcast_object_list", "gather_object", "all_gather_object"} & names_in(save)


def reads_every_entry(load: Function) -> bool:
    """Return whether a load has no argument to skip entries."""
    return not any("missing" in name or "partial" in name for name in signature(load).parameters)
