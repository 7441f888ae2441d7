"""A rank of a layout: stock models with an attached drafter, by a step of Megatron's schedule, DDP and optimizer.

    torchrun --nproc-per-node 2 attached_drafter_worker.py FILE tp2-sp dense "eagle3 rows" "dspark packed"

Rank 0 writes to FILE, of every case, {what: names of tensors that differ on any rank}; test_attached_layouts.py reads
it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from attached_worker import LAYOUTS, SHARDED, batch_of, far, of_ranks, run, saving, step
from drafter_settings import LAYERS, STEPS, gradients_of_stage, settings_of, trained
from megatron.core import mpu
from megatron_single import our_model
from stock_models import draw, stock

from megatron_mtp.attach import Attached, attach
from megatron_mtp.losses.mtp_loss import own_positions


def compare(layout: str, trunk: str, cases: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Of every case, a kind of drafters and the form of its batches, what differs."""
    found = {}
    changes = LAYOUTS[layout] | ({} if trunk == "hybrid" else LAYERS)
    for name in cases:
        kind, form = name.split()
        plain, model = stock(trunk, **changes), stock(trunk, **changes)
        attached = attach(model, settings=settings_of(kind))
        for each in (plain, model):
            draw(each)
        batches, sharded = [batch_of(seed, form) for seed in (2, 3)], layout == SHARDED
        record = {}
        if trunk == "dense":
            ours = our_model(STEPS, drafter_layers=(), drafter=trained(kind), **changes)
            by_ours, by_attached = both_gradients(ours, model, attached, *batches[0])
            record["ours"] = far(by_attached, by_ours, 1e-4)
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
        expected = step([plain], batches, None, sharded=sharded)
        record["policy"] = far(step([model], batches, attached, apart=True, sharded=sharded), expected)
        record["saved"] = saving(model)
        found[name] = of_ranks(record)
    return found


def both_gradients(
    ours: Any, model: Any, attached: Attached, batch: dict[str, Any], packed: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The drafter's gradients on this rank: of the stage that `train` builds, and of the attached one."""
    own_S = own_positions(mpu.get_context_parallel_group(), batch["tokens"].size(1), packed)
    expected = gradients_of_stage(ours, model, attached.settings[0], batch, packed, own_S)
    model(batch["tokens"][:, own_S], batch["position_ids"][:, own_S], None, packed_seq_params=packed)
    attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return expected, found


if __name__ == "__main__":
    run(compare, *sys.argv[1:])
