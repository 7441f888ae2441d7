"""`megatron-mtp serve`: a checkpoint behind OpenAI's HTTP API until a signal ends it."""

import logging
import os
import socket
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch

from megatron_mtp.drafting.command import drafter_of, named, tokenizer_of
from megatron_mtp.drafting.config import SpeculativeConfig, parse_config
from megatron_mtp.drafting.engine import ContinuousEngine, EngineSettings
from megatron_mtp.drafting.load import Loaded, load_checkpoint
from megatron_mtp.drafting.memory import blocks_for, blocks_in
from megatron_mtp.drafting.requests import Engine
from megatron_mtp.drafting.runner import Runner
from megatron_mtp.errors import check_counts, sentences
from megatron_mtp.platform import cpu
from megatron_mtp.serving.answers import Served
from megatron_mtp.serving.app import make_app
from megatron_mtp.serving.metrics import Metrics
from megatron_mtp.serving.ranks import Leader, follow, group_of_all
from megatron_mtp.serving.server import Server, address_of, listener
from megatron_mtp.serving.service import Service
from megatron_mtp.serving.tokens import Ids, Words

LARGEST_GIB = 2**20
"""No machine has more; a larger number is a mistake."""


def main(program: str, args: Namespace) -> int:
    """Serve; bad input ends with one sentence and exit status 2, a bug of the engine with status 1."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with sentences(program):
        return serve(args)


def serve(args: Namespace) -> int:
    """Load, listen, and serve until a signal ends it; ValueError for bad input, before anything is loaded if it can.

    Of several ranks, of torchrun, rank 0 speaks HTTP.
    """
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    config = _check(args)
    listening = listener(args.host, args.port) if rank == 0 else None
    loaded, engine, served = _made(args, config)
    group = group_of_all() if ranks > 1 else None
    if listening is None:
        follow(engine, served.codec, group)
        return 0
    print(f"> {named(args.load, loaded.runner)}", flush=True)
    if group is None:
        return run(engine, served, listening, args.api_key)
    leader = Leader(engine, group)
    status = run(leader, served, listening, args.api_key)
    if status == 0:
        leader.end()
    return status


def _made(args: Namespace, config: SpeculativeConfig | None) -> tuple[Loaded, ContinuousEngine, Served]:
    """The checkpoint, its engine, and what clients are told of it."""
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    loaded = load_checkpoint(args.load, dtype=dtype, trust_remote_code=args.trust_remote_code)
    tokenizer, drafter = tokenizer_of(args, loaded), drafter_of(config, dtype)
    blocks = _blocks(args, loaded.runner, drafter)
    sizes = EngineSettings(args.max_running, args.max_waiting, blocks, overlap=not cpu.installed())
    served = Served(
        name=args.served_model_name or _model_name(Path(args.load)),
        codec=Ids() if tokenizer is None else Words(tokenizer),
        positions=loaded.runner.positions,
        vocabulary=loaded.runner.vocab_size,
        most_texts=args.max_waiting,  # they wait for a step before they run
        created=int(time.time()),
    )
    return loaded, ContinuousEngine(loaded.runner, sizes, config, drafter), served


def run(engine: Engine, served: Served, listening: socket.socket, key: str | None) -> int:
    """Serve an engine at a socket; the exit status, 1 if the engine has failed."""
    metrics = Metrics()
    service = Service(engine, metrics)

    def ready() -> None:
        print(f"> '{served.name}' is served at {address_of(listening)}", flush=True)

    Server(make_app(service, served, metrics, key), service, ready).run([listening])
    sys.stdout.flush()
    return int(service.broken)


def _check(args: Namespace) -> SpeculativeConfig | None:
    """How texts draft; ValueError for flags that cannot be served."""
    check_counts(args, "max_running", "max_waiting")
    if args.cache_gib is not None and not 0 < args.cache_gib <= LARGEST_GIB:
        raise ValueError(
            f"--cache-gib is {args.cache_gib}; give the GiB of memory that the cache may take, at most {LARGEST_GIB}."
        )
    if args.api_key == "":
        raise ValueError("--api-key is empty; give a key, or leave the flag out.")
    return None if args.speculative_config is None else parse_config(args.speculative_config)


def _blocks(args: Namespace, runner: Runner, drafter: Runner | None) -> int:
    """Of the cache: as many as were asked for, or else as all running texts can need."""
    if args.cache_gib is not None:
        return blocks_in(args.cache_gib, args.max_running, runner, drafter)
    return blocks_for(args.max_running, runner, drafter)


def _model_name(folder: Path) -> str:
    """The folder's name; of a run's `checkpoint`, the run's."""
    whole = folder.resolve()
    return whole.parent.name if whole.name == "checkpoint" else whole.name
