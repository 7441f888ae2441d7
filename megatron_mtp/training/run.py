"""One training run: arguments and model configuration, and Megatron's `pretrain()` with them."""

import os
from pathlib import Path

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)

from megatron_mtp.model.sharing import embedding_ranks
from megatron_mtp.training.arguments import fail, parse_checked_args, set_machine_flags
from megatron_mtp.training.datasets import datasets_provider
from megatron_mtp.training.forward_step import ForwardStep
from megatron_mtp.training.metrics import Metrics


def main(argv: list[str], on_cpu: bool) -> Metrics:
    """Run what the command line asks for; bad input ends with one sentence and exit status 2."""
    join_single_process()
    note = set_machine_flags(argv, on_cpu)
    if note and os.environ["RANK"] == "0":
        print(f"> {note}", flush=True)
    try:
        args, model_config = parse_checked_args()
    except ValueError as error:
        fail(Path(argv[0]).name, error)
    settings = model_config.mtp
    metrics = Metrics(None if settings.mtp_metrics_dir is None else Path(settings.mtp_metrics_dir))
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            datasets_provider,
            ModelType.encoder_or_decoder,
            ForwardStep(settings, metrics),
            get_embedding_ranks=get_embedding_ranks,
            non_loss_data_func=metrics.end_evaluation,
        )
    except SystemExit:  # --exit-interval and its like end the loop so, on all ranks together
        metrics.close()
        raise
    metrics.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return metrics


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
