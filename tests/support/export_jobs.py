"""Jobs (layout_jobs.py) that export a model from the memory of its ranks, with and without a checkpoint."""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from layout_jobs import JOBS, NEW_RUN, build, gather
from layouts import LAYOUTS
from megatron.training import get_args
from megatron.training.checkpointing import save_checkpoint
from safetensors.torch import load_file

from megatron_mtp.checkpoint.convert.export_hf import Export, mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.live import export_hf_weights, load_hf_weights
from megatron_mtp.checkpoint.convert.plan import parts_of
from megatron_mtp.checkpoint.convert.stream import Options

BUCKET = 20_000
"""Bytes of a bucket; a model has several times as many."""


def export(folder: Path, model_name: str, layout_name: str) -> dict[str, Any]:
    """Return what `export_hf_weights` yields on every rank and mcore-to-hf writes, and the bytes the former holds."""
    load = f"--load {folder / 'init' / 'ours' / model_name} {NEW_RUN} --moe-router-score-function sigmoid"
    model, *_ = build(model_name, LAYOUTS[layout_name], flags=load)
    args = get_args()
    before, peak = bytes_of_tensors(), 0

    def measured(*given: Any, **named: Any) -> Any:
        nonlocal peak
        peak = max(peak, bytes_of_tensors() - before)
        return broadcast(*given, **named)

    broadcast = torch.distributed.broadcast
    with mock.patch.object(torch.distributed, "broadcast", measured):
        for _ in export_hf_weights(model, args, bucket_bytes=BUCKET):
            peak = max(peak, bytes_of_tensors() - before)
    live = dict(export_hf_weights(model, args, bucket_bytes=BUCKET))
    drafts = dict(export_hf_weights(model, args, only_mtp=True))
    args.save = str(folder / "exported" / f"{model_name}-{layout_name}")
    save_checkpoint(1, model, None, None, 0)
    target, source = Path(f"{args.save}-hf"), Path(args.save)
    if torch.distributed.get_rank() == 0:
        mcore_to_hf(source, target, Options(quiet=True, workers=1), form_of(source))
    torch.distributed.barrier()
    written = load_file(target / "model.safetensors")
    rules = Export.of(source, target, form_of(source)).rules
    sizes = [sum(4 * live[one.name].numel() for rule in part for one in rule.hf) for part in parts_of(rules).values()]
    layer = max(sizes)
    differing = [name for name in written if name not in live or not torch.equal(live[name], written[name])]
    differing += [name for name in {**live, **drafts} if name not in written]
    if args.num_experts is None:  # without arguments; the folder has a router bias that the model lacks
        alike = dict(export_hf_weights(model, like=target))
        differing += [name for name in written if not torch.equal(alike[name], written[name])]
        other = {name: 2 * value for name, value in written.items()}
        load_hf_weights(model[0], other.items(), like=target)
        taken = dict(export_hf_weights(model, like=target))
        differing += [name for name in written if not torch.equal(taken[name], other[name])]
    differing += [name for name in drafts if not torch.equal(drafts[name], written[name])]
    return {
        "differing": gather(differing),
        "peak": gather(peak),
        "most": BUCKET + layer,
        "bytes": sum(value.numel() * value.itemsize for value in written.values()),
        "names": sorted(written),
        "drafts": sorted(drafts),
    }


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors in this process, counting shared memory once."""
    held = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter):
            held[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(held.values())


JOBS["export"] = export
