"""Jobs: build, train, save or load a model with Megatron's own machinery.

    torchrun --nproc-per-node 2 layout_worker.py FOLDER train/tied-d1/tp2

Rank 0 writes FOLDER/records/<job>.pt: losses, and whole tensors assembled from all ranks. test_layouts.py and
test_interop.py compare them.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import numpy
import torch
from layout_batches import MICROBATCHES, ROWS, SEQUENCE, VOCABULARY, microbatches
from layouts import LAYOUTS, MODELS, SINGLE, Layout, sources
from megatron.core import mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args, get_timers, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.initialize import initialize_megatron
from megatron.training.training import evaluate, train_step

from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.training import checks
from megatron_mtp.training.arguments import mtp_config_from_args, parse_checked_args, set_machine_flags
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import Metrics
from megatron_mtp.training.parameter_group import mtp_grad_norm
from megatron_mtp.training.run import get_embedding_ranks, join_single_process, observed

ON_CPU = prepare()

COMMON = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size {ROWS["stream"]} --global-batch-size {ROWS["stream"] * MICROBATCHES}
    --train-iters 10 --eval-interval 10 --lr 1e-2 --clip-grad 1.0 --adam-eps 1e-3
    --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8
"""
PER_TOKEN = {"embedding.word_embeddings.weight", "output_layer.weight"}
"""Keys of tensors with one row per token."""

NEW_RUN = "--finetune --no-load-optim --no-load-rng"


def init(folder: Path, model_name: str, block: str) -> None:
    """Save new weights of a model as FOLDER/init/<block>/<model>, with norms that differ from 1.

    New Gated DeltaNet layers keep only e^-1 to e^-20 of their state from one position to the next, so gradients of
    their decays would be rounding errors; here they keep most of it.
    """
    model, *_ = build(model_name, LAYOUTS[SINGLE], block)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model[0].named_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
            if name.endswith("self_attention.A_log"):
                parameter.sub_(4)
    get_args().save = str(folder / "init" / block / model_name)
    save_checkpoint(1, model, None, None, 0)


def resave(folder: Path, model_name: str, layout_name: str, router: str = "softmax") -> None:
    """Save the weights of `init` in another layout as FOLDER/resaved/<model>-<layout>."""
    load = f"--load {folder / 'init' / 'ours' / model_name} {NEW_RUN} --moe-router-score-function {router}"
    model, *_ = build(model_name, LAYOUTS[layout_name], flags=load)
    get_args().save = str(folder / "resaved" / f"{model_name}-{layout_name}")
    save_checkpoint(1, model, None, None, 0)


def train(folder: Path, model_name: str, layout_name: str, fault: str = "") -> dict[str, Any]:
    """Train one step from the weights of `init`, and save as FOLDER/trained/<model>-<layout>."""
    start = folder / "init" / "ours" / model_name
    model, optimizer, scheduler = build(
        model_name, LAYOUTS[layout_name], flags=f"--load {start} {NEW_RUN}", fault=fault
    )
    record = evaluation(model, MODELS[model_name].batches, folder / "metrics" / f"{model_name}-{layout_name}")
    record |= one_step(model, optimizer, scheduler, MODELS[model_name].batches)
    if not fault:
        get_args().save = str(folder / "trained" / f"{model_name}-{layout_name}")
        save_checkpoint(1, model, optimizer, scheduler, 0)
    return record


def move(folder: Path, model_name: str, source: str, target: str) -> dict[str, Any]:
    """Load in the target layout what `train` saved in the source layout, optimizer included, and take the next step."""
    load_flags = f"--load {folder / 'trained' / f'{model_name}-{source}'} --no-load-rng"
    model, optimizer, scheduler = build(model_name, LAYOUTS[target], flags=load_flags)
    return whole_tensors(model, "loaded") | one_step(model, optimizer, scheduler, MODELS[model_name].batches)


def load(folder: Path, model_name: str, layout_name: str) -> dict[str, Any]:
    """Load in one layout what `train` saved in every layout. Return {source: weights that differ after loading}."""
    model, *_ = build(model_name, LAYOUTS[layout_name], flags=NEW_RUN)
    differing = {}
    for source in sources(model_name):
        with torch.no_grad():
            for parameter in (each for chunk in model for each in chunk.parameters()):
                parameter.fill_(float("nan"))
        get_args().load = str(folder / "trained" / f"{model_name}-{source}")
        load_checkpoint(model, None, None)
        loaded = whole_tensors(model, "weights")
        if torch.distributed.get_rank() > 0:
            continue
        saved = torch.load(folder / "records" / f"train-{model_name}-{source}.pt")["weights"]
        differing[source] = [name for name in saved if not torch.equal(loaded["weights"][name], saved[name])]
        differing[source] += [f"copies of {name}" for name, far in loaded["weights apart"].items() if far]
    return {"differing": differing}


def forward(folder: Path, model_name: str, block: str, source: str) -> dict[str, Any]:
    """Return losses of one microbatch with our block or Megatron's, from the weights that `source` saved."""
    load = folder / "init" / source / model_name
    model, *_ = build(model_name, LAYOUTS[SINGLE], block, f"--load {load} {NEW_RUN}")
    losses = our_losses(model[0]) if block == "ours" else megatron_losses(model[0])
    return {"losses": losses, **whole_tensors(model, "weights")}


def save_entries(folder: Path, model_name: str, layout_name: str, block: str) -> dict[str, Any]:
    """Check that the entries of a checkpoint can be created on every rank. Return the errors by rank."""
    model, *_ = build(model_name, LAYOUTS[layout_name], block)
    try:
        unwrap_model(model[0]).sharded_state_dict()
        error = None
    except AssertionError as assertion:
        error = f"AssertionError: {assertion}"
    return {"errors": gather(error)}


JOBS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "init": init,
    "resave": resave,
    "train": train,
    "move": move,
    "load": load,
    "forward": forward,
    "save_entries": save_entries,
}


def build(
    model_name: str, layout: Layout, block: str = "ours", flags: str = "", fault: str = ""
) -> tuple[list[torch.nn.Module], Any, Any]:
    """Return model chunks, optimizer and scheduler as `pretrain()` creates them; `block` is 'ours' or 'megatron'."""
    given = MODELS[model_name]
    command_line = (
        f"{COMMON} {f'--mtp-num-layers {given.depths}' if given.depths else ''} {given.attention} {given.flags} "
        f"{layout.command_line(given.depths)} {flags}"
    )
    if given.frozen and "--load" in flags:
        command_line += " --mtp-train-only"
    sys.argv = ["layout_worker.py", *command_line.split()]
    set_machine_flags(sys.argv, ON_CPU)
    with mock.patch.object(checks, "checkpoint_exists", return_value=True) if not given.depths else nullcontext():
        args, model_config = parse_checked_args(cpu.installed())  # `init` draws a drafter together with its trunk
    args.reads_chats = given.packed  # batches are created here
    if given.exact:  # Megatron does not clip gradients in float64
        model_config.transformer.params_dtype = model_config.transformer.pipeline_dtype = torch.float64
    initialize_megatron(get_embedding_ranks=FAULTS.get(fault, get_embedding_ranks))
    if block == "megatron":
        model_config = gpt_config_from_args(args)
    container = pretrain_cfg_container_from_args(args, model_config)
    args.curr_iteration = 0
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with observed(Metrics(None), settings=mtp_config_from_args(args)):
        return training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder, cfg_container=container, pg_collection=groups
        )


FAULTS: dict[str, Callable[[list[int]], list[int]]] = {"no-embedding-group": lambda pipeline_ranks: pipeline_ranks[:1]}


def one_step(model: list[torch.nn.Module], optimizer: Any, scheduler: Any, batches: str) -> dict[str, Any]:
    """Run Megatron's training step; read gradients between the backward pass and the optimizer."""
    config = get_model_config(model[0])
    config.grad_scale_func, config.timers = optimizer.scale_loss, get_timers()
    config.finalize_model_grads_func = finalize_model_grads
    record: dict[str, Any] = {}
    optimizer_step = optimizer.step

    def read_gradients_and_step() -> Any:
        complete_gradients(model)
        with gradients_as_weights(model):
            record.update(whole_tensors(model, "gradients"))
        return optimizer_step()

    optimizer.step = read_gradients_and_step
    forward_step = step_of_run(Metrics(None))
    data = own_microbatches(batches, len(model))
    forward_backward = get_forward_backward_func()
    losses, *_, grad_norm, _, _ = train_step(
        forward_step,
        data if len(model) > 1 else data[0],
        model,
        optimizer,
        scheduler,
        config,
        forward_backward,
        iteration=0,
    )
    of_ranks = gather({name: value.item() for name, value in losses.items()})
    record |= {"losses": next(filter(None, reversed(of_ranks))), "grad_norm": float(grad_norm)}
    record["mtp_grad_norm"] = mtp_grad_norm(optimizer)
    return record | whole_tensors(model, "weights")


def evaluation(model: list[torch.nn.Module], batches: str, folder: Path) -> dict[str, Any]:
    """Return losses and acceptance of the global batch, as written after every evaluation."""
    metrics, data = Metrics(folder), own_microbatches(batches, len(model))
    evaluate(
        step_of_run(metrics),
        data if len(model) > 1 else data[0],
        model,
        None,
        get_model_config(model[0]),
        non_loss_data_func=metrics.end_evaluation,
        eval_iters=1,
    )
    torch.distributed.barrier()
    row = json.loads((folder / "metrics.jsonl").read_text())
    return {"evaluation": {name: value for name, value in row.items() if name != "split"}}


def step_of_run(metrics: Metrics) -> ForwardStep:
    return ForwardStep(mtp_config_from_args(get_args()), metrics)


def own_microbatches(kind: str, chunks: int) -> list[RerunDataIterator | None]:
    """Return this data-parallel rank's microbatches, in the order of Megatron's sampler, for every model chunk.

    Only the first tensor-parallel rank reads data.
    """
    if mpu.get_tensor_model_parallel_rank() != 0:
        return [None] * chunks
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    return [RerunDataIterator(iter(microbatches(kind)[rank::ranks])) for _ in range(chunks)]


def our_losses(model: torch.nn.Module) -> dict[str, float]:
    output, _ = step_of_run(Metrics(None))(iter(microbatches("stream")), model)
    of_depths = enumerate(output.heads[0].depths, start=1)
    sums = {"lm loss": output.main} | {f"mtp_{depth} loss": sums for depth, sums in of_depths}
    return {name: (value.total / value.tokens).item() for name, value in sums.items()}


def megatron_losses(model: torch.nn.Module) -> dict[str, float]:
    """Return the losses that Megatron's own MTP leaves in a tracker."""
    batch = microbatches("stream")[0]
    labels, loss_mask = batch.pop("labels"), batch.pop("loss_mask")
    MTPLossLoggingHelper.tracker.clear()
    losses_BS = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels, loss_mask=loss_mask
    )
    losses = {"lm loss": ((losses_BS * loss_mask).sum() / loss_mask.sum()).item()}
    depth_losses = MTPLossLoggingHelper.tracker["loss_values"].tolist()
    return losses | {f"mtp_{depth} loss": loss for depth, loss in enumerate(depth_losses, start=1)}


def complete_gradients(model: list[torch.nn.Module]) -> None:
    """Gather all gradient slices: with the distributed optimizer a rank only has its own reduced slices."""
    for chunk in model:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                slices = shard_buffer(bucket.grad_data, group.size())
                own = slices[group.rank()].clone()
                bucket.grad_data.fill_(float("nan"))
                torch.distributed.all_gather(slices, own, group=group)


@contextmanager
def gradients_as_weights(model: list[torch.nn.Module]) -> Iterator[None]:
    """Replace every parameter's value by its gradient, so that code for sharded weights works for gradients.

    A frozen parameter has no gradient, which counts as zero.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
    yield
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight


@dataclass(frozen=True)
class Piece:
    """The part of a whole tensor that one rank holds; arrays pickle faster than tensors."""

    key: str
    shape: tuple[int, ...]
    where: tuple[int | slice, ...]
    data: numpy.ndarray


def whole_tensors(model: list[torch.nn.Module], name: str) -> dict[str, Any]:
    """Return on rank 0 every tensor of the model, assembled from all ranks, by checkpoint key, as {name: tensors}.

    `<name> apart` holds, by key, the largest difference between ranks that hold the same part, relative to the whole.
    Other ranks return no tensors. Vocabulary padding is left out, since its size depends on the layout; gradients must
    be zero there.
    """
    entries: dict[str, Any] = {
        str(index): unwrap_model(chunk).sharded_state_dict() for index, chunk in enumerate(model)
    }
    apply_factories(entries)
    own = [
        Piece(entry.key, tuple(entry.global_shape), entry.global_slice(), entry.data.detach().numpy())
        for entry in nested_values(entries)
        if isinstance(entry, ShardedTensor) and entry.data.is_floating_point()  # not the list of draft tokens
    ]
    of_ranks = [list[Piece]() for _ in range(torch.distributed.get_world_size())]
    torch.distributed.gather_object(own, of_ranks if torch.distributed.get_rank() == 0 else None)
    pieces = [(each, torch.from_numpy(each.data)) for pieces in of_ranks for each in pieces]
    wholes = {each.key: torch.full(each.shape, float("nan"), dtype=data.dtype) for each, data in pieces}
    for each, data in pieces:
        wholes[each.key][each.where] = data
    missing = [key for key, whole in wholes.items() if whole.isnan().any()]
    if missing:
        raise ValueError(f"no rank holds a part of {missing}")
    apart = dict.fromkeys(wholes, 0.0)
    for each, data in pieces:
        whole = wholes[each.key]
        if not torch.equal(whole[each.where], data):
            difference = (whole[each.where] - data).abs().max() / whole.abs().max().clamp(min=1e-30)
            apart[each.key] = max(apart[each.key], difference.item())
    for key in PER_TOKEN & wholes.keys():
        if name == "gradients" and wholes[key][VOCABULARY:].any():
            raise ValueError(f"rows of {key} that pad the vocabulary have a gradient")
        wholes[key] = wholes[key][:VOCABULARY]
    return {name: wholes, f"{name} apart": apart}


def gather(value: Any) -> list[Any]:
    """Gather a value from every rank on every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def main(target: str, job: str) -> None:
    folder = Path(target)
    join_single_process()
    filesystem_async._results_queue = Queue()  # otherwise Megatron starts a process to hold it
    name, *arguments = job.split("/")
    record = JOBS[name](folder, *arguments)
    if torch.distributed.get_rank() == 0:
        file = folder / "records" / f"{job.replace('/', '-')}.pt"
        file.parent.mkdir(exist_ok=True)
        torch.save(record, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
