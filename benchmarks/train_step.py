"""What a training step with MTP depths costs, against Megatron's own MTP at the same setting.

    python benchmarks/train_step.py                              this machine's defaults, D = 1, 2 and 4
    python benchmarks/train_step.py --depths 2 --repeats 40      one number of depths, more rounds
    python benchmarks/train_step.py --quick                      does it run? (the figures mean nothing)

Both sides train the same weights on the same batches, with Megatron's DDP, optimizer, schedule and `train_step`. They
differ in the model (`GPTModelBuilder` against `MTPGPTModelBuilder`) and the forward step (that of Megatron's
`pretrain_gpt.py` against `ForwardStep`, the making of the shifts included). What Megatron logs between steps is
counted for neither. Without Transformer Engine both have the same portable attention and norms in their layers. Sides
take turns step by step, so that a load from outside meets both.

The first step has to give the same loss and the same norm of the gradient on both sides, or there is no comparison and
the benchmark ends with an error.
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from megatron_mtp.platform import prepare

ON_CPU = prepare()

import torch  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: E402
from megatron.core.utils import (  # noqa: E402
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import get_args, get_timers  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args  # noqa: E402
from megatron.training.initialize import initialize_megatron, set_jit_fusion_options  # noqa: E402
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec  # noqa: E402
from megatron.training.training import (  # noqa: E402
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    get_optimizer_param_scheduler,
    train_step,
)
from torch import Tensor  # noqa: E402

from benchmarks.harness import Goal, allocated_peak, compare, count, hardware, interleave, report, resident_peak, table  # noqa: E402
from megatron_mtp.config import MTPConfig  # noqa: E402
from megatron_mtp.model.build import MTPGPTModelConfig  # noqa: E402
from megatron_mtp.model.portable import with_portable_modules  # noqa: E402
from megatron_mtp.training.arguments import parse_checked_args, set_machine_flags  # noqa: E402
from megatron_mtp.training.batches import holds_mtp_depths  # noqa: E402
from megatron_mtp.training.forward_step import ForwardStep  # noqa: E402
from megatron_mtp.training.metrics import Metrics  # noqa: E402
from megatron_mtp.training.run import join_single_process  # noqa: E402

GOAL = 1.05
"""A step of ours costs at most so many steps of Megatron's."""

OURS, THEIRS, THEIRS_AGAIN = "megatron-mtp", "Megatron", "Megatron again"
BATCHES = 4
SAME = {"fp32": 1e-3, "bf16": 3e-2}
"""Relative difference of loss and gradient norm that rounding explains."""


@dataclass(frozen=True)
class Sizes:
    """Model and batch of both sides."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    dtype: str


DEFAULTS = {
    "cpu": Sizes(192, 4, 6, 256, 16, 1024, "fp32"),
    "cuda": Sizes(2048, 8, 16, 2048, 4, 32768, "bf16"),
    "quick": Sizes(32, 1, 2, 32, 2, 256, "fp32"),
}
REPEATS = {"cpu": 15, "cuda": 50, "quick": 2}

MEGATRON_FLAGS = (
    "--lr 1e-4 --train-iters 1000000 --eval-interval 1000000 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --mock-data "
    "--tokenizer-type NullTokenizer --num-workers 0"
)


@dataclass
class Side:
    """One of the two: a model in training, and the step that trains it."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    forward_step: Callable[..., Any]
    batches: RerunDataIterator
    iteration: int = 0

    def step(self) -> tuple[float, float]:
        """Megatron's own training step; the trunk's loss and the norm of the gradient."""
        get_args().curr_iteration = self.iteration
        losses, *_, gradient_norm, _, _ = train_step(
            self.forward_step,
            self.batches,
            self.model,
            self.optimizer,
            self.scheduler,
            get_model_config(self.model[0]),
            get_forward_backward_func(),
            self.iteration,
        )
        self.iteration += 1
        return losses["lm loss"].item(), float(gradient_norm)


def main() -> None:
    """Measure every number of depths that was asked for, and report."""
    wanted = parse(sys.argv[1:])
    sizes, repeats = resolve(wanted)
    if wanted.threads or wanted.quick:
        torch.set_num_threads(wanted.threads or 1)  # threads that wait for each other starve on a busy machine
    command = sys.argv
    set_up_megatron(sizes, max(wanted.depths))
    sys.argv = command
    results = {}
    for depths in wanted.depths:
        results[f"D={depths}"] = measure(depths, sizes, repeats, wanted.self_check)
        print(f"> D={depths}: {results[f'D={depths}']}", flush=True)  # a run that is cut short has said this much
    torch.distributed.destroy_process_group()
    report(
        "train_step",
        hardware(ON_CPU),
        {"sizes": asdict(sizes), "repeats": repeats, **results},
        [Goal(f"ours / Megatron's own MTP, {name}", result["ratio"], GOAL) for name, result in results.items()],
        [_table(results)],
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the process with one sentence and status 2 where a number makes no sense."""
    parser = argparse.ArgumentParser(
        description="Time and memory of a training step with MTP depths, against Megatron's own MTP.",
        epilog="example: python benchmarks/train_step.py --depths 1 2 --hidden-size 256 --repeats 20",
    )
    for name, kind in Sizes.__annotations__.items():
        values = ", ".join(f"{getattr(sizes, name)} ({where})" for where, sizes in DEFAULTS.items())
        choices = tuple(SAME) if name == "dtype" else None
        parser.add_argument("--" + name.replace("_", "-"), type=kind, choices=choices, help=f"default: {values}")
    parser.add_argument("--depths", type=count, nargs="+", default=[1, 2, 4], metavar="D", help="default: 1 2 4")
    values = ", ".join(f"{repeats} ({where})" for where, repeats in REPEATS.items())
    parser.add_argument("--repeats", type=count, help=f"timed rounds, one step of each side; default: {values}")
    parser.add_argument(
        "--self-check", action="store_true", help="time a second copy of Megatron's side too: the noise"
    )
    parser.add_argument("--threads", type=count, help="threads of the CPU; default: all cores (with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    return parser.parse_args(argv)


def resolve(wanted: argparse.Namespace) -> tuple[Sizes, int]:
    """What was asked for; the rest as this machine's defaults have it, or those of --quick."""
    where = "quick" if wanted.quick else "cpu" if ON_CPU else "cuda"
    given = {name: getattr(wanted, name) for name in Sizes.__annotations__}
    chosen = asdict(DEFAULTS[where]) | {name: value for name, value in given.items() if value is not None}
    return Sizes(**chosen), wanted.repeats or REPEATS[where]


def set_up_megatron(sizes: Sizes, depths: int, *more: str) -> None:
    """Megatron's global arguments and process groups, as a run of `pretrain_gpt.py` with `more` flags has them."""
    join_single_process()
    flags = {name: value for name, value in asdict(sizes).items() if name not in ("vocab_size", "dtype")}
    flags |= {
        "vocab_size": sizes.vocab_size - 1,  # NullTokenizer adds its end of document
        "max_position_embeddings": sizes.seq_length,
        "global_batch_size": sizes.micro_batch_size,
        "mtp_num_layers": depths,
    }
    sys.argv = [sys.argv[0], *MEGATRON_FLAGS.split(), *more]
    for name, value in flags.items():
        sys.argv += ["--" + name.replace("_", "-"), str(value)]
    if sizes.dtype == "bf16":
        sys.argv.append("--bf16")
    set_machine_flags(sys.argv, ON_CPU)
    parse_checked_args()
    initialize_megatron()
    set_jit_fusion_options(tp_size=get_args().tensor_model_parallel_size)


def measure(depths: int, sizes: Sizes, repeats: int, self_check: bool) -> dict[str, Any]:
    """Time and memory of both sides with D depths."""
    get_args().mtp_num_layers = depths
    MTPLossLoggingHelper.tracker = {}  # it keeps the number of depths that it saw first
    sides = build_sides(self_check)
    first = check_same({name: side.step() for name, side in sides.items()}, SAME[sizes.dtype])
    steps = {name: side.step for name, side in sides.items()}
    spent = interleave(steps, repeats, synchronize=torch.cuda.synchronize)
    wall = {name: [one.wall for one in rounds] for name, rounds in spent.items()}
    cpu = {name: [one.cpu for one in rounds] for name, rounds in spent.items()}
    result: dict[str, Any] = {
        **asdict(compare(wall[OURS], wall[THEIRS])),
        "seconds": {name: statistics.median(values) for name, values in wall.items()},
        "cpu_seconds": asdict(compare(cpu[OURS], cpu[THEIRS])),
        "allocated_peak": {name: asdict(allocated_peak(steps[name], ON_CPU)) for name in (OURS, THEIRS)},
        "resident_peak": {name: asdict(resident_peak(steps[name], ON_CPU)) for name in (OURS, THEIRS)},
        "first_step": first,
    }
    if self_check:
        result["self_check"] = asdict(compare(wall[THEIRS_AGAIN], wall[THEIRS]))
        result["self_check"]["cpu_seconds"] = asdict(compare(cpu[THEIRS_AGAIN], cpu[THEIRS]))
    return _rounded(result)


def build_sides(self_check: bool) -> dict[str, Side]:
    """Both sides with the same weights, each with its own optimizer and its own walk through the batches."""
    dataset = make_batches(BATCHES)
    theirs = build_side(GPTModelConfig, megatron_forward_step, dataset)
    ours = build_side(MTPGPTModelConfig, ForwardStep(MTPConfig(), Metrics(None)), dataset, like=theirs)
    sides = {OURS: ours, THEIRS: theirs}
    if self_check:
        sides[THEIRS_AGAIN] = build_side(GPTModelConfig, megatron_forward_step, dataset, like=theirs)
    return sides


def build_side(
    model_config: type[GPTModelConfig],
    forward_step: Callable[..., Any],
    dataset: list[dict[str, Tensor]],
    like: Side | None = None,
    settings: MTPConfig | None = None,
) -> Side:
    """Model, DDP, optimizer and learning rate, as `pretrain()` sets them up; `like` gives the weights."""
    args = get_args()
    config = gpt_config_from_args(args, model_config_cls=model_config)
    if settings is not None:
        config.mtp = settings
    if model_config is GPTModelConfig and config.transformer.transformer_impl == "local":
        config.transformer_layer_spec = with_portable_modules(default_layer_spec(config, None), config.transformer)
    model = config.get_builder_cls()(config).build_distributed_models(
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(), ddp_config=get_megatron_ddp_config(args)
    )
    if like is not None:
        copy_weights(like.model[0], model[0])
    optimizer_config, overrides = get_megatron_optimizer_config(args)
    optimizer_config.timers = get_timers()
    optimizer = get_megatron_optimizer(optimizer_config, model, config_overrides=overrides)
    schedule = get_model_config(model[0])
    schedule.grad_scale_func = optimizer.scale_loss
    schedule.finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        chunk.train()
    batches = RerunDataIterator(itertools.cycle(dataset))
    return Side(model, optimizer, get_optimizer_param_scheduler(optimizer), forward_step, batches)


@torch.no_grad()
def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Megatron's `mtp_model_layer` is our `tf_layer`; every other name is the same."""
    weights = {_our_name(name): weight for name, weight in source.named_parameters()}
    for name, weight in target.named_parameters():
        weight.copy_(weights.pop(_our_name(name)))
    if weights:
        raise RuntimeError(f"the two models differ; only Megatron's has {sorted(weights)}.")


def _our_name(name: str) -> str:
    return name.replace(".mtp_model_layer.", ".tf_layer.")


def check_same(first: dict[str, tuple[float, float]], tolerance: float) -> dict[str, dict[str, float]]:
    """Loss and gradient norm of the first step, by side; raises RuntimeError where the sides computed other things."""
    for mine, reference, what in zip(first[OURS], first[THEIRS], ("loss", "gradient norm"), strict=True):
        if not math.isclose(mine, reference, rel_tol=tolerance):
            raise RuntimeError(
                f"the first step's {what} is {mine} here and {reference} in Megatron; the sides cannot be compared."
            )
    return {name: {"lm_loss": loss, "gradient_norm": norm} for name, (loss, norm) in first.items()}


def make_batches(count: int) -> list[dict[str, Tensor]]:
    """Random tokens in the form in which Megatron's loader hands them on, pinned for a CUDA device."""
    args = get_args()
    shape = (args.micro_batch_size, args.seq_length)
    generator = torch.Generator().manual_seed(args.seed)
    position_ids = torch.arange(args.seq_length).expand(shape).contiguous()
    later = torch.ones(args.seq_length, args.seq_length).triu(diagonal=1).bool()
    batches = []
    for _ in range(count):
        text = torch.randint(args.vocab_size, (shape[0], shape[1] + 1), generator=generator)
        batch = {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape),
            "position_ids": position_ids,
            "attention_mask": later.expand(shape[0], 1, *later.shape).contiguous(),
        }
        batches.append({name: value.pin_memory() for name, value in batch.items()})
    return batches


def megatron_forward_step(data_iterator: Iterator[Any], model: torch.nn.Module) -> tuple[Tensor, Any]:
    """What Megatron's `pretrain_gpt.py` hands to `pretrain()`."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = megatron_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(megatron_loss, batch["loss_mask"])


def megatron_batch(data_iterator: Iterator[Any], vp_stage: int | None) -> dict[str, Any]:
    """Megatron's `get_batch` for a run without packing, as `ForwardStep` has it, less the depths."""
    args = get_args()
    batch: dict[str, Any] = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    batch |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"))
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=holds_mtp_depths(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def megatron_loss(loss_mask_BS: Tensor, losses_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's loss function: the masked sum, its checks, the tokens and what to log."""
    mask = loss_mask_BS.view(-1).float()
    loss = torch.sum(losses_BS.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        check = partial(get_rerun_state_machine().validate_result, result=loss, tolerance=0.0, fatal=True)
        check(rejection_func=torch.isnan, message="found NaN in local forward loss calculation")
        check(rejection_func=torch.isinf, message="found Inf in local forward loss calculation")
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def _rounded(value: Any) -> Any:
    """Four decimals say all that a timing can."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def _table(results: dict[str, dict[str, Any]]) -> str:
    """Seconds a step, their ratio, the same by round and of CPU time, the steps' peaks; the noise where asked."""
    header = (
        "depths",
        "s ours",
        "s Megatron",
        "ratio",
        "by round",
        "quartiles",
        "CPU time",
        "MiB ours",
        "MiB Megatron",
    )
    rows: list[tuple[Any, ...]] = []
    for name, result in results.items():
        peaks = [result["allocated_peak"][side]["mib"] for side in (OURS, THEIRS)]
        rows.append((name, *_cells(result, result["seconds"], OURS), *peaks))
        if "self_check" in result:
            rows.append(("noise", *_cells(result["self_check"], result["seconds"], THEIRS_AGAIN), None, None))
    return table(header, rows)


def _cells(comparison: dict[str, Any], seconds: dict[str, float], side: str) -> tuple[Any, ...]:
    low, high = comparison["paired_quartiles"]
    return (
        seconds[side],
        seconds[THEIRS],
        comparison["ratio"],
        comparison["paired_ratio"],
        f"{low:.3f} .. {high:.3f}",
        comparison["cpu_seconds"]["paired_ratio"],
    )


if __name__ == "__main__":
    main()
