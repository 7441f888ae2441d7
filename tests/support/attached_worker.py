"""One rank: train stock models with attached MTP layers through Megatron's schedule, DDP and optimizer.

    torchrun --nproc-per-node 2 attached_worker.py FILE tp2-sp dense "tied adopted rows"

For every case, rank 0 writes to FILE {comparison: names of tensors that differ on any rank}. test_attached_layouts.py
reads it. Every rank compares its own parts of tensors; weights depend only on their names.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.utils import unwrap_model
from megatron_single import make_batch, megatron_name, our_model, relative_difference
from stock_models import KINDS, PACKED, VIRTUAL, chunks, draw, packed_batch
from torch import Tensor

from megatron_mtp.attach import Attached, attach
from megatron_mtp.losses.mtp_loss import logits_and_states, mtp_loss
from megatron_mtp.losses.stage_loss import own_positions
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.parameter_group import get_mtp_optimizer

prepare()

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
    "pp2-vpp2": {
        **{"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, VIRTUAL: 2, "num_layers": 4},
        **{"overlap_p2p_comm": True, "batch_p2p_comm": False},
    },
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "dp2-sharded": {},
    "ep2": {"expert_model_parallel_size": 2},
}
SHARDED = "dp2-sharded"
"""Layout with the distributed optimizer, where a rank only has the reduced gradients of its own slices. No gradient
clipping: additional parameters shift the slices, and so change the summation order of the norm.
"""
APART = MTPConfig(mtp_train_only=True)
Compare = Callable[[str, str, Sequence[str]], dict[str, dict[str, list[str]]]]
WEIGHT = 0.3
EMBEDDING, HEAD = "embedding.word_embeddings", "output_layer"


def compare(layout: str, kind: str, cases: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the differences of every case: tied or untied head, new or adopted MTP layers, and batch format."""
    found, rounding = {}, 1e-4 if kind == "hybrid" else 1e-5  # gradients of decays are small sums of large terms
    for name in cases:
        head, origin, form = name.split()
        tied, own = head == "tied", 2 if origin == "adopted" else None
        build = partial(chunks, kind, tied, **LAYOUTS[layout])
        plain, model, joint, riding = build(), build(depths=own), build(depths=own), build(depths=own)
        for each in model:
            draw(each, tied)
        attached = attach(model, None if own else 2, APART)
        record = {"copies": [wrong for each in model for wrong in copies(each, tied, bool(own))]}
        every = attach(joint, 2), attach(riding, 2, weight=WEIGHT)
        for each in (*plain, *model, *joint, *riding):
            draw(each, tied)
        batches = [batch_of(seed, form) for seed in (2, 3)]
        sharded = layout == SHARDED
        expected = step(plain, batches, None, sharded=sharded)
        is_later = mpu.get_pipeline_model_parallel_rank() > 0
        if tied and own and is_later:  # Megatron's block uses the embedding's copy as its head
            expected = {name.replace(HEAD, EMBEDDING): value for name, value in expected.items()}
        record["trunk"] = far(step(model, batches, attached, apart=True, sharded=sharded), expected)
        if sharded:
            found[name] = of_ranks(record)
            continue
        together = step(joint, batches, every[0])
        record["weight"] = far(step(riding, batches, every[1]), together, rounding, "gradient of ")
        if own and layout == "cp2":
            if kind != "moe":  # Megatron's MTP also routes tokens outside of the document
                theirs, policy = build(depths=own), build(depths=own)
                carrying = attach(policy, weight=WEIGHT)
                for each in (*theirs, *policy):
                    draw(each, tied)
                masked = [with_even_mask(*batch) for batch in batches]
                wanted = step(theirs, masked, None, policy=True)
                record["mask"] = far(step(policy, masked, carrying, policy=True), wanted, rounding, "gradient of ")
            asked, carried = (build(depths=own, calculate_per_token_loss=True) for _ in range(2))
            attachments = attach(asked, 2), attach(carried, weight=WEIGHT)
            for each in (*asked, *carried):
                draw(each, tied)
            wanted, found_now = (
                step(each, batches, of) for each, of in zip((asked, carried), attachments, strict=True)
            )
            record["per token"] = far(found_now, wanted, rounding, "gradient of ")
        if kind in KINDS and len(model) == 1:
            ours = our_model(2, tied, **KINDS[kind], **LAYOUTS[layout])
            draw(ours, tied)
            wanted = {renamed(key, together): value for key, value in step([ours], batches, None, ours=True).items()}
            record["ours"] = far(together, wanted, 1e-6, "gradient of ")
            record["changed"] = [] if far(together, expected, 1e-3) else ["nothing"]
        record["saved"] = [wrong for each in model for wrong in saving(each)]
        found[name] = of_ranks(record)
    return found


def of_ranks(record: dict[str, list[str]]) -> dict[str, list[str]]:
    return {what: sorted({one for rank in gather(names) for one in rank}) for what, names in record.items()}


def copies(model: Any, tied: bool, adopted: bool) -> list[str]:
    """Return faults of the last stage's embedding copy, which `attach` creates if it is missing."""
    weights = dict(model.named_parameters())
    copy = weights.get("embedding.word_embeddings.weight")
    if model.pre_process or adopted or not model.post_process:
        return []
    if tied:
        return [] if copy is None else ["a second copy"]
    assert copy is not None
    given = copy.detach().clone()
    draw(model, tied)
    return [] if torch.equal(given, copy) else ["not the first stage's"]


def saving(model: Any) -> list[str]:
    try:
        model.sharded_state_dict()
    except AssertionError as error:
        return [f"AssertionError: {error}"[:60]]
    return []


def renamed(name: str, found: dict[str, Tensor]) -> str:
    """Return our name for a tensor of a stock model, where the last stage's copy of a tied embedding is the head."""
    name = megatron_name(name)
    return name if name in found else name.replace(EMBEDDING, HEAD)


def far(found: dict[str, Tensor], expected: dict[str, Tensor], rounding: float = 0, prefix: str = "") -> list[str]:
    return [
        name
        for name, value in expected.items()
        if name.startswith(prefix)
        and (relative_difference(found[name], value) > rounding if rounding else not torch.equal(found[name], value))
    ]


def batch_of(seed: int, form: str) -> tuple[dict[str, Any], Any]:
    seed += 10 * mpu.get_data_parallel_rank()
    batch = make_batch(2, seed=seed) | {"attention_mask": None}
    return packed_batch(batch) if form == "packed" else (batch, None)


def with_even_mask(batch: dict[str, Any], packed: Any) -> tuple[dict[str, Any], Any]:
    """Mask tokens so that both context-parallel ranks have the same number of targets at every depth.

    Megatron's own MTP averages over each rank's targets, and then over the ranks. Depth d has target t at position t -
    d - 1; for the last token of a chunk of four or more, that is in the same chunk.
    """
    start, chunk = (0, 4) if packed is None else (PACKED[-2], (PACKED[-1] - PACKED[-2]) // 4)
    place_S = torch.arange(batch["tokens"].size(1)) - start
    mask_S = ((place_S >= 0) & (place_S % chunk == chunk - 1)).float()
    return batch | {"loss_mask": mask_S.expand_as(batch["loss_mask"])}, packed


def step(
    inner: list[Any],
    batches: list[Any],
    attached: Attached | None,
    ours: bool = False,
    apart: bool = False,
    sharded: bool = False,
    policy: bool = False,
) -> dict[str, Tensor]:
    """Return logits, gradients (unless sharded) and weights after one step of a model's chunks, by name.

    If `policy`, the forward pass gets a loss mask but no labels.
    """
    destroy_moe_metrics_tracker()
    of_buffers = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    model = [DistributedDataParallel(each.config, of_buffers, each) for each in inner]
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, clip_grad=float(not sharded), weight_decay=0.0, use_distributed_optimizer=sharded
    )
    make = partial(get_mtp_optimizer, clip_grad=1.0) if apart and not sharded else get_megatron_optimizer
    optimizer = make(settings, model)
    for each in inner:
        each.config.finalize_model_grads_func, each.config.grad_scale_func = finalize_model_grads, None
    logits: dict[str, Tensor] = {}
    torch.manual_seed(7)
    for each in model:
        each.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, attached, ours, policy, logits),
        data_iterator=[iter(batches) for _ in model] if len(model) > 1 else iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=batches[0][0]["tokens"].size(1),
        micro_batch_size=len(batches[0][0]["tokens"]),
        forward_only=False,
    )
    named = {f"{name} ({number})": each for number, one in enumerate(inner) for name, each in one.named_parameters()}
    found = {} if sharded else {f"gradient of {name}": each.main_grad.clone() for name, each in named.items()}
    optimizer.step()
    return {**logits, **found, **{name: each.detach().clone() for name, each in named.items()}}


def forward_step(
    attached: Attached | None, ours: bool, policy: bool, kept: dict[str, Tensor], data: Iterator[Any], model: Any
) -> tuple[Any, Any]:
    """Run a microbatch: the trunk's loss from logits, the MTP loss by a call, or from labels in the forward pass."""
    batch, packed = next(data)
    group = mpu.get_context_parallel_group()
    own_S = own_positions(group, batch["tokens"].size(1), packed)
    here = {name: value[:, own_S] for name, value in batch.items() if torch.is_tensor(value) and value.dim() == 2}
    rides = attached is not None and attached.weight is not None and not policy
    extra: dict[str, Any] = {} if packed is None else {"packed_seq_params": packed}
    if rides:
        extra |= {"labels": here["labels"], "loss_mask": here["loss_mask"]}
    if policy:
        extra["loss_mask"] = here["loss_mask"]
    if ours:
        extra["output_processor"] = logits_and_states
    made = model(here["tokens"], here["position_ids"], None, **extra)
    if attached is not None and attached.weight is None:  # forward pass of a reference policy
        with torch.no_grad():
            model(here["tokens"], here["position_ids"], None, **extra)

    def loss(made: Any) -> tuple[Any, ...]:
        logits_BSV, states_SBH = made if ours else (made, None)
        nats_BS = logits_BSV
        if not rides:
            kept[f"logits {len(kept)}"] = logits_BSV.detach().clone()
            logits_SBV = logits_BSV.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            nats_BS = unwrap_model(model).compute_language_model_loss(here["labels"], logits_SBV)
        per_token = unwrap_model(model).config.calculate_per_token_loss
        given = batch["tokens"], batch["labels"], batch["loss_mask"]
        if per_token:
            total = (nats_BS * here["loss_mask"]).sum()
            if not rides:
                assert attached is not None
                total = total + WEIGHT * attached.loss(*given, normalizer=1.0).loss
            return total, here["loss_mask"].sum().int(), {}
        total = (nats_BS * here["loss_mask"]).sum() / batch["loss_mask"].sum()
        if ours:
            total = total + WEIGHT * mtp_loss(states_SBH, model, *given, packed_seq_params=packed).loss
        elif attached is not None and attached.weight is None:
            total = total + WEIGHT * attached.loss(*given).loss
        return total, {}

    return made, loss


def gather(value: Any) -> list[Any]:
    """Gather a value from every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def run(compared: Compare, file: str, layout: str, kind: str, *cases: str) -> None:
    """Initialize the ranks, compare, and write the result."""
    alone: dict[str, Any] = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **({} if "RANK" in os.environ else alone))
    sizes = {name: LAYOUTS[layout][name] for name in SIZES if name in LAYOUTS[layout]}
    mpu.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(0)
    found = compared(layout, kind, cases)
    if torch.distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", VIRTUAL),
)

if __name__ == "__main__":
    run(compare, *sys.argv[1:])
