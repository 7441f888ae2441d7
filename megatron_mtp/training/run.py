"""One training run: parse arguments, build the model configuration, and call Megatron's `pretrain()` with hooks."""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import get_args, get_timers, pretrain
from megatron.training import training as loop
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.config import PretrainConfigContainer
from megatron.training.global_vars import get_signal_handler
from torch.distributed.checkpoint.api import CheckpointException

from megatron_mtp.common.acceptance import EXPECTED_LENGTH
from megatron_mtp.common.errors import InputError
from megatron_mtp.common.files import remove
from megatron_mtp.losses.objective import scaling_factor
from megatron_mtp.megatron.checkpoint import TRACKER
from megatron_mtp.megatron.checkpoint.iterations import keep_tokenizer
from megatron_mtp.megatron.machine import check_device
from megatron_mtp.megatron.patches.loop import LOOP
from megatron_mtp.megatron.patches.patch import CORE, Replace, State, installed, state_of, while_replaced
from megatron_mtp.megatron.patterns import trunk_and_depths
from megatron_mtp.model.shared_embedding import embedding_ranks
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.spec.head import trained_depths
from megatron_mtp.training.arguments import parse_checked_args, set_connections, set_machine_flags
from megatron_mtp.training.best_state import BestState, ended_run, evaluates_at, iteration_of
from megatron_mtp.training.checks import check_precision, check_writable
from megatron_mtp.training.datasets import datasets_provider
from megatron_mtp.training.disk import check_room, is_full
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import LAMBDA, MTP_GRAD_NORM, MTP_RATE, Measure, Metrics, Reporter, Step
from megatron_mtp.training.parameter_group import get_mtp_optimizer, keep_schedule, lowest_rate, mtp_grad_norm
from megatron_mtp.training.short_log import Listing, ShortLog, fitting_interval, keep_listing, say
from megatron_mtp.training.startup import explained

AnyFunction = Callable[..., Any]


def main(argv: list[str], on_cpu: bool, shows_tables: bool = True, measure: Measure | None = None) -> Metrics:
    """Run the command line. Invalid input ends with one sentence and exit status 2.

    Inside `quiet()`, the run prints a short log, with evaluation tables if `shows_tables`; otherwise Megatron's log.
    `measure` adds values to evaluations.
    """
    fit_to_machine(argv, on_cpu)
    program = Path(argv[0]).name
    with explained(program):
        args, model_config = parse_checked_args(on_cpu)
        check_precision(args)
        config = pretrain_cfg_container_from_args(args, model_config)
        if args.save is not None and not args.skip_train and "://" not in args.save:
            check_writable(Path(args.save))
    if (best := ended_run(args)) is not None:
        if args.rank == 0:
            best.settle(Path(args.save))
            say(f"> the run has already finished; its best checkpoint is from step {best.iteration}")
        return Metrics(None)
    reporter = _short_log(args, argv, shows_tables) if isinstance(sys.stdout, Listing) else None
    metrics = train(config, datasets_provider, reporter, measure)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return metrics


def _short_log(args: Namespace, argv: list[str], shows_tables: bool) -> ShortLog:
    """Return the reporter of a short log.

    One line names Megatron's full log, and --log-interval fits the run unless given.
    """
    steps, samples = args.train_iters, args.train_samples
    if not any(word.startswith("--log-i") for word in argv):
        args.log_interval = fitting_interval(steps if samples is None else samples // args.global_batch_size)
    folder = args.mtp_metrics_dir or args.save
    listing = keep_listing(None if folder is None else Path(folder))
    if args.rank == 0 and args.skip_train:
        say(f"> evaluating {args.load}")  # loading a large one takes minutes
    elif args.rank == 0:
        where = "--verbose shows Megatron's listing" if listing is None else f"Megatron's listing: {listing}"
        end = f"sample {samples:,}" if steps is None else f"step {steps}"
        say(f"> training to {end}, a line every {args.log_interval} steps; {where}")
    return ShortLog(shows_tables)


def fit_to_machine(argv: list[str], on_cpu: bool) -> None:
    """Append the flags that this machine needs to `argv` and print them. Plain `python` starts a job with one rank.

    A rank that finds no GPU in a job with GPUs exits with one sentence and status 2.
    """
    join_single_process()
    with explained(Path(argv[0]).name):
        check_device(on_cpu)
    if not on_cpu:
        set_connections(argv)
    note = set_machine_flags(argv, on_cpu)
    if note and os.environ["RANK"] == "0":
        say(f"> {note}")


def train(
    config: PretrainConfigContainer,
    datasets_provider: Any,
    reporter: Reporter | None = None,
    measure: Measure | None = None,
    **pretrain_arguments: Any,
) -> Metrics:
    """Run Megatron's `pretrain()` on the model that `config.model`, an `MTPModelConfig`, describes.

    Uses our forward step and evaluation hooks. `reporter` replaces Megatron's log, `measure` adds values to
    evaluations, and `pretrain_arguments` are passed on to `pretrain()`.
    """
    settings = config.model.mtp
    metrics = Metrics(None if settings.mtp_metrics_dir is None else Path(settings.mtp_metrics_dir), reporter, measure)
    step = ForwardStep(settings, metrics)
    pretrain_arguments.setdefault("get_embedding_ranks", get_embedding_ranks)
    with (
        explained(Path(sys.argv[0]).name, lambda: metrics.has_trained),
        observed(metrics, shows_checkpoints=reporter is not None, settings=settings),
    ):
        try:
            pretrain(
                config,
                datasets_provider,
                ModelType.encoder_or_decoder,
                step,
                non_loss_data_func=metrics.end_evaluation,
                **pretrain_arguments,
            )
            metrics.leave_out(get_args().train_iters)
        except SystemExit as end:
            if end.code == 0:  # --exit-interval and similar flags end the loop this way, on all ranks
                _end(metrics)
                if metrics.unsaved is not None:
                    raise InputError(f"{metrics.unsaved}; free some, and run the command again.") from None
            raise
        finally:
            step.close()
    if metrics.best is not None and get_args().do_valid:  # by now the last state is saved and evaluated
        assert metrics.step is not None
        if metrics.best.learn(metrics.step.number, metrics.validated):
            metrics.keep_best()
        _say_best(metrics.best)
    _end(metrics)
    return metrics


def _say_best(state: BestState) -> None:
    """Report the best state at the end of the run: the checkpoint loads as it."""
    best = state.end()
    if best is not None and get_args().rank == 0:
        say(f"> the checkpoint is from step {best.iteration}, the best one: {EXPECTED_LENGTH} {best.length:.3f}")


def _end(metrics: Metrics) -> None:
    """Close the metrics, and ignore the signal of --exit-signal-handler, which a job repeats until the process ends.

    While Python ends, the signal's default action takes the place of Megatron's handler, and would kill the rank.
    """
    metrics.close()
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def get_embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the pipeline ranks that hold the word embedding, for Megatron."""
    args = get_args()
    tied = not args.untie_embeddings_and_output_weights
    return embedding_ranks(pipeline_ranks, core_transformer_config_from_args(args), tied)


def join_single_process() -> None:
    """For plain `python`, set the environment that torchrun sets for a job with one rank."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")


# --- Megatron's loop, observed: metrics and short log receive the arguments of its functions -------------------------
#
# The loop has no callbacks. It looks up its own functions by name in its module, so wrappers there see every call; the
# functions are rows of `patches.loop.LOOP`.


@contextmanager
def observed(metrics: Metrics, shows_checkpoints: bool = False, settings: MTPConfig | None = None) -> Iterator[None]:
    """Within this context, report training steps and evaluations to the metrics.

    If `settings` have a learning rate or clip of the MTP layers, optimizers get a parameter group for them. With any
    settings, optimizers keep the schedule of the flags if --override-opt-param-scheduler is set.

    Raises:
        InputError: the installed megatron-core does not support these hooks.
    """
    keeps_best = settings is not None and settings.mtp_patience is not None
    wrappers: dict[str, Replace] = {
        "train_step": partial(_steps, metrics, settings),
        "training_log": partial(_logged_steps, metrics),
        "evaluate_and_print_results": partial(_evaluations, metrics),
        "save_checkpoint_and_time": partial(_saves, metrics, shows_checkpoints),
        # Megatron's FLOP count for its log, for every pass of a repeated layer instead of --mtp-num-layers
        "num_floating_point_operations": lambda count: (
            lambda args, *rest, **named: count(with_passes(args), *rest, **named)
        ),
    }
    if settings is not None:
        wrappers["get_megatron_optimizer"] = partial(_optimizers, settings)
        wrappers["save"] = _with_tokenizer
    wrappers["checkpoint_and_decide_exit"] = partial(_ends, metrics)
    if keeps_best:
        wrappers["checkpoint_and_decide_exit"] = lambda decide: _best_states(metrics, _ends(metrics, decide))
    if any(state_of(row) is State.NOT_NEEDED for row in LOOP if row.name in wrappers):
        raise InputError(
            f"megatron-core is {installed('megatron-core')}, whose training loop does not call its steps as that of "
            f"{CORE} does; install a version in that range."
        )

    with while_replaced(LOOP, wrappers):
        yield


def _optimizers(settings: MTPConfig, get_megatron_optimizer: AnyFunction) -> AnyFunction:
    own: dict[str, Any] = {"lr": settings.mtp_lr, "clip_grad": settings.mtp_clip_grad}

    def made(config: Any, model_chunks: Any, *rest: Any, **named: Any) -> Any:
        optimizer = get_mtp_optimizer(config, model_chunks, *rest, make=get_megatron_optimizer, **own, **named)
        if get_args().override_opt_param_scheduler:
            keep_schedule(optimizer)
        return optimizer

    return made


def _steps(metrics: Metrics, settings: MTPConfig | None, train_step: AnyFunction) -> AnyFunction:
    def timed(
        forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **named: Any
    ) -> Any:
        args = get_args()
        metrics.begin_step()
        if metrics.step is None:
            check_room(args, model, optimizer is not None)
        if settings is not None and settings.mtp_patience is not None and metrics.best is None:
            metrics.best = BestState(args)
        done = train_step(forward_step, data, model, optimizer, scheduler, *rest, **named)
        metrics.mtp_figures = _mtp_figures(args, settings, scheduler)
        if (norm := mtp_grad_norm(optimizer)) is not None:
            metrics.mtp_figures[MTP_GRAD_NORM] = norm
        return done

    return timed


def _mtp_figures(args: Namespace, settings: MTPConfig | None, scheduler: Any) -> dict[str, float]:
    """Return the learning rate of the MTP layers, if separate, and lambda, if it has a schedule."""
    made = {}
    if settings is not None and settings.mtp_lr is not None:
        lowest = lowest_rate(settings.mtp_lr, args.lr, args.min_lr)
        made[MTP_RATE] = float(scheduler.get_lr({"max_lr": settings.mtp_lr, "min_lr": lowest}))
    if settings is not None and settings.mtp_loss_schedule != "constant":
        made[LAMBDA] = scaling_factor(args, settings, args.curr_iteration)
    return made


def _logged_steps(metrics: Metrics, training_log: AnyFunction) -> AnyFunction:
    """Wrap Megatron's log of a step, which runs on all ranks, and log metrics of the MTP layers too."""

    def logged(losses: Any, sums: Any, learning_rate: float | None, step: int, *rest: Any, **named: Any) -> Any:
        done = training_log(losses, sums, learning_rate, step, *rest, **named)
        args, is_skipped, own = get_args(), bool(rest[2]), metrics.mtp_figures
        if is_skipped:
            own.pop(MTP_GRAD_NORM, None)
        packed = {name: named.get(name) for name in ("seqlen_squared_sum_in_batch", "total_real_tokens_in_batch")}
        count: AnyFunction = loop.num_floating_point_operations
        operations = count(args, get_current_running_global_batch_size(), **packed) if args.log_throughput else None
        metrics.end_step(Step(step, learning_rate, rest[3], own, is_skipped, operations))
        return done

    return logged


def _ends(metrics: Metrics, checkpoint_and_decide_exit: AnyFunction) -> AnyFunction:
    """Wrap the end of a step, on all ranks: report why a run ends before its last step."""

    def decided(model: Any, optimizer: Any, scheduler: Any, step: int, *rest: Any) -> bool:
        ends = bool(checkpoint_and_decide_exit(model, optimizer, scheduler, step, *rest))
        if ends:
            metrics.end_early(step, _cause(get_args(), step))
        return ends

    return decided


def _cause(args: Namespace, step: int) -> str:
    """Return what ends a run after this step, as Megatron's loop decides."""
    if args.exit_interval and step % args.exit_interval == 0:
        return f"--exit-interval {args.exit_interval}"
    if step in (args.phase_transition_iterations or ()):
        return f"--phase-transition-iterations {step}"
    if args.exit_signal_handler and any(get_signal_handler().signals_received()):
        return f"{args.exit_signal.name}, by --exit-signal-handler"
    return f"--exit-duration-in-mins {args.exit_duration_in_mins}"


def _evaluations(metrics: Metrics, evaluate_and_print_results: AnyFunction) -> AnyFunction:
    """Wrap evaluations. Only the prefix of Megatron's own line names the data: 'iteration 9', '... on test set'."""

    def announced(prefix: str, *rest: Any, **named: Any) -> None:
        data = "test" if prefix.endswith("test set") else "validation"
        is_after_run = prefix.endswith(" set")
        if (
            is_after_run and data == "validation" and metrics.is_validated
        ):  # different batches, under the same name and step
            return
        if data == "test":  # Megatron would log it as "validation"
            named["write_to_tensorboard"] = False
        metrics.begin_evaluation(data, is_after_run)
        evaluate_and_print_results(prefix, *rest, **named)

    return announced


def _best_states(metrics: Metrics, checkpoint_and_decide_exit: AnyFunction) -> AnyFunction:
    """Wrap the end of a step and its evaluation, on all ranks; return whether the run ends."""

    def decided(
        model: Any, optimizer: Any, scheduler: Any, step: int, operations: Any, context: Any, data: Any
    ) -> bool:
        args, state = get_args(), metrics.best
        is_judged = state is not None and evaluates_at(args, step)
        saves = is_judged and state is not None and state.learn(step, metrics.validated)
        if saves and step % args.save_interval:
            loop.save_checkpoint_and_time(
                step, model, optimizer, scheduler, operations, context, train_data_iterator=data
            )
        ends = bool(checkpoint_and_decide_exit(model, optimizer, scheduler, step, operations, context, data))
        if saves:
            metrics.keep_best()
        if ends or not is_judged or state is None or not state.is_over(step):
            return ends
        if args.rank == 0:
            say(f"> no improvement in {args.mtp_patience} evaluations: training stops at step {step}")
        _say_best(state)
        return True

    return decided


def with_passes(args: Namespace) -> Namespace:
    """Return the arguments of a model that has an MTP layer for every pass of a repeated layer."""
    passes = trained_depths(args)
    if passes == (args.mtp_num_layers or 0):
        return args
    changes: dict[str, Any] = {"mtp_num_layers": passes}
    if args.hybrid_layer_pattern is not None:
        trunk, depths = trunk_and_depths(args.hybrid_layer_pattern)
        changes["hybrid_layer_pattern"] = "/".join([trunk, *depths[:1] * passes])
    return Namespace(**{**vars(args), **changes})


def _with_tokenizer(save: AnyFunction) -> AnyFunction:
    """Wrap `dist_checkpointing.save`: the first rank copies the run's tokenizer next to the iterations."""

    @wraps(save)
    def saved(state: Any, checkpoint_dir: str, *rest: Any, **settings: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            keep_tokenizer(get_args(), Path(checkpoint_dir).parent)
        return save(state, checkpoint_dir, *rest, **settings)

    return saved


def _saves(metrics: Metrics, shows: bool, save_checkpoint_and_time: AnyFunction) -> AnyFunction:
    """Wrap saves: on a full disk, a run of one process continues to its next save.

    Others, and a last save, end with a sentence.
    """

    def saved(step: int, *rest: Any, **named: Any) -> None:
        args = get_args()
        try:
            save_checkpoint_and_time(step, *rest, **named)
        except (OSError, RuntimeError, CheckpointException) as error:
            if args.async_save or named.get("non_persistent_ckpt") or not is_full(Path(args.save), error):
                raise
            if args.rank == 0:
                remove(iteration_of(Path(args.save), step))
            metrics.unsaved = _unsaved(args, step)
            if args.world_size > 1 or args.mtp_patience is not None or step >= args.train_iters:
                raise InputError(f"{metrics.unsaved}; free some, and run the command again.") from error
            say(f"> {metrics.unsaved}; the run goes on to its next save")
            timers = get_timers()  # leave timers as the function does at its end
            timers("save-checkpoint").stop(barrier=False)
            timers("interval-time", log_level=0).start(barrier=True)
            return
        metrics.unsaved = None
        if shows and args.rank == 0:
            say(f"> checkpoint of step {step} {'is being written' if args.async_save else 'saved'} to {args.save}")

    return saved


def _unsaved(args: Namespace, step: int) -> str:
    tracker = Path(args.save) / TRACKER
    whole = f"the last whole checkpoint is that of step {tracker.read_text()}" if tracker.is_file() else ""
    last = whole or "there is no older checkpoint"
    return f"the disk of --save {args.save} is full: step {step} is not saved, and {last}"
