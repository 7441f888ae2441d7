"""Models in training, ours and Megatron's, that run the same steps; shared by the training benchmarks.

`set_up_megatron` once, then `both` or single sides; `Side.step()` is Megatron's own training step. All sides use
Megatron's DDP, optimizer and schedule. They differ in the model (`GPTModelBuilder` against `MTPGPTModelBuilder`) and
the forward step (that of Megatron's `pretrain_gpt.py` against `ForwardStep`).
"""

import atexit
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import get_args, get_timers
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.initialize import initialize_megatron, set_jit_fusion_options
from megatron.training.models import gpt
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec, mtp_block_spec
from megatron.training.training import (
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    get_optimizer_param_scheduler,
    train_step,
)
from torch import Tensor

from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.model.arguments import MTPGPTModelConfig, config_of
from megatron_mtp.model.specs import with_portable_modules
from megatron_mtp.model.swapped import having
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training.arguments import mtp_config_from_args, parse_checked_args, set_machine_flags
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import Metrics
from megatron_mtp.training.reading_stages import holds_mtp_depths
from megatron_mtp.training.run import join_single_process

ON_CPU = prepare()

OURS, THEIRS = "megatron-mtp", "Megatron"
BATCHES = 4
SAME_IN_FLOAT32, SAME_IN_BFLOAT16 = 1e-3, 3e-2
"""Relative difference of loss and gradient norm that rounding can explain."""

Batches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Model and batch sizes of both sides."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    dtype: str


MEGATRON_FLAGS = (
    "--lr 1e-4 --train-iters 1000000 --eval-interval 1000000 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --mock-data "
    "--tokenizer-type NullTokenizer --num-workers 0"
)


@dataclass
class Side:
    """A model in training, and its training step."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    forward_step: Callable[..., Any]
    batches: RerunDataIterator
    iteration: int = 0

    def step(self) -> tuple[float, float]:
        """Run Megatron's own training step; return the trunk's loss and the gradient norm."""
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


def set_up_megatron(sizes: Sizes, depths: int | None, *more: str) -> None:
    """Set Megatron's global arguments and process groups, as in a run of `pretrain_gpt.py` with `more` flags."""
    join_single_process()
    atexit.register(leave_groups)
    of_mtp = [] if depths is None else ["--mtp-num-layers", str(depths)]
    sys.argv = [sys.argv[0], *launch_line(sizes), *of_mtp, *more]
    set_machine_flags(sys.argv, ON_CPU)
    parse_checked_args(ON_CPU)
    initialize_megatron()
    set_jit_fusion_options(tp_size=get_args().tensor_model_parallel_size)


def launch_line(sizes: Sizes) -> list[str]:
    """Return Megatron's flags for a training of this size."""
    given = asdict(sizes) | {
        "vocab_size": sizes.vocab_size - 1,  # NullTokenizer adds an end-of-document token
        "max_position_embeddings": sizes.seq_length,
        "global_batch_size": sizes.micro_batch_size,
    }
    dtype = ["--bf16"] if given.pop("dtype") == "bf16" else []
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*MEGATRON_FLAGS.split(), *words, *dtype]


def leave_groups() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def both(
    ours: Callable[[Batches, Side | None], Side],
    theirs: Callable[[Batches, Side | None], Side],
    depths: int | None,
) -> tuple[dict[str, Side], dict[str, tuple[float, float]]]:
    """Return two sides with the same weights after a first step, and its loss and gradient norm by side.

    Each has its own optimizer and iterates over the batches separately.

    Raises:
        RuntimeError: the first steps differ.
    """
    get_args().mtp_num_layers = depths
    MTPLossLoggingHelper.tracker = {}  # it keeps the number of MTP layers that it saw first
    batches = make_batches()
    megatrons = theirs(batches, None)
    sides = {OURS: ours(batches, megatrons), THEIRS: megatrons}
    first = {name: side.step() for name, side in sides.items()}
    tolerance = SAME_IN_BFLOAT16 if get_args().bf16 else SAME_IN_FLOAT32
    for mine, reference, what in zip(first[OURS], first[THEIRS], ("loss", "gradient norm"), strict=True):
        if not math.isclose(mine, reference, rel_tol=tolerance):
            raise RuntimeError(
                f"the first step's {what} is {mine} here and {reference} in Megatron; the sides cannot be compared."
            )
    return sides, first


def our_gpt(batches: Batches, like: Side | None = None) -> Side:
    """Build a GPT from Megatron's arguments with our MTP."""
    config = gpt_config_from_args(get_args(), model_config_cls=MTPGPTModelConfig)
    return side_of(config, ForwardStep(MTPConfig(), Metrics(None)), batches, like)


def our_drafter(batches: Batches, like: Side) -> Side:
    """Build a frozen GPT from Megatron's arguments with their drafter."""
    config = config_of(get_args())
    config.mtp, config.true_vocab_size = mtp_config_from_args(get_args()), None  # like Megatron's side
    return side_of(config, ForwardStep(config.mtp, Metrics(None)), batches, like)


def megatron_gpt(batches: Batches, like: Side | None = None, hooks: Sequence[Callable[[Any], Any]] = ()) -> Side:
    """Build a GPT from Megatron's arguments with its own MTP; `hooks` are called before it is wrapped."""
    config = gpt_config_from_args(get_args(), model_config_cls=GPTModelConfig)
    config.pre_wrap_hooks += hooks
    if config.transformer.transformer_impl != "local":
        return side_of(config, megatron_forward_step, batches, like)
    config.transformer_layer_spec = with_portable_modules(default_layer_spec(config, None), config.transformer)
    with having([gpt], mtp_block_spec=portable_mtp_block):  # the builder accepts no spec for it
        return side_of(config, megatron_forward_step, batches, like)


def portable_mtp_block(config: Any, *others: Any, **named: Any) -> Any:
    """Return the spec of Megatron's MTP block, with the layers of the portable trunk."""
    return with_portable_modules(mtp_block_spec(config, *others, **named), config.transformer)


def side_of(config: Any, forward_step: Callable[..., Any], batches: Batches, like: Side | None) -> Side:
    """Create model, DDP, optimizer and learning rate as `pretrain()` does; `like` gives the weights."""
    args = get_args()
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
    walk = RerunDataIterator(itertools.cycle(batches))
    return Side(model, optimizer, get_optimizer_param_scheduler(optimizer), forward_step, walk)


@torch.no_grad()
def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy weights by name: Megatron's `mtp_model_layer` is our `tf_layer`, and an attached drafter our `mtp`.

    A drafter that only the target has keeps its weights.
    """
    weights = {_our_name(name): weight for name, weight in source.named_parameters()}
    for name, weight in target.named_parameters():
        if _our_name(name) in weights or "drafter_" not in name:
            weight.copy_(weights.pop(_our_name(name)))
    if weights:
        raise RuntimeError(f"the two models differ; only one has {sorted(weights)}.")


def _our_name(name: str) -> str:
    return re.sub(r"\bdrafter_\w+\.", "mtp.", name.replace(".mtp_model_layer.", ".tf_layer."))


def make_batches() -> Batches:
    """Return random tokens in the format of Megatron's loader, pinned for a CUDA device."""
    args = get_args()
    shape = (args.micro_batch_size, args.seq_length)
    generator = torch.Generator().manual_seed(args.seed)
    position_ids = torch.arange(args.seq_length).expand(shape).contiguous()
    later = torch.ones(args.seq_length, args.seq_length).triu(diagonal=1).bool()
    batches = []
    for _ in range(BATCHES):
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
    """Return the forward step that Megatron's `pretrain_gpt.py` passes to `pretrain()`."""
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
    """Run Megatron's `get_batch` for a run without packing, like `ForwardStep` without MTP layers."""
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
    """Compute Megatron's loss function: the masked sum, its checks, the tokens and values to log."""
    mask = loss_mask_BS.view(-1).float()
    loss = torch.sum(losses_BS.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        check = partial(get_rerun_state_machine().validate_result, result=loss, tolerance=0.0, fatal=True)
        check(rejection_func=torch.isnan, message="found NaN in local forward loss calculation")
        check(rejection_func=torch.isinf, message="found Inf in local forward loss calculation")
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}
