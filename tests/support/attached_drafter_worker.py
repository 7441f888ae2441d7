"""One rank: train stock models with an attached drafter for one step of Megatron's schedule, DDP and optimizer.

    torchrun --nproc-per-node 2 attached_drafter_worker.py FILE tp2-sp dense "eagle3 rows" "dspark packed"

For every case, rank 0 writes to FILE {comparison: names of tensors that differ on any rank}. test_attached_layouts.py
reads it.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attached_worker import LAYOUTS, SHARDED, batch_of, far, gather, of_ranks, run, saving, step
from drafter_settings import (
    DRAFTED,
    LAYERS,
    STEPS,
    gradients_of_stage,
    settings_of,
    several_heads,
    trained,
    vocabulary_in,
)
from megatron.core import mpu
from megatron_single import our_model
from stock_models import chunks, draw
from torch import Tensor

from megatron_mtp.attach import Attached, Head, attach
from megatron_mtp.checkpoint.convert.live_drafter import export_drafter_weights
from megatron_mtp.losses.stage_loss import own_positions
from megatron_mtp.spec.head import is_head

FOLDED = 1e-4
"""Float32 error of sums over one packed row under tensor parallelism. For an input with an unusual stride torch uses a
different product if the weight is trained, and `train` freezes the trunk. In float64 the error is 1e-13; with the
policy frozen too, it is 0.
"""


def compare(layout: str, trunk: str, cases: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the differences of every case, which is a kind of drafter and a batch format."""
    found, has_stages = {}, layout.startswith("pp2")
    own = Path(os.environ["OF_ONE_PROCESS"], f"rank {torch.distributed.get_rank()}")
    own.mkdir(exist_ok=True)
    changes = ({} if trunk == "hybrid" else LAYERS) | LAYOUTS[layout]
    for name in cases:
        kind, form = name.split()
        plain, model = chunks(trunk, **changes), chunks(trunk, **changes)
        several = several_heads(vocabulary_in(own))
        heads = several if kind == "several" else [Head(settings_of(kind))]
        attached = attach(model, heads=heads)
        for each in (*plain, *model):
            draw_whole(each)
        batches, sharded, record = [batch_of(seed, form) for seed in (2, 3, 4, 5)], layout == SHARDED, {}
        if trunk == "dense" and not has_stages:
            folds = layout == "tp2" and form == "packed"
            record["ours"] = far(*both_gradients(changes, model[0], attached, *batches[0]), FOLDED if folds else 0)
            if folds:
                for weight in policy_of(model[0]):
                    weight.requires_grad_(False)
                record["ours, policy frozen"] = far(*both_gradients(changes, model[0], attached, *batches[0]))
                for weight in policy_of(model[0]):
                    weight.requires_grad_(True)
        for each in (*plain, *model):
            each.zero_grad(set_to_none=True)
        attached._losses = 0  # so that all layouts draw for the same steps
        expected = step(plain, batches, None, sharded=sharded)
        made = step(model, batches, attached, apart=True, sharded=sharded)
        record["policy"] = far(made, expected)
        record["one process"] = far_from_one(made, layout, name)
        exported = {
            f"{head.called} {key}": tensor.float()
            for head in heads
            if head.settings.drafter is not None
            for key, tensor in export_drafter_weights(model, head.called)
        }
        record["exported"] = far_from_one(exported, layout, f"exported {name}")
        if has_stages:
            stage = model[-mpu.get_pipeline_model_parallel_rank()]
            first, last = (each.tolist() for each in gather(stage.embedding.word_embeddings.weight.detach()))
            record["copies"] = [] if first == last else ["the embedding of the last stage"]
        record["saved"] = [wrong for each in model for wrong in saving(each)]
        found[name] = of_ranks(record)
    return found


def policy_of(model: Any) -> list[torch.nn.Parameter]:
    return [weight for name, weight in model.named_parameters() if not is_head(name.partition(".")[0])]


def draw_whole(stage: Any) -> None:
    """Draw weights by layer numbers of the whole model instead of the stage."""
    names = {name: weight for name, weight in stage.named_parameters() if not name.startswith("decoder.layers.")}
    for layer in stage.decoder.layers:
        names |= {f"layer {layer.layer_number} {name}": weight for name, weight in layer.named_parameters()}
    draw(Namespace(named_parameters=names.items))


def far_from_one(made: dict[str, Tensor], layout: str, case: str) -> list[str]:
    """Return the heads' gradients and weights, or all tensors of an export, that differ from the run in one process."""
    kept = Path(os.environ["OF_ONE_PROCESS"]) / f"{case}.pt"
    own = {
        name.split(" (")[0]: value
        for name, value in made.items()
        if case.startswith("exported") or is_head(name.removeprefix("gradient of ").partition(".")[0])
    }
    if layout == "one":
        torch.save(own, kept)
    if not layout.startswith("pp2") or not own:
        return []
    expected: dict[str, Tensor] = torch.load(kept, weights_only=True)
    return far(own, expected, 1e-5) if own.keys() == expected.keys() else ["other tensors"]


def both_gradients(
    changes: dict[str, Any], model: Any, attached: Attached, batch: dict[str, Any], packed: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the drafters' gradients on this rank: from the attached model, and from the stage that `train` builds."""
    own_S = own_positions(mpu.get_context_parallel_group(), batch["tokens"].size(1), packed)
    expected = dict[str, Tensor]()
    for head in attached.given:
        if head.settings.drafter is not None:
            drafted = None if head.settings.mtp_draft_vocab_file is None else DRAFTED
            kind = trained(head.settings.drafter)
            ours = our_model(STEPS, drafter_layers=(), drafter=kind, drafted=drafted, **changes)
            expected |= gradients_of_stage(ours, model, head, batch, packed, own_S)
    model(batch["tokens"][:, own_S], batch["position_ids"][:, own_S], None, packed_seq_params=packed)
    model.zero_grad(set_to_none=True)
    attached._losses = 0
    attached.loss(batch["tokens"], batch["labels"], batch["loss_mask"]).loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return found, expected


if __name__ == "__main__":
    run(compare, *sys.argv[1:])
