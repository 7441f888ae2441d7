"""One training run: arguments and model configuration, and Megatron's `pretrain()` with them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.config import PretrainConfigContainer

from megatron_mtp.model.sharing import embedding_ranks
from megatron_mtp.training.arguments import fail, parse_checked_args, set_machine_flags
from megatron_mtp.training.datasets import datasets_provider
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.loading import loads_checked
from megatron_mtp.training.metrics import Metrics


def main(argv: list[str], on_cpu: bool) -> Metrics:
    """Run what the command line asks for; bad input ends with one sentence and exit status 2."""
    fit_to_machine(argv, on_cpu)
    try:
        args, model_config = parse_checked_args()
    except ValueError as error:
        fail(Path(argv[0]).name, error)
    metrics = train(pretrain_cfg_container_from_args(args, model_config), datasets_provider)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return metrics


def fit_to_machine(argv: list[str], on_cpu: bool) -> None:
    """Add to `argv` what this machine needs, and say so; started as plain `python`, be a job of one rank."""
    join_single_process()
    note = set_machine_flags(argv, on_cpu)
    if note and os.environ["RANK"] == "0":
        print(f"> {note}", flush=True)


def train(config: PretrainConfigContainer, datasets_provider: Any, **pretrain_arguments: Any) -> Metrics:
    """Megatron's `pretrain()` of the model that `config.model`, an `MTPGPTModelConfig`, describes.

    The forward step is ours, and what is done after evaluations; `pretrain_arguments` are others of `pretrain()`.
    """
    settings = config.model.mtp
    metrics = Metrics(None if settings.mtp_metrics_dir is None else Path(settings.mtp_metrics_dir))
    pretrain_arguments.setdefault("get_embedding_ranks", get_embedding_ranks)
    try:
        with _evaluations_told(metrics), loads_checked():
            pretrain(
                config,
                datasets_provider,
                ModelType.encoder_or_decoder,
                ForwardStep(settings, metrics),
                non_loss_data_func=metrics.end_evaluation,
                **pretrain_arguments,
            )
    except SystemExit:  # --exit-interval and its like end the loop so, on all ranks together
        metrics.close()
        raise
    metrics.close()
    return metrics


@contextmanager
def _evaluations_told(metrics: Metrics) -> Iterator[None]:
    """Let the metrics know on what data each evaluation is, which Megatron says in the prefix of its own line alone."""
    evaluate = training.evaluate_and_print_results

    def told(prefix: str, *rest: Any, **settings: Any) -> None:
        metrics.begin_evaluation("test" if prefix.endswith("test set") else "validation")
        evaluate(prefix, *rest, **settings)

    training.evaluate_and_print_results = told
    try:
        yield
    finally:
        training.evaluate_and_print_results = evaluate


def get_embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Megatron's question which ranks of a pipeline hold the word embedding."""
    args = get_args()
    tied = not args.untie_embeddings_and_output_weights
    return embedding_ranks(pipeline_ranks, core_transformer_config_from_args(args), tied)


def join_single_process() -> None:
    """Started as plain `python`, be the one rank of a job, as torchrun would say it."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
