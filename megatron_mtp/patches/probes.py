"""Probes for faults that may be mended: each takes the original function, and leaves no trace in the process.

True: the fault is there. False: it is not. None, or any exception: the function is not one that the probe knows.
Most probes call the function with a few numbers; where that would need a job, they read its compiled code.
"""

import inspect
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, cast

import torch

from megatron_mtp.patches.saving import FORMAT

Function = Callable[..., Any]
Probe = Callable[[Any], bool | None]


def names_in(function: Function) -> set[str]:
    """Names and strings that the code of a function mentions, with the functions inside it."""
    waiting, names = [cast(FunctionType, inspect.unwrap(function)).__code__], set[str]()
    while waiting:
        code = waiting.pop()
        names |= {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def with_globals(function: Function, **changed: Any) -> Function:
    """A copy of the function that finds other objects under some global names."""
    plain = cast(FunctionType, inspect.unwrap(function))
    made = FunctionType(plain.__code__, {**plain.__globals__, **changed}, plain.__name__, plain.__defaults__)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


# --- data -------------------------------------------------------------------------------------------------------------


def compiles_without_makefile(compile_helpers: Function) -> bool:
    """Return whether it runs make in a folder that has no Makefile."""
    folder = Path(inspect.getfile(inspect.unwrap(compile_helpers))).parent
    return "make" in names_in(compile_helpers) and not (folder / "Makefile").exists()


# --- positions --------------------------------------------------------------------------------------------------------


def refuses_yarn(validate_args: Function) -> bool:
    """Return whether depths are refused by the kind of positions; a wrapper's own code does not refuse them."""
    code = cast(FunctionType, validate_args).__code__
    return any(
        isinstance(text, str) and text.startswith("Multi-Token Prediction (MTP) is not") for text in code.co_consts
    )


# --- experts ----------------------------------------------------------------------------------------------------------


def mask_hits_experts(apply_expert_bias: Function) -> bool | None:
    """Two tokens, two experts, the second token masked: counts are [1, 1], or with the fault [2, 0]."""
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
    with torch.enable_grad():
        apply_expert_bias(router, torch.tensor([[True, True], [True, False]]), torch.tensor([False, True]))
    return {(1.0, 1.0): False, (2.0, 0.0): True}.get(tuple(router.local_tokens_per_expert.tolist()))


def sum_overwrites_count(get_counts: Function) -> bool | None:
    """One token for one expert on each of two ranks, one of the tokens masked: this rank has 1 token, all have 2."""
    counted = with_globals(get_counts, reduce_from_tensor_model_parallel_region=lambda counts, _: counts.mul_(2))
    _, own, total = counted(torch.tensor([[1, 0], [0, 0]]), SimpleNamespace(size=lambda: 2), 1, True)
    return {(1, 2): False, (2, 2): True}.get((int(own), int(total)))


def counts_other_routers(report: Function) -> bool | None:
    """A trunk of one layer with experts, and a depth without: the average of the one router's 1.0 is 1.0, or 0.5."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    class OfOneRank(MoEMetricsTracker):
        def _sync_metrics(self, *_: Any) -> None:
            pass

    tracker, losses = OfOneRank(), dict[str, Any]()
    tracker.record("loss", torch.ones(()), 1, 2)
    counts = {"num_layers": 1, "moe_layer_freq": [1], "mtp_num_layers": 1}
    report(tracker, 1.0, 0, track_names="loss", total_loss_dict=losses, **counts)
    return {1.0: False, 0.5: True}.get(float(losses["loss"]))


# --- layers -----------------------------------------------------------------------------------------------------------


def refuses_without_apex(init: Function) -> bool:
    """Return whether a layer asks for Apex's extension when it is made."""
    return "_grad_accum_fusion_available" in names_in(init)


# --- optimizers -------------------------------------------------------------------------------------------------------


def counts_padding(state_of: Function) -> bool | None:
    """Bucket 0 has one number and one of padding; bucket 1 has three, and the parameter is the first two.

    Gathered: [0, 1, 2, 3]; the parameter is [1, 2], or with the fault [2, 3].
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


def makes_no_stubs(get_optimizer: Function) -> bool:
    """Return whether stages without anything to train get no stub: the functions that make optimizers mention none."""
    scope = inspect.unwrap(get_optimizer).__globals__
    parts = ("_get_megatron_optimizer_based_on_param_groups", "_get_param_groups_and_buffers", "_get_param_groups")
    functions = [get_optimizer, *(scope[part] for part in parts if part in scope)]
    return not any("is_stub_optimizer" in names_in(function) for function in functions)


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Planted:
    """A class that no checkpoint holds."""


def unpickles_catalogues(read_metadata: Function) -> bool:
    """Return whether a catalogue may name any class."""

    @contextmanager
    def stream(*_: Any) -> Iterator[io.BytesIO]:
        yield io.BytesIO(pickle.dumps(Planted()))

    reader = SimpleNamespace(
        fs=SimpleNamespace(create_stream=stream), _get_metadata_path=lambda *_: "catalogue", load_id=None
    )
    try:
        read_metadata(reader)
    except pickle.UnpicklingError:
        return False
    return True


def unpickles_objects(load_bytes: Function) -> bool:
    """Return whether an entry may name any class."""
    content = io.BytesIO()
    torch.save(Planted(), content)
    content.seek(0)
    planner = SimpleNamespace(flatten_state_dict=False, state_dict={})
    try:
        load_bytes(planner, SimpleNamespace(dest_index=SimpleNamespace(fqn="entry")), content)
    except (pickle.UnpicklingError, ValueError):
        return False
    return "entry" in planner.state_dict


def writes_no_checksum(write_item: Function) -> bool:
    """Return whether the record of an entry's place has no checksum."""
    from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms
    from torch.distributed.checkpoint.planner import WriteItemType

    item = SimpleNamespace(type=WriteItemType.BYTE_IO, index=None)
    content = io.BytesIO(b"bytes")
    written = write_item(
        _StorageWriterTransforms(), io.BytesIO(), content, item, "file", SerializationFormat.TORCH_SAVE
    )
    return not any(part in name for name in vars(written.storage_data) for part in ("crc", "checksum", "hash", "sha"))


def reads_damaged_bytes(slice_file: Function) -> bool:
    """Return whether an entry is opened although its checksum is not the one in its place."""
    place = SimpleNamespace(relative_path="file", offset=0, length=5, crc32=0, transform_descriptors=None)
    try:
        slice_file(SimpleNamespace(), io.BytesIO(b"bytes"), place)
    except ValueError:
        return False
    return True


def keeps_mark(save: Function) -> bool | None:
    """Return whether a folder that is saved to again is still marked as whole when the save begins."""
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
    """Return whether a save makes no checksum of the catalogue by default."""
    settings = inspect.signature(save).parameters
    return "verify_integrity" not in settings or settings["verify_integrity"].default is False


def lends_nothing(save: Function) -> bool:
    """Return whether rank 0 writes only its own optimizer: no object is exchanged before the save."""
    return not {"broadcast_object_list", "gather_object", "all_gather_object"} & names_in(save)


def leaves_helper(get_queue: Function) -> bool:
    """Return whether the queue's process is a plain Manager, which nothing ends with its parent."""
    return "Manager" in names_in(get_queue)


# --- the training loop ------------------------------------------------------------------------------------------------


def has_no_callbacks(_: Any) -> bool:
    """Return whether `pretrain()` takes no callbacks, so that only its functions' arguments show a run."""
    from megatron.training import training

    return not any("callback" in name for name in inspect.signature(training.pretrain).parameters)


def called_by_name(*first: str) -> Probe:
    """A probe: Megatron's loop calls the function by its name in the module, with these arguments first."""

    def probe(function: Function) -> bool | None:
        if tuple(inspect.signature(function).parameters)[: len(first)] != first:
            return None
        return any(function.__name__ in caller.__code__.co_names for caller in _functions_of_loop())

    return probe


def _functions_of_loop() -> list[FunctionType]:
    from megatron.training import training

    functions = [inspect.unwrap(one) for one in vars(training).values() if inspect.isfunction(one)]
    return [cast(FunctionType, one) for one in functions if one.__module__ == training.__name__]


def unobserved(*first: str) -> Probe:
    """A probe: there are no callbacks, and the loop calls the function as `called_by_name` says."""
    by_name = called_by_name(*first)
    return lambda function: by_name(function) if has_no_callbacks(function) else False
