"""Runs the ranks: a tiny model of the user's Megatron takes one step in every case, on the CPU over gloo.

    python worker.py JOB.pt FOLDER

A standalone script: it imports torch, the Megatron that comes first on PYTHONPATH, and stand_ins.py next to it. From
this package it imports only `megatron_mtp.attach`, and only to judge attached layers. Torch and Megatron are imported
once; the ranks of every layout are forked from this process. Progress goes to stdout, one JSON object per line:
{"megatron": ...} first, then {"case": I, "file": PATH} or {"case": I, "failed": SENTENCE, "in": "", "control" or
"step"}, where "in" is the part whose model was built last.

A case's file has, for the step and for a step without MTP layers (the control): the losses that Megatron logs, sums of
the main loss by rank, all gradients of the whole model by name, and the differences between copies on several ranks.
"""

import faulthandler
import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
import zlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megatron_mtp.extensions.prove import stand_ins
else:
    sys.path.insert(0, str(Path(__file__).parent))
    import stand_ins

    del sys.path[0]

GRACE = 3.0
"""Seconds that other ranks have to fail on their own after one has failed."""


# --- a tiny Megatron model -------------------------------------------------------------------------------------------


def config_of(job: dict[str, Any], case: dict[str, Any]) -> Any:
    """Return the config of a case, without the fields that this Megatron lacks."""
    import dataclasses

    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    functional = torch.nn.functional
    settings = {**job["config"], **case["config"]}
    kind = MLATransformerConfig if settings.pop("multi_latent_attention", False) else TransformerConfig
    if kind is MLATransformerConfig:
        settings["multi_latent_attention"] = True
    activation = settings.pop("activation")
    settings["activation_func"] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "squared_relu": lambda x: functional.relu(x).square(),
    }[activation]
    dtype = torch.bfloat16 if case["in_bf16"] else torch.float32
    settings |= {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": case["in_bf16"],
        "use_cpu_initialization": True,
    }
    settings["transformer_impl"] = "local"
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in settings.items() if name in known})


def model_of(job: dict[str, Any], config: Any) -> Any:
    """Build the model of this rank."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    sizes = job["model"]
    if "pattern" in sizes:
        return hybrid_model_of(sizes, config)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    whole = spec
    if not getattr(spec, "layer_specs", None):  # stage without layers: use the last layer's
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

        whole = get_gpt_decoder_layer_specs(config, False, config.normalization)[-1]
    of_mtp = get_gpt_mtp_block_spec(config, whole, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        spec,
        sizes["vocab"],
        sizes["positions"],
        **ends_of(sizes),
        mtp_block_spec=of_mtp,
    ).train()


def ends_of(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of GPTs and hybrids for embedding and output layer on this rank."""
    from megatron.core import parallel_state

    return {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": sizes["tied"],
        "position_embedding_type": sizes["position_embedding"],
        "rotary_base": sizes["rotary_base"],
        "rotary_percent": sizes["rotary_percent"],
    }


def hybrid_model_of(sizes: dict[str, Any], config: Any) -> Any:
    """Build the hybrid model of this rank, with Megatron's MTP block."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec_for_backend,
    )

    spec, pattern = stand_ins.hybrid_stack_of(config), sizes["pattern"]
    layer = stand_ins.with_stand_ins(get_mtp_layer_spec_for_backend(None, LocalSpecProvider()))
    spec.submodules.mtp_block_spec = MultiTokenPredictionBlockSubmodules([layer])
    return HybridModel(
        config,
        spec,
        sizes["vocab"],
        sizes["positions"],
        pattern if config.mtp_num_layers else pattern.partition("/")[0],
        **ends_of(sizes),
    ).train()


def attached_model_of(job: dict[str, Any], config: Any) -> tuple[Any, Any]:
    """Build the model of this rank without its own MTP layers, and attach those of this package."""
    from megatron_mtp.attach import attach

    depths, config.mtp_num_layers = config.mtp_num_layers, None
    model, block = model_of(job, config), job["model"].get("pattern", "/own").split("/")[1]
    return model, attach(model, depths, weight=config.mtp_loss_scaling_factor, block=block)


def name_of(name: str, model: Any, tied: bool) -> str:
    """Return the name of a parameter in the whole model."""
    from megatron.core import parallel_state

    if name.startswith("decoder.layers."):
        own = name.split(".")[2]
        name = name.replace(own, str(model.decoder.layers[int(own)].layer_number - 1), 1)
    if found := re.search(r"local_experts\.(\d+)\.", name):
        local = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        number = int(found[1]) + local * parallel_state.get_expert_model_parallel_rank()
        name = name.replace(found[0], f"local_experts.{number}.")
    if tied and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"
    return name.replace(".transformer_layer.", ".mtp_model_layer.")


class Shards:
    """Splits weights over the tensor-parallel ranks, and joins them."""

    def __init__(self, config: Any) -> None:
        from megatron.core import parallel_state

        self.config = config
        self.rank = parallel_state.get_tensor_model_parallel_rank()
        self.ranks = parallel_state.get_tensor_model_parallel_world_size()

    def dim(self, name: str, parameter: Any) -> int | None:
        """Return the dimension that is split, or None for a replicated weight."""
        if self.ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return None
        return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")) else 0

    def blocks(self, name: str, size: int) -> list[int]:
        """Return the sizes of the parts of a dimension of this size; each part is split separately."""
        if "linear_fc1" in name and self.config.gated_linear_unit:
            return [size // 2] * 2
        if "mixer.in_proj" in name or "mixer.conv1d" in name:
            heads, groups = (
                self.config.mamba_num_heads,
                2 * [self.config.mamba_num_groups * self.config.mamba_state_dim],
            )
            inner = heads * self.config.mamba_head_dim
            return [inner, inner, *groups, heads] if "in_proj" in name else [inner, *groups]
        return [size]

    def own(self, name: str, whole: Tensor, dim: int | None) -> Tensor:
        """Return this rank's part of a weight."""
        if dim is None:
            return whole
        blocks = whole.split(self.blocks(name, whole.size(dim)), dim)
        return torch.cat([block.chunk(self.ranks, dim)[self.rank] for block in blocks], dim)

    def whole(self, name: str, parts: list[Tensor], dim: int | None) -> Tensor:
        """Join the parts of all ranks."""
        if dim is None:
            return parts[0]
        sizes = [size // self.ranks for size in self.blocks(name, parts[0].size(dim) * self.ranks)]
        return torch.cat(
            [block for blocks in zip(*(part.split(sizes, dim) for part in parts), strict=True) for block in blocks], dim
        )


def drawn(name: str, shape: list[int], centered: bool) -> Tensor:
    """Return a random weight that depends only on its name, the same in every layout."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2
    return values + 1 if "norm" in name and name.endswith("weight") and not centered else values


def fill(model: Any, shards: Shards, tied: bool) -> None:
    """Set every parameter of this rank to its part of the weight with its name."""
    with torch.no_grad():
        for own_name, parameter in model.named_parameters():
            name, shape = name_of(own_name, model, tied), list(parameter.shape)
            dim = shards.dim(name, parameter)
            if dim is not None:
                shape[dim] *= shards.ranks
            values = drawn(name, shape, model.config.layernorm_zero_centered_gamma)
            parameter.copy_(shards.own(name, values, dim))


# --- a step ----------------------------------------------------------------------------------------------------------


def step(
    job: dict[str, Any], case: dict[str, Any], ddp: Any, config: Any, attached: Any = None
) -> tuple[list[float], float]:
    """Run forward and backward of all microbatches with Megatron's schedule.

    Args:
        attached: layers that this package has attached to the model; None if the MTP layers are Megatron's own.

    Returns:
        The MTP losses that Megatron would log, and the sum of the main loss over this rank's targets; an empty list and
        0 on ranks that do not have them.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    count = case["microbatches"]
    start = count * parallel_state.get_data_parallel_rank()
    batches = job["batches"][case["batch"]][start : start + count]
    per_token, main, means = config.calculate_per_token_loss, list[float](), list[Tensor]()

    def forward(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        held, true = batch["held"], batch["true"]
        own = stand_ins.positions_of(held or [0, batch["tokens"].size(1)], ranks, rank)
        tokens, mask, labels = batch["tokens"], batch["mask"], batch["labels"]
        others = {}
        if held is not None:
            longest = max(end - begin for begin, end in pairwise(held))
            offsets, padded = (torch.tensor(one, dtype=torch.int32) for one in (true, held))
            behind = (padded, padded) if true != held else (None, None)
            others["packed_seq_params"] = PackedSeqParams("thd", offsets, offsets, *behind, longest, longest)
        out = model(
            tokens[:, own],
            batch["positions"][:, own],
            None,
            labels=None if labels is None else labels[:, own],
            loss_mask=mask[:, own],
            **others,
        )
        if attached is not None and attached.heads:
            means.append(attached.last.depth_means)

        def loss_of(out: Tensor) -> Any:
            if labels is None:
                value = torch.nn.functional.cross_entropy(
                    out[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum"
                )
                total = torch.tensor(tokens[:, 1:].numel())
            else:
                value, total = (out.float() * mask[:, own]).sum(), mask.sum()
            main.append(float(value.detach()))
            if per_token:
                return value, (total if labels is None else mask[:, own].sum()).int(), {}
            return value / total, {}

        return out, loss_of

    tracker: Any = MTPLossLoggingHelper
    tracker.tracker.clear()
    ddp.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=[ddp],
        num_microbatches=count,
        seq_length=batches[0]["tokens"].size(1),
        micro_batch_size=batches[0]["tokens"].size(0),
        forward_only=False,
    )
    logged: dict[str, Any] = {}
    if means:
        mean = torch.stack(means).mean(0)
        dist.all_reduce(mean, dist.ReduceOp.AVG, parallel_state.get_data_parallel_group())
        return mean.tolist(), sum(main)
    if parallel_state.is_pipeline_last_stage() and config.mtp_num_layers:
        tracker.track_mtp_metrics(1 / count, 0, None, None, logged)
    return [float(value) for name, value in logged.items() if re.fullmatch(r"mtp_\d+ loss", name)], sum(main)


def gradients_of(model: Any, shards: Shards, tied: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gather the gradients of the whole model on rank 0, with the differences of copies; a collective call."""
    own = []
    for own_name, parameter in model.named_parameters():
        if own_name == "output_layer.weight" and tied and hasattr(model, "embedding"):
            continue  # tied: the embedding of the MTP stage is the output weight, and this copy is unused
        name = name_of(own_name, model, tied)
        gradient = parameter.main_grad if parameter.main_grad is not None else parameter.grad
        own.append((name, shards.dim(name, parameter), shards.rank, gradient.detach().clone()))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    copies: dict[str, dict[int, list[Tensor]]] = {}
    dims: dict[str, int | None] = {}
    for name, dim, rank, gradient in (entry for of_rank in every for entry in of_rank):
        dims[name] = dim
        copies.setdefault(name, {}).setdefault(0 if dim is None else rank, []).append(gradient)
    whole, apart = {}, {}
    for name, by_rank in copies.items():
        parts = [by_rank[rank][0] for rank in sorted(by_rank)]
        whole[name] = shards.whole(name, parts, dims[name])
        size = float(whole[name].abs().max()) or 1.0
        far = max(float((one - of[0]).abs().max()) for of in by_rank.values() for one in of) / size
        if far > 1e-4:
            apart[name] = far
    return whole, apart


def run(job: dict[str, Any], case: dict[str, Any], folder: Path, file: str) -> None:
    """Run a case on this rank; rank 0 writes its file."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    tied, found = job["model"]["tied"], dict[str, Any]()
    without = {name: value for name, value in case["config"].items() if name != "pipeline_model_parallel_layout"}
    control = case | {"config": without | {"mtp_num_layers": None}}
    for kind, settings in (("control", control), ("step", case)):
        model_parallel_cuda_manual_seed(1)
        config, attached = config_of(job, settings), None
        if job["attached"] and config.mtp_num_layers:
            model, attached = attached_model_of(job, config)
        else:
            model = model_of(job, config)
        shards = Shards(config)
        fill(model, shards, tied)
        (folder / f"in-{dist.get_rank()}").write_text(kind)
        whole_model = Float16Module(config, model) if case["in_bf16"] else model
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), whole_model)
        config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, None
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, step(job, settings, ddp, config, attached))
        whole, apart = gradients_of(model, shards, tied)
        logged, main = max((one[0] for one in told), key=len), [one[1] for one in told]
        found[kind] = {"logged": logged, "main": main, "gradients": whole, "apart": apart}
    if dist.get_rank() == 0:
        centered = config.layernorm_zero_centered_gamma
        gradients = found["step"]["gradients"]
        dtype = torch.bfloat16 if case["in_bf16"] else torch.float32
        found["weights"] = {name: drawn(name, list(one.shape), centered).to(dtype) for name, one in gradients.items()}
        torch.save(found, file)


def rank_of(job: dict[str, Any], cases: list[int], rank: int, folder: Path, round_: int) -> None:
    """Run the cases of one layout, one after the other, in a forked rank."""
    from megatron.core import parallel_state

    layout = job["cases"][cases[0]]["layout"]
    sizes = {name: layout[name] for name in ("tensor", "pipeline", "context", "expert")}
    world = layout["ranks"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    meeting = folder / f"meeting-{cases[0]}-{round_}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        sizes["tensor"],
        sizes["pipeline"],
        context_parallel_size=sizes["context"],
        expert_model_parallel_size=sizes["expert"],
    )
    for number in cases:
        (folder / f"at-{rank}").write_text(str(number))
        stacks = (folder / f"stack-{rank}").open("w")
        faulthandler.dump_traceback_later(job["seconds"], file=stacks, exit=True)
        (folder / f"in-{rank}").write_text("")
        run(job, job["cases"][number], folder, str(folder / f"case-{number}.pt"))
        dist.barrier()
        faulthandler.cancel_dump_traceback_later()
        stacks.close()
        if rank == 0:
            say({"case": number, "file": str(folder / f"case-{number}.pt")})


# --- the ranks of all layouts ----------------------------------------------------------------------------------------


def say(event: dict[str, Any]) -> None:
    """Print one complete line to stdout."""
    os.write(1, (json.dumps(event) + "\n").encode())


def forked(job: dict[str, Any], cases: list[int], folder: Path, round_: int) -> tuple[int, str] | None:
    """Run the cases of a layout on its ranks. Return the case that failed, with the reason, or None."""
    ranks = job["cases"][cases[0]]["layout"]["ranks"]
    children = {}
    for rank in range(ranks):
        for kind in ("at", "stack", "error", "in"):
            (folder / f"{kind}-{rank}").unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_of(job, cases, rank, folder, round_)
                status = 0
            except BaseException as error:
                last = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__][-1:]
                place = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
                text = " ".join(str(error).split())[:200]
                (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {text}{place}")
            finally:
                os._exit(status)
        children[child] = rank
    failed, deadline = list[int](), float("inf")
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            rank = children.pop(child)
            if status:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + GRACE)
        elif time.monotonic() > deadline:
            for left in children:
                os.kill(left, 9)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    if not failed:
        return None
    return reason(folder, failed)


def reason(folder: Path, failed: list[int]) -> tuple[int, str]:
    """Return the case that failed and a sentence with the reason."""
    at = folder / f"at-{failed[0]}"
    case = int(at.read_text()) if at.exists() else -1
    for rank in failed:
        error = folder / f"error-{rank}"
        if error.exists():
            return case, f"rank {rank}: {error.read_text()}"
    for rank in failed:
        stack = folder / f"stack-{rank}"
        frames = re.findall(r'File "([^"]*megatron/core/[^"]*)", line (\d+) in (\w+)', stack.read_text())
        if frames:
            path, line, function = next((one for one in frames if "multi_token" in one[0]), frames[0])
            return case, f"rank {rank} hangs in {function} ({Path(path).name}:{line}) and was ended"
    return case, f"rank {failed[0]} ended without a message"


def main() -> None:
    """Run all cases of the job, layout by layout."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    stand_ins.stand_in()
    import megatron.core
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401  # imported once, before forking the ranks
    from megatron.core.transformer import multi_token_prediction

    stand_ins.stand_in_in_megatron()
    job, folder = torch.load(sys.argv[1], weights_only=True), Path(sys.argv[2])
    if job["attached"]:
        import megatron_mtp.attach  # noqa: F401
    version, file = megatron.core.__version__, multi_token_prediction.__file__
    say({"megatron": {"version": version, "file": file, "stand_ins": stand_ins.reasons("pattern" in job["model"])}})
    layouts: dict[str, list[int]] = {}
    for number, case in enumerate(job["cases"]):
        layouts.setdefault(case["layout"]["name"], []).append(number)
    for cases in layouts.values():
        left, round_ = cases, 0
        while left:
            stopped = forked(job, left, folder, round_)
            if stopped is None:
                break
            case, why = stopped
            case = case if case in left else left[0]
            ranks = [folder / f"in-{rank}" for rank in range(job["cases"][case]["layout"]["ranks"])]
            say({"case": case, "failed": why, "in": max(one.read_text() if one.exists() else "" for one in ranks)})
            left, round_ = left[left.index(case) + 1 :], round_ + 1


if __name__ == "__main__":
    main()
