"""Kill and restart training runs over and over until one finishes.

    python killed_trainings.py FOLDER KILLS SEED

Prints JSON: how many runs finished after kills, at which iterations they were killed, and what was wrong.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from killing import Killer, files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_mtp.megatron.checkpoint import TRACKER
from megatron_mtp.megatron.runtime import prepare
from megatron_mtp.training.read_runs import read_rows, read_run_record
from megatron_mtp.training.run import main as train
from megatron_mtp.training.run_files import METRICS

prepare()

STEPS = 8
SAVED = "saved"
MEASURED = {"step seconds", "peak memory bytes"}
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0.1 "
    "--micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --mtp-num-layers 1 --mock-data --num-workers 0 "
    f"--tokenizer-type NullTokenizer --vocab-size 127 --train-iters {STEPS} --save-interval 2 --log-interval 1 "
    f"--eval-interval 4 --eval-iters 1 --save {SAVED} --load {SAVED} --mtp-metrics-dir ."
).split()

Saved = dict[str, dict[str, bytes]]
"""Files of each iteration, by its folder."""
State = dict[str, object]


def train_in(folder: Path) -> int:
    """Train with the same arguments in every folder, so that the arguments in its checkpoints are equal too."""
    os.chdir(folder)
    sys.argv = ["pretrain_gpt.py", *FLAGS]
    train(sys.argv, on_cpu=True)
    return 0


def main(folder: Path, kills: int, seed: int) -> dict[str, object]:
    killer = Killer(kills, Random(seed), folder / "log")
    never = folder / "never-killed"
    never.mkdir()
    killer.measure(lambda: train_in(never))
    right = {name: state(never, name) for name in whole_iterations(never)}
    figures = rows(never)
    assert len(right) == STEPS / 2, f"saved {sorted(right)}"
    wrong: list[str] = []
    found: list[int] = []
    number = 0
    while not killer.enough:
        number += 1
        run = folder / f"killed-{number}"
        run.mkdir()
        before: Saved = {}
        named = 0
        while not killer.enough and killer.end_or_kill(lambda run=run: train_in(run)):  # type: ignore[misc]
            after = whole_iterations(run)
            found.append(saved_iteration(run))
            wrong += [f"{run.name}: {each}" for each in faults(run, named, before, after, right)]
            before, named = after, max(named, saved_iteration(run))
        killer.end(lambda run=run: train_in(run))  # type: ignore[misc]
        ended = whole_iterations(run)
        wrong += [f"{run.name}: {each}" for each in faults(run, named, before, ended, right)]
        if ended.keys() != right.keys() or saved_iteration(run) != STEPS:
            wrong.append(f"{run.name} ends with {sorted(ended)}, of which it names {saved_iteration(run)}")
        wrong += [f"{run.name} has other figures at {step}" for step, row in rows(run).items() if row != figures[step]]
    return {"through": number, "killed": killer.done, "found at": found, "wrong": wrong}


def whole_iterations(run: Path) -> Saved:
    """Return iterations that are marked complete: `metadata.json` is written last."""
    folders = sorted((run / SAVED).glob("iter_*/metadata.json"))
    return {file.parent.name: files(file.parent) for file in folders}


def saved_iteration(run: Path) -> int:
    """Return the saved iteration, 0 if there is none."""
    tracker = run / SAVED / TRACKER
    return int(tracker.read_text() or 0) if tracker.exists() else 0


def faults(run: Path, kept: int, before: Saved, after: Saved, right: dict[str, State]) -> list[str]:
    """Return violations after a kill. Iterations up to `kept` were saved; a run may save later ones again."""
    saved = [name for name in before if name <= f"iter_{kept:07d}"]
    found = [f"{name} was saved and has changed" for name in saved if after.get(name) != before[name]]
    new = [name for name, held in after.items() if before.get(name) != held]
    found += [f"{name} says that it is whole" for name in new if state(run, name) != right[name]]
    named = saved_iteration(run)
    if 0 < named < kept:
        found.append(f"iteration {named} is named, where it was {kept}")
    if named and f"iter_{named:07d}" not in after:
        found.append(f"iteration {named} is named and not whole")
    return found + unreadable(run)


def state(run: Path, iteration: str) -> State:
    """Return all that an iteration holds, bit by bit: weights, optimizer, random state, counters.

    Arguments are left out, because they include the iteration that a run resumed from.
    """
    file = run / "whole.pt"
    try:
        dcp_to_torch_save(run / SAVED / iteration, file)
    except Exception as error:  # torch raises any type for a damaged one
        return {"unreadable": str(error)}
    return dict(leaves(torch.load(file, weights_only=False)))


def leaves(held: Any, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(held, dict | list | tuple):
        parts = held.items() if isinstance(held, dict) else enumerate(held)
        for key, part in parts:
            yield from leaves(part, f"{name}.{key}")
    elif isinstance(held, torch.Tensor):
        yield name, (held.dtype, held.shape, held.view(torch.uint8).numpy().tobytes() if held.dim() else held.item())
    elif not isinstance(held, Namespace):
        yield name, held.tobytes() if isinstance(held, np.ndarray) else repr(held)


def unreadable(run: Path) -> list[str]:
    """Return records of the run that have a row but cannot be read."""
    if not (run / METRICS).exists():
        return []
    try:
        read_rows(run), read_run_record(run)
    except ValueError as error:
        return [str(error)]
    return []


def rows(run: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Return metrics of a run by split and step, without machine-dependent ones."""
    read = read_rows(run)
    return {(row["split"], row["iteration"]): {key: row[key] for key in row.keys() - MEASURED} for row in read}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
